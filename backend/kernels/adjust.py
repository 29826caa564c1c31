"""Biases, penalties, the minimum length and grammars: a row's logits adjusted by its sampling and the tokens before it.

Why the result depends on nothing else. Each row is adjusted by itself, for the token ids it is about, each of which
occurs once; what happens to a logit is a chain of single float32 additions, multiplications and divisions, each rounded
as IEEE 754 says (no product is fused into a sum), so neither the number of ids nor their order matters. Nothing is kept
between rows or calls: the counts are taken anew from the tokens before the row, drafts among them. A row behind a draft
that is refused has seen tokens that never stand, but then its own choice does not stand either; and the row that
replaces it sees the sequence that does. So there is nothing to roll back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch

from backend.protocol import Sampling

_LARGEST = 1e30
"""Adjusted logits stay within this, whatever is divided by a tiny penalty: a choice needs finite differences."""
_EXCLUDED = -1e35
"""Below every other logit by more than any temperature makes up for, yet finite."""


@dataclass(frozen=True, slots=True)
class Past:
    """What one choice may look at: the tokens before it, the last `generated` of them generated, and the stop ids.

    `allowed` is what a grammar allows behind these tokens, a bit for each token id, lowest first: id is bit `id % 8` of
    byte `id // 8`. At least one id is allowed. None allows all.
    """

    tokens: Sequence[int]
    generated: int
    stop_ids: Set[int]
    allowed: bytes | None = None


def adjust(row: torch.Tensor, sampling: Sampling, past: Past) -> None:
    """Adjust one row [vocab] of finite float32 logits in place, in the order that `Sampling` gives."""
    assert row.dim() == 1 and row.dtype == torch.float32
    if sampling.logit_bias:
        ids = _indices(id_ for id_, _ in sampling.logit_bias)
        row[ids] = row[ids] + _float32(bias for _, bias in sampling.logit_bias)
    if sampling.repetition_penalty != 1:
        ids = _indices(dict.fromkeys(past.tokens))
        penalty = _float32([sampling.repetition_penalty])
        logits = row[ids]
        row[ids] = torch.where(logits > 0, logits / penalty, logits * penalty).clamp(-_LARGEST, _LARGEST)
    if past.generated and (sampling.frequency_penalty != 0 or sampling.presence_penalty != 0):
        counts = Counter(past.tokens[-past.generated :])
        ids = _indices(counts)
        by_count = _float32([sampling.frequency_penalty]) * _float32(counts.values())
        row[ids] = row[ids] - by_count - _float32([sampling.presence_penalty])
    held_back = past.generated < sampling.min_tokens
    if past.allowed is not None:
        row.masked_fill_(~_allowed(past, row.numel(), held_back).to(row.device), _EXCLUDED)
    elif held_back:
        row[_stops(past, row.numel())] = _EXCLUDED


def _allowed(past: Past, vocab: int, held_back: bool) -> torch.Tensor:
    """What the grammar allows, bool [vocab]; without the stop ids where these are held back and something is left."""
    assert past.allowed is not None
    # Several times as fast as the same in torch.
    bits = np.unpackbits(np.frombuffer(past.allowed, np.uint8), count=vocab, bitorder="little")
    allowed = torch.from_numpy(bits).bool()
    assert bool(allowed.any())
    if held_back:
        others = allowed.clone()
        others[_stops(past, vocab)] = False
        if bool(others.any()):
            return others
    return allowed


def _stops(past: Past, vocab: int) -> torch.Tensor:
    return _indices(id_ for id_ in sorted(past.stop_ids) if id_ < vocab)


def _indices(ids: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int64)


def _float32(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float32)
