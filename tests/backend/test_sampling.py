"""Sampling: a row's choice depends on its logits, sampling, seed and position alone; and it is distributed right."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.kernels.sampling import Draw, choose, finite_rows, gumbel, logprobs, top_scores
from backend.protocol import Sampling

VOCAB = 1003

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 50, 5000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@given(
    st.lists(st.tuples(samplings, st.integers(0, 10_000)), min_size=1, max_size=9), st.integers(0, 2**31), st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_company_never_matters(draws: list[tuple[Sampling, int]], noise: int, coarse: bool) -> None:
    logits = torch.randn(len(draws), VOCAB, generator=torch.Generator().manual_seed(noise)) * 4
    if coarse:
        logits = logits.to(torch.bfloat16).float()  # Many exact ties.
    together = choose(logits, [Draw(sampling, position) for sampling, position in draws])
    scores = logprobs(logits)
    for row, (sampling, position) in enumerate(draws):
        torch.set_num_threads(1 + row % 2)
        assert choose(logits[row : row + 1].clone(), [Draw(sampling, position)])[0] == together[row]
        assert torch.equal(logprobs(logits[row : row + 1].clone())[0], scores[row])


def test_noise_does_not_depend_on_company_or_threads() -> None:
    keys = [(seed, position) for seed in (0, 1, -1, 2**63 - 1) for position in (0, 1, 777)]
    torch.set_num_threads(2)
    together = gumbel(keys, 49_152)
    torch.set_num_threads(1)
    for row, key in enumerate(keys):
        assert torch.equal(gumbel([key], 49_152)[0], together[row])
    assert len({tuple(row.tolist()) for row in together[:, :8]}) == len(keys)


def test_logprobs_do_not_depend_on_company_or_threads() -> None:
    logits = torch.randn(33, 49_152) * 5
    torch.set_num_threads(2)
    together = logprobs(logits)
    torch.set_num_threads(1)
    for row in range(0, 33, 8):
        assert torch.equal(logprobs(logits[row : row + 1].clone())[0], together[row])


def test_temperature_sampling_draws_from_the_softmax() -> None:
    """Chi-squared of 40,000 draws over 12 tokens: the 0.9999 quantile for 11 degrees of freedom is 37.4."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5))
    draws = [Draw(Sampling(temperature=0.7, seed=seed), position) for seed in range(200) for position in range(200)]
    chosen = choose(logits.expand(len(draws), -1).contiguous(), draws)
    observed = torch.bincount(chosen, minlength=12).double()
    expected = torch.softmax(logits.double() / 0.7, dim=0) * len(draws)
    assert float(((observed - expected) ** 2 / expected).sum()) < 37.4


def test_gumbel_noise_has_the_right_tail() -> None:
    """Over 2**22 draws the share above each level is that of a standard Gumbel, within five standard errors."""
    noise = torch.cat([gumbel([(seed, position) for position in range(64)], 1 << 12).flatten() for seed in range(16)])
    assert torch.isfinite(noise).all()
    for level in (-1.0, 0.0, 2.0, 5.0, 9.0):
        share = 1 - math.exp(-math.exp(-level))
        error = math.sqrt(share * (1 - share) / noise.numel())
        assert abs(float((noise > level).double().mean()) - share) < 5 * error


def _support(logits: torch.Tensor, **filters: float) -> set[int]:
    draws = [Draw(Sampling(temperature=1.0, seed=seed, **filters), 0) for seed in range(3000)]  # type: ignore[arg-type]
    return set(choose(logits.expand(len(draws), -1).contiguous(), draws).tolist())


def test_filters_keep_what_they_say() -> None:
    logits = torch.log(torch.tensor([0.05, 0.4, 0.2, 0.2, 0.1, 0.05]))
    assert _support(logits) == {0, 1, 2, 3, 4, 5}
    assert _support(logits, top_k=1) == {1}
    assert _support(logits, top_k=2) == {1, 2}, "a tie at the cut goes to the lowest id"
    assert _support(logits, top_p=0.39) == {1}
    assert _support(logits, top_p=0.55) == {1, 2}
    assert _support(logits, top_p=0.7) == {1, 2, 3}
    assert _support(logits, min_p=0.2) == {1, 2, 3, 4}
    assert _support(logits, top_k=3, top_p=0.45) == {1}, "top_p counts what top_k left"


def test_a_nucleus_larger_than_the_candidates_is_found() -> None:
    logits = torch.zeros(600)
    assert max(_support(logits, top_p=0.499)) == 299


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_lowest_id(temperature: float) -> None:
    logits = torch.full((3, 50), -1.0)
    logits[:, [7, 8, 40]] = 5.0
    draws = [Draw(Sampling(temperature=temperature, top_k=1), position) for position in range(3)]
    assert choose(logits, draws).tolist() == [7, 7, 7]
    assert [score.id for score in top_scores(logits[0], 4)] == [7, 8, 40, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_told_apart(value: float) -> None:
    logits = torch.randn(4, 90)
    logits[2, 33] = value
    assert finite_rows(logits).tolist() == [True, True, False, True]


@pytest.mark.parametrize("temperature", [1e-5, 1e-37, 1e-38, 1e-44, 1e-46, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3}])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.randn(5, 1003) * 8
    draws = [Draw(Sampling(temperature=temperature, seed=row, **filters), row) for row in range(5)]  # type: ignore[arg-type]
    assert choose(logits, draws).tolist() == logits.argmax(dim=1).tolist()
