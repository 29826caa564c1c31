"""The choice between drafting and decoding, by what it costs in all: not below the better of the two alone.

In virtual time, over the real scheduler and the gateway's loop, with costs as they were measured on one CPU.
"""

from __future__ import annotations

import functools

import pytest

from backend.engine.lane_costs import Curve
from backend.protocol import Sampling
from benchmarks.share_table import Speed
from benchmarks.traffic import Way
from policies.policy import window_schedule
from tests.backend.virtual_engine import SHAPE, Machine, VirtualEngine, closed_loop, misjudged

ROWS = (1, 2, 4, 8, 16, 32)
WINDOW = Curve({8: 0.021, 32: 0.055, 256: 0.37}, 128, 2e-6)
CPU = Machine(
    {
        "fast": Curve(dict(zip(ROWS, (0.0174, 0.0194, 0.0222, 0.0284, 0.037, 0.062), strict=True)), 128, 6e-6),
        "fixed": Curve(dict(zip(ROWS, (0.0215, 0.0225, 0.0242, 0.029, 0.0395, 0.064), strict=True)), 128, 9e-6),
        "window": WINDOW,
    },
    fast_prompt_s=0.0008,
    fixed_prompt_s=0.0011,
)
SLOW_FIXED_LANE = Machine(
    CPU.curves
    | {"fixed": Curve({rows: 2 * cost for rows, cost in CPU.curves["fixed"].points.items()}, 128, 9e-6)}
    | {"window": Curve({rows: 0.7 * cost for rows, cost in WINDOW.points.items()}, 128, 2e-6)},
    fast_prompt_s=0.0008,
    fixed_prompt_s=0.0011,
)
IN_FLIGHT = 16
SHARES = (5, 20, 50)
RIGHT = (1.0, 1.0, 1.0)


def speed(
    machine: Machine,
    way: str,
    percent: int,
    prompt: int,
    output: int,
    noise: float = 0.0,
    errors: tuple[float, ...] = RIGHT,
) -> float:
    """Tokens a second."""
    engine = VirtualEngine(machine, misjudged(machine.curves, errors), noise)
    served = Way(
        window_schedule(8, SHAPE.window - 1),
        Sampling(temperature=0.0),
        adaptive=way == "adaptive",
        batching="invariant" if way == "batch_invariant" else "dynamic",
    )
    tally = closed_loop(engine, served, percent, IN_FLIGHT, prompt, output, completions=100)
    token_s = machine.curves["fast"].seconds(IN_FLIGHT, prompt + output / 2) / IN_FLIGHT
    return Speed(prompt * machine.fast_prompt_s, token_s, output).cpu([tally])


@functools.cache
def better_way(slow: bool, percent: int, prompt: int, output: int) -> float:
    machine = SLOW_FIXED_LANE if slow else CPU
    drafted, invariant = ((way, share) for way, share in (("drafted", percent), ("batch_invariant", 0)))
    return max(speed(machine, *drafted, prompt, output), speed(machine, *invariant, prompt, output))


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(("prompt", "output"), [(32, 64), (256, 32)])
@pytest.mark.parametrize("percent", SHARES)
def test_the_choice_costs_nothing(slow: bool, percent: int, prompt: int, output: int) -> None:
    machine = SLOW_FIXED_LANE if slow else CPU
    assert speed(machine, "adaptive", percent, prompt, output) > 0.985 * better_way(slow, percent, prompt, output)


@pytest.mark.parametrize("percent", SHARES)
def test_nor_does_it_where_passes_vary_and_the_start_misjudged_them(percent: int) -> None:
    for errors in ((1.05, 1.0, 1.0), (1.0, 1.05, 1.0), (1.0, 1.0, 1.2)):
        adaptive = speed(CPU, "adaptive", percent, 256, 32, noise=0.15, errors=errors)
        assert adaptive > 0.97 * better_way(False, percent, 256, 32), errors
