"""Computes an answer again by verification alone, and compares it with its receipt.

The recorded tokens are the draft: each call verifies as many of them as fill the backend's shape, so that a pass takes
G windows of W tokens, and none is computed twice. It is the loop of any verified answer (gateway.dvr) with all of its
tokens recorded; so nothing that is recorded changes what the verifier says.

A choice's calls follow one another, since each goes on from the keys and values of the one before, which the backend
has cached. Choices have nothing in common but their prompt, and run at the same time.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from backend.protocol import Info, Role
from gateway.domain import Commit, Job, Token
from gateway.driver import WindowBackend, run_verified
from gateway.dvr import Verifier
from gateway.receipts.chain import LOGPROB_BYTES
from gateway.receipts.receipt import Answer, Choice, sampling_of


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position of a choice at which what came is not what was recorded."""

    choice: int
    position: int
    what: str

    def __str__(self) -> str:
        return f"choice {self.choice}, position {self.position}: {self.what}"


async def replay(
    backend: WindowBackend, info: Info, answer: Answer, prompts: Sequence[Sequence[int]]
) -> Difference | None:
    """The first difference of the first choice that has one; None where every token and every bit is the same.

    `prompts` are the answer's. The backend's fingerprint must be the answer's. Raises `BackendError`.
    """
    assert info.fingerprint == answer.fingerprint
    places = asyncio.Semaphore(info.verify.groups)

    async def compare(index: int, choice: Choice) -> Difference | None:
        async with places:
            return await _compare(backend, info, answer, index, choice, prompts[choice.prompt])

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(compare(index, choice)) for index, choice in enumerate(answer.choices)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return next((found for task in running if (found := task.result()) is not None), None)


async def _compare(
    backend: WindowBackend, info: Info, answer: Answer, index: int, choice: Choice, prompt: Sequence[int]
) -> Difference | None:
    if not choice.tokens:
        return Difference(index, 0, "no token is recorded, and every answer has one")
    job = Job(tuple(prompt), sampling_of(answer, choice), len(choice.tokens), answer.stop_ids, top_logprobs=0)
    recorded = [
        (id_, bits) for id_, (bits,) in zip(choice.tokens, struct.iter_unpack("4s", _bits(choice)), strict=True)
    ]
    windows = (max(1, info.verify.groups * info.verify.window - 1),)  # a call adds a token of its own
    roles: tuple[Role, ...] = ("verify",)
    verifier = Verifier(info.fingerprint, info.vocab_size)
    position = 0
    async with aclosing(run_verified(backend, job, windows, verifier, roles, (), choice.tokens)) as progress:
        async for step in progress:
            if isinstance(step, Commit):
                for token in step.tokens:
                    if what := _unlike(token, *recorded[position]):
                        return Difference(index, position, what)
                    position += 1
    if position < len(recorded):
        return Difference(index, position, f"the sequence has ended, token {recorded[position][0]} is recorded")
    if not _may_end(answer, choice, full=len(prompt) + position >= info.max_context):
        return Difference(index, position, f"finish {choice.finish} is recorded, and nothing ends the answer so")
    return None


def _may_end(answer: Answer, choice: Choice, *, full: bool) -> bool:
    """Whether the tokens can end as recorded; `full` says that the context is. A stop string is not looked for: that
    takes text."""
    by_id = choice.tokens[-1] in answer.stop_ids
    if choice.finish == "stop":
        return by_id or bool(answer.stops)
    return not by_id and (full or len(choice.tokens) == choice.max_tokens)


def _unlike(token: Token, id_: int, bits: bytes) -> str | None:
    if token.id != id_:
        return f"token {token.id} came, {id_} is recorded"
    came = struct.pack(">f", token.logprob)
    if came != bits:
        recorded: float = struct.unpack(">f", bits)[0]
        return f"logprob {token.logprob!r} ({came.hex()}) came, {recorded!r} ({bits.hex()}) is recorded"
    return None


def _bits(choice: Choice) -> bytes:
    bits = bytes.fromhex(choice.logprobs)
    assert len(bits) == LOGPROB_BYTES * len(choice.tokens)
    return bits
