"""The fields of a chat request that say how tokens are chosen, and what ends the sequence by its id.

Owns their defaults and bounds. Ids are not held against a vocabulary here: that takes the model.

`temperature`, `top_p`, `presence_penalty`, `frequency_penalty` and `logit_bias` are OpenAI's; `top_k` (0 or -1 for no
limit), `min_p`, `repetition_penalty`, `min_tokens` and `stop_token_ids` are vLLM's and SGLang's. `min_tokens` holds
back the ids that end a sequence, not stop strings. The token that ended a sequence is part of the answer; where it has
text, which the model's own do not, the text is shown.
"""

from __future__ import annotations

import re

import msgspec

from backend.protocol import MAX_BIAS, MAX_BIASES, MAX_PENALTY, MAX_REPETITION_PENALTY, Sampling
from gateway.errors import RequestError

MAX_TEMPERATURE = 2.0
MAX_STOP_IDS = 128

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""One spelling for each id, so that none is named twice."""


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True):
    """As the client wrote them, defaults filled in."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    min_tokens: int = 0
    stop_token_ids: list[int] = []


def check_sampling(fields: SamplingFields) -> None:
    """Raise `RequestError` naming the first field out of bounds."""
    # Written so that NaN fails every comparison.
    require(0.0 <= fields.temperature <= MAX_TEMPERATURE, "temperature", f"must be between 0 and {MAX_TEMPERATURE:g}")
    require(0.0 < fields.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
    require(fields.top_k >= -1, "top_k", "must be -1 or 0 (no limit) or more")
    require(0.0 <= fields.min_p <= 1.0, "min_p", "must be between 0 and 1")
    for name, penalty in (
        ("presence_penalty", fields.presence_penalty),
        ("frequency_penalty", fields.frequency_penalty),
    ):
        require(-MAX_PENALTY <= penalty <= MAX_PENALTY, name, f"must be between {-MAX_PENALTY:g} and {MAX_PENALTY:g}")
    require(
        0.0 < fields.repetition_penalty <= MAX_REPETITION_PENALTY,
        "repetition_penalty",
        f"must be above 0 and at most {MAX_REPETITION_PENALTY:g}",
    )
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


def sampling_of(fields: SamplingFields) -> Sampling:
    """Checked fields in the one form that equal ones share; without a seed."""
    # Adding 0.0 turns -0.0 into 0.0.
    return Sampling(
        temperature=fields.temperature + 0.0,
        top_p=fields.top_p,
        top_k=max(fields.top_k, 0),
        min_p=fields.min_p + 0.0,
        presence_penalty=fields.presence_penalty + 0.0,
        frequency_penalty=fields.frequency_penalty + 0.0,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=tuple(sorted((int(id_), bias) for id_, bias in fields.logit_bias.items() if bias != 0)),
        min_tokens=fields.min_tokens,
    )


def stop_ids_of(fields: SamplingFields) -> tuple[int, ...]:
    """The extra stop ids in the one form that equal ones share."""
    return tuple(sorted(set(fields.stop_token_ids)))


def require(holds: bool, field: str, rule: str) -> None:
    """Raise `RequestError` for the field unless the rule holds."""
    if not holds:
        raise RequestError(f"{field} {rule}", param=field)
