"""The compiled grammars of one backend: compiled once, off the event loop and the engine's thread, and kept.

Owns a bounded cache, least recently used out first, of grammars that compile and of refusals alike. One grammar is
compiled at a time, so a client's costly grammar delays others' new grammars and nothing else, and equal ones that come
together are compiled once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Set
from typing import Protocol

from backend.engine.grammar import Compiled, Constraint
from backend.engine.grammar_source import GRAMMAR_FIELD, GrammarError
from backend.protocol import Grammar
from backend.server.errors import CallError

MAX_KEPT = 32
MAX_WAITING = 64


class CompilesGrammars(Protocol):
    """What the cache needs of a compiler."""

    @property
    def ends(self) -> Set[int]: ...

    def compile(self, grammar: Grammar) -> Compiled: ...


class Grammars:
    """For one event loop. Without a compiler every grammar is refused for the `reason`."""

    def __init__(self, compiler: CompilesGrammars | None, reason: str = "") -> None:
        self._compiler = compiler
        self._reason = reason
        self._kept: OrderedDict[Grammar, Compiled | GrammarError] = OrderedDict()
        self._compiling = asyncio.Lock()
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<Grammars kept={len(self._kept)} waiting={self._waiting}>"

    async def constrain(self, grammar: Grammar | None, stop_ids: Set[int]) -> Constraint | None:
        """What a call with this grammar needs, None without one. Raises CallError naming the field at fault."""
        if grammar is None:
            return None
        if self._compiler is None:
            raise CallError("invalid_request", f"{GRAMMAR_FIELD}: {self._reason}", GRAMMAR_FIELD)
        if not stop_ids & self._compiler.ends:
            raise CallError(
                "invalid_request",
                f"stop_ids must hold an id that stands for no text beside {GRAMMAR_FIELD}",
                "stop_ids",
            )
        found = self._find(grammar) or await self._compile(self._compiler, grammar)
        if isinstance(found, GrammarError):
            raise CallError("invalid_request", f"{GRAMMAR_FIELD}: {found}", GRAMMAR_FIELD)
        return found.constrain(stop_ids)

    def _find(self, grammar: Grammar) -> Compiled | GrammarError | None:
        found = self._kept.get(grammar)
        if found is None or (isinstance(found, Compiled) and found.worn):
            return None
        self._kept.move_to_end(grammar)
        return found

    async def _compile(self, compiler: CompilesGrammars, grammar: Grammar) -> Compiled | GrammarError:
        if self._waiting >= MAX_WAITING:
            raise CallError("overloaded", f"{MAX_WAITING} calls wait for their grammars to be compiled")
        self._waiting += 1
        try:
            async with self._compiling:
                # The one before may have been the same.
                if (found := self._find(grammar)) is not None:
                    return found
                compiled = await asyncio.to_thread(_compile, compiler, grammar)
        finally:
            self._waiting -= 1
        self._kept[grammar] = compiled
        self._kept.move_to_end(grammar)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return compiled


def _compile(compiler: CompilesGrammars, grammar: Grammar) -> Compiled | GrammarError:
    try:
        return compiler.compile(grammar)
    except GrammarError as error:
        return error
