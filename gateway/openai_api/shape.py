"""Answers and chunks in OpenAI's JSON, the parts that all generating endpoints share.

Owns the envelope, the usage and the order of a choice's pieces. An answer sent whole is folded from the very pieces
that a stream would have sent, so the two cannot differ. Takes ids and times as given. What a piece looks like is the
endpoint's business (`Shape`).

As vLLM does, the token that ended an answer is counted and has its logprobs, although its text is not shown: logprobs
and `completion_tokens` always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from gateway.domain import ChoiceDeltas, ChoiceEvent, ChoiceFinished, Counts, Delta, Finish

Json: TypeAlias = dict[str, object]


class ChoiceShape(Protocol):
    """One choice's way into JSON. Pieces are the members of `choices` in chunks, without their index."""

    def open(self) -> list[Json]:
        """Before anything else is known of it."""
        ...

    def push(self, delta: Delta) -> list[Json]:
        """The pieces that may be shown now."""
        ...

    def close(self, finish: Finish) -> list[Json]:
        """The pieces behind the last delta, the reason for the end in the last one."""
        ...

    def fold(self, pieces: Sequence[Json]) -> Json:
        """All pieces in one: the member of `choices` in an answer sent whole, without its index."""
        ...


class Shape(Protocol):
    """One answer's way into JSON."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    @property
    def choices(self) -> Sequence[ChoiceShape]: ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of one answer share."""

    id: str
    created: int
    model: str
    fingerprint: str

    def wrap(self, kind: str, choices: list[Json], **more: object) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
            "system_fingerprint": self.fingerprint,
        }


class Whole:
    """Gathers the events of an answer that is sent in one piece."""

    def __init__(self, envelope: Envelope, shape: Shape) -> None:
        self._envelope = envelope
        self._shape = shape
        self._pieces = [choice.open() for choice in shape.choices]
        self._completion_tokens = 0
        self.counts = Counts()

    def add(self, event: ChoiceEvent) -> None:
        choice, pieces = self._shape.choices[event.index], self._pieces[event.index]
        match event:
            case ChoiceDeltas():
                for delta in event.deltas:
                    pieces += choice.push(delta)
            case ChoiceFinished():
                self._completion_tokens += event.completion_tokens
                self.counts += event.counts
                pieces += choice.close(event.finish)

    def body(self, prompt_tokens: int) -> Json:
        """The response, once every choice is finished."""
        folded = [choice.fold(pieces) for choice, pieces in zip(self._shape.choices, self._pieces, strict=True)]
        return self._envelope.wrap(
            self._shape.whole_object,
            [{"index": index} | choice for index, choice in enumerate(folded)],
            usage=_usage(prompt_tokens, self._completion_tokens),
        )


class Chunks:
    """Turns the events of a streamed answer into chunks, each as soon as it can be shown."""

    def __init__(self, envelope: Envelope, shape: Shape, include_usage: bool) -> None:
        self._envelope = envelope
        self._shape = shape
        self._started = [False] * len(shape.choices)
        self._include_usage = include_usage
        self._completion_tokens = 0
        self.counts = Counts()

    def add(self, event: ChoiceEvent) -> list[Json]:
        """The chunks an event makes."""
        choice = self._shape.choices[event.index]
        pieces: list[Json] = []
        if not self._started[event.index]:
            self._started[event.index] = True
            pieces += choice.open()
        match event:
            case ChoiceDeltas():
                for delta in event.deltas:
                    pieces += choice.push(delta)
            case ChoiceFinished():
                self._completion_tokens += event.completion_tokens
                self.counts += event.counts
                pieces += choice.close(event.finish)
        # OpenAI: with include_usage, every chunk but the last carries a null usage.
        more: Json = {"usage": None} if self._include_usage else {}
        return [
            self._envelope.wrap(self._shape.chunk_object, [{"index": event.index} | piece], **more) for piece in pieces
        ]

    def end(self, prompt_tokens: int) -> list[Json]:
        """The chunks behind the last choice: usage, where it was asked for."""
        if not self._include_usage:
            return []
        usage = _usage(prompt_tokens, self._completion_tokens)
        return [self._envelope.wrap(self._shape.chunk_object, [], usage=usage)]


def _usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
