"""Calls on an engine for threads that wait: one call, and a whole verified completion with any proposals.

The completion is driven by hand, not by the gateway's state machine: what it proposes is up to the caller.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from backend.engine.tasks import DecodeTask, Scored, Task, VerifyTask
from backend.protocol import Sampling
from benchmarks.grammars import TakesCalls
from benchmarks.waiting import Ending


@dataclass(frozen=True, slots=True)
class Request:
    """All that a verified answer depends on."""

    prompt: tuple[int, ...]
    count: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    top: int = 0


Answer: TypeAlias = list[Scored]
Call: TypeAlias = Callable[[], Task]
"""Makes the task of a call; a call that is made again is another task."""
Propose: TypeAlias = Callable[[list[int], int], Call]
"""(context, how much of it was generated) -> the call that adds to the answer: one whose tokens are the verifier's."""


def perform(engine: TakesCalls, task: Task) -> None:
    """Run a task to its end. Raises what it failed with."""
    ends: SimpleQueue[Exception | None] = SimpleQueue()
    engine.submit(task, Ending(ends.put))
    error = ends.get()
    if error is not None:
        raise error


def complete(
    engine: TakesCalls, request: Request, propose: Propose, make: Callable[[TakesCalls, Call], Task] | None = None
) -> Answer:
    """The verified answer, call by call; the first one verifies the prompt. `make` performs a call, to its end."""
    answer: Answer = []
    make = make or _make
    while len(answer) < request.count:
        context = [*request.prompt, *(token.id for token in answer)]
        call = propose(context, len(answer)) if answer else verify(request, context, 0, [])
        task = make(engine, call)
        answer += task.produced
        if task.finish is not None:
            break
    return answer[: request.count]


def verify(request: Request, context: list[int], generated: int, draft: list[int]) -> Call:
    """A verification of `draft`."""
    sampling, stop_ids, top = request.sampling, request.stop_ids, request.top
    return lambda: VerifyTask(context, draft, sampling, stop_ids, top, generated)


def drafting(engine: TakesCalls, request: Request, windows: Sequence[int]) -> Propose:
    """Proposes what the engine's own fast lane drafts, in windows of these sizes in turn; the last one repeats."""
    turn = 0

    def propose(context: list[int], generated: int) -> Call:
        nonlocal turn
        count = windows[min(turn, len(windows) - 1)]
        turn += 1
        return verify(request, context, generated, draft(engine, request, context, generated, count))

    return propose


def _make(engine: TakesCalls, call: Call) -> Task:
    task = call()
    perform(engine, task)
    return task


def draft(engine: TakesCalls, request: Request, context: list[int], generated: int, count: int) -> list[int]:
    """Up to `count` tokens of the fast lane behind a context."""
    task = DecodeTask(context, count, request.sampling, request.stop_ids, 0, is_draft=True, generated=generated)
    perform(engine, task)
    return [token.id for token in task.produced]


def bits(answer: Answer) -> bytes:
    """All that an answer reports of a verified token, bit for bit: its id, its logprob and the best ones beside it."""
    packed = bytearray()
    for token in answer:
        packed += struct.pack("<if", token.id, token.logprob)
        for scored in token.top:
            packed += struct.pack("<if", scored.id, scored.score)
    return bytes(packed)
