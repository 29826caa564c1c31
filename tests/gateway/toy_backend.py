"""A window backend over a toy model: real HTTP over TCP, written by hand so that it can misbehave at any byte.

`drafter` corrupts what the fast path proposes; `faults` decides what happens to a call. Both are for tests to set. A
call that hangs releases `hung`, and `left` once its caller has closed the connection; tests acquire them to wait for
either.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from toy_model import FILES, VOCAB, ToyModel

from backend.protocol import (
    PROTOCOL_VERSION,
    DecodeEvent,
    DecodeRequest,
    DraftRequest,
    DraftResponse,
    DraftToken,
    ErrorBody,
    ErrorDetail,
    Finish,
    Health,
    Info,
    StreamEvent,
    StreamRequest,
    StreamToken,
    TokenizerFiles,
    VerifiedToken,
    VerifyRequest,
    VerifyResponse,
    VerifyShape,
)

T = TypeVar("T", bound=msgspec.Struct)

FINGERPRINT = "toy-1"
Drafter = Callable[[list[int], int], list[int]]


@dataclass(frozen=True, slots=True)
class Status:
    """Answer with a status, and a protocol error body or the one given."""

    code: int
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Hang:
    """Say nothing until the caller leaves."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Answer once the event is set."""

    event: asyncio.Event


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the connection after this many bytes of the answer."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class DropAfter:
    """Close the connection after this many lines of a stream."""

    lines: int


@dataclass(frozen=True, slots=True)
class HangAfter:
    """Send this many lines of a stream, then say nothing until the caller leaves."""

    lines: int


Fault = Status | Hang | Wait | Drop | DropAfter | HangAfter | None
Faults = Callable[[str, int], Fault]


def honest(truth: list[int], count: int) -> list[int]:
    return truth


def no_faults(path: str, nth: int) -> Fault:
    return None


def on(path: str, fault: Fault, *, nth: int | None = None) -> Faults:
    """A fault for the nth call of a path (from 0), or for every one."""
    return lambda p, n: fault if p == path and (nth is None or n == nth) else None


