"""The engine: a thread that runs passes while there is work, and the door through which calls reach it.

`submit` and `cancel` can be called from any thread; results are handed to a task's listener from the engine's thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from backend.engine.admission import Admission, QueueFullError
from backend.engine.checkpoint import Checkpoint, ModelConfig, Progress
from backend.engine.fingerprint import fingerprint
from backend.engine.kv_pool import RESERVED_BLOCKS, KvPool, block_bytes
from backend.engine.lane_costs import FIXED_SHAPE, LANES_COINCIDE, Advice, LaneCosts
from backend.engine.measure import MEASURE_BLOCKS, measure, pass_clock
from backend.engine.memory import bound_kernel_caches, keep_freed_memory
from backend.engine.model import Model
from backend.engine.prefix_cache import PrefixCache
from backend.engine.probe import PROBE_BLOCKS, InvarianceError, probe
from backend.engine.runner import Runner
from backend.engine.scheduler import Limits, Pass, Scheduler
from backend.engine.stats import Stats, Totals
from backend.engine.tasks import DecodeTask, Scored, Task
from backend.kernels.attention import BLOCK
from backend.kernels.ops import Ops
from backend.kernels.platform import Platform, open_platform
from backend.protocol import PROTOCOL_VERSION, Info, Role, VerifyShape
from backend.settings import EngineSettings

_PREFILL_ROWS = 256
_MAX_RUNNING = 64
_GROUP_WAIT = 4

log = logging.getLogger(__name__)


class EngineError(Exception):
    """A call failed inside the engine; the message says why. `field` is set where the call itself is at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Listener(Protocol):
    """Hears of one task, from the engine's thread. Exactly one of `ended` and `failed` comes last."""

    def produced(self, tokens: Sequence[Scored]) -> None: ...

    def ended(self) -> None: ...

    def failed(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class _Submit:
    task: Task
    listener: Listener


@dataclass(frozen=True, slots=True)
class _Cancel:
    task: Task
    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command: TypeAlias = _Submit | _Cancel | _Stop


class Engine:
    """One model under two lanes. Build it, `start` it, `stop` it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: EngineSettings,
        progress: Progress,
        fast: Ops | None = None,
        fixed: Ops | None = None,
        on_breakdown: Callable[[], None] = lambda: None,
        platform: Platform | None = None,
    ):
        """Where they are given, `platform` stands for the settings' device, and `fast` and `fixed` for its lanes."""
        platform = platform or open_platform(settings.device)
        fast, fixed = fast or platform.fast, fixed or platform.fixed
        bound_kernel_caches()
        keep_freed_memory()
        torch.set_num_threads(settings.threads)
        self._on_breakdown = on_breakdown
        self.refusal: str | None = None
        """Why the verify role is refused, where the probe failed."""
        config = checkpoint.config
        dtype: torch.dtype = getattr(torch, settings.dtype)
        shape = VerifyShape(groups=settings.verify_groups, window=settings.verify_window)
        model = Model(checkpoint, dtype, progress, platform)
        blocks = settings.kv_bytes // block_bytes(config, dtype) - RESERVED_BLOCKS
        if blocks < 1:
            raise EngineError(f"kv_bytes: {settings.kv_bytes} holds no block of {block_bytes(config, dtype)} bytes")

        def runner(blocks: int) -> Runner:
            return Runner(model, KvPool(config, dtype, blocks, model.device), fast, fixed, shape, platform.capture)

        self._cache = PrefixCache(blocks, BLOCK, first=RESERVED_BLOCKS)
        self._runner = runner(blocks)
        roles: list[Role] = ["draft", "verify"]
        probe_digest = ""
        settled: Advice | None = None if fixed.shape_invariant else FIXED_SHAPE
        try:
            probe_digest = probe(runner(PROBE_BLOCKS), config, shape)
            if _coincide(fast, runner(PROBE_BLOCKS), config, shape, probe_digest):
                settled = LANES_COINCIDE
        except InvarianceError as error:
            log.error("the verify role is refused: %s", error)
            self.refusal = str(error)
            roles = ["draft"]
        else:
            if fixed.shape_invariant:
                roles.append("decode")
        self._pass_clock = pass_clock(platform.device.type, settings.threads)
        self._costs = LaneCosts(
            shape.window, settled or measure(runner(MEASURE_BLOCKS), config, shape, self._pass_clock)
        )
        max_context = min(config.max_position, blocks * BLOCK)
        self._scheduler = Scheduler(
            Admission(self._cache, _MAX_RUNNING, settings.max_waiting),
            Limits(shape, max_context, _PREFILL_ROWS, _GROUP_WAIT),
            fixed.shape_invariant,
            self._costs,
        )
        self._totals = Totals()
        self.info = Info(
            protocol=PROTOCOL_VERSION,
            model=config.name,
            fingerprint=fingerprint(checkpoint.digest, dtype, platform.hardware, fixed, shape, probe_digest),
            roles=roles,
            verify=shape,
            max_context=max_context,
            vocab_size=config.vocab_size,
            dtype=settings.dtype,
            device=platform.device.type,
        )
        self._stopped = False
        self._listeners: dict[Task, Listener] = {}
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Fail what is in flight and end the thread, after the pass that is running."""
        self._commands.put(_Stop())
        self._thread.join()

    def submit(self, task: Task, listener: Listener) -> None:
        """Queue a task. The listener hears a QueueFullError where the queue is full, an EngineError after the end."""
        self._commands.put(_Submit(task, listener))
        if self._stopped:
            self._refuse_commands()

    def cancel(self, task: Task, done: Callable[[], None] = lambda: None) -> None:
        """Drop a task and free what it holds, after the pass that is running; its listener hears nothing more."""
        self._commands.put(_Cancel(task, done))
        if self._stopped:
            self._refuse_commands()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException:
            log.critical("the engine has broken down")
            self._on_breakdown()
            raise
        finally:
            self._stopped = True
            for listener in self._listeners.values():
                listener.failed(EngineError("the engine has stopped"))
            self._listeners.clear()
            self._refuse_commands()

    def _refuse_commands(self) -> None:
        """Answer what is in the queue when no thread reads it any more."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Submit):
                command.listener.failed(EngineError("the engine has stopped"))
            elif isinstance(command, _Cancel):
                command.done()

    def stats(self) -> Stats:
        """What it has done so far and is doing; from any thread, without waiting for a pass to end."""
        totals, admission = self._totals, self._scheduler.admission
        return Stats(
            # dict() copies in one step, which no other thread interrupts.
            passes=dict(totals.passes),
            rows=dict(totals.rows),
            seconds=dict(totals.seconds),
            tokens=dict(totals.tokens),
            windows=totals.windows,
            rollbacks=totals.rollbacks,
            drafted=totals.drafted,
            rolled_back=totals.rolled_back,
            advice=dict(self._scheduler.advice),
            pass_costs=self._costs.seconds,
            running=len(admission.running),
            waiting=admission.waiting,
            blocks=self._cache.total,
            blocks_available=self._cache.available,
            evictions=self._cache.evictions,
            preemptions=admission.preemptions,
        )

    @torch.inference_mode()
    def _loop(self) -> None:
        work: Pass | None = None
        while True:
            # Idle, the thread sleeps on the queue; busy, it only looks.
            while work is None or not self._commands.empty():
                command = self._commands.get()
                if isinstance(command, _Stop):
                    return
                self._obey(command)
                if self._commands.empty():
                    break
            for task in self._scheduler.admit():
                assert task.lease is not None
                self._runner.prepare(task.lease)
            work = self._scheduler.next_pass()
            if work is not None:
                self._perform(work)

    def _obey(self, command: _Submit | _Cancel) -> None:
        if isinstance(command, _Cancel):
            if self._listeners.pop(command.task, None) is not None:
                self._scheduler.end(command.task)
            command.done()
            return
        try:
            self._scheduler.submit(command.task)
        except QueueFullError as error:
            command.listener.failed(error)
        else:
            self._listeners[command.task] = command.listener

    def _perform(self, work: Pass) -> None:
        before = [len(span.task.produced) for span in work.spans]
        started, began = time.perf_counter(), self._pass_clock()
        try:
            chosen = self._runner.run(work)
        except (RuntimeError, MemoryError) as error:
            log.exception("a pass of the %s lane broke", work.lane)
            for span in work.spans:
                self._scheduler.fail(span.task)
                self._listeners.pop(span.task).failed(EngineError(str(error)))
            return
        self._scheduler.observe(work, self._pass_clock() - began)
        self._totals.add_pass(work, time.perf_counter() - started)
        outcome = self._scheduler.apply(work, chosen)
        for task, why in outcome.broken:
            self._listeners.pop(task).failed(EngineError(why.reason, why.field))
        ended = set(outcome.ended)
        for span, count in zip(work.spans, before, strict=True):
            listener = self._listeners.get(span.task)
            if listener is None:
                continue
            if len(span.task.produced) > count and isinstance(span.task, DecodeTask):
                listener.produced(span.task.produced[count:])
            if span.task in ended:
                self._totals.add_ended(span.task)
                del self._listeners[span.task]
                listener.ended()


def _coincide(fast: Ops, runner: Runner, config: ModelConfig, shape: VerifyShape, fixed_digest: str) -> bool:
    """Whether the fast lane's arithmetic is as invariant as the fixed lane's and gives the same bits.

    The probe alone would be no proof: arithmetic that does not claim to be invariant can pass it by chance.
    """
    if not fast.shape_invariant:
        return False
    try:
        return probe(runner, config, shape, "fast") == fixed_digest
    except InvarianceError as error:
        log.warning("drafts have to be verified: %s", error)
        return False
