"""Grammars at work: which tokens may come next, by llguidance, as a function of the generated tokens alone.

Owns the compiled form of a grammar and the matcher that follows one call's tokens. The matcher is a cache: it has
consumed some tokens, is rolled back to what it has in common with those it is asked about next, and consumes the rest.
What it answers is what a fresh one would answer; so drafts that are refused, preemption and repeated calls leave
nothing behind, and a task needs no more of it than a call's worth.

Knows neither tensors nor the protocol's calls. Compiling can take long and belongs in a thread of its own; a constraint
belongs to the thread that runs passes.

In doubt: the library bounds its work by counters, not by time. The copies of a matcher share what they have worked out,
and the bounds: one that fails has failed for all of them, and near a bound it depends on them whether a call fails. It
fails with an error then, and the grammar is compiled anew for calls to come; no call ever gets another answer.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence, Set

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from backend.engine.grammar_source import GrammarError, lark_source
from backend.protocol import Grammar, TokenizerFiles

MAX_COMPILE_S = 2.0
MAX_MASKS = 20_000
"""A compiled grammar keeps what it has worked out, which can be much. After so many masks it is time for a new one."""

_MAX_LEXER_STATES = 100_000  # Of one to two kilobytes each.


class _DeadEndError(GrammarError):
    def __init__(self) -> None:
        super().__init__("the grammar leaves no token to go on with")


class Compiler:
    """Compiles grammars for one tokenizer. Raises GrammarError where no grammar can be served."""

    def __init__(
        self, tokenizer: TokenizerFiles, vocab_size: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self.ends = _textless(tokenizer)
        """The ids that stand for no text: such an id ends an answer where it is a stop id."""
        if not self.ends:
            raise GrammarError("the model has no token that could end an answer")
        try:
            self._tokenizer = LLTokenizer(tokenizer.tokenizer_json, n_vocab=vocab_size, eos_token=min(self.ends))
        except ValueError as error:
            raise GrammarError(f"the model's tokenizer is not understood: {error}") from error

    def compile(self, grammar: Grammar) -> Compiled:
        """May take seconds. Raises GrammarError."""
        started = self._clock()
        matcher = LLMatcher(
            self._tokenizer,
            lark_source(grammar),
            log_level=0,
            limits=LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False),
        )
        _check(matcher)
        compiled = Compiled(matcher, self.ends)
        # A grammar to which no text belongs is found out by asking for the first token.
        compiled.constrain(self.ends).allowed([])
        if self._clock() - started > MAX_COMPILE_S:
            raise GrammarError(f"the grammar takes longer than {MAX_COMPILE_S:g} s to compile")
        return compiled


class Compiled:
    """A grammar ready for use, for any number of calls."""

    def __init__(self, matcher: LLMatcher, ends: Set[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self.masks = 0
        self.failure: GrammarError | None = None

    @property
    def worn(self) -> bool:
        """Whether new calls should have a new one."""
        return self.failure is not None or self.masks >= MAX_MASKS

    def constrain(self, stop_ids: Set[int]) -> Constraint:
        """What one call needs. At least one of its stop ids must stand for no text."""
        assert stop_ids & self._ends
        return Constraint(self, self._matcher, self._ends, stop_ids)


class Constraint:
    """The grammar of one call, which can follow any tokens; fastest where they grow or shrink at their end."""

    def __init__(self, compiled: Compiled, matcher: LLMatcher, ends: Set[int], stop_ids: Set[int]) -> None:
        self._compiled = compiled
        self._ends = ends
        self._stops = sorted(stop_ids & ends)
        self._fresh = matcher
        self._matcher = matcher.deep_copy()
        self._consumed: list[int] = []

    def allowed(self, generated: Sequence[int]) -> bytes | None:
        """The tokens that may follow, a bit for each id, lowest first; None behind tokens that are not of the grammar.

        Raises GrammarError where no token can follow, or the grammar has become too complex.
        """
        if self._compiled.failure is None:
            try:
                return self._allowed(generated)
            except _DeadEndError:
                # Only this matcher is at its end, and only behind these tokens.
                self._matcher, self._consumed = self._fresh.deep_copy(), []
                raise
            except GrammarError as error:
                self._compiled.failure = error
        raise self._compiled.failure

    def _allowed(self, generated: Sequence[int]) -> bytes | None:
        common = _common_prefix(self._consumed, generated)
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
            _check(self._matcher)
            del self._consumed[common:]
        rest = list(generated[common:])
        text = next((i for i, id_ in enumerate(rest) if id_ in self._ends), len(rest))
        taken = self._matcher.try_consume_tokens(rest[:text])
        _check(self._matcher)
        self._consumed += rest[:taken]
        self._compiled.masks += 1
        mask = bytearray(self._matcher.compute_bitmask())
        _check(self._matcher)
        # Only now: a matcher that has failed takes no more tokens, and says why when it is asked for a mask.
        if taken < len(rest):
            return None
        for id_ in self._ends:
            mask[id_ >> 3] &= ~(1 << (id_ & 7))
        if self._matcher.is_accepting():
            for id_ in self._stops:
                mask[id_ >> 3] |= 1 << (id_ & 7)
        if not any(mask):
            raise _DeadEndError
        return bytes(mask)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(i for i in range(length) if left[i] != right[i])


def _check(matcher: LLMatcher) -> None:
    if not matcher.is_error():
        return
    message = matcher.get_error()
    if "NoExtensionBias" in message:
        raise _DeadEndError
    # The place in our own source, an excerpt of it, and a mark for what is left out.
    reason = re.sub(r"^at \d+\(\d+\): ", "", message).partition("\n   1 | ")[0].removesuffix("\n<non-verbose/>")
    raise GrammarError(" ".join(reason.split()))


def _textless(tokenizer: TokenizerFiles) -> frozenset[int]:
    try:
        added = json.loads(tokenizer.tokenizer_json)["added_tokens"]
    except (json.JSONDecodeError, KeyError) as error:
        raise GrammarError(f"the model's tokenizer is not understood: {error}") from error
    return frozenset(tokenizer.eos_ids) | {token["id"] for token in added if token["special"]}
