"""Which shape G x W of the verify pass is the best where every window is drafted: recomputed tokens and throughput.

For each shape a closed loop with all completions verified, and one with a tenth of them, beside one in mode off;
windows are full (W - 1 drafts) from the first one on. `recomputed` is the share of drafted tokens that were rolled
back, which is LLM-42's figure 13; the throughput is what the defaults of G and W are chosen by.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from backend.protocol import Sampling
from backend.settings import Dtype
from benchmarks import published
from benchmarks.closed_loop import ClosedLoop, Load, Tally
from benchmarks.parts import build_engine, in_processes, parser, save, shape, smollm2
from benchmarks.pass_log import PassLog
from benchmarks.prompts import Prompts
from benchmarks.report import print_table
from benchmarks.traffic import Way, numbered

_PERCENTS = (0, 10, 100)


def measure(dtype: Dtype, options: argparse.Namespace) -> dict[str, Any]:
    """All shapes in one dtype, an engine for each."""
    checkpoint = smollm2()
    prompts = Prompts(checkpoint.tokenizer)
    prompt, output = options.workload
    sampling = Sampling(temperature=options.temperature, seed=1)
    measured = []
    for groups, window in [(groups, window) for window in options.windows for groups in options.groups]:
        engine = build_engine(checkpoint, dtype, options, (groups, window))
        passes = PassLog(engine)
        engine.start()
        tallies: dict[int, Tally] = {}
        for percent in _PERCENTS:
            load = Load(percent, options.in_flight, output, Way((window - 1,), sampling, adaptive=False))
            # The same prompts for every shape: they are the engine's first.
            loop = ClosedLoop(engine, passes, numbered(prompts, percent * 1000, prompt), load)
            tallies[percent] = loop.run(options.completions)
        engine.stop()
        measured.append({"groups": groups, "window": window} | _figures(tallies))
        print(f"{dtype} {groups}x{window}: {measured[-1]['recomputed']:.3f} recomputed", file=sys.stderr)
    return {"fingerprint": engine.info.fingerprint, "shapes": measured}


def _figures(tallies: dict[int, Tally]) -> dict[str, Any]:
    def ratio(percent: int, seconds: str) -> float:
        """Tokens per second, or per second of CPU, relative to mode off."""
        run, off = tallies[percent], tallies[0]
        return float(run.tokens / getattr(run, seconds) * getattr(off, seconds) / off.tokens)

    counts = tallies[100].counts
    return {
        "recomputed": counts.rolled_back / max(1, counts.drafted),
        "rollbacks_per_window": counts.rollbacks / max(1, counts.windows),
        "ratios": {f"{percent}%": ratio(percent, "wall_s") for percent in _PERCENTS},
        "cpu_ratios": {f"{percent}%": ratio(percent, "cpu_s") for percent in _PERCENTS},
        "tokens_per_s": {f"{percent}%": tallies[percent].tokens / tallies[percent].wall_s for percent in _PERCENTS},
        "runs": {f"{percent}%": asdict(tally) for percent, tally in tallies.items()},
    }


def main() -> None:
    arguments = parser(__doc__, "rollbacks")
    arguments.add_argument("--windows", nargs="+", type=int, default=[8, 16, 32, 64], help="W, drafts and one")
    arguments.add_argument("--groups", nargs="+", type=int, default=[1, 4, 8, 16], help="G")
    arguments.add_argument("--workload", type=shape, default=(32, 128), help="PROMPTxOUTPUT tokens")
    arguments.add_argument("--completions", type=int, default=20, help="measured, for each shape and share")
    arguments.add_argument("--in-flight", type=int, default=16)
    arguments.add_argument("--temperature", type=float, default=0.0)
    options = arguments.parse_args()
    if options.quick:
        options.windows, options.groups, options.completions, options.workload = [16], [8], 10, (32, 32)
    result = in_processes("benchmarks.rollbacks", options, measure)
    if result is None:
        return
    result["published"] = {"source": published.SOURCE, "recomputed": published.RECOMPUTED}
    rows: list[list[object]] = []
    for part in result["measurements"]:
        for figures in part["shapes"]:
            name = f"{figures['groups']}x{figures['window']}"
            llm42 = published.RECOMPUTED.get(name, "")
            cpu, wall = figures["cpu_ratios"], figures["ratios"]
            row = [figures["recomputed"], llm42, wall["10%"], cpu["10%"], wall["100%"], cpu["100%"]]
            rows.append([f"{part['dtype']}, {name}", *row])
    head = ["G x W", "recomputed", "LLM-42*", "ratio at 10%", "CPU ratio", "ratio at 100%", "CPU ratio"]
    print_table("Every window drafted: recomputed tokens, and throughput as a ratio to mode off", head, rows)
    print(f"* {published.SOURCE}")
    print(f"\n{save(options, result)}")


if __name__ == "__main__":
    main()
