"""The replicas of one model: whom to ask, and whom to ask next when that fails.

Owns the group's fingerprint, the choice of a replica and the retries. A verified answer depends on the fingerprint
alone, so a call that failed on one replica is made on another one, and nobody can tell from the tokens.

Who is asked: a completion stays with one replica, which has its prefix cached, until a call fails there; then, and at
its beginning, it goes to the one with the fewest calls in flight among those that are well. Where none is well, one
that may be is asked all the same. A drafter is the verifying replica itself where it drafts too.

What is tried again: every call is idempotent. One that reached nobody, or was refused for want of room or of the role
(429, 409, 503), goes to each replica in turn, and twice more to all of them after a pause if they were not there. One
that broke off, timed out or got a 5xx goes to one other replica only: a request that kills backends should not be
handed to all of them. One that the backend refuses as wrong (4xx) is not repeated.

Who is to blame: a replica that could not be reached. For everything else it takes evidence, that the same call went
well elsewhere; so a request that fails everywhere opens no breaker, whoever keeps sending it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Literal, Protocol, TypeAlias, TypeVar

import msgspec

from backend.protocol import (
    DecodeEvent,
    DecodeRequest,
    DraftRequest,
    DraftResponse,
    Finish,
    Info,
    Role,
    StreamEvent,
    StreamRequest,
    VerifyRequest,
    VerifyResponse,
)
from gateway.backends.client import BackendClient
from gateway.backends.replica import Replica
from gateway.errors import (
    BackendError,
    BackendFailed,
    BackendRefused,
    BackendUnavailable,
    BackendUnreachable,
    ProtocolViolation,
    RoleRefused,
)

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]

Work: TypeAlias = Literal["draft", "verify", "decode", "stream"]
"""A kind of call."""

RETRY_DELAYS_S = (0.1, 0.4)
MOST_BROKEN = 2
"""Replicas on which one call may break off before it is given up."""


class Drafter(Protocol):
    """Somebody else who drafts for the group, in place of its replicas."""

    async def draft(self, request: DraftRequest) -> DraftResponse: ...


class ReplicaGroup:
    """Replicas that give the bits of one fingerprint, in the order in which they are configured.

    `model` is what clients call the model that they serve, `reference` what the replica says whose fingerprint is the
    group's.
    """

    def __init__(
        self,
        model: str,
        reference: Info,
        replicas: Sequence[Replica],
        sleep: Sleep = asyncio.sleep,
        drafter: Drafter | None = None,
    ) -> None:
        assert replicas
        self.drafter = drafter
        self.model = model
        self.fingerprint = reference.fingerprint
        self._backend_model = reference.model
        self.replicas = tuple(replicas)
        self.sleep = sleep

    def __repr__(self) -> str:
        return f"<ReplicaGroup {self.model} {self.fingerprint} {list(self.replicas)}>"

    @property
    def roles(self) -> tuple[Role, ...]:
        """What somebody can do for the model itself: generate without a guarantee ("draft"), verify, decode."""
        roles: tuple[tuple[Role, Work], ...] = (("draft", "stream"), ("verify", "verify"), ("decode", "decode"))
        return tuple(role for role, work in roles if any(self.suits(replica, work) for replica in self.replicas))

    @property
    def verifying(self) -> tuple[Role, ...]:
        """What somebody can do for a verified completion; drafts may be another model's."""
        roles: tuple[Role, ...] = ("draft", "verify", "decode")
        there = (role for role in roles if any(self.suits(replica, role) for replica in self.replicas))
        return tuple(there) if self.drafter is None else ("draft", *(role for role in there if role != "draft"))

    @property
    def trouble(self) -> str | None:
        """Why nothing can be verified or generated, None where something can."""
        if any(replica.well and replica.belongs for replica in self.replicas):
            return None
        return "; ".join(f"{replica.client.url}: {replica.trouble or 'it keeps failing'}" for replica in self.replicas)

    def session(self) -> Session:
        """The backend of one completion."""
        return Session(self)

    async def check(self, replica: Replica) -> None:
        """Look after one of the replicas. Where others are left, its calls are taken away from one in trouble."""
        await replica.check(self.fingerprint)
        if replica.trouble is not None and any(self._stands_in(other, replica) for other in self.replicas):
            replica.give_up()

    def suits(self, replica: Replica, work: Work) -> bool:
        """Whether the replica's answer to such a call counts, be it well or not."""
        if work == "stream":
            # A drafter may be a smaller model, whose answer would be another's.
            return replica.plays("draft") and replica.info is not None and replica.info.model == self._backend_model
        return replica.plays(work)

    def choose(self, work: Work, but: Sequence[Replica]) -> Replica | None:
        """The replica to ask; None where nobody is left."""
        left = [replica for replica in self.replicas if self.suits(replica, work) and replica not in but]
        return min([r for r in left if r.well] or left, key=lambda replica: replica.in_flight, default=None)

    @staticmethod
    def _stands_in(other: Replica, replica: Replica) -> bool:
        return other.well and replica.info is not None and all(map(other.plays, replica.info.roles))


