"""What the HTTP side of every backend does alike: decoding and checking calls, encoding answers, leaving clients.

Knows nothing of what serves the calls. Checks against the model need no more than the backend's `Info`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from backend.protocol import (
    DecodeRequest,
    DraftRequest,
    ErrorBody,
    ErrorDetail,
    Info,
    Sampling,
    StreamRequest,
    VerifyRequest,
)
from backend.server.errors import STATUS, CallError, from_decoding

_MAX_BODY_BYTES = 16 << 20
_LEFT = "the client left"

Body = TypeVar("Body", bound=msgspec.Struct)
Result = TypeVar("Result")


def answer_errors(app: FastAPI) -> None:
    """Give every refusal of `app` the protocol's error body."""
    answer_call_errors(app)
    app.add_exception_handler(HTTPException, _answer_http_error)


def answer_call_errors(app: FastAPI) -> None:
    """Give refused calls the protocol's error body, and leave the app's other errors as they are."""
    app.add_exception_handler(CallError, _answer_call_error)


async def decode(request: Request, struct: type[Body]) -> Body:
    """The call in a request's body. Raises CallError, naming the field, where it is none."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                raise CallError("too_large", f"the body is longer than {_MAX_BODY_BYTES} bytes")
    except ClientDisconnect as error:
        raise CallError("unavailable", _LEFT) from error
    try:
        return msgspec.json.decode(body, type=struct)
    except msgspec.DecodeError as error:
        raise from_decoding(error) from error


def check_call(info: Info, call: DraftRequest | VerifyRequest | DecodeRequest | StreamRequest) -> None:
    """Check what all calls have in common. Raises CallError."""
    check_ids(info, call.context, "context")
    check_room(info, len(call.context), "context")
    _check_sampling(info, call.sampling, call.stop_ids)


def check_ids(info: Info, ids: list[int], field: str) -> None:
    """Raises CallError where an id lies outside the vocabulary."""
    vocab = info.vocab_size
    if ids and max(ids) >= vocab:
        raise CallError("invalid_request", f"{field} holds token id {max(ids)}; the vocabulary has {vocab}", field)


def _check_sampling(info: Info, sampling: Sampling, stop_ids: list[int]) -> None:
    check_ids(info, [id_ for id_, _ in sampling.logit_bias], "sampling.logit_bias")
    vocab = info.vocab_size
    if sampling.min_tokens and len(stop_ids) >= vocab and set(stop_ids) >= set(range(vocab)):
        raise CallError("invalid_request", "sampling.min_tokens leaves no token to choose", "sampling.min_tokens")


def check_room(info: Info, length: int, field: str) -> None:
    """Raises CallError where a sequence of `length` tokens leaves no room for another."""
    limit = info.max_context
    if length >= limit:
        raise CallError(
            "invalid_request",
            f"{field} reaches {length} tokens; the context of {limit} leaves no room for another",
            field,
        )


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Await `work`, or cancel it as soon as the client leaves: FastAPI does not do that for a plain handler."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise CallError("unavailable", _LEFT)
    finally:
        for future in (working, leaving):
            future.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    """A struct as the body of an answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _answer_call_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CallError)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return Response(
        msgspec.json.encode(ErrorBody(error.detail)), error.status, headers=headers, media_type="application/json"
    )


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = next((name for name, status in STATUS.items() if status == error.status_code), "invalid_request")
    detail = ErrorDetail(type=kind, message=f"{request.method} {request.url.path}: {error.detail}")
    return json_response(ErrorBody(detail), error.status_code)
