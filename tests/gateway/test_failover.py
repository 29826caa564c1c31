"""A completion whose backend dies, freezes or changes goes on elsewhere, byte for byte as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from launched import Gateway, launch_models
from toy_backend import Drop, Fault, Hang, Status, ToyBackend, Wait, no_faults, on

from backend.protocol import Health
from gateway.backends.replica import STRIKES
from gateway.backends.replica_group import MOST_BROKEN
from gateway.errors import StartError
from gateway.models_file import ModelConfig

VERIFY = "/v1/verify"


@asynccontextmanager
async def launch(*toys: ToyBackend, name: str | None = None, **overrides: object) -> AsyncIterator[Gateway]:
    """A gateway over one group of these toys."""
    async with AsyncExitStack() as stack:
        for toy in toys:
            await stack.enter_async_context(toy)
        urls = tuple(toy.url for toy in toys)
        yield await stack.enter_async_context(launch_models((ModelConfig(name, urls),), **overrides))


async def ask(gateway: Gateway, **fields: Any) -> httpx.Response:
    return await gateway.chat(**{"is_deterministic": True, "max_tokens": 60, "logprobs": True, **fields})


def answer(response: httpx.Response) -> Any:
    """What must not depend on who answered."""
    if response.headers["content-type"].startswith("text/event-stream"):
        chunks = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
        assert chunks[-1] == "[DONE]", chunks[-1]
        return [{**json.loads(chunk), "created": 0} for chunk in chunks[:-1]]
    assert response.status_code == 200, response.text
    return {**response.json(), "created": 0}


async def undisturbed(**fields: Any) -> Any:
    async with launch(ToyBackend()) as gateway:
        return answer(await ask(gateway, **fields))


def error_of(response: httpx.Response) -> Any:
    """The error, of a whole answer or at the end of a stream."""
    last = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
    return json.loads(last)["error"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("nth", [0, 1, 3])
@pytest.mark.parametrize("fault", [Drop(), Drop(70), Status(500), Status(503), Status(429), Status(200, b"{}")])
async def test_a_verify_call_that_fails_is_made_elsewhere(fault: Fault, nth: int, stream: bool) -> None:
    first, second = ToyBackend(faults=on(VERIFY, fault, nth=nth)), ToyBackend()
    async with launch(first, second) as gateway:
        assert answer(await ask(gateway, stream=stream)) == await undisturbed(stream=stream)
        assert first.calls[VERIFY] == nth + 1
        assert second.calls[VERIFY] >= 1


async def test_a_completion_stays_where_its_prefix_is_cached() -> None:
    first, second = ToyBackend(), ToyBackend()
    async with launch(first, second) as gateway:
        answer(await ask(gateway))
        assert (second.calls[VERIFY], second.calls["/v1/draft"]) == (0, 0)


async def test_the_one_with_fewer_calls_in_flight_is_asked() -> None:
    gate = asyncio.Event()
    slow, fast = ToyBackend(faults=on(VERIFY, Wait(gate), nth=0)), ToyBackend()
    async with launch(slow, fast) as gateway:
        waiting = asyncio.create_task(ask(gateway))
        await slow.hung.acquire()
        for _ in range(5):
            answer(await ask(gateway))
        assert slow.calls[VERIFY] == 1
        gate.set()
        assert answer(await waiting) == await undisturbed()


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_to_a_frozen_replica_are_taken_from_it(stream: bool) -> None:
    frozen, other = ToyBackend(faults=on(VERIFY, Hang(), nth=2)), ToyBackend()
    async with launch(frozen, other, health_timeout_s=0.05) as gateway:
        asking = asyncio.create_task(ask(gateway, stream=stream))
        await frozen.hung.acquire()
        frozen.faults = lambda path, nth: Hang()
        for _ in range(STRIKES):
            await gateway.check()
        assert answer(await asking) == await undisturbed(stream=stream)
        (group,) = gateway.models.groups
        assert group.replicas[0].trouble == "it does not answer"
        answer(await ask(gateway))
        assert frozen.calls[VERIFY] == 3, "nobody asks it any more"


async def test_the_only_replica_keeps_its_calls_while_it_is_silent() -> None:
    gate = asyncio.Event()
    toy = ToyBackend(faults=on(VERIFY, Wait(gate), nth=2))
    async with launch(toy, health_timeout_s=0.05) as gateway:
        asking = asyncio.create_task(ask(gateway))
        await toy.hung.acquire()
        toy.faults = on("/healthz", Hang())
        for _ in range(STRIKES):
            await gateway.check()
        assert (await gateway.http.get("/healthz")).status_code == 503
        gate.set()
        assert answer(await asking) == await undisturbed()
        answer(await ask(gateway))  # Nobody else is there, so it is asked all the same.


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_whose_fingerprint_changes_leaves_the_group(stream: bool) -> None:
    changing, other = ToyBackend(), ToyBackend()

    def change(path: str, nth: int) -> Fault:
        if path == VERIFY and nth == 2:
            changing.fingerprint = "toy-2"
        return None

    changing.faults = change
    async with launch(changing, other) as gateway:
        assert answer(await ask(gateway, stream=stream)) == await undisturbed(stream=stream)
        (group,) = gateway.models.groups
        assert not group.replicas[0].belongs
        await gateway.check()
        assert group.replicas[0].trouble == "its fingerprint is 'toy-2'"
        answer(await ask(gateway))
        assert changing.calls[VERIFY] == 3
        changing.fingerprint = other.fingerprint
        await gateway.check()
        answer(await ask(gateway))
        assert changing.calls[VERIFY] > 3, "it may come back as who it was"


@pytest.mark.parametrize("code", [400, 409, 429, 500])
@pytest.mark.parametrize("path", ["/healthz", "/v1/info"])
async def test_a_replica_that_answers_oddly_is_in_trouble_and_looked_after(path: str, code: int) -> None:
    """Whatever stands before it and answers in its place: the others are looked after too."""
    toys = [ToyBackend(), ToyBackend()]
    async with launch(*toys) as gateway:
        toys[0].faults = on(path, Status(code))
        await gateway.check()
        (group,) = gateway.models.groups
        assert [replica.well for replica in group.replicas] == [False, True]
        toys[0].faults = no_faults
        await gateway.check()
        assert [replica.well for replica in group.replicas] == [True, True]


async def test_a_stranger_is_no_stand_in() -> None:
    first, stranger = ToyBackend(), ToyBackend(fingerprint="toy-2")
    async with launch(first, stranger) as gateway:
        first.faults = on(VERIFY, Drop())
        assert error_of(await ask(gateway))["code"] == "backend_failed"
        assert stranger.calls[VERIFY] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_with_no_other_replica_there_is_an_error(stream: bool) -> None:
    dead = on(VERIFY, Drop())

    def late(path: str, nth: int) -> Fault:
        return Drop() if path == VERIFY and nth >= 2 else None

    async with launch(ToyBackend(faults=late), ToyBackend(faults=dead)) as gateway:
        response = await ask(gateway, stream=stream)
        assert response.status_code == (200 if stream else 502)
        assert error_of(response)["code"] == "backend_failed"
        assert "[DONE]" not in response.text


async def test_a_request_that_kills_backends_is_not_handed_to_all_of_them() -> None:
    toys = [ToyBackend(faults=on(VERIFY, Drop())) for _ in range(4)]
    async with launch(*toys) as gateway:
        assert error_of(await ask(gateway))["code"] == "backend_failed"
        assert sum(toy.calls[VERIFY] for toy in toys) == MOST_BROKEN


@pytest.mark.parametrize("fault", [Status(400), Status(422), Status(500), Status(429), Drop()])
async def test_no_request_that_fails_everywhere_opens_a_breaker(fault: Fault) -> None:
    toys = [ToyBackend(faults=on(VERIFY, fault)) for _ in range(2)]
    async with launch(*toys) as gateway:
        for _ in range(10):
            assert error_of(await ask(gateway))["type"]
        (group,) = gateway.models.groups
        assert all(replica.well for replica in group.replicas)


async def test_a_request_refused_as_wrong_is_not_repeated() -> None:
    toys = [ToyBackend(faults=on(VERIFY, Status(400))) for _ in range(2)]
    async with launch(*toys) as gateway:
        assert (await ask(gateway)).status_code == 400
        assert [toy.calls[VERIFY] for toy in toys] == [1, 0]


async def test_a_replica_that_fails_where_others_do_not_is_left_alone() -> None:
    broken, other = ToyBackend(faults=on(VERIFY, Status(500))), ToyBackend()
    async with launch(broken, other) as gateway:
        (group,) = gateway.models.groups
        for _ in range(20):
            answer(await ask(gateway, max_tokens=1))
        # Read off its state: whether it may be tried again is a matter of time.
        assert "open until" in repr(group.replicas[0])
        assert broken.calls[VERIFY] < 20
        await gateway.check()
        assert "open until" in repr(group.replicas[0]), "that it calls itself healthy does not count"


async def test_a_backend_that_only_drafts_may_be_any_and_may_go() -> None:
    verifier, drafter = ToyBackend(roles=("verify",)), ToyBackend(roles=("draft",), fingerprint="something else")
    async with launch(verifier, drafter) as gateway:
        expected = await undisturbed()
        assert answer(await ask(gateway)) == expected
        assert (verifier.calls["/v1/draft"], drafter.calls[VERIFY]) == (0, 0)
        assert drafter.calls["/v1/draft"] >= 2
        for fault in (Drop(), Status(429), Status(400)):
            drafter.faults = on("/v1/draft", fault)
            assert answer(await ask(gateway)) == expected


async def test_a_draft_model_does_not_answer_for_the_model() -> None:
    verifier, drafter = ToyBackend(roles=("verify",)), ToyBackend(roles=("draft",), fingerprint="d", name="small")
    async with launch(verifier, drafter) as gateway:
        assert answer(await ask(gateway)) == await undisturbed()
        assert drafter.calls["/v1/draft"] >= 2
        assert error_of(await gateway.chat(max_tokens=4, is_deterministic=False))["code"] == "role_refused"
        assert drafter.calls["/v1/stream"] == 0


@pytest.mark.parametrize("path", ["/v1/stream"])
async def test_mode_off_starts_elsewhere_and_breaks_off_later(path: str) -> None:
    first, second = ToyBackend(faults=on(path, Drop())), ToyBackend()
    async with launch(first, second) as gateway:
        whole = await gateway.chat(max_tokens=8, is_deterministic=False)
        assert whole.status_code == 200
        assert (first.calls[path], second.calls[path]) == (1, 1)
        first.faults = on(path, Drop(200))
        broken = await gateway.chat(max_tokens=8, is_deterministic=False, stream=True)
        assert error_of(broken)["code"] == "backend_failed"


async def test_many_models(toy: ToyBackend) -> None:
    async with launch(ToyBackend(), name="one") as gateway, ToyBackend(fingerprint="toy-2") as second:
        (group,) = gateway.models.groups
        configs = (ModelConfig("one", (toy.url,)), ModelConfig("two", (second.url,)))
        async with launch_models(configs) as both:
            listed = (await both.http.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["one", "two"]
            assert answer(await ask(both, model="two"))["system_fingerprint"] == "toy-2"
            assert answer(await ask(both, model="one"))["system_fingerprint"] == group.fingerprint
            missing = await ask(both, model="three")
            assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")
            assert "'one', 'two'" in error_of(missing)["message"]
            toy.health = second.health
            second.faults = on("/healthz", Status(500))
            await both.check()
            health = await both.http.get("/healthz")
            assert (health.status_code, health.json()["status"]) == (200, "partly_ready")
            assert list(health.json()["detail"]) == ["two"]


async def test_a_fingerprint_can_be_asked_for() -> None:
    async with ToyBackend() as first, ToyBackend(fingerprint="toy-2") as second:
        urls = (first.url, second.url)
        async with launch_models((ModelConfig("m", urls, "toy-2"),)) as gateway:
            assert answer(await ask(gateway, model="m"))["system_fingerprint"] == "toy-2"
            assert first.calls[VERIFY] == 0
        with pytest.raises(StartError, match="its fingerprint is 'toy-1'"):
            async with launch_models((ModelConfig("m", urls, "toy-3"),), start_timeout_s=0.3):
                pass


async def test_a_gateway_starts_with_whoever_is_there() -> None:
    gone, there = ToyBackend(health=Health("loading", 0.5)), ToyBackend()
    async with launch(gone, there) as gateway:
        assert answer(await ask(gateway)) == await undisturbed()
        (group,) = gateway.models.groups
        assert group.replicas[0].trouble == "it is loading, 50% done"
        gone.health = there.health
        await gateway.check()
        assert group.replicas[0].well
        answer(await ask(gateway))
        assert gone.calls[VERIFY] > 0
