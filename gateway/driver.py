"""Performs the commands of a completion against a backend and yields what is committed.

Owns the translation between the wire and the domain. Decides nothing: which command comes next, and what an answer may
change, is the state machine's business (dvr.py). Retries and deadlines are the client's.

Cancelling the consumer, or closing the iterator, cancels the call in flight.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol, TypeAlias

from backend.protocol import (
    DraftRequest,
    DraftResponse,
    ScoredToken,
    StreamEvent,
    StreamRequest,
    StreamToken,
    VerifiedToken,
    VerifyRequest,
    VerifyResponse,
)
from gateway.domain import Commit, Counts, Finish, Finished, Job, Scored, Token
from gateway.dvr import Draft, Loop, Verdict, Verifier, Verify
from gateway.errors import BackendFailed, ProtocolViolation

Progress: TypeAlias = Commit | Finished
"""One or more commits, then the end."""


class WindowBackend(Protocol):
    """What the driver needs of a backend."""

    async def draft(self, request: DraftRequest) -> DraftResponse: ...

    async def verify(self, request: VerifyRequest) -> VerifyResponse: ...

    def stream(self, request: StreamRequest) -> AsyncGenerator[StreamEvent]: ...


async def run_verified(
    backend: WindowBackend, job: Job, windows: Sequence[int], verifier: Verifier, *, drafts: bool = True
) -> AsyncGenerator[Progress]:
    """The verifier's own sequence, window by window. Without `drafts` the backend is never asked for one."""
    loop = Loop(job, windows, verifier, drafts=drafts)
    command: Draft | Verify | Finished = loop.start()
    while not isinstance(command, Finished):
        match command:
            case Draft():
                command = loop.on_draft(await _draft(backend, job, command))
            case Verify():
                commit, command = loop.on_verdict(await _verify(backend, job, command))
                yield commit
    yield command


async def run_fast(backend: WindowBackend, job: Job, vocab_size: int) -> AsyncGenerator[Progress]:
    """The fast path's tokens as they come, without a guarantee."""
    request = StreamRequest(
        context=list(job.prompt),
        max_tokens=job.max_tokens,
        sampling=job.sampling,
        stop_ids=list(job.stop_ids),
        top_logprobs=job.top_logprobs,
    )
    count = 0
    finish: Finish | None = None
    async with aclosing(backend.stream(request)) as events:
        async for event in events:
            if event.error is not None:
                raise BackendFailed(f"the backend broke off: {event.error.message}")
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


async def _draft(backend: WindowBackend, job: Job, command: Draft) -> list[int]:
    response = await backend.draft(
        DraftRequest(
            context=list(command.context),
            generated=command.generated,
            count=command.count,
            sampling=job.sampling,
            stop_ids=list(job.stop_ids),
        )
    )
    return [token.id for token in response.tokens]


async def _verify(backend: WindowBackend, job: Job, command: Verify) -> Verdict:
    response = await backend.verify(
        VerifyRequest(
            context=list(command.context),
            generated=command.generated,
            draft=list(command.draft),
            extend=command.extend,
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
    )


def _token(token: VerifiedToken | StreamToken) -> Token:
    return Token(token.id, token.logprob, tuple(map(_scored, token.top)))


def _scored(scored: ScoredToken) -> Scored:
    return Scored(scored.id, scored.score)
