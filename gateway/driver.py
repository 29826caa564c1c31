"""Performs the commands of a completion against a backend and yields what is committed.

Owns the calls in flight, and the translation between the wire and the domain. Decides nothing: which calls there should
be, and what an answer may change, is the state machine's business (dvr.py). Retries and deadlines are the client's.

A completion has at most two calls in flight, a verification and a draft ahead of it, or one decode call. The first two
run on while the consumer handles what was committed. Cancelling the consumer, closing the iterator, or an error of one
call cancels all of them; none outlives the iterator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from backend.protocol import (
    Batching,
    DecodeEvent,
    DecodeRequest,
    DraftRequest,
    DraftResponse,
    ErrorDetail,
    Role,
    ScoredToken,
    StreamEvent,
    StreamRequest,
    StreamToken,
    VerifiedToken,
    VerifyRequest,
    VerifyResponse,
)
from gateway.domain import Commit, Counts, Finish, Finished, Job, Progress, Scored, Token
from gateway.dvr import Command, Decode, Decoded, Draft, Loop, Verdict, Verifier, Verify
from gateway.errors import (
    BackendError,
    BackendFailed,
    BackendRefused,
    ProtocolViolation,
    RoleRefused,
)
from gateway.telemetry.work import Work


class WindowBackend(Protocol):
    """What the driver needs of a backend."""

    async def draft(self, request: DraftRequest) -> DraftResponse: ...

    async def verify(self, request: VerifyRequest) -> VerifyResponse: ...

    def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent]: ...

    def stream(self, request: StreamRequest) -> AsyncGenerator[StreamEvent]: ...


async def run_verified(
    backend: WindowBackend,
    job: Job,
    windows: Sequence[int],
    verifier: Verifier,
    roles: Collection[Role],
    committed: Sequence[int] = (),
    recorded: Sequence[int] = (),
    work: Work | None = None,
) -> AsyncGenerator[Progress]:
    """The verifier's own sequence. The backend is asked for nothing but what is in its `roles`.

    It begins behind the tokens that are `committed`, with those `recorded` as the first drafts. What it takes is added
    to `work`.
    """
    work = work or Work()
    loop = Loop(job, windows, verifier, roles, committed, recorded)
    calls = _Calls(backend, job)
    loop.start()
    try:
        while loop.finish is None:
            match loop.pending:
                case (Decode() as command,):
                    begins = True
                    async with aclosing(_decode(backend, job, loop, command)) as commits:
                        async for commit in commits:
                            work.decoded(len(commit.tokens), begins=begins)
                            begins = False
                            yield commit
                    continue
            await calls.follow(loop.pending)
            match await calls.next():
                case Verdict() as verdict:
                    (asked,) = (command for command in loop.pending if isinstance(command, Verify))
                    commit = loop.on_verdict(verdict)
                    work.verified(asked.generated, len(asked.draft), verdict.agreed, len(commit.tokens))
                    await calls.follow(loop.pending)
                    yield commit
                case Proposal(ids):
                    loop.on_draft(ids)
                case DrafterLost():
                    loop.on_drafter_lost()
    finally:
        await calls.follow(())
    yield Finished(loop.finish)


async def run_fast(
    backend: WindowBackend, job: Job, vocab_size: int, batching: Batching = "dynamic"
) -> AsyncGenerator[Progress]:
    """The fast path's tokens as they come, unverified."""
    request = StreamRequest(
        context=list(job.prompt),
        max_tokens=job.max_tokens,
        sampling=job.sampling,
        stop_ids=list(job.stop_ids),
        top_logprobs=job.top_logprobs,
        batching=batching,
    )
    count = 0
    finish: Finish | None = None
    async with aclosing(backend.stream(request)) as events:
        async for event in events:
            if event.error is not None:
                raise _broken_off(event.error)
            if finish is not None:
                raise ProtocolViolation("the backend streamed on after the finish")
            count += len(event.tokens)
            if count > job.max_tokens or not all(0 <= token.id < vocab_size for token in event.tokens):
                raise ProtocolViolation("the backend streamed too many tokens, or one outside the vocabulary")
            finish = event.finish
            if event.tokens:
                yield Commit(tuple(map(_token, event.tokens)), Counts())
    if finish is None:
        raise BackendFailed("the backend's stream ended before it was finished")
    yield Finished(finish)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter answered."""

    ids: list[int]


class DrafterLost:
    """No backend drafts any more. That is no end: a verifier needs no drafts."""


Answer: TypeAlias = Verdict | Proposal | DrafterLost


class _Calls:
    """The calls of one completion, a task for each. Not a task group: it would have to be left in the task in which it
    was entered, and a generator's consumer may take each step in another one."""

    def __init__(self, backend: WindowBackend, job: Job) -> None:
        self._backend = backend
        self._job = job
        self._running: list[tuple[Command, asyncio.Task[Answer]]] = []

    async def follow(self, pending: Sequence[Command]) -> None:
        """Start the commands that are new, cancel the calls whose command is no longer among them."""
        # By identity: comparing whole contexts would cost more than the rest of this.
        dropped = [task for command, task in self._running if not any(command is kept for kept in pending)]
        for task in dropped:
            task.cancel()
        running = [call for call in self._running if call[1] not in dropped]
        new = [command for command in pending if not any(command is known for known, _ in running)]
        self._running = running + [(command, asyncio.create_task(self._perform(command))) for command in new]
        if dropped:
            # Their errors do not matter any more.
            await asyncio.gather(*dropped, return_exceptions=True)

    async def next(self) -> Answer:
        """The next answer; a verdict first where both are there."""
        await asyncio.wait([task for _, task in self._running], return_when=asyncio.FIRST_COMPLETED)
        for index, (_, task) in enumerate(self._running):
            if task.done():
                del self._running[index]
                return task.result()
        raise AssertionError("one of them is done")

    async def _perform(self, command: Command) -> Answer:
        match command:
            case Draft():
                try:
                    return await _draft(self._backend, self._job, command)
                except (BackendError, RoleRefused):
                    # Also one that refuses: it may be another model, with a shorter context, or have no room now.
                    return DrafterLost()
            case Verify():
                return await _verify(self._backend, self._job, command)
            case Decode():
                raise AssertionError("a decode call has no single answer")


