"""HTTP routes of the window protocol: decode, check against the model, run, encode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from backend.engine.engine import Engine
from backend.engine.tasks import DecodeTask, Scored, VerifyTask
from backend.protocol import (
    DraftRequest,
    DraftResponse,
    DraftToken,
    ErrorBody,
    ErrorDetail,
    Health,
    Sampling,
    StreamEvent,
    StreamRequest,
    StreamToken,
    TokenizerFiles,
    VerifiedToken,
    VerifyRequest,
    VerifyResponse,
)
from backend.server.calls import run, stream
from backend.server.errors import STATUS, CallError, from_decoding

_MAX_BODY_BYTES = 16 << 20

Body = TypeVar("Body", bound=msgspec.Struct)
Result = TypeVar("Result")


class Backend:
    """The engine on its way to being ready; written by the loader's thread, read by the handlers."""

    def __init__(self) -> None:
        self._health = Health(status="loading", loaded=0.0)
        self._engine: Engine | None = None
        self._tokenizer: TokenizerFiles | None = None

    @property
    def health(self) -> Health:
        return self._health

    def loading(self, share: float) -> None:
        """Note the share of the start-up work that is done."""
        self._health = Health(status="loading", loaded=share)

    def ready(self, engine: Engine, tokenizer: TokenizerFiles) -> None:
        """Begin to serve."""
        self._tokenizer = tokenizer
        self._engine = engine
        self._health = Health(status="ready", loaded=1.0)

    def stop(self) -> None:
        """Fail what is in flight."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()

    @property
    def engine(self) -> Engine:
        """Raises CallError until the engine is ready."""
        if self._engine is None:
            raise CallError("unavailable", "the backend is loading or stopping")
        return self._engine

    @property
    def tokenizer(self) -> TokenizerFiles:
        """Raises CallError until the engine is ready."""
        if self._tokenizer is None:
            raise CallError("unavailable", "the backend is loading or stopping")
        return self._tokenizer


def create_app(backend: Backend) -> FastAPI:
    """The window protocol over one backend."""
    app = FastAPI(title="Verbatim backend", openapi_url=None)

    async def health(request: Request) -> Response:
        return _json(backend.health, 200 if backend.health.status == "ready" else 503)

    async def info(request: Request) -> Response:
        return _json(backend.engine.info)

    async def tokenizer(request: Request) -> Response:
        return _json(backend.tokenizer)

    async def draft(request: Request) -> Response:
        engine = backend.engine
        call = await _decode(request, DraftRequest)
        _check_call(engine, call)
        room = engine.info.max_context - len(call.context)
        task = DecodeTask(
            context=call.context,
            count=min(call.count, room),
            sampling=call.sampling,
            stop_ids=frozenset(call.stop_ids),
            top=call.top_logits,
            is_draft=True,
            generated=call.generated,
        )
        await _unless_gone(request, run(engine, task))
        tokens = [DraftToken(id=t.id, logprob=t.logprob, margin=t.margin, top=t.top) for t in task.produced]
        return _json(DraftResponse(tokens=tokens, fingerprint=engine.info.fingerprint))

    async def verify(request: Request) -> Response:
        engine = backend.engine
        if engine.refusal is not None:
            raise CallError("role_refused", f"this backend does not verify: {engine.refusal}")
        call = await _decode(request, VerifyRequest)
        _check_call(engine, call)
        _check_ids(engine, call.draft, "draft")
        _check_room(engine, len(call.context) + len(call.draft), "draft")
        room = engine.info.max_context - len(call.context) - len(call.draft) - 1
        task = VerifyTask(
            context=call.context,
            draft=call.draft,
            extend=min(call.extend, room),
            sampling=call.sampling,
            stop_ids=frozenset(call.stop_ids),
            top=call.top_logprobs,
            generated=call.generated,
        )
        await _unless_gone(request, run(engine, task))
        return _json(
            VerifyResponse(
                agreed=task.agreed,
                tokens=[VerifiedToken(id=t.id, logprob=t.logprob, top=t.top) for t in task.produced],
                finish=task.finish,
                fingerprint=engine.info.fingerprint,
                wants_draft=task.wants_draft,
            )
        )

    async def stream_tokens(request: Request) -> Response:
        engine = backend.engine
        call = await _decode(request, StreamRequest)
        _check_call(engine, call)
        task = DecodeTask(
            context=call.context,
            count=min(call.max_tokens, engine.info.max_context - len(call.context)),
            sampling=call.sampling,
            stop_ids=frozenset(call.stop_ids),
            top=call.top_logprobs,
            is_draft=False,
        )
        # The first tokens decide between an error status and a stream.
        tokens = stream(engine, task)
        first = await _unless_gone(request, anext(tokens))
        return StreamingResponse(_events(task, first, tokens), media_type="application/x-ndjson")

    for path, handler, method in (
        ("/healthz", health, "GET"),
        ("/v1/info", info, "GET"),
        ("/v1/tokenizer", tokenizer, "GET"),
        ("/v1/draft", draft, "POST"),
        ("/v1/verify", verify, "POST"),
        ("/v1/stream", stream_tokens, "POST"),
    ):
        app.add_route(path, handler, methods=[method])
    app.add_exception_handler(CallError, _call_error)
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _events(
    task: DecodeTask, first: Sequence[Scored], rest: AsyncGenerator[Sequence[Scored], None]
) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield _line(first)
        try:
            async for tokens in rest:
                yield _line(tokens)
        except CallError as error:
            yield msgspec.json.encode(StreamEvent(error=error.detail)) + b"\n"
            return
    yield msgspec.json.encode(StreamEvent(finish=task.finish or "length")) + b"\n"


def _line(tokens: Sequence[Scored]) -> bytes:
    event = StreamEvent(tokens=[StreamToken(id=t.id, logprob=t.logprob, top=t.top) for t in tokens])
    return msgspec.json.encode(event) + b"\n"


async def _decode(request: Request, struct: type[Body]) -> Body:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise CallError("too_large", f"the body is longer than {_MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=struct)
    except msgspec.DecodeError as error:
        raise from_decoding(error) from error


def _check_call(engine: Engine, call: DraftRequest | VerifyRequest | StreamRequest) -> None:
    """What all calls have in common."""
    _check_ids(engine, call.context, "context")
    _check_room(engine, len(call.context), "context")
    _check_sampling(engine, call.sampling, call.stop_ids)


def _check_ids(engine: Engine, ids: list[int], field: str) -> None:
    vocab = engine.info.vocab_size
    if ids and max(ids) >= vocab:
        raise CallError("invalid_request", f"{field} holds token id {max(ids)}; the vocabulary has {vocab}", field)


def _check_sampling(engine: Engine, sampling: Sampling, stop_ids: list[int]) -> None:
    _check_ids(engine, [id_ for id_, _ in sampling.logit_bias], "sampling.logit_bias")
    vocab = engine.info.vocab_size
    if sampling.min_tokens and len(stop_ids) >= vocab and set(stop_ids) >= set(range(vocab)):
        raise CallError("invalid_request", "sampling.min_tokens leaves no token to choose", "sampling.min_tokens")


def _check_room(engine: Engine, length: int, field: str) -> None:
    limit = engine.info.max_context
    if length >= limit:
        raise CallError(
            "invalid_request",
            f"{field} reaches {length} tokens; the context of {limit} leaves no room for another",
            field,
        )


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Await `work`, or cancel it as soon as the client leaves: FastAPI does not do that for a plain handler."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise CallError("unavailable", "the client left")
    finally:
        for future in (working, leaving):
            future.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _call_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CallError)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return Response(
        msgspec.json.encode(ErrorBody(error.detail)), error.status, headers=headers, media_type="application/json"
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = next((name for name, status in STATUS.items() if status == error.status_code), "invalid_request")
    detail = ErrorDetail(type=kind, message=f"{request.method} {request.url.path}: {error.detail}")
    return _json(ErrorBody(detail), error.status_code)
