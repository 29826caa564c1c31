"""The HTTP routes. Each handler reads its input and hands over; nothing is decided here."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.answer import Answer
from gateway.authentication import Authenticator
from gateway.domain import Caller
from gateway.errors import ReceiptNotFound
from gateway.http.json_body import read_json_body
from gateway.models import Model, Models
from gateway.openai_api import chat_request, completion_request
from gateway.openai_api.ask import Ask
from gateway.openai_api.models import model_card
from gateway.openai_api.openapi import openapi_document
from gateway.openai_api.shape import Json
from gateway.openai_api.tokenization import DETOKENIZE_ROUTES, TOKENIZE_ROUTES, parse_detokenize, parse_tokenize
from gateway.receipts.keys import WELL_KNOWN
from gateway.receipts.notary import Notary
from gateway.telemetry.record import recording
from policies.policy import HEADER, RECEIPT_HEADER

INLINE_BYTES = 64 * 1024
"""Bodies up to this long are parsed on the event loop; longer ones, of which some take half a second, in a thread."""


JSON = "application/json"

Parser: TypeAlias = Callable[[bytes, str | None], Ask]
P = ParamSpec("P")
T = TypeVar("T")


def build_router(
    models: Models, authenticator: Authenticator, notary: Notary, max_body_bytes: int, started_at: int
) -> APIRouter:
    """The routes over the models. Whoever asks is known before a body is read."""
    router = APIRouter()

    def card(model: Model) -> Json:
        return model_card(model.name, started_at, model.max_context)

    async def caller_of(request: Request) -> Caller:
        caller = await authenticator.caller(request.headers.get("authorization"))
        recording().tenant = caller.tenant
        return caller

    async def answer(request: Request, parse: Parser) -> Answer:
        caller = await caller_of(request)
        content = await read_json_body(request, max_body_bytes)
        ask = await _parse(parse, content, request.headers.get(HEADER))
        # A list, which may stand in several lines.
        cache_control = ", ".join(request.headers.getlist("cache-control"))
        receipt = request.headers.get(RECEIPT_HEADER)
        facts = replace(ask.order.facts, cache_control=cache_control, receipt=receipt)
        digest = (await _parse(hashlib.sha256, content)).hexdigest()
        ask = replace(ask, order=replace(ask.order, facts=facts), digest=digest)
        return Answer(models.service(ask.order.model, caller.sees), ask, caller, notary)

    parsers = {
        chat_request.ROUTE: chat_request.parse_chat,
        completion_request.ROUTE: completion_request.parse_completion,
    }
    for path, parser in parsers.items():
        router.routes.append(Route(path, Generating(path, answer, parser), methods=["POST"]))

    async def tokenize(request: Request) -> Response:
        caller = await caller_of(request)
        ask = await _parse(parse_tokenize, await read_json_body(request, max_body_bytes))
        service = models.service_or_only(ask.model, caller.sees)
        async with service.count(caller):
            ids = await service.tokens.encode(ask.prompts, fitting=False)
        return Response(msgspec.json.encode(ask.body(ids, service.text, service.info.max_context)), media_type=JSON)

    async def detokenize(request: Request) -> Response:
        caller = await caller_of(request)
        ask = await _parse(parse_detokenize, await read_json_body(request, max_body_bytes))
        service = models.service_or_only(ask.model, caller.sees)
        for row in ask.rows:
            service.tokens.check_ids(row, "tokens")
        async with service.count(caller):
            body = await asyncio.to_thread(ask.body, service.text)
        return Response(msgspec.json.encode(body), media_type=JSON)

    for path in TOKENIZE_ROUTES:
        router.add_api_route(path, tokenize, methods=["POST"])
    for path in DETOKENIZE_ROUTES:
        router.add_api_route(path, detokenize, methods=["POST"])

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        caller = await caller_of(request)
        return JSONResponse({"object": "list", "data": [card(model) for model in models if caller.sees(model.name)]})

    @router.get("/v1/models/{model:path}")
    async def get_model(request: Request, model: str) -> Response:
        caller = await caller_of(request)
        return JSONResponse(card(models.model(model, caller.sees)))

    @router.get("/v1/receipts/{id}")
    async def get_receipt(request: Request) -> Response:
        caller = await caller_of(request)
        receipt = await notary.find(caller.tenant, request.path_params["id"])
        if receipt is None:
            raise ReceiptNotFound("there is no such receipt", param="id")
        return Response(receipt, media_type=JSON)

    @router.get(WELL_KNOWN)
    async def receipt_keys() -> Response:
        return JSONResponse(notary.keys.current.public.jwks())

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        caller = await caller_of(request)
        return JSONResponse(openapi_document([model.name for model in models if caller.sees(model.name)]))

    @router.api_route("/healthz", methods=["GET", "HEAD"])
    async def health() -> Response:
        if models.admission.draining:
            return JSONResponse({"status": "draining"}, 503)
        troubles = models.troubles
        if not troubles:
            return JSONResponse({"status": "ready"})
        # One model that cannot be served is no reason to send the requests for the others elsewhere.
        partly = len(troubles) < len(models)
        status = "partly_ready" if partly else "backend_unavailable"
        return JSONResponse({"status": status, "detail": troubles}, 200 if partly else 503)

    return router


class Generating:
    """An endpoint that answers by itself: FastAPI's way to call a function costs as much as a hit in the commit log."""

    def __init__(self, path: str, answer: Callable[[Request, Parser], Awaitable[Answer]], parse: Parser) -> None:
        self._path = path
        self._answer = answer
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        recording().route = self._path
        answer = await self._answer(Request(scope, receive), self._parse)
        await answer(scope, receive, send)


async def _parse(parse: Callable[Concatenate[bytes, P], T], content: bytes, *more: P.args, **named: P.kwargs) -> T:
    if len(content) <= INLINE_BYTES:
        return parse(content, *more, **named)
    return await asyncio.to_thread(parse, content, *more, **named)
