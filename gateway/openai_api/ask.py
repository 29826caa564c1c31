"""A request as the rest of the gateway sees it: the order, and how its answer is to be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gateway.domain import Order
from gateway.openai_api.shape import Shape
from gateway.text.model_text import ModelText


class View(Protocol):
    """How one endpoint shows answers, as far as the request says."""

    @property
    def key(self) -> list[object]:
        """All that the body depends on beside the completion: JSON values, which the id of a verified answer covers."""
        ...

    def shape(self, choices: int, text: ModelText, digest: str) -> Shape:
        """The shape of one answer of so many choices; `digest` tells it from all others."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """A valid request. `include_usage` is for streams: an answer in one piece always tells its usage.

    `digest` is SHA-256 of the body as it was sent, in hexadecimal.
    """

    order: Order
    view: View
    stream: bool
    include_usage: bool
    digest: str = ""
