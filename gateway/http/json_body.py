"""Reads the body of a request that must be JSON, no further than it may be long."""

from __future__ import annotations

from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.errors import BodyTooLarge, ClientLeft, UnsupportedMedia
from gateway.telemetry.record import recording

LINGER = 8
"""How many times the limit we read on, discarding, so that a client still sending gets to see its 413."""


async def read_json_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes; raises `UnsupportedMedia`, `BodyTooLarge` or `ClientLeft`."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMedia(f"content-type must be application/json, not {media_type}", param="content-type")
    body = bytearray()
    size = 0
    try:
        with recording().waiting():
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    body += chunk
                elif size > LINGER * limit:
                    break
    except ClientDisconnect as error:
        raise ClientLeft from error
    if size > limit:
        raise BodyTooLarge(f"the body is over the limit of {limit} bytes")
    recording().read(bytes(body))
    return bytes(body)
