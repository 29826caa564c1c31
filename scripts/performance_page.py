"""Prints docs/performance.md, made of benchmarks/results: `make reference` writes it, a test compares it.

Figures are read, never typed, and each table names its file, so that a benchmark run anew changes the page with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SHARES = (2, 5, 10, 20, 50, 100)
TARGETS = {
    "not_below_better_way": "not below the better of the two ways",
    "above_llm42_sharegpt": "above LLM-42's published ratio",
    "off_not_slowed_beyond_its_share": "mode off not slowed beyond its share",
}
CHUNKS = 100
"""Of a streamed answer in benchmarks/gateway.py."""

HEAD = """\
# Performance

<!-- Made by `make reference` out of benchmarks/results; edit scripts/performance_page.py. -->

All figures are from CPUs, with SmolLM2-135M unless a table says otherwise, on machines that others were using too: trust ratios, and of those the ones by CPU time, to about 0.1. No GPU has been measured. Each table comes from a file in
`benchmarks/results/`, which also names the machine, the commit and the load; `benchmarks/README.md` says how each is measured. `make bench` measures the engine and replays on your machine, the command under a table what it shows."""


def result(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return read


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def source(name: str, command: str) -> str:
    about = result(name)
    return (
        f"`{command}`; `{name}.json`, {about['cpu']} ({about['isa']}), {about['cores']} cores, load"
        f" {about['load_average'][0]:.1f} at the end, {about['time'][:10]}."
    )


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def sections() -> Iterator[str]:
    yield HEAD
    yield from by_share()
    yield from first_token()
    yield from rolled_back()
    yield from spans()
    yield from beside_others()
    yield from sglang()
    yield from gateway()
    yield from hits()
    yield from replayed()
    yield from holds()


def by_share() -> Iterator[str]:
    yield "## What verified traffic costs"
    runs = ("share_table", "share_table_long")
    options = result(runs[0])["options"]
    yield (
        f"Throughput of the engine as a ratio to mode off by CPU time, {options['in_flight']} requests in flight, one thread, passes of {options['shape'][0]} x {options['shape'][1]}."
        " `adaptive` is what the gateway does: draft and verify, or decode in the fixed lane, whichever costs less. `drafted` drafts and verifies everything. Last, everything in"
        " batch-invariant arithmetic, the alternative that others take. `off` is the speed, by the clock, of a request in mode off while so many others are verified: at 1 it is as if they were in mode off too."
    )
    rows = []
    judged: list[list[str]] = []
    for measured, load in loads(runs):
        cells = {(cell["way"], cell["percent"]): cell["cpu_ratio"] for cell in load["cells"]}
        invariant = next(ratio for (way, _), ratio in cells.items() if way == "batch_invariant")
        lengths = f"{load['prompt_tokens']} + {load['new_tokens']}"
        for way in ("adaptive", "drafted"):
            found = [cells.get((way, percent)) for percent in SHARES]
            if any(found):
                rows.append([measured["dtype"], lengths, way, *map(figure, found), f"{invariant:.2f}"])
        speeds = {cell["percent"]: cell["off_speed"] for cell in load["cells"] if cell["way"] == "adaptive"}
        found = [speeds.get(percent) for percent in SHARES]
        rows.append([measured["dtype"], lengths, "off", *map(figure, found), ""])
        judged.append([measured["dtype"], lengths, *(missed(load["targets"], name) for name in TARGETS)])
    yield table(["dtype", "prompt + answer", "way", *(f"{percent} %" for percent in SHARES), "batch-invariant"], rows)
    for run in runs:
        yield source(run, "python -m benchmarks.share_table")
    yield "Shares at which a target was missed, as the run judged it:"
    yield table(["dtype", "prompt + answer", *TARGETS.values()], judged)


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def loads(runs: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """What was measured in one dtype, and one workload of it."""
    for run in runs:
        for measured in result(run)["measurements"]:
            for load in measured["workloads"]:
                yield measured, load


def missed(targets: Any, name: str) -> str:
    return ", ".join(f"{target['percent']} %" for target in targets if target[name] is False) or "none"


def first_token() -> Iterator[str]:
    yield "## The first token"
    about = result("first_token")
    rows = [
        [measured["dtype"], share["percent"], f"{share['ratio_p50']:.2f}", f"{share['ratio_p99']:.2f}"]
        for measured in about["measurements"]
        for share in measured["shares"]
    ]
    yield "Time until the first token is final, as a ratio to mode off at the same rate of requests (half of what mode off can serve)."
    yield table(["dtype", "verified, %", "P50", "P99"], rows)
    yield source("first_token", "python -m benchmarks.first_token")
    yield f"Target: {about['target']}."


def rolled_back() -> Iterator[str]:
    yield "## What is rolled back"
    rows = [
        [
            measured["dtype"],
            f"{shape['groups']} x {shape['window']}",
            share(shape["recomputed"]),
            *(f"{shape['cpu_ratios'][percent]:.2f}" for percent in ("10%", "100%")),
        ]
        for measured in result("rollbacks")["measurements"]
        for shape in measured["shapes"]
    ]
    yield "Where every window is drafted: the share of drafted tokens that is computed again, and throughput as a ratio to mode off by CPU time, by the shape of the verification pass. In float32 nothing is rolled back with this model."
    yield table(["dtype", "shape", "recomputed", "10 % verified", "100 % verified"], rows)
    yield source("rollbacks", "python -m benchmarks.rollbacks")


def spans() -> Iterator[str]:
    yield "## How far unverified answers go along"
    for measured in result("spans")["measurements"]:
        by = measured["diverged_by"]
        yield f"Share of answers in mode off ({measured['dtype']}) that have parted from the verified one, by token:"
        yield table(list(by), [[share(value) for value in by.values()]])
        yield (
            f"The median parts at token {measured['median_first_span']:g}; behind that, {share(measured['second_span_at_most_1'])} agree by chance for one more token at the most."
            " That is why what is behind a wrong token is thrown away, not corrected."
        )
    yield source("spans", "python -m benchmarks.spans")


def beside_others() -> Iterator[str]:
    yield "## The engine beside others"
    yield (
        "The engine in mode off against others with the same weights, prompts and threads: its throughput over theirs, by"
        " wall time and by CPU time, the median of pairs of runs, and the share of requests that both answer with the"
        " same tokens."
    )
    for name, command in (
        ("engine", "python -m benchmarks.engine"),
        ("engine_beside_others", "python -m benchmarks.engine --others sglang continuous transformers"),
    ):
        rows = [
            [
                measured["dtype"],
                measured["concurrent"],
                other,
                f"{figures['ratio']:.2f}",
                f"{figures['cpu_ratio']:.2f}",
                share(figures["same_tokens"]),
            ]
            for measured in result(name)["measurements"]
            for other, figures in measured.items()
            if isinstance(figures, dict) and "tokens_per_s" in figures and other != "engine"
        ]
        yield table(["dtype", "in flight", "beside", "wall time", "CPU time", "same tokens"], rows)
        yield source(name, command)


def sglang() -> Iterator[str]:
    yield "## On SGLang"
    about = result("sglang_share")
    cells = about["measurements"]
    yield "Throughput as a ratio to SGLang's own endpoint on the same server, float32 on a CPU, 8 requests in flight:"
    yield table([cell["cell"] for cell in cells], [[f"{cell['ratio']:.2f}" for cell in cells]])
    yield source("sglang_share", "python -m benchmarks.sglang_share")


def gateway() -> Iterator[str]:
    yield "## The gateway"
    about = result("gateway")
    yield "CPU of the proxy's process for each request that is handed on in mode off to a mock upstream, and for each streamed chunk, at 16 in flight; latency is with the load generator on the same cores. Targets: 0.7 ms a request and 30 µs a chunk, 50 times less than LiteLLM, within 3 times the Rust router, 90 MB."
    rows = []
    for subject in about["subjects"]:
        cells = {(cell["concurrent"], cell["stream"]): cell for cell in subject["cells"]}
        whole, stream = cells[16, False], cells[16, True]
        chunk_us = 1000 * (stream["cpu_ms_per_request"] - whole["cpu_ms_per_request"]) / CHUNKS
        errors = sum(cell["errors"] for cell in subject["cells"])
        if subject["name"] != "direct":
            rows.append(
                [
                    subject["name"],
                    f"{whole['cpu_ms_per_request']:.2f}",
                    f"{chunk_us:.0f}",
                    f"{whole['p50_ms']:.1f}",
                    f"{whole['p99_ms']:.1f}",
                    f"{subject['idle_mb']:.0f}",
                    errors,
                ]
            )
    yield table(["", "ms a request", "µs a chunk", "P50, ms", "P99, ms", "MB idle", "errors"], rows)
    yield source("gateway", "python -m benchmarks.gateway")


def hits() -> Iterator[str]:
    yield "## Answers out of the log"
    yield (
        "CPU of the gateway's process for each answer that its log has, HTTP included, at 1, 16 and 64 in flight."
        " Targets: 0.25 ms from memory, 0.5 ms from Redis, 50 times less than LiteLLM."
    )
    cells = result("cache")["cells"]
    rows: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        answer = "40 words" if cell["tokens"] is None else f"{cell['tokens']} tokens"
        rows.setdefault((cell["subject"], answer), []).append(f"{cell['cpu_ms_per_hit']:.2f}")
    yield table(["", "answer", "1", "16", "64"], [[*of, *figures] for of, figures in rows.items()])
    yield source("cache", "python -m benchmarks.cache --peers ENVIRONMENT")


def replayed() -> Iterator[str]:
    yield "## Replaying a receipt"
    about = result("replay")
    yield f"How many times faster an answer of {about['options']['tokens']} tokens is computed again from its receipt than it was generated. Target: 5."
    rows = [[one["dtype"], f"{one['wall_ratio']:.1f}", f"{one['cpu_ratio']:.1f}"] for one in about["measurements"]]
    yield table(["dtype", "by the clock", "by CPU time"], rows)
    yield source("replay", "python -m benchmarks.replay")


def holds() -> Iterator[str]:
    yield "## Whether it holds"
    yield "What was compared, bit for bit, and how much of it was wrong:"
    rows: list[list[object]] = []
    for measured in result("soak")["measurements"]:
        did = f"{measured['answers']:,} answers, {measured['tokens']:,} tokens, {measured['evictions']:,} evictions"
        did += f"; {measured['grown_bytes'] >> 20} MiB more held in the last quarter than in the second"
        wrong = measured["differing_answers"]
        rows.append([f"mixed traffic against each answer alone, {measured['dtype']}", did, wrong, "`soak.json`"])
    for name in ("lossless", "lossless_float32"):
        for measured in result(name)["measurements"]:
            each = measured["windows"]
            differing = sum(each["differing_answers"].values())
            did = f"{each['answers_each']} answers of each size"
            rows.append([f"windows of 1 to 64 against none, {measured['dtype']}", did, differing, f"`{name}.json`"])
    kills = result("kills")
    did = f"{kills['kills']} replicas killed in mid-stream"
    wrong = kills["kills"] - kills["equal"]
    rows.append(["streams that go on elsewhere, tiny random model", did, wrong, "`kills.json`"])
    for name, by in (("chaos", "tiny random model"), ("chaos_kills", "toy backends")):
        report = result(name)["report"]
        deaths = sum(report["deaths"].values())
        did = f"{report['answers']:,} answers in {report['seconds']:.0f} s, {deaths} processes killed or restarted"
        rows.append([f"gateways and backends that die under load, {by}", did, report["wrong"], f"`{name}.json`"])
    yield table(["", "what was done", "wrong", ""], rows)
    yield "At temperature 1 verified answers are distributed as direct sampling is (permutation test; samplers that are wrong on purpose fail it):"
    sampled = [
        (measured["dtype"], measured["distribution"])
        for name in ("lossless", "lossless_float32")
        for measured in result(name)["measurements"]
    ]
    yield table(
        ["dtype", "tokens", "p", "p of the wrong ones"],
        [
            [
                dtype,
                f"{tests['verified']['tokens']:,}",
                f"{tests['verified']['p']:.3f}",
                ", ".join(f"{wrong['p']:.4f}" for wrong in tests["wrong_on_purpose"].values()),
            ]
            for dtype, tests in sampled
        ],
    )


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(sections()) + "\n")