class Session:
    """What the driver sees: one backend that does not break as long as a replica is there."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._at: dict[Work, Replica] = {}

    def __repr__(self) -> str:
        return f"<Session at {self._at}>"

    def quarantine(self) -> bool:
        """Ask those no more whose verified tokens came last, since these contradict what stands; whether others are
        left to ask."""
        for replica in filter(None, (self._at.get("verify"), self._at.get("decode"))):
            replica.quarantine()
        return any(self._group.suits(replica, "verify") for replica in self._group.replicas)

    async def draft(self, request: DraftRequest) -> DraftResponse:
        if self._group.drafter is not None:
            return await self._group.drafter.draft(request)

        async def perform(replica: Replica) -> DraftResponse:
            return await replica.call(lambda client: client.draft(request))

        return await self._somewhere("draft", perform)

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        async def perform(replica: Replica) -> VerifyResponse:
            answer = await replica.call(lambda client: client.verify(request))
            self._check(replica, answer.fingerprint)
            return answer

        answer = await self._somewhere("verify", perform)
        if self._group.drafter is None:
            return answer
        # The verifier's advice supposes that it drafts itself. Drafts of somebody else cost it nothing.
        return msgspec.structs.replace(answer, wants_draft=True, wants_draft_ahead=True)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent]:
        """Where somebody else drafts and the call may yield to drafts, it does so behind its first token."""
        yields = self._group.drafter is not None and request.yields and request.max_tokens > 1
        asked = msgspec.structs.replace(request, max_tokens=1, yields=False) if yields else request
        async with aclosing(self._decode(asked)) as events:
            async for event in events:
                if yields and event.finish == "length":
                    yield msgspec.structs.replace(event, finish=None, wants_draft=True)
                else:
                    yield event

    async def _decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent]:
        """Where it breaks off it goes on elsewhere: the tokens that stand are part of the next call's context."""
        broken: list[Replica] = []
        while True:
            replica, event, rest = await self._open("decode", _decoding(request), broken)
            for other in broken:
                other.blame()
            came: list[int] = []
            ended = False
            try:
                async with aclosing(rest):
                    while event is not None:
                        self._check(replica, event.fingerprint)
                        if event.error is not None and event.error.type != "invalid_request":
                            raise BackendFailed(f"the backend broke off: {event.error.message}")
                        yield event
                        ended = event.finish is not None or event.wants_draft or event.error is not None
                        came += [token.id for token in event.tokens]
                        event = await anext(rest, None)
                if not ended:
                    raise BackendFailed("the backend's decoding ended before it was finished")
                return
            except BackendError:
                if ended:
                    return
                if (finish := _finish(request, came)) is not None:
                    yield DecodeEvent(self._group.fingerprint, finish=finish)
                    return
                broken.append(replica)
                if len(broken) == MOST_BROKEN or self._next("decode", broken) is None:
                    raise
                request = _behind(request, came)

    async def stream(self, request: StreamRequest) -> AsyncGenerator[StreamEvent]:
        """Until the first event comes another replica may be asked; from then on the stream is this one's."""
        _, event, rest = await self._open("stream", lambda client: client.stream(request), ())
        async with aclosing(rest):
            while event is not None:
                yield event
                event = await anext(rest, None)

    async def _open(
        self, work: Work, call: Callable[[BackendClient], AsyncGenerator[T]], but: Sequence[Replica]
    ) -> tuple[Replica, T | None, AsyncGenerator[T]]:
        """Begin a call that is answered piece by piece: on whom, the first piece, the others."""

        async def perform(replica: Replica) -> tuple[Replica, T | None, AsyncGenerator[T]]:
            events = replica.iterate(call)
            try:
                return replica, await anext(events, None), events
            except BaseException:
                await events.aclose()
                raise

        return await self._somewhere(work, perform, but)

    def _check(self, replica: Replica, fingerprint: str) -> None:
        if fingerprint != self._group.fingerprint:
            replica.leave(fingerprint)
            raise ProtocolViolation(
                f"the verifier's fingerprint is {fingerprint!r}, expected {self._group.fingerprint!r}"
            )

    async def _somewhere(
        self, work: Work, perform: Callable[[Replica], Awaitable[T]], but: Sequence[Replica] = ()
    ) -> T:
        """Perform on one replica after the other until it goes well, or raise what happened last."""
        for delay_s in (*RETRY_DELAYS_S, None):
            failures: list[tuple[Replica, BackendError | RoleRefused]] = []
            while (replica := self._next(work, [*but, *(replica for replica, _ in failures)])) is not None:
                try:
                    answer = await perform(replica)
                except (BackendError, RoleRefused) as error:
                    failures.append((replica, error))
                    if isinstance(error, BackendUnreachable):
                        replica.blame()
                    if _is_final(error) or sum(_broke(why) for _, why in failures) == MOST_BROKEN:
                        raise
                else:
                    for failed, why in failures:
                        if _broke(why):
                            failed.blame()
                    self._at[work] = replica
                    return answer
            if not failures:
                raise BackendUnavailable(f"no backend can {work} now: {self._group.trouble or 'none has that role'}")
            if delay_s is None or not all(isinstance(why, BackendUnavailable) for _, why in failures):
                raise failures[-1][1]
            await self._group.sleep(delay_s)
        raise AssertionError("the last round returns or raises")

    def _next(self, work: Work, but: Sequence[Replica]) -> Replica | None:
        # The verifying replica has the prefix cached that a draft goes on from, and the other way round.
        for at in (self._at.get(work), *self._at.values()):
            if at is not None and at.well and self._group.suits(at, work) and at not in but:
                return at
        return self._group.choose(work, but)


