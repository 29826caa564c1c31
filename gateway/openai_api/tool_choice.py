"""Which tools the model may and must call: `tools`, `tool_choice` and `parallel_tool_calls` together.

With `none` the tools are not shown to the model, as SGLang does. With `auto` the model calls in its own syntax, or does
not. Where a call is forced a grammar leaves it nothing else to say, in JSON whatever the model, as vLLM does: the
arguments of a function that is named, a list of calls where any is `required`. Only a forced call is sure to keep to
its function's schema, so `strict` is refused otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from gateway.domain import ChatPrompt, Tool
from gateway.openai_api.chat_prompt import ChatPromptFields
from gateway.openai_api.response_format import ANY_OBJECT, Format, schema_format
from gateway.openai_api.sampling import require

_DEFINITIONS = ("$defs", "definitions")


class _FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _FunctionName


class ToolChoiceFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """As the client wrote them, defaults filled in."""

    tool_choice: Literal["none", "auto", "required"] | _NamedFunction | None = None
    parallel_tool_calls: bool = True


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions an answer may call, by name; one call at most unless `parallel`.

    "auto": in the model's syntax or not at all. "required": the answer is a list of calls. "named": it is the arguments
    of a call of the only one.
    """

    names: tuple[str, ...]
    parallel: bool
    choice: Literal["auto", "required", "named"] = "auto"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The chat as the model is to see it, what it may call, and the form that a forced call has."""

    chat: ChatPrompt
    use: ToolUse | None = None
    form: Format | None = None


def tool_plan_of(fields: ToolChoiceFields, prompt: ChatPromptFields, chat: ChatPrompt) -> ToolPlan:
    """Check the fields; raises `RequestError` naming the one at fault."""
    choice, parallel = fields.tool_choice, fields.parallel_tool_calls
    names = tuple(tool.name for tool in chat.tools)
    if isinstance(choice, _NamedFunction):
        name = choice.function.name
        require(name in names, "tool_choice.function.name", "must be one of tools")
        index = names.index(name)
        form = schema_format(_parameters(chat.tools[index]), f"tools[{index}].function.parameters")
        return ToolPlan(chat, ToolUse((name,), parallel, "named"), form)
    if choice == "required":
        require(bool(names), "tool_choice", "needs tools")
        return ToolPlan(
            chat, ToolUse(names, parallel, "required"), schema_format(_calls(chat.tools, parallel), "tools")
        )
    if choice == "none" or not names:
        return ToolPlan(replace(chat, tools=()))
    for index, tool in enumerate(prompt.tools):
        require(
            not tool.function.strict,
            f"tools[{index}].function.strict",
            "takes a tool_choice that leaves no other answer",
        )
    return ToolPlan(chat, ToolUse(names, parallel))


def _calls(tools: Sequence[Tool], parallel: bool) -> dict[str, object]:
    """The schema of a list of calls, the definitions of all functions' schemas at its root, where references lead."""
    schema: dict[str, object] = {"type": "array", "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    calls = []
    for index, tool in enumerate(tools):
        parameters = _parameters(tool)
        for key in _DEFINITIONS:
            if key in parameters:
                field = f"tools[{index}].function.parameters.{key}"
                schema[key] = _merged(schema.get(key, {}), parameters.pop(key), field)
        properties: dict[str, object] = {"name": {"const": tool.name}, "parameters": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    return schema | {"items": {"anyOf": calls}}


def _merged(known: object, more: object, field: str) -> dict[str, object]:
    assert isinstance(known, dict)
    require(isinstance(more, dict), field, "must be an object")
    assert isinstance(more, dict)
    clashes = [name for name in more if name in known and known[name] != more[name]]
    require(not clashes, field, f"means something else by {', '.join(clashes)} than another function's")
    return known | more


def _parameters(tool: Tool) -> dict[str, object]:
    return dict(ANY_OBJECT if tool.parameters is None else tool.parameters)
