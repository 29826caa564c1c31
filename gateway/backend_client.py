"""The window protocol over HTTP: one backend, typed calls, typed errors.

Owns deadlines and the translation of everything aiohttp or the wire can do wrong into our errors. Knows nothing of what
the calls are for, and tries each of them once: who else may be asked is the replica group's business. Cancelling a call
closes its connection, which is how the backend learns that nobody wants the answer any more.

Connections are not limited here. Admission bounds what is in flight; a second, silent bound would only add waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import aiohttp
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
    BackendUnreachable,
    GatewayError,
    RoleRefused,
)
from gateway.telemetry.record import recording
from gateway.telemetry.tracing import NO_SPAN, Span

Answer = TypeVar("Answer")

KEEPALIVE_S = 2.0
"""Below the 5 s after which uvicorn closes an idle connection, so that we never write into one being closed."""


def open_http(*, connect_timeout_s: float, first_byte_timeout_s: float) -> aiohttp.ClientSession:
    """The HTTP client of a whole gateway; to be called in its event loop. The second timeout is for each read."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=first_byte_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("accept", "accept-encoding", "user-agent"),  # streams are read as they come
        trust_env=False,
    )


class BackendClient:
    """Calls to the backend at `url`. The timeouts bound each call as a whole, and each question after its health."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, call_timeout_s: float, health_timeout_s: float = 5.0
    ) -> None:
        self._http = http
        self._call_timeout_s = call_timeout_s
        self._health_timeout_s = health_timeout_s
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
        status, content, headers = await self._exchange("GET", "/healthz", None, deadline, NO_SPAN)
        if status not in (200, 503):
            raise _refusal(status, content, headers)
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
                response = await self._send("POST", f"/v1/{name}", body, deadline, span)
            try:
                if response.status != 200:
                    raise _refusal(response.status, await self._read(response, deadline), response.headers)
                line = b""
                while True:
                    record.wait()
                    try:
                        with translated():
                            async with asyncio.timeout_at(deadline):
                                chunk = await response.content.readany()
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
                response.release()  # Closes the connection unless all has been read.

    async def _call(
        self, method: str, path: str, body: msgspec.Struct | None, answer: type[Answer], span: Span
    ) -> Answer:
        with recording().calling():
            status, content, headers = await self._exchange(method, path, body, self._deadline(), span)
        if status != 200:
            raise _refusal(status, content, headers)
        return _decode(content, answer)

    async def _exchange(
        self, method: str, path: str, body: msgspec.Struct | None, deadline: float, span: Span
    ) -> tuple[int, bytes, Mapping[str, str]]:
        response = await self._send(method, path, body, deadline, span)
        try:
            return response.status, await self._read(response, deadline), response.headers
        finally:
            response.release()

    async def _send(
        self, method: str, path: str, body: msgspec.Struct | None, deadline: float, span: Span
    ) -> aiohttp.ClientResponse:
        content = None if body is None else msgspec.json.encode(body)
        headers = recording().headers(span) | ({} if body is None else _JSON)
        with translated():
            async with asyncio.timeout_at(deadline):
                return await self._http.request(
                    method, self.url + path, data=content, headers=headers, allow_redirects=False
                )

    def _span(self, name: str, asked: Mapping[str, int]) -> Span:
        return recording().span.child(name, {"url.full": self.url, **asked}, calls=True)

    @staticmethod
    async def _read(response: aiohttp.ClientResponse, deadline: float) -> bytes:
        with translated():
            async with asyncio.timeout_at(deadline):
                return await response.read()

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._call_timeout_s


_JSON = {"content-type": "application/json"}


def _work(request: DraftRequest | VerifyRequest | DecodeRequest) -> dict[str, int]:
    """Where in an answer a call goes on, for its span."""
    return {"verbatim.context": len(request.context), "verbatim.position": request.generated}


@contextmanager
def translated() -> Iterator[None]:
    """Raises `BackendError` for whatever aiohttp or a deadline raises."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise BackendUnreachable(f"the backend cannot be reached: {error.strerror or error}") from error
    except aiohttp.ConnectionTimeoutError as error:
        raise BackendUnreachable("the backend cannot be reached: the connection took too long") from error
    except TimeoutError as error:
        raise BackendTimeout("the backend did not answer in time") from error
    except aiohttp.ClientError as error:
        raise BackendFailed(f"the connection to the backend broke: {error or type(error).__name__}") from error


def _refusal(status: int, content: bytes, headers: Mapping[str, str]) -> GatewayError:
    try:
        detail = msgspec.json.decode(content, type=ErrorBody).error
    except msgspec.DecodeError:
        detail = ErrorDetail("", f"the backend answered status {status}")
    message = detail.message
    retry_after_s = headers.get("retry-after")
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
