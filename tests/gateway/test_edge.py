"""What comes over the wire: what two servers could read differently is refused, and nothing grows without a bound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from launched import launch_gateway, launch_models
from mock_upstream import MockUpstream, plain
from toy_backend import HangAfter, ToyBackend, Wait, on

from gateway.http.server import MAX_HEAD_BYTES, HttpServerProtocol
from gateway.models_file import ModelConfig, UpstreamConfig

BODY = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "hi"}]}).encode()
LENGTH = b"content-length: %d" % len(BODY)
CHUNKED = b"transfer-encoding: chunked"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
CLOSE = b"connection: close"
LINE = b"POST /v1/chat/completions HTTP/1.1"


@dataclass
class Edge:
    port: int
    upstream: MockUpstream

    async def send(self, data: bytes) -> bytes:
        """All that comes back, until the gateway closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            async with asyncio.timeout(20):  # below the gateway's patience, which must not be what ends it
                return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    @property
    def handed_on(self) -> int:
        return len(self.upstream.received)


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    """A gateway that hands requests on, so that what it lets through can be seen."""
    async with MockUpstream() as upstream:
        config = ModelConfig("toy", upstreams=(UpstreamConfig(upstream.url, "toy", "the-gateways-key"),))
        async with launch_models((config,)) as gateway:
            yield Edge(int(gateway.url.rpartition(":")[2]), upstream)


def request(*headers: bytes, body: bytes = BODY, line: bytes = LINE, host: bytes = b"host: gateway\r\n") -> bytes:
    lines = (line, b"content-type: application/json", *headers)
    return lines[0] + b"\r\n" + host + b"\r\n".join(lines[1:]) + b"\r\n\r\n" + body


def refused(answer: bytes, status: int = 400) -> str:
    """The message of a refusal that is the only answer."""
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"\r\nx-request-id: " in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    message: str = error["message"]
    return message


