"""The fields that make the prompt of a chat: messages, tools, and what the model's template is told.

Owns their parsing, for every endpoint that takes a chat. Whether the model's template can show tools is for the model
to say.

Where OpenAI leaves room: text parts of one message are joined by newlines, as vLLM does. `developer` is `system` to the
model's template. `chat_template_kwargs`, `add_generation_prompt` and `continue_final_message` are vLLM's.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from gateway.domain import ChatPrompt, Message, Tool, ToolCall
from gateway.errors import RequestError
from gateway.openai_api.body import MISSING, check_nesting
from gateway.openai_api.sampling import require

FREE = frozenset({"tools", "chat_template_kwargs"})
"""Fields that hold JSON of the client's own."""

MAX_TOOLS = 128
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: _CalledFunction
    type: Literal["function"] = "function"


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_TextPart], msgspec.Meta(min_length=1)] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] = []
    tool_call_id: str | None = None


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


class ChatPromptFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """As the client wrote them, defaults filled in."""

    messages: list[_Message]
    tools: list[_Tool] = []
    chat_template_kwargs: dict[str, object] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


def chat_prompt_of(fields: ChatPromptFields) -> ChatPrompt:
    """Check the fields; raises `RequestError` naming the first at fault."""
    require(len(fields.messages) > 0, "messages", "must hold at least one message")
    continues = fields.continue_final_message
    if continues:
        require(fields.add_generation_prompt is not True, "continue_final_message", "contradicts add_generation_prompt")
        last = fields.messages[-1]
        require(
            last.role == "assistant" and last.content is not None,
            "continue_final_message",
            "needs a last message of role assistant with content",
        )
    opens_turn = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    return ChatPrompt(
        messages=tuple(_message(message, f"messages[{index}]") for index, message in enumerate(fields.messages)),
        tools=_tools(fields.tools),
        variables=fields.chat_template_kwargs,
        opens_turn=opens_turn,
        continues=continues,
    )


def _message(message: _Message, field: str) -> Message:
    is_assistant, is_tool = message.role == "assistant", message.role == "tool"
    require(message.content is not None or bool(message.tool_calls), f"{field}.content", "is required", MISSING)
    require(is_assistant or not message.tool_calls, f"{field}.tool_calls", "needs the role assistant")
    require(is_tool or message.tool_call_id is None, f"{field}.tool_call_id", "needs the role tool")
    require(not is_tool or message.tool_call_id is not None, f"{field}.tool_call_id", "is required", MISSING)
    content = message.content or ""
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=content if isinstance(content, str) else "\n".join(part.text for part in content),
        name=message.name,
        tool_calls=tuple(_call(call, f"{field}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)),
        tool_call_id=message.tool_call_id,
    )


def _call(call: _ToolCall, field: str) -> ToolCall:
    field += ".function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{field} must be the text of a JSON object", param=field) from error
    check_nesting(arguments, field)
    return ToolCall(call.id, call.function.name, arguments)


def _tools(tools: list[_Tool]) -> tuple[Tool, ...]:
    require(len(tools) <= MAX_TOOLS, "tools", f"must hold at most {MAX_TOOLS} functions")
    for index, tool in enumerate(tools):
        require(
            bool(_TOOL_NAME.fullmatch(tool.function.name)),
            f"tools[{index}].function.name",
            "must be 1 to 64 letters, digits, underscores and dashes",
        )
    names = [tool.function.name for tool in tools]
    require(len(set(names)) == len(names), "tools", "must have a name of its own for each function")
    return tuple(Tool(tool.function.name, tool.function.description, tool.function.parameters) for tool in tools)
