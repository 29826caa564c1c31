"""Builds chat completion responses and chunks.

Owns OpenAI's field names on the way out. Takes ids and times as given. Logprobs are written as they came, digit for
digit: a float32 widened to a double survives JSON unharmed.

As vLLM does, the token that ended the answer is counted and has a logprobs entry, although its text is not shown: the
entries and `completion_tokens` always agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gateway.domain import ChoiceDeltas, ChoiceEvent, ChoiceFinished, Counts, Delta, Finish, Token

Json: TypeAlias = dict[str, object]
TokenName: TypeAlias = Callable[[int], bytes]


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


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None


class Whole:
    """Gathers the events of an answer that is sent in one piece."""

    def __init__(self, envelope: Envelope, choices: int, token_name: TokenName | None) -> None:
        self._envelope = envelope
        self._choices = [_Choice() for _ in range(choices)]
        self._token_name = token_name
        self._completion_tokens = 0
        self.counts = Counts()

    def add(self, event: ChoiceEvent) -> None:
        choice = self._choices[event.index]
        match event:
            case ChoiceDeltas():
                for delta in event.deltas:
                    choice.text.append(delta.text)
                    choice.tokens += delta.tokens
            case ChoiceFinished():
                choice.finish = event.finish
                self._completion_tokens += event.completion_tokens
                self.counts += event.counts

    def body(self, prompt_tokens: int) -> Json:
        """The response, once every choice is finished."""
        choices: list[Json] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": _logprobs(choice.tokens, self._token_name),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._envelope.wrap("chat.completion", choices, usage=_usage(prompt_tokens, self._completion_tokens))


class Chunks:
    """Turns the events of a streamed answer into chunks, each as soon as it can be shown."""

    def __init__(self, envelope: Envelope, choices: int, token_name: TokenName | None, include_usage: bool) -> None:
        self._envelope = envelope
        self._started = [False] * choices
        self._token_name = token_name
        self._include_usage = include_usage
        self._completion_tokens = 0
        self.counts = Counts()

    def add(self, event: ChoiceEvent) -> list[Json]:
        """The chunks an event makes. A choice's first chunk carries its role."""
        chunks = []
        if not self._started[event.index]:
            self._started[event.index] = True
            chunks.append(self._chunk(event.index, {"role": "assistant", "content": "", "refusal": None}))
        match event:
            case ChoiceDeltas():
                chunks += [self._delta(event.index, delta) for delta in event.deltas if delta.text or self._token_name]
            case ChoiceFinished():
                self._completion_tokens += event.completion_tokens
                self.counts += event.counts
                chunks.append(self._chunk(event.index, {}, finish_reason=event.finish))
        return chunks

    def end(self, prompt_tokens: int) -> list[Json]:
        """The chunks behind the last choice: usage, where it was asked for."""
        if not self._include_usage:
            return []
        usage = _usage(prompt_tokens, self._completion_tokens)
        return [self._envelope.wrap("chat.completion.chunk", [], usage=usage)]

    def _delta(self, index: int, delta: Delta) -> Json:
        return self._chunk(index, {"content": delta.text}, logprobs=_logprobs(delta.tokens, self._token_name))

    def _chunk(
        self, index: int, delta: Json, *, logprobs: Json | None = None, finish_reason: Finish | None = None
    ) -> Json:
        choice: Json = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        # OpenAI: with include_usage, every chunk but the last carries a null usage.
        more: Json = {"usage": None} if self._include_usage else {}
        return self._envelope.wrap("chat.completion.chunk", [choice], **more)


def model_card(model: str, created: int, max_context: int) -> Json:
    """An entry of `GET /v1/models`; `max_model_len` is vLLM's name for the context."""
    return {"id": model, "object": "model", "created": created, "owned_by": "verbatim", "max_model_len": max_context}


def _usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _logprobs(tokens: Sequence[Token], token_name: TokenName | None) -> Json | None:
    if token_name is None:
        return None
    entries = [
        {
            **_scored(token.id, token.logprob, token_name),
            "top_logprobs": [_scored(top.id, top.logprob, token_name) for top in token.top],
        }
        for token in tokens
    ]
    return {"content": entries, "refusal": None}


def _scored(id_: int, logprob: float, token_name: TokenName) -> Json:
    name = token_name(id_)
    return {"token": name.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(name)}
