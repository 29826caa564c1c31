"""Soak: mixed random traffic on one engine, then every verified answer beside the same one computed alone.

The engine has little KV memory, so that blocks are evicted and streams preempted all the time (soak_traffic.py). Each
distinct request that was answered is computed again in a fresh process, alone, a token a pass (alone.py); all answers
have to equal that one in every bit they report. Meanwhile the KV accounting is checked, and memory is sampled: what the
process holds must not grow, and at the end every block must be free or evictable. The exit status is 1 where anything
is off.

Before each sample freed memory goes back to the system. What the C library would otherwise keep of it, for each thread
apart, is the most that thread ever needed at a time: it rises by chance for as long as one looks, to hundreds of MiB,
and would hide a leak. The first half of a run is for what fills up to a bound: compiled kernels, masks of grammars.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from backend.engine.engine import Engine
from backend.engine.kv_pool import RESERVED_BLOCKS, block_bytes
from backend.engine.memory import give_back
from backend.engine.tasks import DecodeTask
from backend.protocol import Sampling, TokenizerFiles
from backend.settings import Dtype
from benchmarks.alone import Build, answers_alone
from benchmarks.drive import bits
from benchmarks.parts import build_engine, in_processes, parser, save, shape, smollm2
from benchmarks.report import print_table
from benchmarks.soak_traffic import Mix, SoakTraffic
from benchmarks.subject import memory
from benchmarks.waiting import Ending

_SAMPLES = 100
_SLACK_BYTES = 16 << 20
_WARMING_BYTES = 256 << 20
"""What a quick run may grow by: it touches its memory for the first time throughout."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one moment, taken between two passes. Nothing that was freed is resident then."""

    time_s: float
    resident_bytes: int
    available_blocks: int
    evictions: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a soak; `faults` says in words what is wrong. `peak_bytes` counts what was freed and kept, too."""

    tokens: int
    answers: int
    distinct_requests: int
    differing_answers: int
    did: dict[str, int]
    evictions: int
    preemptions: int
    grown_bytes: int
    peak_bytes: int
    samples: list[Sample]
    faults: list[str] = field(default_factory=list)


def soak(
    build: Build,
    tokenizer: TokenizerFiles,
    mix: Mix,
    enough: Callable[[int], bool],
    sample_every_s: float,
    slack_bytes: int = _SLACK_BYTES,
) -> Report:
    """Run the traffic on an engine built here until it is enough, then compare with answers of another process."""
    engine = build()
    engine.start()
    traffic = SoakTraffic(engine, mix, tokenizer)
    samples = [_sample(engine)]
    over = threading.Event()

    def keep_sampling() -> None:
        while not over.wait(sample_every_s):
            samples.append(_sample(engine))

    sampler = threading.Thread(target=keep_sampling)
    sampler.start()
    try:
        traffic.run(enough)
    finally:
        over.set()
        sampler.join()
    samples.append(_sample(engine))
    engine.stop()
    requests = [traffic.requests[index] for index in sorted(traffic.answers)]
    alone = answers_alone(build, requests, tokenizer)
    return _judge(traffic, [bits(answer) for answer in alone], samples, slack_bytes)


def _judge(traffic: SoakTraffic, expected: Sequence[bytes], samples: list[Sample], slack_bytes: int) -> Report:
    """`expected` are the bits of each distinct request that was answered, in order of their numbers."""
    indices = sorted(traffic.answers)
    differing = sum(
        count
        for index, alone in zip(indices, expected, strict=True)
        for answer, count in traffic.answers[index].items()
        if answer != alone
    )
    second, last = (samples[len(samples) * quarter // 4 : len(samples) * (quarter + 1) // 4] for quarter in (1, 3))
    grown = int(median(s.resident_bytes for s in last) - median(s.resident_bytes for s in second)) if second else 0
    end = samples[-1]
    faults = []
    if differing:
        faults.append(f"{differing} answers differ from those computed alone")
    if grown > slack_bytes:
        faults.append(f"the memory that the process holds grew by {grown >> 20} MiB")
    if end.available_blocks != samples[0].available_blocks:
        faults.append(f"blocks are not given back: {end}")
    return Report(
        traffic.tokens,
        traffic.did["answers"],
        len(indices),
        differing,
        dict(traffic.did),
        end.evictions,
        end.preemptions,
        grown,
        memory("VmHWM"),
        samples,
        faults,
    )


def _sample(engine: Engine) -> Sample:
    """Look at the engine from its own thread, between two passes; its accounting must be sound."""
    samples: list[Sample] = []

    def look(error: Exception | None) -> None:
        if error is None:
            engine._cache.check_integrity()
            give_back()
            stats = engine.stats()
            samples.append(
                Sample(time.monotonic(), memory("VmRSS"), stats.blocks_available, stats.evictions, stats.preemptions)
            )
        looked.set()

    looked = threading.Event()
    engine.submit(DecodeTask([0], 1, Sampling(temperature=0.0), frozenset(), 0, is_draft=True), Ending(look))
    looked.wait()
    if not samples:
        raise RuntimeError("the engine broke down")
    return samples[0]


def measure(dtype: Dtype, options: argparse.Namespace) -> dict[str, Any]:
    """A soak of the real model in one dtype."""
    mix = Mix(options.seed, options.requests, options.clients, options.blocks)
    end = time.monotonic() + options.minutes * 60
    # What is in flight then is still answered.
    report = soak(
        partial(_build, dtype, options),
        smollm2().tokenizer,
        mix,
        lambda answers: time.monotonic() >= end,
        sample_every_s=options.minutes * 60 / _SAMPLES,
        slack_bytes=_WARMING_BYTES if options.quick else _SLACK_BYTES,
    )
    return {"mix": asdict(mix)} | asdict(report)


def _build(dtype: Dtype, options: argparse.Namespace) -> Engine:
    checkpoint = smollm2()
    options.kv_bytes = (options.blocks + RESERVED_BLOCKS) * block_bytes(checkpoint.config, getattr(torch, dtype))
    return build_engine(checkpoint, dtype, options, options.shape)


def main() -> None:
    arguments, usual = parser(__doc__, "soak"), Mix()
    arguments.add_argument("--minutes", type=float, default=10.0, help="of traffic, for each dtype")
    arguments.add_argument("--shape", type=shape, default=(8, 32), help="GxW of a verify pass")
    arguments.add_argument("--seed", type=int, default=usual.seed)
    arguments.add_argument("--requests", type=int, default=usual.requests, help="distinct verified ones")
    arguments.add_argument("--clients", type=int, default=usual.clients)
    arguments.add_argument("--blocks", type=int, default=usual.blocks, help="of KV, 64 tokens each")
    options = arguments.parse_args()
    if options.quick:
        options.minutes, options.requests = min(options.minutes, 0.3), 20
    result = in_processes("benchmarks.soak", options, measure)
    if result is None:
        return
    rows, faults = [], []
    for part in result["measurements"]:
        did = part["did"]
        keys = ("tokens", "answers", "distinct_requests", "differing_answers")
        grammars, cancelled = (did.get(kind, 0) for kind in ("answers of a grammar", "cancellations"))
        rest = (grammars, cancelled, part["evictions"], part["preemptions"], part["grown_bytes"] >> 20)
        rows.append([part["dtype"], *(part[key] for key in keys), *rest])
        faults += [f"{part['dtype']}: {fault}" for fault in part["faults"]]
    head = [
        "dtype",
        "tokens compared",
        "answers",
        "distinct",
        "differing",
        "of a grammar",
        "cancelled calls",
        "evictions",
        "preemptions",
        "MiB grown",
    ]
    print_table("Verified answers under load beside the same computed alone", head, rows)
    print(f"\n{save(options, result)}")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