def _decoding(request: DecodeRequest) -> Callable[[BackendClient], AsyncGenerator[DecodeEvent]]:
    return lambda client: client.decode(request)


def _behind(request: DecodeRequest, came: Sequence[int]) -> DecodeRequest:
    """What is left of a request behind the tokens that came."""
    return msgspec.structs.replace(
        request,
        context=[*request.context, *came],
        generated=request.generated + len(came),
        max_tokens=request.max_tokens - len(came),
    )


def _finish(request: DecodeRequest, came: Sequence[int]) -> Finish | None:
    """How a request has ended of which all tokens came but not the last word."""
    if came and came[-1] in request.stop_ids:
        return "stop"
    return "length" if len(came) == request.max_tokens else None


def _is_final(error: BackendError | RoleRefused) -> bool:
    """Whether the request is at fault, so that nobody else would do better."""
    return isinstance(error, BackendRefused) and error.status != 429


def _broke(error: BackendError | RoleRefused) -> bool:
    """Whether a replica took the call and did not bring it to its end."""
    return not isinstance(error, BackendUnavailable | BackendRefused | ProtocolViolation | RoleRefused)


async def watch(groups: Sequence[ReplicaGroup], interval_s: float) -> None:
    """Look after every replica, each by itself, for as long as the gateway runs."""

    async def look_after(group: ReplicaGroup, replica: Replica) -> None:
        while True:
            await group.check(replica)
            await asyncio.sleep(interval_s)

    async with asyncio.TaskGroup() as tasks:
        for group in groups:
            for replica in group.replicas:
                tasks.create_task(look_after(group, replica))
