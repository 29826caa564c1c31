"""How far an unverified answer goes along with the verified one, and how soon it leaves again: LLM-42's figure 6.

All prompts are answered at once in mode off, so that they share batches that change from step to step; then all again
by the verifier. The *first span* ends where the two first differ. The *second span* is how many tokens behind that, at
the same positions, are equal until they differ again: hardly any, which is why what follows a wrong token is rolled
back.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from queue import SimpleQueue
from statistics import median
from typing import Any

from backend.engine.engine import Engine
from backend.engine.tasks import DecodeTask
from backend.protocol import Batching, Sampling
from backend.settings import Dtype
from benchmarks import published
from benchmarks.parts import build_engine, in_processes, parser, save, smollm2
from benchmarks.prompts import Prompts
from benchmarks.report import print_table
from benchmarks.waiting import Ending

_BY = (8, 16, 32, 64, 128, 256, 512)


def answers(
    engine: Engine, prompts: Sequence[list[int]], count: int, sampling: Sampling, batching: Batching
) -> list[list[int]]:
    """The tokens of all the prompts' answers, which are decoded together."""
    ends: SimpleQueue[Exception | None] = SimpleQueue()
    tasks = [
        DecodeTask(prompt, count, sampling, frozenset(), 0, is_draft=False, batching=batching) for prompt in prompts
    ]
    for task in tasks:
        engine.submit(task, Ending(ends.put))
    for _ in tasks:
        error = ends.get()
        if error is not None:
            raise error
    return [[token.id for token in task.produced] for task in tasks]


def spans(unverified: Sequence[int], verified: Sequence[int]) -> tuple[int, int | None]:
    """Lengths of the first and the second consistent span; None for the second where nothing differs."""
    equal = [a == b for a, b in zip(unverified, verified, strict=True)]
    first = len(list(takewhile(bool, equal)))
    if first == len(equal):
        return first, None
    return first, len(list(takewhile(bool, equal[first + 1 :])))


def measure(dtype: Dtype, options: argparse.Namespace) -> dict[str, Any]:
    """All prompts in one dtype."""
    checkpoint = smollm2()
    engine = build_engine(checkpoint, dtype, options, (8, 32))
    engine.start()
    prompts = [Prompts(checkpoint.tokenizer)[number] for number in range(options.requests)]
    sampling = Sampling(temperature=options.temperature, seed=1)
    # Mode off first: it would go on from what the verifier computed of the prompts.
    unverified = answers(engine, prompts, options.tokens, sampling, "dynamic")
    verified = answers(engine, prompts, options.tokens, sampling, "invariant")
    engine.stop()
    both = [spans(*pair) for pair in zip(unverified, verified, strict=True)]
    seconds = [second for _, second in both if second is not None]
    return {
        "fingerprint": engine.info.fingerprint,
        "first_spans": [first for first, _ in both],
        "second_spans": seconds,
        "diverged_by": {
            by: sum(first < by for first, second in both if second is not None) / len(both)
            for by in _BY
            if by <= options.tokens
        },
        "median_first_span": median(first for first, _ in both),
        "second_span_at_most_1": sum(second <= 1 for second in seconds) / len(seconds) if seconds else None,
        "second_span_counts": dict(sorted(Counter(seconds).items())),
    }


def main() -> None:
    arguments = parser(__doc__, "spans")
    arguments.add_argument("--requests", type=int, default=64)
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--temperature", type=float, default=0.0)
    options = arguments.parse_args()
    if options.quick:
        options.requests, options.tokens = 12, 48
    result = in_processes("benchmarks.spans", options, measure)
    if result is None:
        return
    result["published"] = {
        "source": published.SOURCE,
        "diverged_by": published.DIVERGED_BY,
        "second_span_at_most_1": published.SECOND_SPAN_AT_MOST_1,
    }
    columns = [by for by in _BY if by <= options.tokens]
    rows: list[list[object]] = []
    for part in result["measurements"]:
        shares = part["diverged_by"]
        second = "" if part["second_span_at_most_1"] is None else part["second_span_at_most_1"]
        rows.append([part["dtype"], *(shares[str(by)] for by in columns), second])
    llm42 = [published.DIVERGED_BY.get(by, "") for by in columns]
    rows.append(["LLM-42*", *llm42, published.SECOND_SPAN_AT_MOST_1])
    print_table(
        "Share of unverified answers that differ by token", ["", *map(str, columns), "second span at most 1"], rows
    )
    print(f"* {published.SOURCE}")
    print(f"\n{save(options, result)}")


if __name__ == "__main__":
    main()
