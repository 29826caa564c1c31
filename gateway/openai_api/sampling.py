"""The fields of a chat request that say how tokens are chosen, and what ends the sequence by its id.

Owns their defaults and bounds. Ids are not held against a vocabulary here: that takes the model.

`temperature`, `top_p`, `presence_penalty`, `frequency_penalty` and `logit_bias` are OpenAI's; `top_k` (0 or -1 for no
limit), `min_p`, `repetition_penalty`, `min_tokens` and `stop_token_ids` are vLLM's and SGLang's. `min_tokens` holds
back the ids that end a sequence, not stop strings. The token that ended a sequence is part of the answer; where it has
text, which the model's own do not, the text is shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from backend.protocol import MAX_BIAS, MAX_BIASES, MAX_PENALTY, MAX_REPETITION_PENALTY, Grammar, Sampling
from gateway.errors import RequestError

MAX_STOP_IDS = 128
MAX_TOP_K = 2**31 - 1
"""More than any vocabulary has, and no more than keys of logs and receipts can say."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a parameter may be: `most` is included, `least` unless it is `above`."""

    least: float
    most: float
    above: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise `RequestError` naming the parameter if it is out of bounds."""
        # Written so that NaN fails every comparison.
        holds = self.least <= value <= self.most and not (self.above and value == self.least)
        lower = f"above {self.least:g} and at most" if self.above else f"between {self.least:g} and"
        require(holds, name, f"must be {lower} {self.most:g}")


BOUNDS = {
    "temperature": Bounds(0, 2),
    "top_p": Bounds(0, 1, above=True),
    "min_p": Bounds(0, 1),
    "presence_penalty": Bounds(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": Bounds(-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": Bounds(0, MAX_REPETITION_PENALTY, above=True),
}
"""The parameters that a policy may fill in, and narrow."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""One spelling for each id, so that none is named twice."""


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True):
    """As the client wrote them. Those that are unset are the policy's to fill in (`given` has the others)."""

    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    top_k: int = 0
    logit_bias: dict[str, float] = {}
    min_tokens: int = 0
    stop_token_ids: list[int] = []


def check_sampling(fields: SamplingFields) -> None:
    """Raise `RequestError` naming the first field out of bounds."""
    for name, value in given(fields).items():
        BOUNDS[name].check(name, value)
    require(-1 <= fields.top_k <= MAX_TOP_K, "top_k", f"must be -1 or 0 (no limit) or more, up to {MAX_TOP_K}")
    biases = fields.logit_bias
    require(len(biases) <= MAX_BIASES, "logit_bias", f"must hold at most {MAX_BIASES} token ids")
    require(all(map(_TOKEN_ID.fullmatch, biases)), "logit_bias", "must have token ids for its keys")
    require(
        all(-MAX_BIAS <= bias <= MAX_BIAS for bias in biases.values()),
        "logit_bias",
        f"must hold biases between {-MAX_BIAS:g} and {MAX_BIAS:g}",
    )
    require(fields.min_tokens >= 0, "min_tokens", "must be 0 or more")
    require(len(fields.stop_token_ids) <= MAX_STOP_IDS, "stop_token_ids", f"must hold at most {MAX_STOP_IDS} token ids")
    require(all(id_ >= 0 for id_ in fields.stop_token_ids), "stop_token_ids", "must hold token ids of 0 or more")


def sampling_of(fields: SamplingFields, grammar: Grammar | None = None) -> Sampling:
    """Checked fields in the one form that equal ones share; without a seed, and without what is unset."""
    others = Sampling(
        top_k=max(fields.top_k, 0),
        logit_bias=tuple(sorted((int(id_), bias) for id_, bias in fields.logit_bias.items() if bias != 0)),
        min_tokens=fields.min_tokens,
        grammar=grammar,
    )
    return msgspec.structs.replace(others, **given(fields))


def given(fields: SamplingFields) -> dict[str, float]:
    """The parameters of `BOUNDS` that the client wrote, by name."""
    values = ((name, getattr(fields, name)) for name in BOUNDS)
    # Adding 0.0 turns -0.0 into 0.0.
    return {name: value + 0.0 for name, value in values if value is not UNSET}


def stop_ids_of(fields: SamplingFields) -> tuple[int, ...]:
    """The extra stop ids in the one form that equal ones share."""
    return tuple(sorted(set(fields.stop_token_ids)))


def require(holds: bool, field: str, rule: str, code: str | None = None) -> None:
    """Raise `RequestError` for the field unless the rule holds."""
    if not holds:
        raise RequestError(f"{field} {rule}", param=field, code=code)
