"""The small parts: admission, merging, settings, events, ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest

from backend.protocol import Grammar, Sampling
from gateway import errors
from gateway.admission import Admission
from gateway.completion_id import completion_id
from gateway.config_file import read_settings
from gateway.domain import Completion, Job, choice_seed
from gateway.errors import ClientLeft, ConfigError, Draining, GatewayError, Overloaded
from gateway.http import sse
from gateway.http.disconnect import unless_client_leaves
from gateway.merge import merge
from gateway.settings import Settings
from policies.policy import Mode

# --- admission


async def test_places_are_counted_and_given_back() -> None:
    admission = Admission(3, 60.0)
    async with admission.admit(2, "acme", 1.0):
        with pytest.raises(Overloaded):
            async with admission.admit(2, "acme", 1.0):
                pass
        async with admission.admit(1, "acme", 1.0):
            assert repr(admission) == "<Admission 3/3>"
    with pytest.raises(ZeroDivisionError):
        async with admission.admit(3, "acme", 1.0):
            raise ZeroDivisionError
    await admission.wait_idle()
    assert repr(admission) == "<Admission 0/3>"


async def test_a_tenants_share_is_counted_and_given_back() -> None:
    admission = Admission(8, 60.0)
    async with admission.admit(2, "acme", 0.25):
        with pytest.raises(Overloaded, match="2 of the 2 places for acme are taken; this request needs 1"):
            async with admission.admit(1, "acme", 0.25):
                pass
        async with admission.admit(6, "other", 1.0):
            pass
    async with admission.admit(2, "acme", 0.25):
        pass
    assert admission.places_for(0.001) == 1


async def test_draining_refuses_and_expiry_ends() -> None:
    admission = Admission(3, 60.0)

    async def work() -> None:
        async with admission.admit(1, "acme", 1.0):
            started.set()
            await asyncio.Event().wait()

    started = asyncio.Event()
    working = asyncio.create_task(work())
    await started.wait()
    admission.drain()
    with pytest.raises(Draining):
        async with admission.admit(1, "acme", 1.0):
            pass
    admission.expire()
    with pytest.raises(Draining, match="before the answer was complete"):
        await working
    await admission.wait_idle()


async def test_expiry_ends_the_others_while_one_that_took_too_long_is_ending() -> None:
    admission = Admission(3, 0.01)
    ending, end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with admission.admit(1, "acme", 1.0):
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await end.wait()

    working = asyncio.create_task(work())
    await ending.wait()
    admission.expire()
    end.set()
    with pytest.raises(Draining):
        await working
    await admission.wait_idle()


# --- merge


async def count(name: str, upto: int, closed: list[str], fail: bool = False) -> AsyncGenerator[str]:
    try:
        for i in range(upto):
            yield f"{name}{i}"
        if fail:
            raise ZeroDivisionError
    finally:
        closed.append(name)


async def test_merge_takes_turns_and_keeps_each_order() -> None:
    closed: list[str] = []
    async with aclosing(merge([count("a", 3, closed), count("b", 2, closed)])) as merged:
        assert [item async for item in merged] == ["a0", "b0", "a1", "b1", "a2"]
    assert sorted(closed) == ["a", "b"]


async def test_merge_fails_with_the_first_failure() -> None:
    closed: list[str] = []
    with pytest.raises(ZeroDivisionError):
        async with aclosing(merge([count("a", 99, closed), count("b", 2, closed, fail=True)])) as merged:
            _ = [item async for item in merged]
    assert sorted(closed) == ["a", "b"]


async def test_closing_a_merge_cancels_its_sources() -> None:
    waiting = asyncio.Event()
    closed: list[str] = []

    async def stuck() -> AsyncGenerator[str]:
        try:
            waiting.set()
            await asyncio.Event().wait()
            yield "never"
        finally:
            closed.append("stuck")

    async with aclosing(merge([count("a", 9, closed), stuck()])) as merged:
        assert await anext(merged) == "a0"
        await waiting.wait()
    assert sorted(closed) == ["a", "stuck"]


# --- disconnect


async def test_work_that_finishes_first() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> int:
        return 7

    assert await unless_client_leaves(receive, work()) == 7


async def test_work_is_cancelled_before_the_caller_hears_of_it() -> None:
    messages = [{"type": "http.request"}, {"type": "http.disconnect"}]
    cancelled = False

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return messages.pop(0)

    async def work() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    with pytest.raises(ClientLeft):
        await unless_client_leaves(receive, work())
    assert cancelled


async def test_an_answer_that_was_sent_is_no_leaving() -> None:
    """The server says "disconnect" then too, in the very turn of the loop in which the work ends."""
    sent = asyncio.Event()
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def receive() -> dict[str, Any]:
        await sent.wait()
        return {"type": "http.disconnect"}

    async def work() -> int:
        await asyncio.sleep(0)
        sent.set()
        return 7

    for _ in range(3):
        sent.clear()
        assert await unless_client_leaves(receive, work()) == 7
        await asyncio.sleep(0)
    assert not complaints


@pytest.mark.parametrize("raised", [ZeroDivisionError, TimeoutError])
async def test_what_work_raises_is_passed_on(raised: type[Exception]) -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> None:
        await asyncio.sleep(0)
        raise raised

    with pytest.raises(raised):
        await unless_client_leaves(receive, work())


async def test_cancelling_the_caller_cancels_its_work() -> None:
    begun, ended = asyncio.Event(), False

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> None:
        nonlocal ended
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended = True

    caller = asyncio.create_task(unless_client_leaves(receive, work()))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended


# --- settings


def test_defaults_environment_and_flags() -> None:
    env = {"VERBATIM_PORT": "9", "VERBATIM_DRAIN_TIMEOUT_S": "1.5", "VERBATIM_BACKEND": "http://e", "OTHER": "x"}
    assert read_settings({}, env) == Settings("http://e", port=9, drain_timeout_s=1.5)
    assert read_settings({"backend": "http://x", "port": 7, "host": None}, env).port == 7
    assert read_settings({"backend": "http://f"}, {}) == Settings("http://f")


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        ({}, {}, "VERBATIM_BACKEND"),
        ({"backend": "ftp://x"}, {}, "--backend: "),
        ({"backend": "http://"}, {}, "--backend: "),
        ({"backend": "http://x:y"}, {}, "--backend: "),
        ({}, {"VERBATIM_BACKEND": "x"}, "VERBATIM_BACKEND: "),
        ({"backend": "http://x", "port": 65536}, {}, "--port: "),
        ({"backend": "http://x", "port": -1}, {}, "--port: "),
        ({"backend": "http://x"}, {"VERBATIM_PORT": "1.5"}, "VERBATIM_PORT: "),
        ({"backend": "http://x", "max_concurrent": 7}, {}, "--max-concurrent: "),
        ({"backend": "http://x", "max_body_bytes": 0}, {}, "--max-body-bytes: "),
        ({"backend": "http://x", "call_timeout_s": 0.0}, {}, "--call-timeout-s: "),
        ({"backend": "http://x"}, {"VERBATIM_CONNECT_TIMEOUT_S": "nan"}, "VERBATIM_CONNECT_TIMEOUT_S: "),
        ({"backend": "http://x"}, {"VERBATIM_CONNECT_TIMEOUT_S": "soon"}, "VERBATIM_CONNECT_TIMEOUT_S: "),
        ({"backend": "http://x"}, {"VERBATIM_ACCESS_LOG": "perhaps"}, "VERBATIM_ACCESS_LOG: "),
        ({"backend": "http://x"}, {"VERBATIM_LOG_FORMAT": "xml"}, "VERBATIM_LOG_FORMAT: must be one of text, json"),
    ],
)
def test_a_wrong_setting_names_its_source(flags: dict[str, object], env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(flags, env)
    assert said in caught.value.message


# --- events, seeds, ids, errors


def test_events() -> None:
    assert sse.event({"a": "x\ny"}) == b'data: {"a":"x\\ny"}\n\n'
    assert sse.comment("x") == b": x\n\n"


def test_choice_seeds_are_distinct_and_fit() -> None:
    seeds = [choice_seed(seed, index) for seed in (0, 42, -1) for index in range(8)]
    assert len(set(seeds)) == 24
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    # Part of the guarantee: these numbers may never change.
    assert choice_seed(42, 1) == 3013021233249522700


JOB = Job((1, 2), Sampling(seed=1), 5, (9,), 0)
COMPLETION = Completion("m", Mode.VERIFIED, "f", (JOB,), 1, ("s",), False, (), (8, 16))
OTHER: dict[str, Any] = {
    "model": "m2",
    "mode": Mode.OFF,
    "fingerprint": "g",
    "jobs": (JOB, JOB),
    "choices": 2,
    "stops": ("s", ""),
    "continues": True,
    "spelled": ("<x>",),
    "windows": (1,),
}
OTHER_JOB: dict[str, Any] = {
    "prompt": (1, 2, 3),
    "sampling": Sampling(seed=2),
    "max_tokens": 6,
    "stop_ids": (),
    "top_logprobs": 1,
}


def test_every_field_of_a_completion_is_in_the_id_but_the_windows() -> None:
    assert set(OTHER) == {field.name for field in fields(Completion)}
    assert set(OTHER_JOB) == {field.name for field in fields(Job)}
    base = completion_id(COMPLETION, [False])
    for name, value in OTHER.items():
        changed = completion_id(replace(COMPLETION, **{name: value}), [False]) != base
        assert changed == (name != "windows")
    for name, value in OTHER_JOB.items():
        assert completion_id(replace(COMPLETION, jobs=(replace(JOB, **{name: value}),)), [False]) != base
    assert completion_id(COMPLETION, [True]) != base


OTHER_SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 1,
    "min_p": 0.5,
    "seed": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 0.5,
    "logit_bias": ((3, 1.0),),
    "min_tokens": 1,
    "grammar": Grammar("regex", "a"),
}


def test_every_field_of_a_sampling_is_in_the_id() -> None:
    assert set(OTHER_SAMPLING) == set(Sampling.__struct_fields__)
    ids = {completion_id(COMPLETION, [False])}
    for name, value in OTHER_SAMPLING.items():
        job = replace(JOB, sampling=msgspec.structs.replace(JOB.sampling, **{name: value}))
        ids.add(completion_id(replace(COMPLETION, jobs=(job,)), [False]))
    assert len(ids) == 1 + len(OTHER_SAMPLING)


def test_every_error_is_in_the_tree() -> None:
    def below(kind: type[Exception]) -> list[type[Exception]]:
        return [kind, *(found for sub in kind.__subclasses__() for found in below(sub))]

    tree = errors.__doc__
    assert tree is not None
    assert all(kind.__name__ in tree for kind in below(GatewayError))
