"""What the gateway's own HTTP client makes of answers, well formed, cut anywhere, broken off or hostile."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BackendFailed, BackendTimeout, BackendUnreachable, ConfigError
from gateway.http.answer import MAX_HEAD_BYTES, HttpAnswer
from gateway.http.client import HIGH_WATER_BYTES, HttpClient, Server

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: \xe9 b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n"
    b"2;ext=1\r\nhe\r\n3\r\nllo\r\n0\r\nX-T: 1\r\n\r\n"
)
UNTIL_EOF = b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\nhello"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def fed(answer: HttpAnswer, data: bytes, cuts: list[int]) -> bytes:
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    body = b""
    for left, right in itertools.pairwise(edges):
        answer.feed(data[left:right])
        body += answer.take()
    return body


@given(data=st.sampled_from([WHOLE, CHUNKED, UNTIL_EOF]), cuts=st.lists(st.integers(0, 200), max_size=9))
def test_answers_are_read_the_same_wherever_they_are_cut(data: bytes, cuts: list[int]) -> None:
    answer = HttpAnswer()
    assert fed(answer, data, cuts) == b"hello"
    assert answer.status == 200
    assert answer.complete is answer.reusable is (data is not UNTIL_EOF)
    answer.feed_eof()
    assert answer.complete
    names = [name for name, _ in answer.headers]
    assert names == {WHOLE: [b"content-length", b"x-a"], UNTIL_EOF: [b"connection"]}.get(
        data, [b"transfer-encoding", b"trailer"]
    )


@given(data=st.sampled_from([WHOLE, CHUNKED]), end=st.integers(0, 200))
def test_an_answer_cut_short_is_no_answer(data: bytes, end: int) -> None:
    answer = HttpAnswer()
    answer.feed(data[: min(end, len(data) - 1)])
    with pytest.raises(BackendFailed, match="broke off"):
        answer.feed_eof()


@given(st.binary(max_size=300))
def test_whatever_comes_is_an_answer_or_an_error_of_ours(data: bytes) -> None:
    answer = HttpAnswer()
    try:
        answer.feed(data)
        answer.feed_eof()
    except BackendFailed:
        return
    assert answer.complete


@pytest.mark.parametrize(
    "status", [b"204 No Content", b"304 Not Modified"], ids=lambda status: status.decode().partition(" ")[0]
)
def test_some_answers_have_no_body(status: bytes) -> None:
    answer = HttpAnswer()
    answer.feed(b"HTTP/1.1 " + status + b"\r\n\r\n")
    assert answer.complete
    assert answer.reusable


@pytest.mark.parametrize(
    "behind", [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", b"garbage"], ids=["answer", "garbage"]
)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_comes_behind_an_answer_is_not_part_of_it(behind: bytes, at_once: bool) -> None:
    """A server that answers twice must not answer somebody else's next request."""
    answer = HttpAnswer()
    try:
        body = fed(answer, WHOLE + behind, [] if at_once else [len(WHOLE)])
    except BackendFailed:
        return
    assert body == b"hello"
    assert not answer.reusable


@pytest.mark.parametrize("closing", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n"])
def test_an_answer_that_says_so_ends_its_connection(closing: bytes) -> None:
    answer = HttpAnswer()
    answer.feed(closing + b"content-length: 2\r\n\r\nok")
    assert answer.complete
    assert not answer.reusable


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n",
        b"HTTP/1.1 999 Denied\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"{}",
    ],
    ids=[
        "upgrade",
        "two framings",
        "two lengths",
        "negative",
        "huge chunk",
        "coded",
        "coded twice",
        "no status",
        "another protocol",
        "no head",
    ],
)
def test_what_cannot_be_trusted_is_refused(data: bytes) -> None:
    with pytest.raises(BackendFailed, match=r"no HTTP/1\.1"):
        HttpAnswer().feed(data)


