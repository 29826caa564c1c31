"""The window protocol's routes beside SGLang's own, and the tie of the service's life to the server's."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from backend.protocol import DraftRequest, Finish, Info, StreamEvent, StreamRequest, StreamToken, VerifyRequest
from backend.server.errors import CallError
from backend.server.http import (
    answer_call_errors,
    check_call,
    check_ids,
    check_room,
    decode,
    json_response,
    unless_gone,
)
from backend.sglang.service import Service

log = logging.getLogger(__name__)


def add_routes(app: FastAPI, service: Service) -> None:
    """Serve the window protocol on SGLang's app."""

    async def health(request: Request) -> Response:
        return json_response(service.health, 200 if service.health.status == "ready" else 503)

    async def info(request: Request) -> Response:
        return json_response(service.info)

    async def tokenizer(request: Request) -> Response:
        return json_response(service.tokenizer)

    async def draft(request: Request) -> Response:
        limits = service.info
        call = await decode(request, DraftRequest)
        _check_call(limits, call)
        return json_response(await unless_gone(request, service.draft(call)))

    async def verify(request: Request) -> Response:
        limits = service.info
        service.check_verifies()
        call = await decode(request, VerifyRequest)
        _check_call(limits, call)
        check_ids(limits, call.draft, "draft")
        check_room(limits, len(call.context) + len(call.draft), "draft")
        return json_response(await unless_gone(request, service.verify(call)))

    async def stream(request: Request) -> Response:
        limits = service.info
        call = await decode(request, StreamRequest)
        _check_call(limits, call)
        if call.batching != "dynamic":
            raise CallError("invalid_request", f"batching {call.batching!r}: SGLang batches dynamically", "batching")
        # The first tokens decide between an error status and a stream.
        tokens = service.stream(call)
        first = await unless_gone(request, anext(tokens))
        return StreamingResponse(_events(call, first, tokens), media_type="application/x-ndjson")

    for path, handler, method in (
        ("/healthz", health, "GET"),
        ("/v1/info", info, "GET"),
        ("/v1/tokenizer", tokenizer, "GET"),
        ("/v1/draft", draft, "POST"),
        ("/v1/verify", verify, "POST"),
        ("/v1/stream", stream, "POST"),
    ):
        app.add_route(path, handler, methods=[method])
    answer_call_errors(app)
    _live_with(app, service)


def _check(limits: Info, call: DraftRequest | VerifyRequest | StreamRequest) -> None:
    check_call(limits, call)
    if call.sampling.grammar is not None:
        raise CallError("invalid_request", "the SGLang backend follows no grammar yet", "sampling.grammar")


def _live_with(app: FastAPI, service: Service) -> None:
    """Run the service for as long as the server runs; should it break, so does the server."""
    stock = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with stock(app) as state:
            task = asyncio.create_task(service.run())
            task.add_done_callback(_end_with)
            try:
                yield state
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    app.router.lifespan_context = lifespan


def _end_with(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the window protocol has broken down", exc_info=error)
        signal.raise_signal(signal.SIGTERM)


async def _events(
    call: StreamRequest, first: list[StreamToken], rest: AsyncGenerator[list[StreamToken], None]
) -> AsyncIterator[bytes]:
    last = first[-1].id
    async with aclosing(rest):
        yield _line(StreamEvent(tokens=first))
        try:
            async for tokens in rest:
                last = tokens[-1].id
                yield _line(StreamEvent(tokens=tokens))
        except CallError as error:
            yield _line(StreamEvent(error=error.detail))
            return
    finish: Finish = "stop" if last in call.stop_ids else "length"
    yield _line(StreamEvent(finish=finish))


def _line(event: StreamEvent) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def _check_call(limits: Info, call: DraftRequest | VerifyRequest | StreamRequest) -> None:
    check_call(limits, call)
    if call.sampling.grammar is not None:
        field = "sampling.grammar"
        raise CallError("invalid_request", f"{field}: this backend does not keep answers to a grammar", field)
