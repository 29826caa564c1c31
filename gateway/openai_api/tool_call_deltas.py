"""Tool calls in OpenAI's JSON: as deltas while the model writes, and folded into whole calls.

A call's id is a digest of the answer's and of the call's place in it, so that a verified answer repeats to the byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from gateway.domain import Finish
from gateway.openai_api.shape import Json
from gateway.openai_api.tool_choice import ToolUse
from gateway.text.tool_calls import CallArguments, CallEvent, CallStart, Content, Reader


class ToolCallDeltas:
    """The deltas of one choice. Where calls are not to be parallel, those behind the first are not shown."""

    def __init__(self, reader: Reader, use: ToolUse, short_ids: bool, digest: str, choice: int) -> None:
        self._reader = reader
        self._use = use
        self._short_ids = short_ids
        self._place = f"{digest} {choice}"
        self._called = False

    def push(self, text: str) -> list[Json]:
        """The deltas that may be shown now."""
        return self._deltas(self._reader.push(text))

    def finish(self) -> list[Json]:
        """What was held back. Call once, after the last push."""
        return self._deltas(self._reader.finish())

    def finish_reason(self, finish: Finish) -> str:
        """Why the answer ended, as OpenAI has it: a named function is called without saying so."""
        return "tool_calls" if finish == "stop" and self._called and self._use.choice != "named" else finish

    def _deltas(self, events: Sequence[CallEvent]) -> list[Json]:
        return [self._delta(event) for event in events if self._is_shown(event)]

    def _is_shown(self, event: CallEvent) -> bool:
        return self._use.parallel or isinstance(event, Content) or event.index == 0

    def _delta(self, event: CallEvent) -> Json:
        match event:
            case Content():
                return {"content": event.text}
            case CallStart():
                self._called = True
                function = {"name": event.name, "arguments": ""}
                call: Json = {"index": event.index, "id": self._id(event.index), "type": "function"}
                return {"tool_calls": [call | {"function": function}]}
            case CallArguments():
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def _id(self, index: int) -> str:
        digest = hashlib.sha256(f"{self._place} {index}".encode()).hexdigest()
        return digest[:9] if self._short_ids else f"call_{digest[:24]}"


def fold_calls(deltas: Sequence[Any]) -> list[Json]:
    """Whole calls out of the `tool_calls` of deltas."""
    calls: list[Any] = []
    for delta in deltas:
        if "id" in delta:
            calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls
