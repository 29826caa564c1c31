"""The answer to a request that generates, as an ASGI response that does the work while it is being sent.

Owns ids, times and headers of answers. All of a request's work, from admission to the last byte, happens in one task
inside one context, raced against the client's leaving; so there is no moment at which a place is held or a backend call
runs and nobody is responsible for ending it.

Errors before the first byte are raised: the application's handlers make them a JSON response, also where a stream was
asked for. After it, a stream says so in an event and ends without `[DONE]`.
"""

from __future__ import annotations

import time
import uuid

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.completion_id import completion_id
from gateway.domain import Caller, ChoiceEvent, Completion, Counts
from gateway.errors import ClientLeft, GatewayError, envelope
from gateway.http import sse
from gateway.http.disconnect import unless_client_leaves
from gateway.openai_api.ask import Ask
from gateway.openai_api.shape import Chunks, Envelope, Json, Shape, Whole
from gateway.receipts.notary import Kept, Notary, PendingReceipt
from gateway.receipts.receipt import Request
from gateway.service import Run, Service
from gateway.telemetry.record import recording
from policies.policy import HEADER, RECEIPT_HEADER, Mode


class Answer(Response):
    """Runs a request and sends what comes of it."""

    def __init__(self, service: Service, ask: Ask, caller: Caller, notary: Notary) -> None:
        super().__init__()
        self._service = service
        self._ask = ask
        self._caller = caller
        self._notary = notary
        self._streaming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._run(scope, receive, send))
        except ClientLeft:
            recording().fail("client_left")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._service.open(self._ask.order, self._caller, in_pieces=self._ask.stream) as run:
                recording().stream = self._ask.stream
                if self._ask.stream:
                    last = await self._stream(run, send)
                else:
                    response = await self._whole(run)
        except Exception as error:
            if not self._streaming:
                raise
            if isinstance(error, GatewayError):
                recording().fail_with(error)
                await _send(send, sse.event(error.envelope()), more=False)
                return
            recording().fail("internal_error")
            await _send(send, sse.event(envelope("internal error", "server_error")), more=False)
            raise
        # What ends the answer comes when everything held for it has been given back (gateway.http.disconnect).
        if self._streaming:
            await _send(send, last, more=False)
        else:
            await response(scope, receive, send)

    async def _whole(self, run: Run) -> Response:
        completion = run.completion
        envelope, shape = self._frame(run)
        receipt = self._record(run, envelope.id)
        whole = Whole(envelope, shape)
        async for event in run.events:
            whole.add(event)
            if receipt is not None:
                receipt.add(event)
        body = msgspec.json.encode(whole.body(completion.prompt_tokens))
        # Kept before it is sent: who has the answer can have the receipt.
        kept = None if receipt is None else await self._notary.issue(receipt)
        headers = _headers(run, receipt) | _count_headers(completion, whole.counts, kept)
        return Response(body, media_type="application/json", headers=headers)

    async def _stream(self, run: Run, send: Send) -> bytes:
        """Send a stream up to its end, which is returned."""
        completion = run.completion
        envelope, shape = self._frame(run)
        receipt = self._record(run, envelope.id)
        chunks = Chunks(envelope, shape, self._ask.include_usage)

        def add(event: ChoiceEvent) -> list[Json]:
            if receipt is not None:
                receipt.add(event)
            return chunks.add(event)

        # Nothing is sent before the first event: until then an error can still be a status.
        pending = add(await anext(run.events))
        headers = _headers(run, receipt) | {"cache-control": "no-cache", "x-accel-buffering": "no"}
        start = Response(None, media_type=sse.MEDIA_TYPE, headers=headers)
        del start.headers["content-length"]
        self._streaming = True
        await send({"type": "http.response.start", "status": 200, "headers": start.raw_headers})
        await _send_events(send, pending)
        async for event in run.events:
            await _send_events(send, add(event))
        await _send_events(send, chunks.end(completion.prompt_tokens))
        kept = None if receipt is None else await self._notary.issue(receipt)
        return _count_comment(completion, chunks.counts, kept) + sse.DONE

    def _record(self, run: Run, response: str) -> PendingReceipt | None:
        """Begin the answer's receipt, where it gets one. `response` is the answer's own id."""
        wanted = run.decision.receipt
        if wanted is None:
            return None
        request = Request(
            digest=self._ask.digest,
            route=self._ask.order.facts.route,
            tenant=self._caller.tenant,
            rule=run.decision.rule,
            policy=run.policy_version,
            response=response,
        )
        return PendingReceipt(run.completion, request, run.cache, wanted)

    def _frame(self, run: Run) -> tuple[Envelope, Shape]:
        completion, view = run.completion, self._ask.view
        digest = completion_id(completion, view.key) if completion.mode is Mode.VERIFIED else uuid.uuid4().hex
        shape = view.shape(len(completion.jobs), run.text, digest)
        return Envelope(shape.id_prefix + digest, int(time.time()), completion.model, completion.fingerprint), shape


async def _send_events(send: Send, events: list[dict[str, object]]) -> None:
    if events:
        await _send(send, b"".join(map(sse.event, events)), more=True)


async def _send(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _headers(run: Run, receipt: PendingReceipt | None) -> dict[str, str]:
    """What the answer got and why, and where its client stands."""
    completion, decision = run.completion, run.decision
    headers = {
        HEADER: completion.mode,
        "X-Verbatim-Cache": run.cache,
        "X-Verbatim-Rule": decision.rule,
        "X-Verbatim-Policy": run.policy_version,
        "X-Verbatim-Seed": str(completion.seed),
        "X-Verbatim-Fingerprint": completion.fingerprint,
    }
    if decision.degraded:
        headers["X-Verbatim-Degraded"] = "no-verifier"
    if receipt is not None:
        headers[RECEIPT_HEADER] = receipt.id
    return headers | run.grant.headers


def _count_headers(completion: Completion, counts: Counts, kept: Kept | None) -> dict[str, str]:
    if completion.mode is not Mode.VERIFIED:
        return {}
    headers = {"X-Verbatim-Windows": str(counts.windows), "X-Verbatim-Rollbacks": str(counts.rollbacks)}
    return headers if kept is None else headers | {"X-Verbatim-Receipt-Kept": kept}


def _count_comment(completion: Completion, counts: Counts, kept: Kept | None) -> bytes:
    """What the headers of a whole answer say, where it is known only at the end."""
    if completion.mode is not Mode.VERIFIED:
        return b""
    said = f"verbatim windows={counts.windows} rollbacks={counts.rollbacks}"
    return sse.comment(said if kept is None else f"{said} receipt={kept}")
