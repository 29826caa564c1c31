"""A whole answer ends in time, whatever its calls do: with a 504 before its first byte, or an event in the stream."""

from __future__ import annotations

import json

import pytest
from launched import launch_gateway, launch_models
from mock_upstream import MockUpstream, chunked
from toy_backend import Fault, Hang, HangAfter, ToyBackend, on

from gateway.models_file import ModelConfig, UpstreamConfig

VERIFIED = {"is_deterministic": True}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "asked"), [("/v1/verify", VERIFIED), ("/v1/stream", {})], ids=["verified", "off"])
async def test_before_the_first_byte_it_is_a_status(path: str, asked: dict[str, bool], stream: bool) -> None:
    async with (
        ToyBackend(faults=on(path, Hang())) as toy,
        launch_gateway(toy.url, answer_timeout_s=0.05) as gateway,
    ):
        response = await gateway.chat(stream=stream, **asked)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "answer_timeout")
        await toy.left.acquire()
        await gateway.models.admission.wait_idle()


@pytest.mark.parametrize(
    ("path", "fault", "nth", "asked"),
    [("/v1/verify", Hang(), 2, VERIFIED), ("/v1/stream", HangAfter(2), None, {})],
    ids=["verified", "off"],
)
async def test_behind_it_it_is_an_event(path: str, fault: Fault, nth: int | None, asked: dict[str, bool]) -> None:
    async with (
        ToyBackend(faults=on(path, fault, nth=nth)) as toy,
        launch_gateway(toy.url, answer_timeout_s=2.0) as gateway,
    ):
        response = await gateway.chat(stream=True, **asked)
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert json.loads(events[0])["choices"]
        assert json.loads(events[-1])["error"]["code"] == "answer_timeout"
        await toy.left.acquire()
        await gateway.models.admission.wait_idle()


async def test_what_is_handed_on_ends_too() -> None:
    upstream = MockUpstream(chunked([b"data: 1\n\n"], "content-type: text/event-stream", end=False), stays=True)
    async with upstream:
        config = ModelConfig("m", upstreams=(UpstreamConfig(upstream.url, "m", None),))
        async with launch_models((config,), answer_timeout_s=1.0) as gateway:
            response = await gateway.chat(model="m", stream=True)
            assert response.text.startswith("data: 1\n\n")
            assert json.loads(response.text.rpartition("data: ")[2])["error"]["code"] == "answer_timeout"
            await upstream.left.acquire()
