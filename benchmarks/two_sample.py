"""A two-sample test for sequences of tokens: were both samples drawn from the same distribution?

The statistic is the chi-squared statistic of the two samples' token counts, summed over positions; tokens that both
samples together hold rarely at a position count as one. The positions of a sequence depend on each other, so the
statistic's distribution is not taken from a table but from permutations: whole sequences change sides at random (Fisher
1935; Phipson and Smyth 2010 for the p-value, which is never 0). The p-value is exact whatever the distribution is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_RARE = 10
_AT_ONCE = 250


@dataclass(frozen=True, slots=True)
class Outcome:
    """`p` is the share of permutations whose statistic is at least as large; `categories` counts what is compared."""

    p: float
    statistic: float
    tokens: int
    categories: int


def compare(left: torch.Tensor, right: torch.Tensor, permutations: int, generator: torch.Generator) -> Outcome:
    """Test two samples, int64 [sequences, positions] each with the same number of positions."""
    pooled = torch.cat([left, right])
    counted = torch.cat([_categories(column) for column in pooled.unbind(1)], dim=1)
    observed = torch.zeros(1, len(pooled), dtype=torch.float64)
    observed[0, : len(left)] = 1
    statistic = float(_statistics(observed, counted)[0])
    reached = 0
    for first in range(0, permutations, _AT_ONCE):
        sides = torch.stack(
            [
                observed[0, torch.randperm(len(pooled), generator=generator)]
                for _ in range(min(_AT_ONCE, permutations - first))
            ]
        )
        reached += int((_statistics(sides, counted) >= statistic - 1e-9).sum())
    return Outcome((1 + reached) / (1 + permutations), statistic, left.numel(), counted.shape[1])


def _categories(column: torch.Tensor) -> torch.Tensor:
    """One position's tokens [N] -> which of its categories each is, one-hot float64 [N, categories]."""
    _, index, counts = torch.unique(column, return_inverse=True, return_counts=True)
    frequent = counts >= _RARE
    # The frequent ones in order, then one for all the rest.
    names = torch.where(frequent, frequent.cumsum(0) - 1, frequent.sum())
    return torch.nn.functional.one_hot(names[index]).double()


def _statistics(sides: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Chi-squared over all categories, for each row of sides [P, N] that says with 1 who is on the left -> [P]."""
    totals = counted.sum(0)
    share = float(sides[0].mean())
    expected = totals * share
    return ((sides @ counted - expected) ** 2 / (expected * (1 - share))).sum(1)