@dataclass
class ToyBackend:
    model: ToyModel = field(default_factory=ToyModel)
    drafter: Drafter = honest
    faults: Faults = no_faults
    window: int = 16
    max_context: int = 4096
    vocab_size: int = VOCAB
    fingerprint: str = FINGERPRINT
    wants_draft: bool = True
    wants_draft_ahead: bool = False
    name: str = "toy"
    roles: tuple[str, ...] = ("draft", "verify")
    health: Health = Health("ready", 1.0)  # noqa: RUF009  # frozen
    calls: Counter[str] = field(default_factory=Counter)
    requests: list[msgspec.Struct] = field(default_factory=list)
    heads: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path and headers of each call."""
    hung: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    left: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    connections: int = 0
    port: int = 0
    protocol: int = PROTOCOL_VERSION
    files: TokenizerFiles = FILES  # frozen

    async def __aenter__(self) -> ToyBackend:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def truth(self, context: list[int], generated: int, count: int, request: DraftRequest | StreamRequest) -> list[int]:
        out: list[int] = []
        while len(out) < count and not (out and out[-1] in request.stop_ids):
            out.append(self.model.next([*context, *out], generated + len(out), request.sampling).id)
        return out

    def draft(self, request: DraftRequest) -> DraftResponse:
        truth = self.truth(request.context, request.generated, request.count, request)
        proposed = self.drafter(truth, request.count)
        return DraftResponse([DraftToken(id_, -0.5, 1.0) for id_ in proposed], self.fingerprint)

    def verify(self, request: VerifyRequest) -> VerifyResponse:
        context, tokens, finish = list(request.context), list[VerifiedToken](), None
        agreed, agrees = 0, True
        for drafted in [*request.draft, None]:
            token = self.model.next(context, request.generated + len(tokens), request.sampling, request.top_logprobs)
            tokens.append(token)
            context.append(token.id)
            agrees = agrees and token.id == drafted
            agreed += agrees
            finish = self._finish(context, request.stop_ids)
            if finish or len(tokens) == agreed + 1:
                break
        return VerifyResponse(agreed, tokens, finish, self.fingerprint, self.wants_draft, self.wants_draft_ahead)

    def decode(self, request: DecodeRequest) -> list[DecodeEvent]:
        context, events = list(request.context), list[DecodeEvent]()
        finish: Finish | None = None
        while finish is None and not (events and request.yields and self.wants_draft):
            generated = request.generated + len(events)
            token = self.model.next(context, generated, request.sampling, request.top_logprobs)
            context.append(token.id)
            events.append(DecodeEvent(self.fingerprint, [token]))
            finish = self._finish(context, request.stop_ids)
            if len(events) == request.max_tokens:
                finish = finish or "length"
        return [*events, DecodeEvent(self.fingerprint, finish=finish, wants_draft=finish is None)]

    def stream(self, request: StreamRequest) -> list[StreamEvent]:
        context, events = list(request.context), list[StreamEvent]()
        finish: Finish | None = None
        for generated in range(request.max_tokens):
            token = self.model.next(context, generated, request.sampling, request.top_logprobs)
            context.append(token.id)
            finish = self._finish(context, request.stop_ids)
            if generated + 1 == request.max_tokens:
                finish = finish or "length"
            events.append(StreamEvent([StreamToken(token.id, token.logprob, token.top)], finish))
            if finish:
                break
        return events

    def _finish(self, context: list[int], stop_ids: list[int]) -> Finish | None:
        if context[-1] in stop_ids:
            return "stop"
        return "length" if len(context) >= self.max_context else None

    def _answer(self, path: str, body: bytes) -> list[bytes]:
        """The answer's body: one piece, or the lines of a stream."""
        match path:
            case "/v1/info":
                shape = VerifyShape(4, self.window)
                info = Info(
                    self.protocol,
                    self.name,
                    self.fingerprint,
                    list(self.roles),
                    shape,
                    self.max_context,
                    self.vocab_size,
                    "f",
                    "cpu",
                )
                return [msgspec.json.encode(info)]
            case "/v1/tokenizer":
                return [msgspec.json.encode(self.files)]
            case "/v1/draft":
                return [msgspec.json.encode(self.draft(self._read(body, DraftRequest)))]
            case "/v1/verify":
                return [msgspec.json.encode(self.verify(self._read(body, VerifyRequest)))]
            case "/v1/decode":
                return [msgspec.json.encode(e) + b"\n" for e in self.decode(self._read(body, DecodeRequest))]
            case "/v1/stream":
                return [msgspec.json.encode(e) + b"\n" for e in self.stream(self._read(body, StreamRequest))]
            case _:
                return [msgspec.json.encode(self.health)]

    def _read(self, body: bytes, type_: type[T]) -> T:
        request = msgspec.json.decode(body, type=type_)
        self.requests.append(request)
        return request

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._call(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = head[0].split(" ")[1]
        pairs = (line.partition(":") for line in head[1:] if line)
        self.heads.append((path, {name.lower(): value.strip() for name, _, value in pairs}))
        length = next((int(line.split(":")[1]) for line in head if line.lower().startswith("content-length")), 0)
        body = await reader.readexactly(length)
        nth = self.calls[path]
        self.calls[path] += 1
        fault = self.faults(path, nth)
        if isinstance(fault, Hang):
            return await self._hang(reader)
        if isinstance(fault, Wait):
            self.hung.release()
            await fault.event.wait()
        if isinstance(fault, Status):
            error = fault.body
            if error is None:
                error = msgspec.json.encode(ErrorBody(ErrorDetail("any", f"the toy says {fault.code}")))
            extra = "".join(f"{name}: {value}\r\n" for name, value in fault.headers)
            writer.write(f"HTTP/1.1 {fault.code} X\r\n{extra}content-length: {len(error)}\r\n\r\n".encode() + error)
            await writer.drain()
            return True
        pieces = self._answer(path, body)
        status = 503 if path == "/healthz" and self.health.status != "ready" else 200
        raw = [f"HTTP/1.1 {status} X\r\n".encode()]
        if path in ("/v1/stream", "/v1/decode"):
            raw[0] += b"transfer-encoding: chunked\r\n\r\n"
            raw += [b"%x\r\n%s\r\n" % (len(line), line) for line in pieces] + [b"0\r\n\r\n"]
        else:
            raw[0] += f"content-length: {len(pieces[0])}\r\n\r\n".encode() + pieces[0]
        if isinstance(fault, Drop):
            writer.write(b"".join(raw)[: fault.after])
            await writer.drain()
            return False
        if isinstance(fault, DropAfter):
            writer.write(b"".join(raw[: 1 + fault.lines]))
            await writer.drain()
            return False
        if isinstance(fault, HangAfter):
            writer.write(b"".join(raw[: 1 + fault.lines]))
            await writer.drain()
            return await self._hang(reader)
        writer.write(b"".join(raw))
        await writer.drain()
        return True

    async def _hang(self, reader: asyncio.StreamReader) -> bool:
        self.hung.release()
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""
        self.left.release()
        return False
