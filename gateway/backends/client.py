"""The window protocol over HTTP: one backend, typed calls, typed errors.

Owns deadlines and the translation of what a backend says into our errors; those of the wire are the HTTP client's.
Knows nothing of what the calls are for, and tries each of them once: who else may be asked is the replica group's
business. Cancelling a call closes its connection: so the backend learns that nobody wants the answer any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from backend.protocol import (
    DecodeEvent,
    DecodeRequest,
    DraftRequest,
    DraftResponse,
    ErrorBody,
    ErrorDetail,
    Health,
    Info,
    StreamEvent,
    StreamRequest,
    TokenizerFiles,
    VerifyRequest,
    VerifyResponse,
)
from gateway.errors import (
    BackendFailed,
    BackendRefused,
    BackendTimeout,
    BackendUnavailable,
    GatewayError,
    RoleRefused,
)
from gateway.http.client import Header, HttpClient, Incoming, Server
from gateway.telemetry.record import recording
from gateway.telemetry.tracing import NO_SPAN, Span

Answer = TypeVar("Answer")


class BackendClient:
    """Calls to the backend at `url`. The timeouts bound each call as a whole, and each question after its health."""

    def __init__(self, http: HttpClient, url: str, call_timeout_s: float, health_timeout_s: float = 5.0) -> None:
        self._http = http
        self._call_timeout_s = call_timeout_s
        self._health_timeout_s = health_timeout_s
        self._server = Server.at(url)
        self.url = url.rstrip("/")

    def __repr__(self) -> str:
        return f"<BackendClient {self.url}>"

    async def info(self) -> Info:
        return await self._call("GET", "/v1/info", None, Info, NO_SPAN)

    async def tokenizer(self) -> TokenizerFiles:
        return await self._call("GET", "/v1/tokenizer", None, TokenizerFiles, NO_SPAN)

    async def draft(self, request: DraftRequest) -> DraftResponse:
        with self._span("draft", {**_work(request), "verbatim.tokens.asked": request.count}) as span:
            answer = await self._call("POST", "/v1/draft", request, DraftResponse, span)
            span.set({"verbatim.tokens": len(answer.tokens)})
            return answer

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        with self._span("verify", {**_work(request), "verbatim.tokens.drafted": len(request.draft)}) as span:
            answer = await self._call("POST", "/v1/verify", request, VerifyResponse, span)
            span.set({"verbatim.tokens.agreed": answer.agreed, "verbatim.tokens": len(answer.tokens)})
            return answer

    async def health(self) -> Health:
        """The backend's own word; status 503 carries one too, so it is not an error here."""
        deadline = asyncio.get_running_loop().time() + self._health_timeout_s
        status, content, retry_after_s = await self._exchange("GET", "/healthz", None, deadline, NO_SPAN)
        if status not in (200, 503):
            raise _refusal(status, content, retry_after_s)
        return _decode(content, Health)

    def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent]:
        """Events as they come. Closing the iterator closes the connection."""
        return self._lines(
            "decode", request, DecodeEvent, {**_work(request), "verbatim.tokens.asked": request.max_tokens}
        )

    def stream(self, request: StreamRequest) -> AsyncGenerator[StreamEvent]:
        """Events as they come. Closing the iterator closes the connection."""
        asked = {"verbatim.context": len(request.context), "verbatim.tokens.asked": request.max_tokens}
        return self._lines("stream", request, StreamEvent, asked)

    async def _lines(
        self, name: str, body: msgspec.Struct, event: type[Answer], asked: Mapping[str, int]
    ) -> AsyncGenerator[Answer]:
        # The deadline is set read by read: a timeout that spanned a yield would strike in the consumer's code.
        deadline = self._deadline()
        record = recording()
        with self._span(name, asked) as span:
            with record.calling():
                incoming = await self._send("POST", f"/v1/{name}", body, deadline, span)
            try:
                if incoming.status != 200:
                    content = await self._read(incoming, deadline)
                    raise _refusal(incoming.status, content, incoming.header(_RETRY_AFTER))
                line = b""
                while True:
                    record.wait()
                    try:
                        with translated():
                            async with asyncio.timeout_at(deadline):
                                chunk = await incoming.read_some()
                    finally:
                        record.go_on()
                    if not chunk:
                        break
                    *lines, line = (line + chunk).split(b"\n")
                    for complete in lines:
                        yield _decode(complete, event)
                if line:
                    raise BackendFailed("the backend's stream broke off in the middle of a line")
            finally:
                incoming.close()  # Closes the connection unless all has been read.

    async def _call(
        self, method: str, path: str, body: msgspec.Struct | None, answer: type[Answer], span: Span
    ) -> Answer:
        with recording().calling():
            status, content, retry_after_s = await self._exchange(method, path, body, self._deadline(), span)
        if status != 200:
            raise _refusal(status, content, retry_after_s)
        return _decode(content, answer)

    async def _exchange(
        self, method: str, path: str, body: msgspec.Struct | None, deadline: float, span: Span
    ) -> tuple[int, bytes, str | None]:
        incoming = await self._send(method, path, body, deadline, span)
        try:
            return incoming.status, await self._read(incoming, deadline), incoming.header(_RETRY_AFTER)
        finally:
            incoming.close()

    async def _send(self, method: str, path: str, body: msgspec.Struct | None, deadline: float, span: Span) -> Incoming:
        said = recording().headers(span).items()
        headers: list[Header] = [(name.lower().encode(), value.encode("latin-1")) for name, value in said]
        with translated():
            async with asyncio.timeout_at(deadline):
                if body is None:
                    return await self._http.get(self._server, path.encode(), headers)
                content = msgspec.json.encode(body)
                return await self._http.post(self._server, path.encode(), [*headers, _JSON], content)

    def _span(self, name: str, asked: Mapping[str, int]) -> Span:
        return recording().span.child(name, {"url.full": self.url, **asked}, calls=True)

    @staticmethod
    async def _read(incoming: Incoming, deadline: float) -> bytes:
        with translated():
            async with asyncio.timeout_at(deadline):
                return await incoming.read()

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._call_timeout_s


_JSON = (b"content-type", b"application/json")
_RETRY_AFTER = b"retry-after"


def _work(request: DraftRequest | VerifyRequest | DecodeRequest) -> dict[str, int]:
    """Where in an answer a call goes on, for its span."""
    return {"verbatim.context": len(request.context), "verbatim.position": request.generated}


@contextmanager
def translated() -> Iterator[None]:
    """Raises `BackendTimeout` where a deadline strikes."""
    try:
        yield
    except TimeoutError as error:
        raise BackendTimeout("the backend did not answer in time") from error


def _refusal(status: int, content: bytes, retry_after_s: str | None) -> GatewayError:
    try:
        detail = msgspec.json.decode(content, type=ErrorBody).error
    except msgspec.DecodeError:
        detail = ErrorDetail("", f"the backend answered status {status}")
    message = detail.message
    if status == 503:
        return BackendUnavailable(message, retry_after_s=retry_after_s)
    if status == 409:
        return RoleRefused(message)
    if 400 <= status < 500:
        return BackendRefused(message, status, field=detail.field, retry_after_s=retry_after_s)
    return BackendFailed(message)


def _decode(content: bytes, answer: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(content, type=answer)
    except msgspec.DecodeError as error:
        raise BackendFailed(f"the backend's answer is no {answer.__name__}: {error}") from error
