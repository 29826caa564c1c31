"""The endpoints that generate, by route: what makes a request of a body and the header that asks for a mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.openai_api import chat_request, completion_request
from gateway.openai_api.ask import Ask

PARSERS: Mapping[str, Callable[[bytes, str | None], Ask]] = {
    chat_request.ROUTE: chat_request.parse_chat,
    completion_request.ROUTE: completion_request.parse_completion,
}