@pytest.mark.parametrize(
    "begin",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nx: ",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;",
    ],
    ids=["headers", "one header", "trailers", "extension"],
)
def test_what_is_no_body_has_a_bound(begin: bytes) -> None:
    answer = HttpAnswer()
    answer.feed(begin)
    line = b"a: b\r\n" if begin.endswith(b"\n") else b"aaaaaa"
    with pytest.raises(BackendFailed, match="head of over"):
        for _ in range(MAX_HEAD_BYTES // len(line) + 2):
            answer.feed(line)


def test_a_long_body_is_no_head() -> None:
    answer = HttpAnswer()
    answer.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    for _ in range(10):
        answer.feed(b"x" * 100_000)
    assert answer.complete


@asynccontextmanager
async def serving(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server whose every connection `serve` handles; yields where it is."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client's way to go.
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head + await reader.readexactly(length)


def client(silence_timeout_s: float = 30.0) -> HttpClient:
    return HttpClient(connect_timeout_s=5.0, silence_timeout_s=silence_timeout_s)


async def ask(http: HttpClient, url: str, body: bytes = b"{}") -> bytes:
    incoming = await http.post(Server.at(url), b"/x?y=%20", [(b"x-a", b"\xe9")], body)
    try:
        return await incoming.read()
    finally:
        incoming.close()


async def test_a_connection_is_used_again_after_a_complete_answer() -> None:
    connections: list[list[bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append([])
        while True:
            connections[-1].append(await request(reader))
            writer.write(WHOLE)

    async with serving(serve) as url, client() as http:
        for _ in range(3):
            assert await ask(http, url) == b"hello"
        assert await asyncio.gather(ask(http, url), ask(http, url)) == [b"hello", b"hello"]
        assert sorted(map(len, connections)) == [1, 4]
        authority = url.split("/")[2].encode()
        head = b"POST /v1/x?y=%20 HTTP/1.1\r\nhost: " + authority
        assert connections[0][0] == head + b"\r\nx-a: \xe9\r\ncontent-length: 2\r\n\r\n{}"
        assert repr(http) == "<HttpClient idle=2>"
    assert repr(http) == "<HttpClient idle=0>"


@pytest.mark.parametrize("behind", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"], ids=["closed", "spoke"])
async def test_a_connection_that_ended_while_idle_is_not_used(behind: bytes) -> None:
    connections = 0
    answered, gone = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await request(reader)
        writer.write(WHOLE)
        await answered.wait()
        if behind:
            writer.write(behind)
            assert await reader.read() == b"", "the client hangs up"
        gone.set()

    async with (
        serving(serve) as url,
        HttpClient(connect_timeout_s=5.0, silence_timeout_s=5.0, keepalive_s=3600.0) as http,
    ):
        for count in (1, 2):
            assert await ask(http, url) == b"hello"
            assert connections == count
            answered.set()
            await gone.wait()
            answered.clear()
            gone.clear()
            for _ in range(20):  # What the other end did arrives here too.
                await asyncio.sleep(0)


async def test_a_server_that_answers_twice_is_asked_on_a_new_connection() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await request(reader)
            writer.write(WHOLE + b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")

    async with serving(serve) as url, client() as http:
        for count in (1, 2):
            assert await ask(http, url) == b"hello"
            assert connections == count


async def test_what_idles_is_closed() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(WHOLE)
        assert await reader.read() == b""
        closed.set()

    async with (
        serving(serve) as url,
        HttpClient(connect_timeout_s=5.0, silence_timeout_s=5.0, keepalive_s=0.05) as http,
    ):
        assert await ask(http, url) == b"hello"
        await closed.wait()
        assert repr(http) == "<HttpClient idle=0>"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_end_that_the_event_loop_has_not_read_yet_is_seen(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A busy loop is late; meanwhile the other end may have closed what looks idle."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(65536).endswith(b"{}")
                connection.sendall(WHOLE)
                answered.wait()
            ended.set()

    async def run() -> None:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        async with client() as http:
            assert await ask(http, url) == b"hello"
            assert repr(http) == "<HttpClient idle=1>"
            answered.set()
            ended.wait()  # The loop stands still.
            assert await ask(http, url) == b"hello"

    answered = threading.Event()
    serving = threading.Thread(target=serve)
    serving.start()
    with listener, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
        serving.join()


async def test_an_answer_that_came_whole_and_was_not_read_holds_up_no_other() -> None:
    """Its server was held back, for so much of it was unread: the next one to ask it must be able to hear it."""
    connections = 0
    body = b"x" * (HIGH_WATER_BYTES + 1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async with serving(serve) as url, client() as http:
        incoming = await http.post(Server.at(url), b"/x", [], b"{}")
        for _ in range(200):  # All of it arrives.
            await asyncio.sleep(0.001)
        incoming.close()
        assert repr(http) == "<HttpClient idle=1>"
        async with asyncio.timeout(5):
            assert await ask(http, url) == body
        assert connections == 1


async def test_an_answer_left_early_closes_its_connection() -> None:
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello")
        assert await reader.read() == b""
        left.set()

    async with serving(serve) as url, client() as http:
        incoming = await http.post(Server.at(url), b"", [], b"")
        assert (incoming.status, incoming.headers) == (200, [(b"content-length", b"10")])
        assert await incoming.read_some() == b"hello"
        incoming.close()
        await left.wait()
        assert repr(http) == "<HttpClient idle=0>"


async def test_a_server_is_held_back_where_nobody_reads() -> None:
    size = 32 * 1024 * 1024
    stuck = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        sent = 0
        while sent < size:
            writer.write(b"x" * 65536)
            sent += 65536
            try:
                await asyncio.wait_for(writer.drain(), 0.2)
            except TimeoutError:
                stuck.set()
                await writer.drain()

    # The silence is ours while we do not read, so it is no failure of the server's.
    async with serving(serve) as url, client(silence_timeout_s=0.3) as http:
        incoming = await http.post(Server.at(url), b"", [], b"")
        await stuck.wait()
        await asyncio.sleep(0.4)
        assert len(await incoming.read_some()) < 8 * HIGH_WATER_BYTES
        rest = 0
        while some := await incoming.read_some():
            rest += len(some)
        assert size - 8 * HIGH_WATER_BYTES < rest < size
        incoming.close()


@pytest.mark.parametrize(
    "sent",
    [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello", UNTIL_EOF],
    ids=["head", "body", "body without a length"],
)
async def test_silence_has_an_end(sent: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(sent)
        assert await reader.read() == b""

    async with serving(serve) as url, client(silence_timeout_s=0.05) as http:
        with pytest.raises(BackendTimeout):
            await ask(http, url)


async def test_a_server_that_speaks_now_and_then_is_not_silent() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n")
        for _ in range(10):
            await asyncio.sleep(0.1)
            writer.write(b"x")

    async with serving(serve) as url, client(silence_timeout_s=0.9) as http:
        assert await ask(http, url) == b"x" * 10


@pytest.mark.parametrize("sent", [b"", WHOLE[:20], WHOLE[:-1], b"nonsense\r\n\r\n"])
async def test_what_breaks_is_an_error_of_the_backend(sent: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(sent)

    async with serving(serve) as url, client() as http:
        with pytest.raises(BackendFailed):
            await ask(http, url)


async def test_nobody_there() -> None:
    async with serving(lambda reader, writer: asyncio.sleep(0)) as url:
        pass
    async with client() as http:
        with pytest.raises(BackendUnreachable):
            await ask(http, url)
        with pytest.raises(BackendUnreachable):
            await ask(http, "http://no-such-host.invalid/v1")


async def test_a_long_body_is_sent_whole() -> None:
    body = bytes(range(256)) * 40_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = await request(reader)
        writer.write(WHOLE if seen.endswith(body) else b"")

    async with serving(serve) as url, client() as http:
        assert await ask(http, url, body) == b"hello"


async def test_a_server_that_answers_before_it_has_read_all_gets_no_second_request() -> None:
    connections, left = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\nno")
        await left.wait()

    async with serving(serve) as url, client() as http:
        for _ in range(2):
            assert await ask(http, url, b"x" * 50_000_000) == b"no"
        assert connections == 2
        left.set()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate of 127.0.0.1's."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, SHA256())
    )
    as_pem = serialization.Encoding.PEM
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(as_pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(as_pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "certificate.pem", folder / "key.pem"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_tls(tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Spoken, and the certificate is checked."""
    certificate, key = self_signed(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    handshakes = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal handshakes
        handshakes += 1
        while True:
            await request(reader)
            writer.write(CHUNKED)

    async def run() -> None:
        async with serving(serve, tls) as url:
            async with client() as http:
                with pytest.raises(BackendUnreachable, match="certificate"):
                    await ask(http, url)
            trusting = ssl.create_default_context(cafile=certificate)
            async with HttpClient(connect_timeout_s=5.0, silence_timeout_s=5.0, tls=trusting) as http:
                before = handshakes
                for _ in range(2):
                    assert await ask(http, url, b"x" * 100_000) == b"hello"
                assert handshakes == before + 1

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://a.example/v1", Server("a.example", 80, False, b"a.example", b"/v1")),
        ("https://a.example", Server("a.example", 443, True, b"a.example", b"")),
        ("https://A.example:8443/x/", Server("a.example", 8443, True, b"a.example:8443", b"/x")),
        ("http://[::1]:80/v1", Server("::1", 80, False, b"[::1]:80", b"/v1")),
        (
            "http://b\u00fccher.example/\u00e9 %20",
            Server("b\u00fccher.example", 80, False, b"xn--bcher-kva.example", b"/%C3%A9%20%20"),
        ),
    ],
)
def test_where_a_url_leads(url: str, server: Server) -> None:
    assert Server.at(url) == server


@pytest.mark.parametrize("url", ["", "a.example", "ftp://a.example", "http://", "http://:80/"])
def test_what_leads_nowhere(url: str) -> None:
    with pytest.raises(ConfigError):
        Server.at(url)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://a.example", b"/"),
        ("http://a.example/x/", b"/x/"),
        ("http://a.example/x%20y?a=b%2F&c=/?", b"/x%20y?a=b%2F&c=/?"),
        ("http://a.example/\u00e9 ?\u00e9 ", b"/%C3%A9%20?%C3%A9%20"),
    ],
)
def test_where_a_whole_url_leads(url: str, target: bytes) -> None:
    assert Server.of(url) == (Server("a.example", 80, False, b"a.example", b""), target)


@pytest.mark.parametrize("method", ["get", "post"])
async def test_only_what_may_be_asked_twice_is(method: str) -> None:
    """Of two kept connections the server forgets both: a GET is sent again on a new one, a POST is not."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await both.wait()
        writer.write(WHOLE)
        asked.append((await reader.readuntil(b"\r\n\r\n")).partition(b" ")[0])  # and no answer

    both = asyncio.Barrier(2)
    async with serving(serve) as url, client() as http:
        server = Server.at(url)
        for incoming in await asyncio.gather(http.get(server, b"/x"), http.get(server, b"/x")):
            assert await incoming.read() == b"hello"
            incoming.close()
        if method == "post":
            with pytest.raises(BackendFailed):
                await http.post(server, b"/x", [], b"")
            assert asked == [b"POST"]
        else:
            both = asyncio.Barrier(1)
            incoming = await http.get(server, b"/x")
            assert await incoming.read() == b"hello"
            incoming.close()
            assert asked == [b"GET"]


async def test_a_request_that_is_cancelled_closes_its_connection() -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        asked.set()
        assert await reader.read() == b""
        left.set()

    async with serving(serve) as url, client(silence_timeout_s=3600.0) as http:
        asking = asyncio.create_task(ask(http, url))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await left.wait()