async def _decode(backend: WindowBackend, job: Job, loop: Loop, command: Decode) -> AsyncGenerator[Commit]:
    """Perform a decode call, which nothing else runs beside, to its end."""
    request = DecodeRequest(
        context=list(command.context),
        generated=command.generated,
        max_tokens=command.count,
        yields=command.yields,
        sampling=job.sampling,
        stop_ids=list(job.stop_ids),
        top_logprobs=job.top_logprobs,
    )
    async with aclosing(backend.decode(request)) as events:
        async for event in events:
            if event.error is not None:
                raise _broken_off(event.error)
            if loop.pending != (command,):
                raise ProtocolViolation("the backend decoded on after the end")
            commit = loop.on_decoded(
                Decoded(tuple(map(_token, event.tokens)), event.finish, event.wants_draft, event.fingerprint)
            )
            if commit is not None:
                yield commit
    if loop.pending == (command,):
        raise BackendFailed("the backend's decoding ended before it was finished")


async def _draft(backend: WindowBackend, job: Job, command: Draft) -> Proposal:
    response = await backend.draft(
        DraftRequest(
            context=list(command.context),
            generated=command.generated,
            count=command.count,
            sampling=job.sampling,
            stop_ids=list(job.stop_ids),
        )
    )
    return Proposal([token.id for token in response.tokens])


async def _verify(backend: WindowBackend, job: Job, command: Verify) -> Verdict:
    response = await backend.verify(
        VerifyRequest(
            context=list(command.context),
            generated=command.generated,
            draft=list(command.draft),
            sampling=job.sampling,
            stop_ids=list(job.stop_ids),
            top_logprobs=job.top_logprobs,
        )
    )
    return Verdict(
        agreed=response.agreed,
        tokens=tuple(map(_token, response.tokens)),
        finish=response.finish,
        fingerprint=response.fingerprint,
        wants_draft=response.wants_draft,
        wants_draft_ahead=response.wants_draft_ahead,
    )


def _broken_off(error: ErrorDetail) -> BackendError:
    message = f"the backend broke off: {error.message}"
    if error.type == "invalid_request":
        return BackendRefused(message, 400, field=error.field)
    return BackendFailed(message)


def _token(token: VerifiedToken | StreamToken) -> Token:
    return Token(token.id, token.logprob, tuple(map(_scored, token.top)))


def _scored(scored: ScoredToken) -> Scored:
    return Scored(scored.id, scored.score)
