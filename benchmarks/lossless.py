"""Is verified output what plain decoding gives? Token for token, and as a distribution.

*Bits*: with windows of 1 to 64 drafts the verified answer equals that of the fixed lane decoding alone, a token a pass
in a process of its own: tokens, logprobs and the best logprobs beside them, bit for bit.

*Distribution*: at temperature 1, over many seeds, verified answers are compared with sequences that torch's own sampler
drew from the fixed lane's logits (two_sample.py). The prompt is short: it would be computed for each sequence again. To
show what the test can see, samplers that are wrong on purpose have to fail it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
import torch

from backend.engine.engine import Engine
from backend.protocol import Sampling
from backend.settings import Dtype
from benchmarks.alone import Alone, answers_alone
from benchmarks.drive import Request, bits, complete, drafting
from benchmarks.parts import build_engine, in_processes, parser, save, smollm2
from benchmarks.prompts import Prompts
from benchmarks.report import print_table
from benchmarks.two_sample import Outcome, compare

WINDOWS = (1, 2, 4, 8, 16, 64)
_THREADS = 48
_PROMPT_TOKENS = 12
_WINDOW = 6  # Drafts of the answers that are compared as a distribution.
_PASSES = 0.01
"""The p-value below which samples count as different."""
WRONG = {
    "temperature 0.9": Sampling(temperature=0.9),
    "top_p 0.9": Sampling(temperature=1.0, top_p=0.9),
    "min_p 0.02": Sampling(temperature=1.0, min_p=0.02),
}


def with_windows(engine: Engine, requests: Sequence[Request]) -> dict[int, list[bytes]]:
    """The bits of the requests' verified answers, for each size of window; the requests share the engine."""
    answers = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for window in WINDOWS:

            def answer(request: Request, window: int = window) -> bytes:
                return bits(complete(engine, request, drafting(engine, request, (window,))))

            answers[window] = list(threads.map(answer, requests))
    return answers


def verified_sample(engine: Engine, request: Request, seeds: range, windows: Sequence[int]) -> torch.Tensor:
    """The tokens of verified answers for all seeds, int64 [seeds, count]."""

    def answer(seed: int) -> list[int]:
        seeded = msgspec.structs.replace(request.sampling, seed=seed)
        own = Request(request.prompt, request.count, seeded)
        return [token.id for token in complete(engine, own, drafting(engine, own, windows))]

    with ThreadPoolExecutor(_THREADS) as threads:
        return torch.tensor(list(threads.map(answer, seeds)))


def direct_sample(alone: Alone, request: Request, sequences: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences drawn directly, int64 [sequences, count]."""
    sizes = [min(alone.most, sequences - first) for first in range(0, sequences, alone.most)]
    return torch.cat([alone.sample(request, size, generator) for size in sizes])


def measure(dtype: Dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Both questions in one dtype."""
    build = partial(_build, dtype, options)
    engine, alone = build(), Alone(build())
    prompts = Prompts(smollm2().tokenizer)
    engine.start()
    samplings = [Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.95, seed=42), Sampling(seed=7)]
    requests = [
        Request(tuple(prompts[number]), options.tokens, samplings[number % len(samplings)], top=5)
        for number in range(options.requests)
    ]
    expected = [bits(answer) for answer in answers_alone(build, requests)]
    answers = with_windows(engine, requests)
    differing = {window: sum(a != b for a, b in zip(expected, answers[window], strict=True)) for window in WINDOWS}

    request = Request(tuple(prompts[0][-_PROMPT_TOKENS:]), options.positions, Sampling(temperature=1.0))
    generator = torch.Generator().manual_seed(0)
    reference = direct_sample(alone, request, options.seeds, generator)

    def against_reference(sampling: Sampling) -> Outcome:
        changed = Request(request.prompt, request.count, sampling)
        sample = verified_sample(engine, changed, range(options.seeds), (_WINDOW,))
        return compare(sample, reference, options.permutations, generator)

    verified = against_reference(request.sampling)
    wrong = {name: against_reference(sampling) for name, sampling in WRONG.items()}
    engine.stop()
    return {
        "fingerprint": engine.info.fingerprint,
        "windows": {
            "answers_each": len(requests),
            "tokens_each": len(requests) * options.tokens,
            "differing_answers": differing,
        },
        "distribution": {
            "verified": asdict(verified),
            "wrong_on_purpose": {name: asdict(outcome) for name, outcome in wrong.items()},
        },
        "passed": not any(differing.values())
        and verified.p >= _PASSES
        and all(outcome.p < _PASSES for outcome in wrong.values()),
    }


def _build(dtype: Dtype, options: argparse.Namespace) -> Engine:
    return build_engine(smollm2(), dtype, options, (8, 32))


def main() -> None:
    arguments = parser(__doc__, "lossless")
    arguments.add_argument("--requests", type=int, default=12, help="answers compared for each size of window")
    arguments.add_argument("--tokens", type=int, default=96, help="of each of these answers")
    arguments.add_argument("--seeds", type=int, default=1200)
    arguments.add_argument("--positions", type=int, default=8, help="tokens drawn for each seed")
    arguments.add_argument("--permutations", type=int, default=2000)
    options = arguments.parse_args()
    if options.quick:
        options.requests, options.tokens, options.seeds, options.permutations = 3, 24, 100, 200
    result = in_processes("benchmarks.lossless", options, measure)
    if result is None:
        return
    rows = []
    for measurement in result["measurements"]:
        dtype, windows, distribution = (measurement[key] for key in ("dtype", "windows", "distribution"))
        differing = ", ".join(f"{count} with {window}" for window, count in windows["differing_answers"].items())
        print(f"{dtype}: of {windows['answers_each']} answers differ {differing}")
        samples = {"verified": distribution["verified"]} | distribution["wrong_on_purpose"]
        for name, outcome in samples.items():
            rows.append([f"{dtype}, {name}", outcome["tokens"], f"{outcome['p']:.4f}"])
    print_table("Against direct sampling: two-sample test", ["sample", "tokens", "p"], rows)
    print(f"\n{save(options, result)}")
    if not all(measurement["passed"] for measurement in result["measurements"]):
        sys.exit("verified output is not that of plain decoding")


if __name__ == "__main__":
    main()
