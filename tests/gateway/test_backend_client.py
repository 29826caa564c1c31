"""Everything a backend can do wrong becomes one of our errors; what is safe to repeat is repeated."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import pytest
from toy_backend import Drop, Fault, Hang, HangAfter, Status, ToyBackend, on
from toy_model import FILES

from backend.protocol import DraftRequest, Health, Info, StreamRequest, VerifyRequest
from gateway.backends.client import BackendClient
from gateway.errors import (
    BackendFailed,
    BackendRefused,
    BackendTimeout,
    BackendUnavailable,
    BackendUnreachable,
    GatewayError,
    RoleRefused,
)
from gateway.http.client import HttpClient

VERIFY = VerifyRequest([1, 2], 0, [])
STREAM = StreamRequest([1, 2], 5)


async def open_client(url: str, first_byte_s: float = 60.0, call_s: float = 60.0) -> AsyncIterator[BackendClient]:
    async with HttpClient(connect_timeout_s=5.0, silence_timeout_s=first_byte_s) as http:
        yield BackendClient(http, url, call_s)


@pytest.fixture
async def client(toy: ToyBackend) -> AsyncIterator[BackendClient]:
    async for opened in open_client(toy.url):
        yield opened


async def test_calls(toy: ToyBackend, client: BackendClient) -> None:
    info = await client.info()
    assert isinstance(info, Info)
    assert info.fingerprint == toy.fingerprint
    assert await client.tokenizer() == FILES
    assert await client.health() == Health("ready", 1.0)
    draft = DraftRequest([1, 2], 0, 4)
    assert await client.draft(draft) == toy.draft(draft)
    assert await client.verify(VERIFY) == toy.verify(VERIFY)
    async with aclosing(client.stream(STREAM)) as events:
        assert [event async for event in events] == toy.stream(STREAM)
    assert toy.connections == 1  # kept alive throughout


async def test_health_may_say_not_yet(toy: ToyBackend, client: BackendClient) -> None:
    toy.health = Health("loading", 0.25)
    assert await client.health() == toy.health


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Status(503), BackendUnavailable),
        (Status(500), BackendFailed),
        (Status(429, headers=(("retry-after", "7"),)), BackendRefused),
        (Status(400), BackendRefused),
        (Status(409), RoleRefused),
        (Status(302), BackendFailed),
        (Status(500, b"<html>"), BackendFailed),
        (Status(200, b"{}"), BackendFailed),
        (Status(200, b""), BackendFailed),
        (
            Status(200, b'{"agreed":0,"tokens":[{"id":1,"logprob":null}],"finish":null,"fingerprint":"f"}'),
            BackendFailed,
        ),
        (
            Status(200, b'{"agreed":0,"tokens":[{"id":1,"logprob":NaN}],"finish":null,"fingerprint":"f"}'),
            BackendFailed,
        ),
        (Drop(0), BackendFailed),
        (Drop(10), BackendFailed),
        (Drop(60), BackendFailed),
    ],
)
async def test_failures(toy: ToyBackend, client: BackendClient, fault: Fault, error: type[GatewayError]) -> None:
    toy.faults = on("/v1/verify", fault)
    with pytest.raises(GatewayError) as caught:
        await client.verify(VERIFY)
    assert type(caught.value) is error
    assert toy.calls["/v1/verify"] == 1, "who else is asked is not its business"
    if isinstance(fault, Status) and fault.code != 200 and fault.body is None:
        assert str(fault.code) in caught.value.message
    if isinstance(fault, Status) and fault.code == 429:
        assert (caught.value.status, caught.value.retry_after_s) == (429, "7")


async def test_nobody_listens() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        async for client in open_client(f"http://127.0.0.1:{reserved.getsockname()[1]}"):
            with pytest.raises(BackendUnreachable):
                await client.verify(VERIFY)
            with pytest.raises(BackendUnavailable):
                await client.health()


@pytest.mark.parametrize("limits", [{"first_byte_s": 0.05}, {"call_s": 0.05}])
async def test_silence_ends_in_a_timeout_and_the_backend_hears_of_it(toy: ToyBackend, limits: dict[str, float]) -> None:
    toy.faults = on("/v1/verify", Hang())
    async for client in open_client(toy.url, **limits):
        with pytest.raises(BackendTimeout):
            await client.verify(VERIFY)
        await toy.left.acquire()


@pytest.mark.parametrize("limits", [{"first_byte_s": 0.05}, {"call_s": 0.05}])
async def test_a_stream_that_falls_silent(toy: ToyBackend, limits: dict[str, float]) -> None:
    toy.faults = on("/v1/stream", HangAfter(2))
    async for client in open_client(toy.url, **limits):
        with pytest.raises(BackendTimeout):
            async with aclosing(client.stream(STREAM)) as events:
                assert [event async for event in events]
        await toy.left.acquire()


@pytest.mark.parametrize("after", [0, 30, 60, 120, 250])
async def test_a_stream_that_breaks_off(toy: ToyBackend, client: BackendClient, after: int) -> None:
    toy.faults = on("/v1/stream", Drop(after))
    with pytest.raises(BackendFailed):
        async with aclosing(client.stream(STREAM)) as events:
            _ = [event async for event in events]


@pytest.mark.parametrize("body", [b"{}\n{", b"x\n", b"[]\n"])
async def test_a_stream_of_nonsense(toy: ToyBackend, client: BackendClient, body: bytes) -> None:
    toy.faults = on("/v1/stream", Status(200, body))
    with pytest.raises(BackendFailed):
        async with aclosing(client.stream(STREAM)) as events:
            _ = [event async for event in events]


async def test_leaving_a_stream_closes_its_connection(toy: ToyBackend, client: BackendClient) -> None:
    toy.faults = on("/v1/stream", HangAfter(1))
    async with aclosing(client.stream(STREAM)) as events:
        async for _ in events:
            break
    await toy.left.acquire()


async def test_cancelling_a_call_closes_its_connection(toy: ToyBackend, client: BackendClient) -> None:
    toy.faults = on("/v1/verify", Hang())
    call = asyncio.create_task(client.verify(VERIFY))
    await toy.hung.acquire()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await toy.left.acquire()


async def test_no_call_waits_for_a_connection(toy: ToyBackend, client: BackendClient) -> None:
    toy.faults = on("/v1/verify", Hang())
    calls = [asyncio.create_task(client.verify(VERIFY)) for _ in range(150)]
    for _ in calls:
        await toy.hung.acquire()  # All are there at the same time: there is no silent limit.
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def test_the_wire_keeps_float32_exact() -> None:
    tiny = msgspec.json.encode([-0.0, 1e-45, -1.1920928955078125e-07])
    assert str(msgspec.json.decode(tiny)) == "[-0.0, 1e-45, -1.1920928955078125e-07]"
