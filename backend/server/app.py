"""HTTP routes of the window protocol: decode, check against the model, run, encode."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response

from backend.engine.engine import Engine
from backend.engine.grammar import Compiler
from backend.engine.grammar_source import GrammarError
from backend.engine.tasks import DecodeTask, VerifyTask
from backend.protocol import (
    Batching,
    DecodeRequest,
    DraftRequest,
    DraftResponse,
    DraftToken,
    Health,
    StreamRequest,
    TokenizerFiles,
    VerifiedToken,
    VerifyRequest,
    VerifyResponse,
)
from backend.server import metrics
from backend.server.calls import run
from backend.server.errors import CallError
from backend.server.grammars import Grammars
from backend.server.http import answer_errors, check_call, check_ids, check_room, decode, json_response, unless_gone
from backend.server.lines import DecodeLines, StreamLines, streamed

log = logging.getLogger(__name__)


class Backend:
    """The engine on its way to being ready; written by the loader's thread, read by the handlers."""

    def __init__(self) -> None:
        self._health = Health(status="loading", loaded=0.0)
        self._engine: Engine | None = None
        self._tokenizer: TokenizerFiles | None = None
        self._grammars = Grammars(None, "the backend is loading")

    @property
    def health(self) -> Health:
        return self._health

    def loading(self, share: float) -> None:
        """Note the share of the start-up work that is done."""
        self._health = Health(status="loading", loaded=share)

    def ready(self, engine: Engine, tokenizer: TokenizerFiles) -> None:
        """Begin to serve."""
        self._tokenizer = tokenizer
        self._grammars = _grammars(tokenizer, engine.info.vocab_size)
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

    @property
    def grammars(self) -> Grammars:
        return self._grammars


def _grammars(tokenizer: TokenizerFiles, vocab_size: int) -> Grammars:
    try:
        return Grammars(Compiler(tokenizer, vocab_size))
    except GrammarError as error:
        log.warning("structured output is refused: %s", error)
        return Grammars(None, str(error))


def create_app(backend: Backend) -> FastAPI:
    """The window protocol over one backend."""
    app = FastAPI(title="Verbatim backend", openapi_url=None)

    async def health(request: Request) -> Response:
        return json_response(backend.health, 200 if backend.health.status == "ready" else 503)

    async def info(request: Request) -> Response:
        return json_response(backend.engine.info)

    async def tokenizer(request: Request) -> Response:
        return json_response(backend.tokenizer)

    async def metrics_page(request: Request) -> Response:
        return Response(metrics.render(backend.engine.stats()), media_type=metrics.MEDIA_TYPE)

    async def draft(request: Request) -> Response:
        engine = backend.engine
        call = await decode(request, DraftRequest)
        check_call(engine.info, call)
        room = engine.info.max_context - len(call.context)
        constraint = await backend.grammars.constrain(call.sampling.grammar, frozenset(call.stop_ids))
        task = DecodeTask(
            context=call.context,
            count=min(call.count, room),
            sampling=call.sampling,
            stop_ids=frozenset(call.stop_ids),
            top=call.top_logits,
            is_draft=True,
            generated=call.generated,
            constraint=constraint,
        )
        await unless_gone(request, run(engine, task))
        tokens = [DraftToken(id=t.id, logprob=t.logprob, margin=t.margin, top=t.top) for t in task.produced]
        return json_response(DraftResponse(tokens=tokens, fingerprint=engine.info.fingerprint))

    async def verify(request: Request) -> Response:
        engine = backend.engine
        if engine.refusal is not None:
            raise CallError("role_refused", f"this backend does not verify: {engine.refusal}")
        call = await decode(request, VerifyRequest)
        check_call(engine.info, call)
        check_ids(engine.info, call.draft, "draft")
        check_room(engine.info, len(call.context) + len(call.draft), "draft")
        constraint = await backend.grammars.constrain(call.sampling.grammar, frozenset(call.stop_ids))
        task = VerifyTask(
            context=call.context,
            draft=call.draft,
            sampling=call.sampling,
            stop_ids=frozenset(call.stop_ids),
            top=call.top_logprobs,
            generated=call.generated,
            constraint=constraint,
        )
        await unless_gone(request, run(engine, task))
        return json_response(
            VerifyResponse(
                agreed=task.agreed,
                tokens=[VerifiedToken(id=t.id, logprob=t.logprob, top=t.top) for t in task.produced],
                finish=task.finish,
                fingerprint=engine.info.fingerprint,
                wants_draft=task.wants_draft,
            )
        )

    async def streaming_task(
        engine: Engine, call: DecodeRequest | StreamRequest, generated: int, batching: Batching, *, yields: bool
    ) -> DecodeTask:
        constraint = await backend.grammars.constrain(call.sampling.grammar, frozenset(call.stop_ids))
        return DecodeTask(
            context=call.context,
            count=min(call.max_tokens, engine.info.max_context - len(call.context)),
            sampling=call.sampling,
            stop_ids=frozenset(call.stop_ids),
            top=call.top_logprobs,
            is_draft=False,
            generated=generated,
            batching=batching,
            yields=yields,
            constraint=constraint,
        )

    async def decode_tokens(request: Request) -> Response:
        engine = backend.engine
        if "decode" not in engine.info.roles:
            raise CallError("role_refused", f"this backend does not decode: {engine.refusal or 'its shape is fixed'}")
        call = await decode(request, DecodeRequest)
        check_call(engine.info, call)
        task = await streaming_task(engine, call, call.generated, "invariant", yields=call.yields)
        return await streamed(request, engine, task, DecodeLines(engine.info.fingerprint))

    async def stream_tokens(request: Request) -> Response:
        engine = backend.engine
        call = await decode(request, StreamRequest)
        check_call(engine.info, call)
        if call.batching == "invariant" and engine.refusal is not None:
            raise CallError("role_refused", f"this backend is not invariant: {engine.refusal}", "batching")
        task = await streaming_task(engine, call, 0, call.batching, yields=False)
        return await streamed(request, engine, task, StreamLines())

    for path, handler, method in (
        ("/healthz", health, "GET"),
        ("/metrics", metrics_page, "GET"),
        ("/v1/info", info, "GET"),
        ("/v1/tokenizer", tokenizer, "GET"),
        ("/v1/draft", draft, "POST"),
        ("/v1/verify", verify, "POST"),
        ("/v1/decode", decode_tokens, "POST"),
        ("/v1/stream", stream_tokens, "POST"),
    ):
        app.add_route(path, handler, methods=[method])
    answer_errors(app)
    return app
