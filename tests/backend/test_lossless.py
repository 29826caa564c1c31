"""Verified output is that of plain decoding: bit for bit with any window, and in distribution by a two-sample test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from backend.engine.engine import Engine
from backend.protocol import Sampling
from backend.settings import Dtype, EngineSettings
from benchmarks.alone import Alone
from benchmarks.drive import Request, bits
from benchmarks.lossless import WINDOWS, WRONG, direct_sample, verified_sample, with_windows
from benchmarks.two_sample import compare
from tests.backend.harness import tiny_checkpoint

PROMPT = (7, 300, 21, 21, 5, 88, 130, 2, 14)
SEEDS = 1500
POSITIONS = 7


def build(dtype: Dtype) -> Engine:
    settings = EngineSettings("tiny", dtype, 1, 1 << 24, verify_groups=16, verify_window=16)
    return Engine(tiny_checkpoint(), settings, lambda share: None)


def test_any_window_gives_the_bits_of_plain_decoding(dtype: Dtype) -> None:
    samplings = [Sampling(temperature=0.0), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.8, top_p=0.9)]
    requests = [Request(PROMPT[index:], 70, sampling, top=3) for index, sampling in enumerate(samplings)]
    alone = Alone(build(dtype))
    engine = build(dtype)
    engine.start()
    answers = with_windows(engine, requests)
    engine.stop()
    expected = [bits(alone.answer(request)) for request in requests]
    assert answers == dict.fromkeys(WINDOWS, expected)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = build("float32")
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    request = Request(PROMPT, POSITIONS, Sampling(temperature=1.0))
    return direct_sample(Alone(build("float32")), request, SEEDS, torch.Generator().manual_seed(0))


def p_value(engine: Engine, sampling: Sampling, reference: torch.Tensor) -> float:
    sample = verified_sample(engine, Request(PROMPT, POSITIONS, sampling), range(SEEDS), (6,))
    outcome = compare(sample, reference, permutations=1000, generator=torch.Generator().manual_seed(1))
    assert outcome.tokens >= 9000 and outcome.categories > 100
    return outcome.p


def test_verified_output_is_distributed_as_direct_sampling_is(engine: Engine, reference: torch.Tensor) -> None:
    assert p_value(engine, Sampling(temperature=1.0), reference) > 0.01


def test_a_sampler_that_is_wrong_fails_the_same_test(engine: Engine, reference: torch.Tensor) -> None:
    assert p_value(engine, WRONG["temperature 0.9"], reference) < 0.01


def test_the_test_itself_gives_uniform_p_values() -> None:
    """Where nothing differs, p is below 0.1 in about a tenth of the cases: within four standard errors."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(40, generator=generator) ** 3
    draw = partial(torch.multinomial, weights, replacement=True, generator=generator)
    outcomes = [compare(draw(300).view(100, 3), draw(300).view(100, 3), 99, generator) for _ in range(200)]
    share = sum(outcome.p <= 0.1 for outcome in outcomes) / len(outcomes)
    assert abs(share - 0.1) < 4 * (0.1 * 0.9 / len(outcomes)) ** 0.5
