"""Parses and checks `POST /v1/chat/completions`.

Owns the list of fields: understood, accepted because they cannot change the answer, accepted only at the value that
means nothing, and refused. What is not listed is refused by name: a field silently dropped is an answer silently
changed. Knows nothing of models, policies or capacity.

Where OpenAI leaves room: null means absent. Text parts of one message are joined by newlines, as vLLM does. `developer`
is `system` to the model's template. `ignore_eos` is vLLM's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from backend.protocol import MAX_SEED, MAX_TOP_LOGPROBS, MIN_SEED
from gateway.domain import Message, Order
from gateway.errors import RequestError
from gateway.openai_api.sampling import SamplingFields, check_sampling, require, sampling_of, stop_ids_of
from gateway.settings import MAX_CHOICES
from policies.policy import RequestFacts

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_NESTING = 8
"""How deep we look into a field. The deepest one understood, `messages[0].content[0].text`, is 4 deep."""

VIEWS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Say something about the request, nothing about the answer: accepted and not looked at."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
"""Known and not supported: accepted at these values, which change nothing, refused at any other."""

UNSUPPORTED = frozenset({"audio", "prediction", "web_search_options", "moderation"})
"""Known and not supported at any value."""

Object: TypeAlias = dict[str, object]
T = TypeVar("T")


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_TextPart], msgspec.Meta(min_length=1)]
    name: str | None = None


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Body(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    model: str
    messages: list[_Message]
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    n: int = 1
    logprobs: bool = False
    top_logprobs: int | None = None
    is_deterministic: bool | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid request: the order, and how its answer is to be shown."""

    order: Order
    stream: bool
    include_usage: bool
    logprobs: bool


def parse_chat(content: bytes, determinism_header: str | None) -> ChatRequest:
    """Parse a request body; raises `RequestError` naming the field at fault."""
    body = _convert(_known_fields(_decode(content)), _Body)
    _check(body)
    order = Order(
        model=body.model,
        messages=tuple(map(_message, body.messages)),
        sampling=sampling_of(body),
        facts=RequestFacts(body.is_deterministic, determinism_header, body.seed),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_tokens_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        stops=tuple(_stops(body)),
        stop_ids=stop_ids_of(body),
        choices=body.n,
        top_logprobs=body.top_logprobs or 0,
        ignore_eos=body.ignore_eos,
    )
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return ChatRequest(order, body.stream, include_usage, body.logprobs)


def _decode(content: bytes) -> Object:
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise _field_that_is_no_json(content) or RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _field_that_is_no_json(content: bytes) -> RequestError | None:
    """The field at fault where Python's json module reads what is no JSON: NaN, an infinity, half a character."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    for path, leaf in _leaves(body, "", 0):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return RequestError(f"{path} must be a finite number", param=path)
        if isinstance(leaf, str) and not _is_text(leaf):
            return RequestError(f"{path} holds a lone surrogate, which is no character", param=path)
    return None


def _leaves(value: object, path: str, depth: int) -> Iterator[tuple[str, object]]:
    """Numbers, strings and the like with their paths, as far down as we look and as the path can be written."""
    if depth > MAX_NESTING:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if _is_text(key):
                yield from _leaves(item, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", depth + 1)
    else:
        yield path, value


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _known_fields(body: Object) -> Object:
    """The fields that say something about the answer, without those that are null."""
    kept: Object = {}
    for name, value in body.items():
        if value is None or name in VIEWS:
            continue
        if name in NEUTRAL:
            # `==` takes 1 for True; parallel_tool_calls of 1 is no neutral value.
            if not any(
                value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL[name]
            ):
                raise RequestError(f"{name} is not supported", param=name)
        elif name in UNSUPPORTED:
            raise RequestError(f"{name} is not supported", param=name)
        else:
            kept[name] = _without_nulls(value, name, 1)
    return kept


def _without_nulls(value: object, field: str, depth: int) -> object:
    if not isinstance(value, dict | list):
        return value
    # What msgspec decodes may be nested deeper than Python can follow.
    if depth > MAX_NESTING:
        raise RequestError(f"{field} is nested too deeply", param=field)
    if isinstance(value, dict):
        return {k: _without_nulls(v, field, depth + 1) for k, v in value.items() if v is not None}
    return [_without_nulls(item, field, depth + 1) for item in value]


_PATH = re.compile(r"^(?P<reason>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)


def _convert(body: Object, type_: type[T]) -> T:
    try:
        return msgspec.convert(body, type_)
    except msgspec.ValidationError as error:
        match = _PATH.match(str(error))
        assert match is not None
        # What is wrong with a value under a key of the client's is said of the whole field.
        reason, path = match["reason"], (match["path"] or "").partition("[...]")[0]
        for pattern, said in ((_MISSING, "is required"), (_UNKNOWN, "is unknown or not supported")):
            if at := pattern.match(reason):
                path, reason = f"{path}.{at[1]}" if path else at[1], said
        raise RequestError(f"{path}: {reason}" if path else reason, param=path or None) from error


def _check(body: _Body) -> None:
    require(len(body.messages) > 0, "messages", "must hold at least one message")
    check_sampling(body)
    require(body.seed is None or MIN_SEED <= body.seed <= MAX_SEED, "seed", "must fit in a signed 64-bit integer")
    require(1 <= body.n <= MAX_CHOICES, "n", f"must be between 1 and {MAX_CHOICES}")
    for name, value in (("max_tokens", body.max_tokens), ("max_completion_tokens", body.max_completion_tokens)):
        require(value is None or value >= 1, name, "must be at least 1")
    both = None not in (body.max_tokens, body.max_completion_tokens)
    require(
        not both or body.max_tokens == body.max_completion_tokens, "max_tokens", "contradicts max_completion_tokens"
    )
    stops = _stops(body)
    require(len(stops) <= MAX_STOPS, "stop", f"must hold at most {MAX_STOPS} strings")
    require(all(stops), "stop", "must not hold an empty string")
    require(
        all(len(stop) <= MAX_STOP_CHARS for stop in stops), "stop", f"must hold at most {MAX_STOP_CHARS} characters"
    )
    if body.top_logprobs is not None:
        require(body.logprobs, "top_logprobs", "needs logprobs to be true")
        require(0 <= body.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", f"must be between 0 and {MAX_TOP_LOGPROBS}")
    require(body.stream or body.stream_options is None, "stream_options", "needs stream to be true")


def _stops(body: _Body) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop


def _message(message: _Message) -> Message:
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return Message("system" if message.role == "developer" else message.role, text, message.name)
