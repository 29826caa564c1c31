"""The fields that every generating endpoint has beside its prompt and its way of showing the answer.

Owns their defaults and bounds. `ignore_eos` is vLLM's and SGLang's, `is_deterministic` LLM-42's.
"""

from __future__ import annotations

import msgspec

from backend.protocol import MAX_SEED, MIN_SEED
from gateway.openai_api.response_format import Format
from gateway.openai_api.sampling import SamplingFields, check_sampling, given, require
from gateway.settings import MAX_CHOICES
from policies.policy import RequestFacts

ENGINES_OWN: dict[str, tuple[object, ...]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "priority": (0,),
}
"""vLLM's and SGLang's fields at their own defaults, which clients may send along: what they ask for holds."""

MAX_STOPS = 4
MAX_STOP_CHARS = 1024


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_obfuscation` asks for padding against eavesdroppers, which is optional: none is sent."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """As the client wrote them, defaults filled in."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    n: int = 1
    is_deterministic: bool | None = None
    ignore_eos: bool = False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def check_generation(fields: GenerationFields) -> None:
    """Raise `RequestError` naming the first field out of bounds."""
    check_sampling(fields)
    require(fields.seed is None or MIN_SEED <= fields.seed <= MAX_SEED, "seed", "must fit in a signed 64-bit integer")
    require(1 <= fields.n <= MAX_CHOICES, "n", f"must be between 1 and {MAX_CHOICES}")
    require(fields.max_tokens is None or fields.max_tokens >= 1, "max_tokens", "must be at least 1")
    stops = fields.stops
    require(len(stops) <= MAX_STOPS, "stop", f"must hold at most {MAX_STOPS} strings")
    require(all(stops), "stop", "must not hold an empty string")
    require(
        all(len(stop) <= MAX_STOP_CHARS for stop in stops), "stop", f"must hold at most {MAX_STOP_CHARS} characters"
    )
    require(fields.stream or fields.stream_options is None, "stream_options", "needs stream to be true")


def check_format(form: Format, fields: GenerationFields) -> None:
    """Raise `RequestError` where an answer of a format could not end."""
    require(form.grammar is None or not fields.ignore_eos, "ignore_eos", f"contradicts {form.field}")


def facts_of(fields: GenerationFields, determinism_header: str | None, route: str) -> RequestFacts:
    """What the request says that a policy has a say in."""
    return RequestFacts(
        is_deterministic=fields.is_deterministic,
        header=determinism_header,
        seed=fields.seed,
        sampling=given(fields),
        model=fields.model,
        route=route,
    )
