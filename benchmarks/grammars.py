"""Grammars in calls that go straight to an engine: compiled once in a process, and at work in each task that has one.

What the server does for calls over HTTP (backend.server.grammars), for threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from backend.engine.engine import Engine, Listener
from backend.engine.grammar import Compiled, Compiler
from backend.engine.tasks import Task
from backend.protocol import Grammar, TokenizerFiles


class TakesCalls(Protocol):
    """An engine, or what stands before one."""

    def submit(self, task: Task, listener: Listener) -> None: ...

    def cancel(self, task: Task, done: Callable[[], None] = ...) -> None: ...


class Grammars:
    """The compiled grammars of one tokenizer; for any thread."""

    def __init__(self, tokenizer: TokenizerFiles, vocab_size: int):
        self._compiler = Compiler(tokenizer, vocab_size)
        self._compiled: dict[Grammar, Compiled] = {}
        self._lock = threading.Lock()

    @property
    def ends(self) -> frozenset[int]:
        """The ids of which a task with a grammar must have one among its stop ids."""
        return frozenset(self._compiler.ends)

    def constrain(self, task: Task) -> None:
        """Give a task what its grammar needs, if it has one."""
        grammar = task.sampling.grammar
        if grammar is None:
            return
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None or compiled.worn:
                compiled = self._compiled[grammar] = self._compiler.compile(grammar)
            task.constraint = compiled.constrain(task.stop_ids)


class Constraining:
    """Stands before an engine and sees to the grammars of its tasks."""

    def __init__(self, engine: Engine, grammars: Grammars):
        self._engine = engine
        self._grammars = grammars

    def submit(self, task: Task, listener: Listener) -> None:
        self._grammars.constrain(task)
        self._engine.submit(task, listener)

    def cancel(self, task: Task, done: Callable[[], None] = lambda: None) -> None:
        self._engine.cancel(task, done)