async def test_what_is_sent_below_is_right_but_for_one_thing_each(edge: Edge) -> None:
    assert (await edge.send(request(LENGTH, CLOSE))).startswith(b"HTTP/1.1 200 ")
    assert (await edge.send(request(CHUNKED, CLOSE, body=CHUNKS))).startswith(b"HTTP/1.1 200 ")
    assert [received.body for received in edge.upstream.received] == [BODY, BODY]


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("at", [1, 60, 150, -20])
async def test_an_offer_of_another_protocol_is_not_taken(edge: Edge, protocol: bytes, at: int) -> None:
    offer = (b"connection: Upgrade, HTTP2-Settings", b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")
    sent = request(LENGTH, *offer, b"Upgrade: " + protocol) + request(CHUNKED, *offer, b"upgrade: x", body=CHUNKS)
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    writer.write(sent[:at])
    await writer.drain()
    await asyncio.sleep(0)
    writer.write(sent[at:] + request(LENGTH, CLOSE))
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.1 200 OK") == 3, answer
    assert [received.body for received in edge.upstream.received] == [BODY] * 3
    for received in edge.upstream.received:
        assert not {"upgrade", "http2-settings"} & {name for name, _ in received.headers}


AMBIGUOUS = {
    "a length and chunks": request(LENGTH, CHUNKED, body=CHUNKS),
    "chunks and a length": request(CHUNKED, LENGTH, body=CHUNKS),
    "two lengths": request(LENGTH, b"content-length: 3"),
    "one length twice": request(LENGTH, LENGTH),
    "a list of lengths": request(LENGTH + b", 3"),
    "a signed length": request(b"content-length: +%d" % len(BODY)),
    "a negative length": request(b"content-length: -1"),
    "a hexadecimal length": request(b"content-length: 0x10"),
    "a length beyond all numbers": request(b"content-length: " + b"9" * 40),
    "an unknown coding": request(b"transfer-encoding: xchunked", body=CHUNKS),
    "a coding under the chunks": request(b"transfer-encoding: gzip, chunked", body=CHUNKS),
    "chunks that are not last": request(b"transfer-encoding: chunked, identity", body=CHUNKS),
    "chunks twice": request(CHUNKED, CHUNKED, body=CHUNKS),
    "a space before the colon": request(b"transfer-encoding : chunked", body=CHUNKS),
    "a coding behind a control character": request(b"transfer-encoding:\x0bchunked", body=CHUNKS),
    "bare line feeds": request(LENGTH).replace(b"\r\n", b"\n"),
    "one bare line feed": request(b"a: b\nx-evil: c", LENGTH),
    "a bare carriage return": request(b"a: b\rx-evil: c", LENGTH),
    "a folded value": request(b"a: b\r\n c", LENGTH),
    "a folded coding": request(b"transfer-encoding:\r\n chunked", body=CHUNKS),
    "a zero byte in a value": request(b"a: b\0c", LENGTH),
    "a zero byte in a name": request(b"a\0: b", LENGTH),
    "a space in a name": request(b"a b: c", LENGTH),
    "no name": request(b": c", LENGTH),
    "a space behind a chunk's size": request(CHUNKED, body=CHUNKS.replace(b"\r\n", b" \r\n", 1)),
    "a chunk beyond all numbers": request(CHUNKED, body=b"f" * 20 + b"\r\n"),
    "a chunk that ends elsewhere": request(CHUNKED, body=CHUNKS.replace(b"}\r\n", b"}XX")),
    "chunks with bare line feeds": request(CHUNKED, body=CHUNKS.replace(b"\r\n", b"\n")),
    "bytes that are no text in the path": request(LENGTH, line=b"POST /v1/\xff HTTP/1.1"),
    "a version that there is not": request(LENGTH, line=b"POST /v1/chat/completions HTTP/1.2"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a tunnel": b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nhost: 127.0.0.1:1\r\n\r\n",
    "no host": request(LENGTH, host=b""),
    "two hosts": request(b"host: other", LENGTH),
    "two credentials": request(b"authorization: Bearer a", b"authorization: Bearer b", LENGTH),
    "two types": request(b"content-type: text/plain", LENGTH),
    "two modes": request(b"x-verbatim-determinism: off", b"X-Verbatim-Determinism: verified", LENGTH),
    "two words on a receipt": request(b"x-verbatim-receipt: false", b"x-verbatim-receipt: true", LENGTH),
}


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_what_could_be_read_in_two_ways_is_refused_and_the_connection_closed(edge: Edge, sent: bytes) -> None:
    # What follows would be the smuggled request.
    answer = await edge.send(sent + b"\r\n" + request(LENGTH, CLOSE, b"x-smuggled: yes"))
    refused(answer)
    assert answer.count(b"content-type:") == 1
    assert not edge.handed_on


async def test_requests_one_after_another_are_answered_in_their_order(edge: Edge) -> None:
    answer = await edge.send(request(LENGTH, b"x-request-id: first") + request(LENGTH, CLOSE, b"x-request-id: second"))
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.index(b"x-request-id: first") < answer.index(b"x-request-id: second")


async def test_trailers_are_no_headers(edge: Edge) -> None:
    trailers = b"x-verbatim-determinism: verified\r\nauthorization: Bearer x\r\nx-evil: yes\r\n\r\n"
    answer = await edge.send(request(CHUNKED, CLOSE, body=CHUNKS[:-2] + trailers))
    assert answer.startswith(b"HTTP/1.1 200 ")
    (received,) = edge.upstream.received
    assert "x-evil" not in dict(received.headers)
    assert dict(received.headers)["authorization"] == "Bearer the-gateways-key"


LONG = b"x" * (MAX_HEAD_BYTES + 1)
HEADS = {
    "a value": request(b"a: " + LONG, LENGTH),
    "a name": request(LONG + b": a", LENGTH),
    "a path": request(LENGTH, line=b"POST /" + LONG + b" HTTP/1.1"),
    "a query": request(LENGTH, line=b"POST /v1/chat/completions?" + LONG + b" HTTP/1.1"),
    "headers": request(*(b"a%d: b" % n for n in range(MAX_HEAD_BYTES // 4)), LENGTH),
    "trailers": request(CHUNKED, body=CHUNKS[:-2] + b"a: b\r\n" * (MAX_HEAD_BYTES // 4)),
    "a chunk's extension": request(CHUNKED, body=b"1;a=" + 8 * LONG),
}


@pytest.mark.parametrize("sent", HEADS.values(), ids=HEADS.keys())
async def test_heads_have_a_bound(edge: Edge, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert "head is over" in refused(await edge.send(sent), 431)
    assert not edge.handed_on
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_head_within_the_bound_is_taken(edge: Edge) -> None:
    answer = await edge.send(request(b"a: " + b"x" * (MAX_HEAD_BYTES - 512), LENGTH, CLOSE))
    assert not answer.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("sent", [request(LENGTH)[:30], request(LENGTH)[:-1], request(CHUNKED, body=b"4\r\nab")])
async def test_a_request_that_does_not_come_to_its_end_is_given_up(
    edge: Edge, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpServerProtocol, "patience_s", 0.05)
    refused(await edge.send(sent), 408)
    assert not edge.handed_on


async def test_a_connection_that_says_nothing_is_closed(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpServerProtocol, "patience_s", 0.05)
    assert await edge.send(b"") == b""


async def test_an_answer_may_take_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpServerProtocol, "patience_s", 0.05)
    release = asyncio.Event()
    async with ToyBackend(faults=on("/v1/stream", Wait(release))) as toy, launch_gateway(toy.url) as gateway:
        asking = asyncio.create_task(gateway.chat())
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, release.set)  # four times the patience, which is not meant for this
        assert (await asking).status_code == 200


async def test_garbage_behind_a_request_does_not_get_into_its_answer() -> None:
    async with ToyBackend(faults=on("/v1/stream", HangAfter(2))) as toy, launch_gateway(toy.url) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        body = BODY[:-1] + b', "stream": true}'
        writer.write(request(b"content-length: %d" % len(body), body=body))
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GARBAGE\r\n\r\n")
        async with asyncio.timeout(20):
            rest = await reader.read()
        assert b"HTTP/1.1" not in rest and b"0\r\n\r\n" not in rest  # cut off, and seen to be
        writer.close()


REQUEST_IDS = [b"a%0d%0aset-cookie: x", b"\xe4\xff", b"a\tb", b"a" * 129, b""]


@pytest.mark.parametrize("id_", REQUEST_IDS)
async def test_a_request_id_comes_back_as_one_header_or_not_at_all(edge: Edge, id_: bytes) -> None:
    head = (await edge.send(request(LENGTH, CLOSE, b"x-request-id: " + id_))).partition(b"\r\n\r\n")[0]
    (line,) = [line for line in head.split(b"\r\n") if line.startswith(b"x-request-id: ")]
    assert b"set-cookie" not in [line.partition(b":")[0] for line in head.split(b"\r\n")]
    assert line.isascii() and b"\t" not in line and len(line) < 160


@pytest.mark.parametrize(
    "path", [b"/v1/%0d%0aset-cookie:%20x", b"/v1/models/%0d%0aset-cookie:%20x", b"/%00", b"/v1/../x"]
)
async def test_a_path_says_nothing_in_an_answers_head(edge: Edge, path: bytes) -> None:
    answer = await edge.send(request(LENGTH, CLOSE, line=b"GET " + path + b" HTTP/1.1"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"set-cookie" not in [line.partition(b":")[0] for line in head.split(b"\r\n")]
    assert "error" in json.loads(body)


async def test_no_request_chooses_where_it_is_sent(edge: Edge) -> None:
    async with MockUpstream() as elsewhere:
        host = elsewhere.url.removeprefix("http://").removesuffix("/base").encode()
        named = (b"x-forwarded-host: " + host, b"forwarded: host=" + host, b"x-original-url: http://" + host)
        line = b"POST http://" + host + b"/v1/chat/completions HTTP/1.1"
        for sent in (
            request(LENGTH, CLOSE, *named, line=line),
            request(LENGTH, CLOSE, host=b"host: " + host + b"\r\n"),
            request(LENGTH, CLOSE, line=b"POST /v1/chat/completions?base_url=http://" + host + b" HTTP/1.1"),
        ):
            assert (await edge.send(sent)).startswith(b"HTTP/1.1 200 ")
        assert edge.handed_on == 3 and not elsewhere.received


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_an_upstream_sends_the_gateway_nowhere_else(edge: Edge, status: str) -> None:
    async with MockUpstream() as elsewhere:
        edge.upstream.answer = plain(b"{}", status, f"location: {elsewhere.url}/v1/chat/completions")
        answer = await edge.send(request(LENGTH, CLOSE))
        assert answer.startswith(f"HTTP/1.1 {status[:3]} ".encode())
        assert not elsewhere.received


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"model": "toy", "messages": ' + b"[" * 100_000]
)
async def test_deep_bodies_are_refused(edge: Edge, body: bytes) -> None:
    answer = await edge.send(request(b"content-length: %d" % len(body), CLOSE, body=body))
    assert answer.startswith(b"HTTP/1.1 400 ")
