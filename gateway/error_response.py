"""An error as an HTTP response: OpenAI's envelope, its status, and when to come back."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from gateway.errors import GatewayError


def error_response(error: GatewayError) -> Response:
    """For errors before the first byte."""
    return JSONResponse(error.envelope(), error.status, error.headers)
