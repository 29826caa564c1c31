"""Choosing a token from its logits: a pure function of (logits, sampling, seed, position, past). Both lanes use it.

Temperature sampling is Gumbel-max: argmax over tokens of logit / temperature + g, with g standard Gumbel noise
(Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030), which draws from softmax(logits / temperature) exactly. The noise
is counter-based: a hash of (seed, position, token id), so a token's noise never depends on a random state, on the
batch, or on which other tokens survive the filters. Two sampling runs that see nearly equal logits therefore nearly
always choose the same token: that is what lets a draft agree with its verification.

The filters keep sets defined by value and lowest id, never by the order in which a sort leaves equal values. Every op
works within its row, and every row is the whole vocabulary, so a row's result does not depend on its company.

The hash is the 32-bit finaliser of Chris Wellons ("lowbias32", github.com/skeeto/hash-prospector), keyed twice by a
SplitMix64 (Steele, Lea, Flood 2014) of seed and position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from backend.kernels.adjust import Past, adjust
from backend.protocol import Sampling, ScoredToken

_TOP_P_CANDIDATES = 256  # The nucleus almost always lies within these; the full sort is for when it does not.
_MASK_64 = (1 << 64) - 1

Sample: TypeAlias = Callable[[torch.Tensor, Sequence[tuple[int, int]]], torch.Tensor]
"""A device's way to choose by noise; `sample` says what it takes and gives."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token at one absolute position is to be chosen. A sampling that adjusts the logits needs the `past`."""

    sampling: Sampling
    position: int
    past: Past | None = None

    def __post_init__(self) -> None:
        assert self.past is not None or not self.sampling.adjusts


