"""What the share table counts: whole completions, whatever an interval happened to begin and end with."""

from __future__ import annotations

import pytest

from benchmarks.closed_loop import Tally
from benchmarks.pace import level
from benchmarks.share_table import Speed

PROMPT_S, TOKEN_S, OUTPUT = 0.2, 0.004, 32


def interval(prompts: int, tokens: int) -> Tally:
    """One that took what its prompts and tokens cost."""
    cpu_s = prompts * PROMPT_S + tokens * TOKEN_S
    return Tally(tokens=tokens, prompts=prompts, cpu_s=cpu_s, wall_s=2 * cpu_s)


def test_the_ends_of_an_interval_do_not_count() -> None:
    speed = Speed(PROMPT_S, TOKEN_S, OUTPUT)
    balanced = speed.cpu([interval(24, 24 * OUTPUT)])
    assert balanced == pytest.approx(OUTPUT / (PROMPT_S + OUTPUT * TOKEN_S))
    assert speed.cpu([interval(24, 20 * OUTPUT)]) == pytest.approx(balanced)
    assert speed.wall([interval(20, 24 * OUTPUT)]) == pytest.approx(balanced / 2)


def test_a_slower_machine_is_not_a_slower_way() -> None:
    speed = Speed(PROMPT_S, TOKEN_S, OUTPUT)
    usual, busy, slow = (interval(24, 24 * OUTPUT) for _ in range(3))
    busy.passes, busy.off_in_flight_s = {"window": (5.0, 3, 1.0)}, 10.0
    busy.cpu_s, busy.pace_s = 1.25 * busy.cpu_s, 1.25 * busy.pace_s
    slow.cpu_s *= 2
    level([usual, busy, slow])
    assert speed.cpu([busy]) == pytest.approx(speed.cpu([usual]))
    assert speed.cpu([slow]) == pytest.approx(speed.cpu([usual]) / 2)
    assert (busy.passes, busy.off_in_flight_s) == ({"window": (4.0, 3, 1.0)}, 8.0)


def test_what_takes_longer_is_slower() -> None:
    speed = Speed(PROMPT_S, TOKEN_S, OUTPUT)
    usual, slow = interval(24, 24 * OUTPUT), interval(24, 24 * OUTPUT)
    slow.cpu_s *= 2
    assert speed.cpu([slow]) == pytest.approx(speed.cpu([usual]) / 2)
    assert speed.cpu([usual, usual, slow]) == pytest.approx(speed.cpu([usual]))
