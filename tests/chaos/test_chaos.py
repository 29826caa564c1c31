"""Four gateways and two backends behind one Redis, killed at random under 64 clients: nothing wrong, nothing lost, and
where nobody died nothing computed twice. `python -m tests.chaos.soak` is the same for as long as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.clients import Told
from tests.chaos.soak import Plan, soak
from tests.chaos.work import AFTER_S, work


@pytest.mark.slow
async def test_every_answer_is_right_whoever_dies(tmp_path: Path) -> None:
    report = await soak(Plan(seconds=20), tmp_path)
    assert report.faults == [], report
    assert report.deaths.get("gateway, killed", 0) + report.deaths.get("backend, killed", 0) >= 3
    assert report.answers > 64
    assert {"lead", "follow", "hit"} <= set(report.log)
    assert report.work is not None and report.work.again < report.work.computed / 2


def test_work_done_twice_is_needless_unless_somebody_died(tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.write_text("100.0 a 0 3\n100.5 b 0 2\n101.0 a 2 2\n")
    assert work(record, [100.7]).needless == []
    found = work(record, [100.0 + AFTER_S + 0.1])
    assert (found.logs, found.computed, found.again) == (2, 7, 1)
    assert found.needless == ["a at 2: 100.00 and 101.00"]


def test_what_broke_off_must_have_been_true() -> None:
    whole = Told("abc", [1, 2, 3], "stop")
    assert Told("ab", [1, 2]).begins(whole) and Told().begins(whole) and whole.begins(whole)
    assert not Told("ax", [1, 2]).begins(whole)
    assert not Told("ab", [1, 9]).begins(whole)
    assert not Told("ab", [1, 2], "stop").begins(whole)