def sample(logits: torch.Tensor, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Choose by the noise of keys[i] = (seed, position) for row i of float32 logits [N, vocab] -> int64 [N].

    Logits may be -inf, but not all of a row's. Of equal scores the lowest id wins.
    """
    return (logits + gumbel(keys, logits.shape[1])).argmax(dim=-1)


def choose(logits: torch.Tensor, draws: Sequence[Draw], sample: Sample = sample) -> torch.Tensor:
    """Choose one token for each row of finite float32 logits [N, vocab] -> int64 [N]."""
    logits = _adjusted(logits, draws)
    chosen = logits.argmax(dim=-1)
    random_rows = [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if random_rows:
        # A whole batch needs no copy of its rows.
        rows = logits if len(random_rows) == len(draws) else logits[random_rows]
        chosen[random_rows] = _choose_at_random(rows, [draws[i] for i in random_rows], sample)
    return chosen


def _adjusted(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The logits to choose from; the model's own stay as they are, to be reported."""
    if all(draw.past is None for draw in draws):
        return logits
    logits = logits.clone()
    for row, draw in zip(logits, draws, strict=True):
        if draw.past is not None:
            # On the host, wherever the row is: a few ids of it change.
            host = row.cpu()
            adjust(host, draw.sampling, draw.past)
            row.copy_(host)
    return logits


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Which rows of logits [N, vocab] are finite throughout, bool [N]. Nothing can be promised about the others."""
    # The extremes of values with a NaN among them are NaN; isfinite over all the values takes several times as long.
    return torch.isfinite(logits.amax(dim=1)) & torch.isfinite(logits.amin(dim=1))


def _choose_at_random(logits: torch.Tensor, draws: Sequence[Draw], sample: Sample) -> torch.Tensor:
    temperatures = torch.tensor(
        [draw.sampling.temperature for draw in draws], dtype=torch.float32, device=logits.device
    )
    # Relative to the maximum, so that no temperature, however small, makes an infinity that is not a zero probability.
    temperatures.clamp_(min=torch.finfo(torch.float32).tiny)
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperatures[:, None]
    for row, draw in zip(scaled, draws, strict=True):
        _filter(row, draw.sampling)
    return sample(scaled, [(draw.sampling.seed, draw.position) for draw in draws])


def _filter(row: torch.Tensor, sampling: Sampling) -> None:
    """Set the logits of one row [vocab] that top_k, top_p and min_p exclude to -inf, in place."""
    if 0 < sampling.top_k < row.numel():
        _keep_best(row, torch.topk(row, sampling.top_k).values)
    if sampling.top_p < 1:
        _keep_best(row, _nucleus(row, sampling.top_p))
    if sampling.min_p > 0:
        row.masked_fill_(torch.exp(row - row.max()) < sampling.min_p, float("-inf"))


def _nucleus(row: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest descending run of values of row [vocab] whose probabilities sum to at least top_p."""
    # In float64, where the rounding of the sum cannot move the cut by more than a value of no weight.
    probabilities = torch.softmax(row.double(), dim=0)
    for count in (min(_TOP_P_CANDIDATES, row.numel()), row.numel()):
        # On the host: a GPU's running sum of floats is not the same from run to run.
        mass = torch.topk(probabilities, count).values.cpu().cumsum(0)
        reached = int((mass < top_p).sum())
        if reached < count:
            break
    return torch.topk(row, min(reached + 1, row.numel())).values


def _keep_best(row: torch.Tensor, values: torch.Tensor) -> None:
    """Keep as many of row's highest logits as `values`, which holds them in descending order; ties by lowest id."""
    threshold = values[-1]
    keep_tied = values.numel() - int((values > threshold).sum())
    tied = row == threshold
    excluded_tied = tied & (tied.cumsum(0) > keep_tied)
    row.masked_fill_((row < threshold) | excluded_tied, float("-inf"))


def gumbel(keys: Sequence[tuple[int, int]], vocab: int) -> torch.Tensor:
    """Standard Gumbel noise float32 [len(keys), vocab]; row i is a function of keys[i] = (seed, position) alone."""
    bits = noise_bits(keys, vocab)
    # Uniform on (0, 1) with full relative precision near 0, which is where the winners are: a token wins where its
    # exponential -log(1 - u) is small.
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    return -torch.log(-torch.log1p(-uniform.clamp_(max=1 - 2.0**-24)))


def noise_bits(keys: Sequence[tuple[int, int]], vocab: int) -> torch.Tensor:
    """The hash that the noise is made from, int32 [len(keys), vocab]."""
    low, high = noise_keys(keys)
    return _mix32(_mix32(torch.arange(vocab, dtype=torch.int32) ^ low[:, None]) ^ high[:, None])


def noise_keys(keys: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves, int32 [len(keys)] each, of the hash's key for each (seed, position)."""
    mixed = [_split_mix(_split_mix(seed & _MASK_64) + position & _MASK_64) for seed, position in keys]
    low = torch.tensor([_signed(key & 0xFFFFFFFF) for key in mixed], dtype=torch.int32)
    high = torch.tensor([_signed(key >> 32) for key in mixed], dtype=torch.int32)
    return low, high


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 16)) * 0x7FEB352D
    x = (x ^ _shift_right(x, 15)) * _signed(0x846CA68B)
    return x ^ _shift_right(x, 16)


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int32, which PyTorch lacks."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _split_mix(x: int) -> int:
    x = x + 0x9E3779B97F4A7C15 & _MASK_64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK_64
    return x ^ x >> 31


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    """float32 logits [N, vocab] -> natural-log probabilities [N, vocab], nothing adjusted or filtered."""
    return torch.log_softmax(logits, dim=-1)


def top_scores(row: torch.Tensor, count: int) -> list[ScoredToken]:
    """The `count` highest values of row [vocab] with their ids, best first, ties by lowest id."""
    if count == 0:
        return []
    threshold = torch.topk(row, count).values[-1]
    ids = (row >= threshold).nonzero().flatten()
    order = torch.sort(row[ids], descending=True, stable=True).indices[:count]
    return [ScoredToken(id=i, score=s) for i, s in zip(ids[order].tolist(), row[ids[order]].tolist(), strict=True)]
