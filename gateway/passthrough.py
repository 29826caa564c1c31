"""Hands requests without a guarantee on to the upstreams of their model, and the answers back, byte for byte.

Stands in front of the application, as plain ASGI: of what it hands on it reads two fields of the body and nothing of
the answer, so neither side's unknown fields are lost and events stay as the upstream cut them. Everything else (another
mode, a model without upstreams, a body that is none) goes on to the application as if nothing had been read.

Owns what becomes of an answer on its way back. Who is asked is the upstream group's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.authentication import Authenticator
from gateway.backends.client import translated
from gateway.backends.upstream import OWN_PREFIX, end_to_end
from gateway.deciding import decide
from gateway.domain import Caller
from gateway.errors import ClientLeft, GatewayError, NotAllowed
from gateway.http import sse
from gateway.http.client import Header, Incoming
from gateway.http.disconnect import unless_client_leaves
from gateway.http.error_response import error_response
from gateway.limits.limiter import Limiter
from gateway.models import Models
from gateway.telemetry.record import recording
from policies.decision import Decision, RequestFacts, Serving
from policies.loader import ROUTES
from policies.policy import HEADER, RECEIPT_HEADER, Mode
from policies.settings import SAMPLING

_PREFIX = "/v1"
HANDED_ON = frozenset(
    f"{_PREFIX}/{path}"
    for path in (
        "chat/completions",
        "completions",
        "embeddings",
        "moderations",
        "rerank",
        "score",
        "classify",
        "pooling",
        "audio/speech",
        "images/generations",
    )
)
"""Paths that infer and leave nothing behind. All tenants come with the same key of the upstream's: what it keeps under
that key (files, fine-tuning jobs, batches, stored responses) would be everybody's."""

_SAID_ANEW = frozenset({b"date", b"server"})
"""Headers of an answer that the server gives in which the gateway runs."""

_CLOSED = frozenset({b"content-encoding", b"content-length"})

_HEADER, _RECEIPT_HEADER = HEADER.lower().encode(), RECEIPT_HEADER.lower().encode()
_EVENT_STREAM = sse.MEDIA_TYPE.encode()

BYTES_PER_TOKEN = 4
"""A rule of thumb, for limits alone."""


class _Peek(msgspec.Struct):
    """What a policy has a say in."""

    model: str
    is_deterministic: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    @property
    def sampling(self) -> dict[str, float]:
        given = ((name, getattr(self, name)) for name in SAMPLING)
        return {name: value for name, value in given if value is not None}


