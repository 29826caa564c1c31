"""The window protocol over HTTP: one backend, typed calls, typed errors.

Owns connections, deadlines, retries and the translation of everything httpx or the wire can do wrong into our errors.
Knows nothing of what the calls are for. Cancelling a call closes its connection, which is how the backend learns that
nobody wants the answer any more.

Retries: every call is idempotent, so one that never reached the backend, or was answered 503, is sent again twice. One
that broke off later is not: a request that kills a backend should not be handed to it three times.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx
import msgspec

from backend.protocol import (
    DraftRequest,
    DraftResponse,
    ErrorBody,
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

Answer = TypeVar("Answer")
Sleep = Callable[[float], Awaitable[None]]

RETRY_DELAYS_S = (0.1, 0.4)
HEALTH_TIMEOUT_S = 5.0
KEEPALIVE_S = 2.0
"""Below the 5 s after which uvicorn closes an idle connection, so that we never write into one being closed."""


def open_http(
    base_url: str, *, connections: int, connect_timeout_s: float, first_byte_timeout_s: float
) -> httpx.AsyncClient:
    """An HTTP client with as many connections as there may be calls at a time, and one for health checks."""
    return httpx.AsyncClient(
        base_url=base_url,
        limits=httpx.Limits(
            max_connections=connections + 1, max_keepalive_connections=connections + 1, keepalive_expiry=KEEPALIVE_S
        ),
        timeout=httpx.Timeout(first_byte_timeout_s, connect=connect_timeout_s),
        headers={"accept-encoding": "identity"},  # streams are read as they come
        trust_env=False,
    )


class BackendClient:
    """Calls to one backend. `call_timeout_s` bounds each call as a whole, retries not counted."""

    def __init__(self, http: httpx.AsyncClient, call_timeout_s: float, sleep: Sleep = asyncio.sleep) -> None:
        self._http = http
        self._call_timeout_s = call_timeout_s
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"<BackendClient {self._http.base_url}>"

    async def info(self) -> Info:
        return await self._call("GET", "/v1/info", None, Info)

    async def tokenizer(self) -> TokenizerFiles:
        return await self._call("GET", "/v1/tokenizer", None, TokenizerFiles)

    async def draft(self, request: DraftRequest) -> DraftResponse:
        return await self._call("POST", "/v1/draft", request, DraftResponse)

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        return await self._call("POST", "/v1/verify", request, VerifyResponse)

    async def health(self) -> Health:
        """The backend's own word; status 503 carries one too, so it is not an error here."""
        with _translated():
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                response = await self._http.get("/healthz")
        if response.status_code not in (200, 503):
            raise _refusal(response)
        return _decode(response.content, Health)

    async def stream(self, request: StreamRequest) -> AsyncGenerator[StreamEvent]:
        """Events as they come. Closing the iterator closes the connection."""
        # The deadline is set read by read: a timeout that spanned a yield would strike in the consumer's code.
        deadline = asyncio.get_running_loop().time() + self._call_timeout_s
        response = await self._send("POST", "/v1/stream", request, deadline, stream=True)
        try:
            chunks = response.aiter_raw()
            line = b""
            while True:
                with _translated():
                    async with asyncio.timeout_at(deadline):
                        chunk = await anext(chunks, b"")
                if not chunk:
                    break
                *lines, line = (line + chunk).split(b"\n")
                for complete in lines:
                    yield _decode(complete, StreamEvent)
            if line:
                raise BackendFailed("the backend's stream broke off in the middle of a line")
        finally:
            await response.aclose()

    async def _call(self, method: str, path: str, body: msgspec.Struct | None, answer: type[Answer]) -> Answer:
        deadline = asyncio.get_running_loop().time() + self._call_timeout_s
        response = await self._send(method, path, body, deadline, stream=False)
        return _decode(response.content, answer)

    async def _send(
        self, method: str, path: str, body: msgspec.Struct | None, deadline: float, *, stream: bool
    ) -> httpx.Response:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        for delay_s in (*RETRY_DELAYS_S, None):
            request = self._http.build_request(method, path, content=content, headers=headers)
            try:
                with _translated():
                    async with asyncio.timeout_at(deadline):
                        response = await self._http.send(request, stream=stream)
                        if response.status_code != 200:
                            await response.aread()
                            await response.aclose()
                if response.status_code != 200:
                    raise _refusal(response)
            except BackendUnavailable:
                if delay_s is None:
                    raise
                await self._sleep(delay_s)
            else:
                return response
        raise AssertionError("the last attempt returns or raises")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise BackendUnavailable(f"the backend cannot be reached: {error}") from error
    except (httpx.TimeoutException, TimeoutError) as error:
        raise BackendTimeout("the backend did not answer in time") from error
    except httpx.HTTPError as error:
        raise BackendFailed(f"the connection to the backend broke: {error or type(error).__name__}") from error


def _refusal(response: httpx.Response) -> GatewayError:
    status = response.status_code
    try:
        message = msgspec.json.decode(response.content, type=ErrorBody).error.message
    except msgspec.DecodeError:
        message = f"the backend answered status {status}"
    retry_after_s = response.headers.get("retry-after")
    if status == 503:
        return BackendUnavailable(message, retry_after_s=retry_after_s)
    if status == 409:
        return RoleRefused(message)
    if 400 <= status < 500:
        return BackendRefused(message, status, retry_after_s=retry_after_s)
    return BackendFailed(message)


def _decode(content: bytes, answer: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(content, type=answer)
    except msgspec.DecodeError as error:
        raise BackendFailed(f"the backend's answer is no {answer.__name__}: {error}") from error
