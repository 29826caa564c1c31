"""Errors before the first byte as HTTP responses: OpenAI's envelope, its status, and when to come back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.errors import ClientLeft, GatewayError, envelope
from gateway.telemetry.record import recording

ErrorHandler: TypeAlias = Callable[[Request, Exception], Awaitable[Response]]


def error_response(error: GatewayError) -> Response:
    """For errors that are known to be the gateway's own."""
    return JSONResponse(error.envelope(), error.status, error.headers)


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    recording().fail_with(error)
    return error_response(error)


async def _client_left(request: Request, error: Exception) -> Response:
    recording().fail("client_left")
    return Response(status_code=499)  # nobody reads it


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: f"no such path: {request.method} {request.url.path}", 405: f"{request.method} is not allowed here"}
    code = "unknown_url" if error.status_code == 404 else None  # OpenAI's
    body = envelope(said.get(error.status_code, error.detail), "invalid_request_error", code=code)
    recording().fail(code or "invalid_request_error")
    return JSONResponse(body, error.status_code, error.headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    return JSONResponse(envelope("internal error", "server_error"), 500)


ERROR_HANDLERS: dict[type[Exception], ErrorHandler] = {
    GatewayError: _gateway_error,
    ClientLeft: _client_left,
    HTTPException: _http_error,
    Exception: _internal_error,
}
"""What becomes of errors before the first byte: the first that fits. The last one is raised on, to be logged."""