class Passthrough:
    """The layer in front of the application."""

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        authenticator: Authenticator,
        limiter: Limiter,
        *,
        max_body_bytes: int,
        call_timeout_s: float,
    ) -> None:
        self._app = app
        self._models = models
        self._authenticator = authenticator
        self._limiter = limiter
        self._max_body_bytes = max_body_bytes
        self._call_timeout_s = call_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or path not in HANDED_ON:
            await self._app(scope, receive, send)
            return
        headers: list[Header] = scope["headers"]
        named = dict(headers)
        read: list[Message] = []
        record = recording()
        try:
            caller = await self._authenticator.caller(_text(named.get(b"authorization")))
            record.tenant = caller.tenant
            with record.waiting():
                content = await self._read(receive, read)
            record.read(content)
            if (peek := self._peek(content)) is not None and caller.sees(peek.model):
                facts = RequestFacts(
                    is_deterministic=peek.is_deterministic,
                    header=_text(named.get(_HEADER)),
                    sampling=peek.sampling,
                    model=peek.model,
                    route=path,
                    receipt=_text(named.get(_RECEIPT_HEADER)),
                )
                decision = decide(caller, facts, Serving(max_draft=0, verifier=self._models.verifies(peek.model)))
                if decision.mode is Mode.OFF:
                    record.route, record.model, record.mode, record.via = path, peek.model, decision.mode, "upstream"
                    request = _Request(path, scope["query_string"], headers, content, peek)
                    work = self._hand_on(_Answer(caller, decision, send), request, caller, decision)
                    await unless_client_leaves(receive, work)
                    return
        except GatewayError as error:
            record.fail_with(error)
            await error_response(error)(scope, receive, send)
            return
        except ClientLeft:
            record.fail("client_left")
            return
        await self._app(scope, _again(read, receive), send)

    async def _read(self, receive: Receive, read: list[Message]) -> bytes:
        """The body, or nothing where it is too long or does not come to its end; `read` gets the messages."""
        parts: list[bytes] = []
        size, more = 0, True
        while more and size <= self._max_body_bytes:
            message = await receive()
            read.append(message)
            if message["type"] == "http.disconnect":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
        return b"".join(parts) if size <= self._max_body_bytes else b""

    def _peek(self, content: bytes) -> _Peek | None:
        """What a request for a model with upstreams says; None where the application is to answer."""
        try:
            peek = msgspec.json.decode(content, type=_Peek)
        except (msgspec.DecodeError, RecursionError):
            return None
        return peek if peek.model in self._models.upstreams else None

    async def _hand_on(self, answer: _Answer, request: _Request, caller: Caller, decision: Decision) -> None:
        limits, places = decision.limits, max(1, request.peek.n or 1)
        more = _bound(request, limits.max_tokens)
        self._models.admission.check(places, limits, "n")
        group, record = self._models.upstreams[request.peek.model], recording()
        try:
            async with (
                self._models.admission.admit(places, caller.tenant, limits.queue_share),
                self._limiter.admit(caller.tenant, limits, places, caller.policy.limits_unavailable) as grant,
            ):
                # Nobody here knows the model's tokens: the prompt's are estimated, the answer's not counted.
                await grant.take_tokens(len(request.content) // BYTES_PER_TOKEN, 0)
                with translated():
                    record.call()
                    async with (
                        asyncio.timeout(self._call_timeout_s),
                        group.post(request.target, request.headers, request.content, more) as incoming,
                    ):
                        record.go_on()
                        await answer.begin(incoming, grant.headers)
                        record.wait()
                        while some := await incoming.read_some():
                            record.piece(some)
                            await answer.go_on(some)
                            record.wait()
                        record.go_on()
                        if incoming.status >= 400:
                            record.fail("upstream")
        except GatewayError as error:
            if not answer.begun:
                raise
            record.fail_with(error)
            await answer.break_off(error)
        else:
            await answer.end()


@dataclass(frozen=True, slots=True)
class _Request:
    """What is handed on."""

    path: str
    query: bytes
    headers: list[Header]
    content: bytes
    peek: _Peek

    @property
    def target(self) -> bytes:
        """Path and query below the upstream's base URL."""
        path = self.path.removeprefix(_PREFIX).encode()
        return path + b"?" + self.query if self.query else path


def _bound(request: _Request, most: int | None) -> dict[str, int]:
    """What has to be set so that the answer has at most so many tokens; raises `NotAllowed`."""
    asked = [field for field in ("max_completion_tokens", "max_tokens") if getattr(request.peek, field) is not None]
    if most is None:
        return {}
    for field in asked:
        if getattr(request.peek, field) > most:
            raise NotAllowed(f"{field} must be at most {most} here", param=field)
    if asked:
        # Said again, since the body may say it twice, and its upstream heed the other one.
        return {field: getattr(request.peek, field) for field in asked}
    return {"max_tokens": most} if request.path in ROUTES else {}


class _Answer:
    """The way back to the client."""

    def __init__(self, caller: Caller, decision: Decision, send: Send) -> None:
        self.begun = False
        self._said: dict[str, str] = {
            HEADER: decision.mode,
            "X-Verbatim-Rule": decision.rule,
            "X-Verbatim-Policy": caller.policy.version,
        }
        if decision.degraded:
            self._said["X-Verbatim-Degraded"] = "no-verifier"
        self._send = send
        self._takes_events = False

    async def begin(self, incoming: Incoming, limits: Mapping[str, str]) -> None:
        """`limits` are the headers that say where the client stands; an upstream's own ones speak of us.

        An upstream that is a gateway like this one says what was true between us and it: its receipts are not here.
        """
        said = {name.lower().encode(): value.encode() for name, value in {**self._said, **limits}.items()}
        anew = _SAID_ANEW.union(said)
        kept = [
            item for item in end_to_end(incoming.headers) if item[0] not in anew and not item[0].startswith(OWN_PREFIX)
        ]
        named = dict(kept)
        streams = named.get(b"content-type", b"").partition(b";")[0].strip().lower() == _EVENT_STREAM
        recording().stream = streams
        # To what is compressed, or has a length, nothing can be added.
        self._takes_events = streams and not _CLOSED & named.keys()
        headers = [*kept, *said.items()]
        await self._send({"type": "http.response.start", "status": incoming.status, "headers": headers})
        self.begun = True

    async def go_on(self, some: bytes) -> None:
        await self._send({"type": "http.response.body", "body": some, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def break_off(self, error: GatewayError) -> None:
        """A stream says so. Another answer is left without an end, for which the server cuts the connection."""
        if self._takes_events:
            # It may have broken off within an event; a blank line ends that one.
            await self.go_on(b"\n\n" + sse.event(error.envelope()))
            await self.end()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _again(read: list[Message], receive: Receive) -> Receive:
    """Receives what has been read, then what comes."""
    messages = iter(read)

    async def receive_again() -> Message:
        return next(messages, None) or await receive()

    return receive_again
