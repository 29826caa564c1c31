"""A verification pass on its way between SGLang's HTTP process and its schedulers, and how its G x W rows are shared.

One pass is one call of SGLang's own RPC channel, which reaches all tensor-parallel ranks in the same order. A pass
keeps no state but the KV cache: each `Span` carries its whole sequence, so that a pass can be repeated, and a sequence
whose KV was evicted is simply replayed from further back. Pure: no I/O, no torch, no SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from backend.protocol import Sampling, ScoredToken


class PassFailedError(Exception):
    """A pass broke in the scheduler; the message says why."""


class Span(msgspec.Struct, frozen=True):
    """Rows that one sequence asks for. Row p holds token p; its logits choose token p + 1.

    Rows before `wanted` are there for their KV alone and are skipped where verified KV exists. Tokens are chosen for
    rows from `wanted` on. Of the tokens up to and with row `wanted`, the last `generated` were generated. The probe
    also says from which row on to compute anew what is verified already (`redo`), and asks for digests of the logits.
    """

    tokens: list[int]
    wanted: int
    generated: int
    sampling: Sampling
    stop_ids: list[int]
    top: int
    redo: int | None = None
    digests: bool = False


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """The token chosen for one row, with the model's logprobs."""

    id: int
    logprob: float
    top: list[ScoredToken]
    digest: str = ""


class Done(msgspec.Struct, frozen=True):
    """What a pass did for a span: rows from `start` to before `stop` are computed; choices for those from `wanted` on.

    `start` == `stop` where the pass had no room for the span, or the pool none for its KV.
    """

    start: int
    stop: int
    choices: list[Choice]


class PassRequest(msgspec.Struct, frozen=True):
    """The spans of one pass, the most urgent first."""

    spans: list[Span]


class PassReply(msgspec.Struct, frozen=True):
    """What was done for each span, in order; `failure` where the whole pass broke."""

    done: list[Done]
    failure: str = ""


class ServerFacts(msgspec.Struct, frozen=True):
    """What the HTTP process cannot know by itself."""

    version: str
    device: str
    hardware: str
    fixed_ops: str
    dtype: str
    max_context: int
    pool_tokens: int
    vocab_size: int
    groups: int
    window: int
    tensor_parallel: int
    libraries: dict[str, str]


def share_groups(rows: Sequence[int], groups: int, window: int) -> list[int]:
    """How many of the pass's `groups` each of the sequences with so many `rows` left gets.

    First one each, in order; then what is left over, in order, to those with rows for more. A sequence with no rows
    gets none.
    """
    shares = [0] * len(rows)
    free = groups
    for index, count in enumerate(rows):
        if count > 0 and free > 0:
            shares[index] = 1
            free -= 1
    for index, count in enumerate(rows):
        if shares[index]:
            more = min(free, -(-count // window) - 1)
            shares[index] += more
            free -= more
    return shares
