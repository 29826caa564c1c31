"""Verified answers from decode calls: the same text as from windows, over one replica or several that break off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from launched import Gateway, launch_gateway, launch_models
from toy_backend import Drop, DropAfter, Fault, Hang, HangAfter, Status, ToyBackend, on

from backend.protocol import DecodeRequest
from gateway.models_file import ModelConfig

ROLES = ("draft", "verify", "decode")


@pytest.fixture
async def toy() -> AsyncIterator[ToyBackend]:
    async with ToyBackend(roles=ROLES, wants_draft=False) as backend:
        yield backend


@pytest.fixture
async def gateway(toy: ToyBackend) -> AsyncIterator[Gateway]:
    async with launch_gateway(toy.url) as running:
        yield running


async def verified(gateway: Gateway, **fields: object) -> httpx.Response:
    return await gateway.chat(is_deterministic=True, max_tokens=40, logprobs=True, top_logprobs=2, **fields)


def answer(response: httpx.Response) -> object:
    """What has to be the same however it came about."""
    assert response.status_code == 200, response.text
    return {key: value for key, value in response.json().items() if key != "created"}


def streamed(response: httpx.Response) -> tuple[str, list[object]]:
    """The text of a stream, and what its events say besides."""
    items = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(item) for item in items if item != "[DONE]"]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))
    return text, [chunk.get("error", {}).get("code") for chunk in chunks if "error" in chunk] + items[-1:]


@pytest.mark.parametrize("wants_draft", [True, False])
async def test_decoded_drafted_or_both_the_answer_is_one(wants_draft: bool) -> None:
    async with (
        ToyBackend() as drafting,
        ToyBackend(roles=ROLES, wants_draft=wants_draft) as decoding,
        launch_gateway(drafting.url) as one,
        launch_gateway(decoding.url) as other,
    ):
        assert answer(await verified(one)) == answer(await verified(other))
        assert streamed(await verified(one, stream=True)) == streamed(await verified(other, stream=True))
    # Where drafts are cheaper, a token is decoded to begin with; else one call brings the whole answer.
    assert decoding.calls["/v1/decode"] == 2
    assert bool(decoding.calls["/v1/verify"]) == wants_draft


async def test_one_call_and_one_connection_for_each_answer(toy: ToyBackend, gateway: Gateway) -> None:
    before = toy.connections
    for _ in range(3):
        await verified(gateway)
    assert toy.calls["/v1/decode"] == 3
    assert toy.connections <= before + 1, "a call that was read to its end leaves its connection to the next"


@pytest.mark.parametrize(
    ("fault", "status"), [(Status(500), 502), (Status(503), 503), (Status(409), 503), (Drop(5), 502), (Drop(60), 502)]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_trouble_before_the_first_byte(
    toy: ToyBackend, gateway: Gateway, fault: Fault, status: int, stream: bool
) -> None:
    toy.faults = on("/v1/decode", fault)
    response = await verified(gateway, stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    await gateway.models.admission.wait_idle()


@pytest.mark.parametrize("after", [300, 700, 1500])
async def test_alone_a_replica_that_breaks_off_ends_the_stream_with_an_error(
    toy: ToyBackend, gateway: Gateway, after: int
) -> None:
    whole, _ = streamed(await verified(gateway, stream=True))
    toy.faults = on("/v1/decode", Drop(after))
    text, end = streamed(await verified(gateway, stream=True))
    assert whole.startswith(text)
    assert text != whole
    assert end[0] == "backend_failed"
    assert end[-1] != "[DONE]"
    assert (await verified(gateway)).status_code == 502


@pytest.fixture
async def pair() -> AsyncIterator[tuple[ToyBackend, ToyBackend, Gateway]]:
    """Two replicas, of which the first is asked first."""
    async with (
        ToyBackend(roles=ROLES, wants_draft=False) as one,
        ToyBackend(roles=ROLES, wants_draft=False) as two,
        launch_models([ModelConfig(None, (one.url, two.url))]) as gateway,
    ):
        yield one, two, gateway


@pytest.mark.parametrize("after", [60, 300, 700, 1500, 4000, 5000])
@pytest.mark.parametrize("stream", [True, False])
async def test_another_replica_goes_on_and_nobody_can_tell(
    pair: tuple[ToyBackend, ToyBackend, Gateway], after: int, stream: bool
) -> None:
    one, two, gateway = pair
    undisturbed = await verified(gateway, stream=stream)
    one.faults = on("/v1/decode", Drop(after))
    disturbed = await verified(gateway, stream=stream)
    if stream:
        assert streamed(disturbed) == streamed(undisturbed)
        assert streamed(disturbed)[1] == ["[DONE]"]
    else:
        assert answer(disturbed) == answer(undisturbed)
    assert (one.calls["/v1/decode"], two.calls["/v1/decode"]) == (2, 1)


async def test_a_request_that_kills_two_replicas_is_handed_to_no_third() -> None:
    async with ToyBackend(roles=ROLES) as a, ToyBackend(roles=ROLES) as b, ToyBackend(roles=ROLES) as c:
        toys = (a, b, c)
        for toy in toys:
            toy.wants_draft = False
            toy.faults = on("/v1/decode", Drop(500))
        async with launch_models([ModelConfig(None, tuple(toy.url for toy in toys))]) as gateway:
            assert (await verified(gateway)).status_code == 502
        assert sum(toy.calls["/v1/decode"] for toy in toys) == 2


async def test_what_came_is_not_asked_for_again(pair: tuple[ToyBackend, ToyBackend, Gateway]) -> None:
    one, two, gateway = pair
    one.faults = on("/v1/decode", Drop(1500))
    assert (await verified(gateway)).status_code == 200
    (first,) = [request for request in one.requests if isinstance(request, DecodeRequest)]
    (second,) = [request for request in two.requests if isinstance(request, DecodeRequest)]
    came = len(second.context) - len(first.context)
    assert came > 0
    assert second.context[:-came] == first.context
    assert (second.generated, second.max_tokens) == (came, 40 - came)


async def test_the_last_word_alone_is_not_asked_for(pair: tuple[ToyBackend, ToyBackend, Gateway]) -> None:
    """Every token came before the first replica broke off."""
    one, two, gateway = pair
    undisturbed = await verified(gateway)
    one.faults = on("/v1/decode", DropAfter(40))
    assert answer(await verified(gateway)) == answer(undisturbed)
    assert (one.calls["/v1/decode"], two.calls["/v1/decode"]) == (2, 0)


@pytest.mark.parametrize("fault", [Hang(), HangAfter(0), HangAfter(3)])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_call(
    toy: ToyBackend, gateway: Gateway, fault: Fault, stream: bool
) -> None:
    toy.faults = on("/v1/decode", fault)
    asking = asyncio.create_task(verified(gateway, stream=stream))
    await toy.hung.acquire()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await toy.left.acquire()
    await gateway.models.admission.wait_idle()


async def test_a_stop_string_ends_the_call(toy: ToyBackend, gateway: Gateway) -> None:
    whole = (await verified(gateway)).json()["choices"][0]["message"]["content"]
    stop = whole[5:8]
    toy.faults = on("/v1/decode", HangAfter(30))
    response = await gateway.chat(is_deterministic=True, max_tokens=40, stop=[stop])
    assert response.json()["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    await toy.left.acquire()


async def test_tokens_come_as_they_are_decoded(toy: ToyBackend, gateway: Gateway) -> None:
    toy.faults = on("/v1/decode", HangAfter(3))
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "is_deterministic": True, "stream": True}
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()
        chunks = 0
        while chunks < 3:
            chunks += (await anext(lines)).startswith("data: ")
        await toy.hung.acquire()
    await toy.left.acquire()
