"""A tiny random model, and a way to run calls against an engine in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from backend.engine.checkpoint import Checkpoint, ModelConfig
from backend.engine.engine import Engine
from backend.engine.tasks import DecodeTask, Scored, Task, VerifyTask
from backend.protocol import Sampling, TokenizerFiles
from backend.settings import Dtype, EngineSettings

TINY = ModelConfig(
    name="tiny",
    vocab_size=331,
    hidden_size=72,
    intermediate_size=200,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=12,
    max_position=512,
    rms_eps=1e-5,
    rope_theta=10000.0,
)


def tiny_checkpoint(seed: int = 0, config: ModelConfig = TINY) -> Checkpoint:
    """A random model whose logits are spread enough for sampling to matter."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    weights = {
        "embedding": weight(config.vocab_size, config.hidden_size) * 6,
        # Not tied: a tied head would favour the last token, and every answer would repeat it.
        "lm_head": weight(config.vocab_size, config.hidden_size) * 3,
        "final_norm": torch.ones(config.hidden_size),
    }
    for i in range(config.layers):
        weights |= {
            f"layers.{i}.attention_norm": torch.ones(config.hidden_size),
            f"layers.{i}.mlp_norm": torch.ones(config.hidden_size),
            f"layers.{i}.q_proj": weight(config.heads * config.head_dim, config.hidden_size),
            f"layers.{i}.k_proj": weight(config.kv_heads * config.head_dim, config.hidden_size),
            f"layers.{i}.v_proj": weight(config.kv_heads * config.head_dim, config.hidden_size),
            f"layers.{i}.o_proj": weight(config.hidden_size, config.heads * config.head_dim),
            f"layers.{i}.gate_proj": weight(config.intermediate_size, config.hidden_size),
            f"layers.{i}.up_proj": weight(config.intermediate_size, config.hidden_size),
            f"layers.{i}.down_proj": weight(config.hidden_size, config.intermediate_size),
        }
    return Checkpoint(config, weights, TokenizerFiles("", None, [2], {}), digest=f"tiny-{seed}")


class Waiter:
    """A listener that a test thread can wait for."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: Exception | None = None
        self.first_token = threading.Event()

    def produced(self, tokens: Sequence[Scored]) -> None:
        self.first_token.set()

    def ended(self) -> None:
        self._over.set()

    def failed(self, error: Exception) -> None:
        self._error = error
        self._over.set()

    def wait(self) -> None:
        assert self._over.wait(120), "the engine did not answer"
        if self._error is not None:
            raise self._error


class Calls:
    """Draft, verify and whole completions against one engine, as a gateway would drive them."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def run(self, *tasks: Task) -> None:
        waiters = [Waiter() for _ in tasks]
        for task, waiter in zip(tasks, waiters, strict=True):
            self.engine.submit(task, waiter)
        for waiter in waiters:
            waiter.wait()

    def draft(self, context: list[int], count: int, sampling: Sampling, generated: int = 0) -> list[int]:
        task = draft_task(context, count, sampling, generated=generated)
        self.run(task)
        return [token.id for token in task.produced]

    def verify(
        self, context: list[int], draft: list[int], sampling: Sampling, top: int = 0, generated: int = 0
    ) -> VerifyTask:
        task = verify_task(context, draft, sampling, top, generated=generated)
        self.run(task)
        return task

    def complete(
        self, prompt: list[int], count: int, sampling: Sampling, windows: Sequence[int] = (7,)
    ) -> list[tuple[int, float]]:
        """The verified completion as (token, logprob), drafted in windows of the given sizes in turn."""
        done: list[Scored] = []
        done += self.verify(prompt, [], sampling).produced
        turn = 0
        while len(done) < count:
            context = prompt + [token.id for token in done]
            draft = self.draft(context, windows[turn % len(windows)], sampling, len(done))
            done += self.verify(context, draft, sampling, generated=len(done)).produced
            turn += 1
        return [(token.id, token.logprob) for token in done[:count]]

    def decode(
        self, prompt: list[int], count: int, sampling: Sampling, lengths: Sequence[int] = (7,)
    ) -> list[tuple[int, float]]:
        """The same, decoded in the fixed lane directly, in calls of the given lengths in turn; wrong drafts between."""
        done: list[Scored] = []
        turn = 0
        while len(done) < count:
            context = prompt + [token.id for token in done]
            if turn % 3 == 2:
                task: Task = verify_task(context, [0] * 2, sampling, generated=len(done))
            else:
                task = decode_task(context, lengths[turn % len(lengths)], sampling, generated=len(done))
            self.run(task)
            done += task.produced
            turn += 1
        return [(token.id, token.logprob) for token in done[:count]]


def draft_task(
    context: list[int], count: int, sampling: Sampling, stop: frozenset[int] = frozenset(), generated: int = 0
) -> DecodeTask:
    return DecodeTask(context, count, sampling, stop, top=0, is_draft=True, generated=generated)


def verify_task(
    context: list[int],
    draft: list[int],
    sampling: Sampling,
    top: int = 0,
    stop: frozenset[int] = frozenset(),
    generated: int = 0,
) -> VerifyTask:
    return VerifyTask(context, draft, sampling, stop, top, generated)


def decode_task(
    context: list[int], count: int, sampling: Sampling, stop: frozenset[int] = frozenset(), generated: int = 0
) -> DecodeTask:
    return DecodeTask(context, count, sampling, stop, 0, is_draft=False, generated=generated, batching="invariant")


@contextmanager
def running_engine(
    checkpoint: Checkpoint,
    dtype: Dtype = "bfloat16",
    groups: int = 4,
    window: int = 16,
    kv_bytes: int = 1 << 26,
    threads: int = 1,
    **lanes: object,
) -> Iterator[Calls]:
    settings = EngineSettings(
        model=checkpoint.config.name,
        dtype=dtype,
        threads=threads,
        kv_bytes=kv_bytes,
        verify_groups=groups,
        verify_window=window,
    )
    engine = Engine(checkpoint, settings, lambda share: None, **lanes)  # type: ignore[arg-type]
    engine.start()
    try:
        yield Calls(engine)
    finally:
        engine.stop()
