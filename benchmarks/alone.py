"""The reference for verified answers: the fixed lane by itself, a sequence at a time, a token a pass.

No scheduler, no prefix cache, no drafts, no thread: only the model under the fixed lane's ops, over cleared KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeAlias, TypeVar

import torch

from backend.engine.engine import Engine
from backend.engine.kv_pool import RESERVED_BLOCKS
from backend.engine.prefix_cache import Lease
from backend.engine.scheduler import Pass, Span
from backend.engine.tasks import Scored, VerifyTask
from backend.kernels.attention import BLOCK
from backend.protocol import TokenizerFiles
from benchmarks.drive import Answer, Request
from benchmarks.grammars import Grammars

_AT_ONCE = 32

Params = ParamSpec("Params")
Result = TypeVar("Result")
Build: TypeAlias = Callable[[], Engine]
"""Builds an engine without starting it. Of a module, or a partial of such, so that a new process can call it."""


class Alone:
    """Takes over an engine that was not started. Requests with a grammar need `grammars`."""

    def __init__(self, engine: Engine, grammars: Grammars | None = None):
        self._runner = engine._runner
        self._grammars = grammars
        self.most = _AT_ONCE if engine._runner.ops("fixed").shape_invariant else engine.info.verify.groups
        """Sequences that a pass takes."""

    def answer(self, request: Request) -> Answer:
        """The whole answer, token by token."""
        task = self._task(request, 0)
        answer: Answer = []
        while len(answer) < request.count and not (answer and answer[-1].id in request.stop_ids):
            span = Span(task, task.computed, len(task.tokens) - task.computed, choices=1)
            ((token,),) = self._runner.run(Pass("fixed", [span]))
            assert isinstance(token, Scored)
            answer.append(token)
            task.computed = len(task.tokens)
            task.tokens.append(token.id)
        return answer

    def sample(self, request: Request, sequences: int, generator: torch.Generator) -> torch.Tensor:
        """Sequences drawn by torch's own multinomial sampler from the fixed lane's logits, int64 [sequences, count].

        Of the request's sampling only the temperature counts. Nothing is shared with the engine's sampler.
        """
        tasks = [self._task(request, index) for index in range(sequences)]
        chosen = []
        for _ in range(request.count):
            spans = [Span(task, task.computed, len(task.tokens) - task.computed, choices=1) for task in tasks]
            logits = self._runner.forward(Pass("fixed", spans)).cpu()
            weights = torch.softmax(logits.double() / request.sampling.temperature, dim=1)
            chosen.append(torch.multinomial(weights, 1, generator=generator)[:, 0])
            for task, token in zip(tasks, chosen[-1].tolist(), strict=True):
                task.computed = len(task.tokens)
                task.tokens.append(token)
        return torch.stack(chosen, dim=1)

    def _task(self, request: Request, index: int) -> VerifyTask:
        task = VerifyTask(list(request.prompt), [], request.sampling, request.stop_ids, request.top)
        each = -(-(len(request.prompt) + request.count) // BLOCK)
        blocks = list(range(RESERVED_BLOCKS + index * each, RESERVED_BLOCKS + (index + 1) * each))
        if self._grammars is not None:
            self._grammars.constrain(task)
        task.lease = Lease(blocks, cached=0, fixed=0, fresh=blocks, copy=None, shared=[])
        self._runner.prepare(task.lease)
        return task


def answers_alone(build: Build, requests: Sequence[Request], tokenizer: TokenizerFiles | None = None) -> list[Answer]:
    """The requests' answers, computed one after the other in a new process. Grammars need the model's tokenizer."""
    return in_new_process(_answers, build, requests, tokenizer)


def in_new_process(function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
    """Call a function of a module in a process that has run nothing else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *args, **kwargs).result()


def _answers(build: Build, requests: Sequence[Request], tokenizer: TokenizerFiles | None) -> list[Answer]:
    engine = build()
    alone = Alone(engine, Grammars(tokenizer, engine.info.vocab_size) if tokenizer else None)
    return [alone.answer(request) for request in requests]
