"""Which tools the model may and must call: `tools`, `tool_choice` and `parallel_tool_calls` together.

With `none` the tools are not shown to the model, as SGLang does. `required` and a named function need an answer that
cannot be anything else, which takes a constrained decoder: refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from gateway.domain import ChatPrompt
from gateway.errors import RequestError


class ToolChoiceFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """As the client wrote them, defaults filled in."""

    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool = True


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions an answer may call, by name; one call at most unless `parallel`."""

    names: tuple[str, ...]
    parallel: bool


def tool_use_of(fields: ToolChoiceFields, chat: ChatPrompt) -> tuple[ChatPrompt, ToolUse | None]:
    """The chat as the model is to see it, and what it may call; raises `RequestError`."""
    choice = fields.tool_choice
    if choice == "none":
        return replace(chat, tools=()), None
    if choice not in (None, "auto"):
        raise RequestError("tool_choice is supported as 'none' and 'auto' only", param="tool_choice")
    if not chat.tools:
        return chat, None
    return chat, ToolUse(tuple(tool.name for tool in chat.tools), fields.parallel_tool_calls)
