from __future__ import annotations

import pytest

from policies.policy import (
    BODY_FIELD,
    DEFAULT_POLICY,
    HEADER,
    Decision,
    Mode,
    Policy,
    PolicyError,
    RequestFacts,
    resolve,
    window_schedule,
)


@pytest.mark.parametrize(
    ("body", "header", "mode"),
    [
        (None, None, Mode.OFF),
        (True, None, Mode.VERIFIED),
        (False, None, Mode.OFF),
        (None, "verified", Mode.VERIFIED),
        (None, " Verified ", Mode.VERIFIED),
        (None, "off", Mode.OFF),
        (True, "verified", Mode.VERIFIED),
        (False, "off", Mode.OFF),
    ],
)
def test_mode(body: bool | None, header: str | None, mode: Mode) -> None:
    assert resolve(DEFAULT_POLICY, RequestFacts(body, header), 15).mode is mode


@pytest.mark.parametrize(("body", "header"), [(True, "off"), (False, "verified")])
def test_contradiction_is_refused(body: bool, header: str) -> None:
    with pytest.raises(PolicyError) as caught:
        resolve(DEFAULT_POLICY, RequestFacts(body, header), 15)
    assert caught.value.field == BODY_FIELD


@pytest.mark.parametrize("header", ["", "yes", "true", "verified,off", "calibrated"])
def test_unknown_mode_names_the_header(header: str) -> None:
    with pytest.raises(PolicyError) as caught:
        resolve(DEFAULT_POLICY, RequestFacts(None, header), 15)
    assert caught.value.field == HEADER


@pytest.mark.parametrize("asked", [True, False, None])
@pytest.mark.parametrize("seed", [0, -7, 42])
def test_a_seed_that_is_given_is_taken(asked: bool | None, seed: int) -> None:
    assert resolve(DEFAULT_POLICY, RequestFacts(asked, seed=seed), 15).seed == seed


def test_a_seed_that_is_not_given_is_drawn_unless_the_answer_is_to_repeat() -> None:
    assert resolve(DEFAULT_POLICY, RequestFacts(), 15).seed is None
    assert resolve(DEFAULT_POLICY, RequestFacts(False), 15).seed is None
    assert resolve(DEFAULT_POLICY, RequestFacts(True), 15).seed == 42
    assert resolve(DEFAULT_POLICY, RequestFacts(header="verified"), 15).seed == 42
    assert resolve(Policy(Mode.VERIFIED), RequestFacts(False), 15).seed is None


def test_policy_is_a_value() -> None:
    policy = Policy(Mode.VERIFIED, default_seed=7, first_window=4)
    assert resolve(policy, RequestFacts(), 31) == Decision(Mode.VERIFIED, 7, (4, 8, 16, 31))
    assert resolve(policy, RequestFacts(is_deterministic=False), 31).mode is Mode.OFF


@pytest.mark.parametrize(
    ("max_draft", "windows"),
    [(0, (0,)), (1, (1,)), (7, (7,)), (8, (8,)), (15, (8, 15)), (31, (8, 16, 31)), (63, (8, 16, 32, 63))],
)
def test_windows_double_up_to_what_the_verifier_takes(max_draft: int, windows: tuple[int, ...]) -> None:
    assert window_schedule(8, max_draft) == windows
