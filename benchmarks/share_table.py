"""Throughput by the share of verified requests, as a ratio to mode off: LLM-42's offline table, on this machine.

A closed loop on the engine itself, for prompts and outputs of several lengths. "Adaptive" follows the engine's advice,
as the gateway does; "drafted" drafts and verifies every window, which is LLM-42's way alone. Beside them, what users do
instead: "batch_invariant" decodes everything in the fixed lane's arithmetic, "batch_of_one" has one request in flight.
All ways take turns in one process for each dtype, so that noise hits all of them; a figure is the median of the rounds.

Tokens a second are those of whole completions. Within an interval there come as many prompts as tokens allow by chance:
where 16 answers of 32 tokens are in flight, 24 completions can have brought a fifth more or less than 24 times 32
tokens, at the price of 24 prompts. So both count, prompts and tokens, by what they cost in mode off. Times are
those at one pace of the machine, as told by passes timed around each interval (pace.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from backend.protocol import Batching, Sampling
from backend.settings import Device, Dtype
from benchmarks import published
from benchmarks.closed_loop import ClosedLoop, Load, Tally
from benchmarks.cost_model import RowCosts, bound
from benchmarks.pace import Pace, level
from benchmarks.parts import Shape, build_engine, in_processes, parser, save, shape, smollm2
from benchmarks.pass_log import Kind, PassLog
from benchmarks.prompts import Prompts
from benchmarks.report import print_table
from benchmarks.traffic import Way, numbered
from policies.policy import window_schedule

_PERCENTS = (2, 5, 10, 20, 50, 100)
_FIRST_WINDOW = 8
_BATCHING: dict[str, Batching] = {"batch_invariant": "invariant", "batch_of_one": "none"}
_AT_MOST_ALONE = 3  # Completions of batch_of_one in a round: it is slow, and has no shares to balance.


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of serving and one share of verified requests, in per cent."""

    way: str
    percent: int


_OFF, _INVARIANT, _OF_ONE, _ALL_DRAFTED = (
    Cell("off", 0),
    Cell("batch_invariant", 0),
    Cell("batch_of_one", 0),
    Cell("drafted", 100),
)


def cells(percents: Sequence[int]) -> list[Cell]:
    """Those of a run, in their order; with all drafted, which says what windows cost."""
    drafted = sorted({*percents, _ALL_DRAFTED.percent})
    return [
        _OFF,
        *(Cell("adaptive", percent) for percent in percents),
        *(Cell("drafted", percent) for percent in drafted),
        _INVARIANT,
        _OF_ONE,
    ]


class Bench:
    """The engines of one dtype, and the next prompt's number."""

    def __init__(self, dtype: Dtype, options: argparse.Namespace):
        checkpoint = smollm2()
        self._options = options
        self._prompts = Prompts(checkpoint.tokenizer)
        self._number = 0
        self._engine = build_engine(checkpoint, dtype, options, options.shape)
        self._passes = PassLog(self._engine)
        self._pace = Pace(self._engine) if options.device == "cpu" else None
        self._engine.start()

    def run(self, cell: Cell, workload: Shape) -> Tally:
        options = self._options
        prompt, output = workload
        windows = window_schedule(_FIRST_WINDOW, options.shape[1] - 1)
        sampling = Sampling(temperature=options.temperature, seed=1)
        way = Way(windows, sampling, cell.way == "adaptive", batching=_BATCHING.get(cell.way, "dynamic"))
        alone = cell.way == "batch_of_one"
        load = Load(cell.percent, 1 if alone else options.in_flight, output, way)
        loop = ClosedLoop(self._engine, self._passes, numbered(self._prompts, self._number, prompt), load)
        # Prompts that no cell had before: the prefix cache would know them. Enough completions for the share to be due.
        self._number += 1000
        due = max(options.completions, 100 // cell.percent if cell.percent else 0)
        before = self._pace_s()
        tally = loop.run(min(_AT_MOST_ALONE, due) if alone else due)
        tally.pace_s = (before + self._pace_s()) / 2
        return tally

    def _pace_s(self) -> float:
        return 1.0 if self._pace is None else self._pace.seconds()

    def close(self) -> str:
        """Stop the engine; its fingerprint."""
        self._engine.stop()
        return self._engine.info.fingerprint


def measure(dtype: Dtype, options: argparse.Namespace) -> dict[str, Any]:
    """All workloads and cells in one dtype."""
    bench = Bench(dtype, options)
    order = cells(options.percents)
    tallies: dict[Shape, dict[Cell, list[Tally]]] = {
        workload: {cell: [] for cell in order} for workload in options.workloads
    }
    for turn in range(options.rounds):
        for workload, runs in tallies.items():
            for cell in order[:: 1 if turn % 2 == 0 else -1]:
                runs[cell].append(run := bench.run(cell, workload))
                print(f"{dtype} {workload} {cell}: {run.tokens} tokens in {run.wall_s:.1f} s", file=sys.stderr)
    level([run for runs in tallies.values() for cell in runs.values() for run in cell])
    return {
        "fingerprint": bench.close(),
        "workloads": [_workload(workload, runs, options) for workload, runs in tallies.items()],
    }


def _workload(workload: Shape, tallies: dict[Cell, list[Tally]], options: argparse.Namespace) -> dict[str, Any]:
    prompt, output = workload
    costs = _costs(tallies, options.device)
    speed = Speed(prompt * costs.fast_prompt, costs.fast_decode + costs.other, output)

    def busy_ratio(cell: Cell) -> float:
        """The ratio to mode off without what others have taken of the machine, where that can be told."""
        return cpu_ratios[cell] if options.device == "cpu" else ratios[cell]

    off = tallies[_OFF]
    ratios = {cell: speed.wall(runs) / speed.wall(off) for cell, runs in tallies.items()}
    cpu_ratios = {cell: speed.cpu(runs) / speed.cpu(off) for cell, runs in tallies.items()}
    figures = []
    for cell, runs in tallies.items():
        best = bound(costs, *workload, options.in_flight, options.shape[1], cell.percent)
        figures.append(
            asdict(cell)
            | {"tokens_per_s": speed.wall(runs), "ratio": ratios[cell], "cpu_ratio": cpu_ratios[cell]}
            | {"off_speed": _off_speed(runs) / _off_speed(off) if cell.percent < 100 else None}
            | _verified(runs)
            | {"bound": asdict(best) | {"reached": busy_ratio(cell) / best.ratio}}
            | {"runs": [asdict(run) for run in runs]}
        )
    spread = [speed.cpu([run]) / speed.cpu(off) for run in off]
    targets = []
    for percent in options.percents:
        adaptive = Cell("adaptive", percent)
        others = max(busy_ratio(Cell("drafted", percent)), busy_ratio(_INVARIANT))
        best = bound(costs, *workload, options.in_flight, options.shape[1], percent)
        off_speed = _off_speed(tallies[adaptive]) / _off_speed(off) if percent < 100 else None
        targets.append(
            {
                "percent": percent,
                "ratio": ratios[adaptive],
                "cpu_ratio": cpu_ratios[adaptive],
                "of_better_way": busy_ratio(adaptive) / others,
                "not_below_better_way": busy_ratio(adaptive) >= others,
                "above_llm42_sharegpt": busy_ratio(adaptive) > published.OFFLINE["ShareGPT"].by_percent[percent],
                "off_not_slowed_beyond_its_share": None if off_speed is None else off_speed >= 1,
                "off_speed": off_speed,
                "of_bound": busy_ratio(adaptive) / best.ratio,
            }
        )
    return {
        "prompt_tokens": prompt,
        "new_tokens": output,
        "row_seconds": asdict(costs),
        "off_spread": max(spread) - min(spread),
        "targets": targets,
        "cells": figures,
    }


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of completions of `output` tokens, the median of runs; see the module's description.

    `prompt_s` and `token_s` are what a prompt and a token cost in mode off.
    """

    prompt_s: float
    token_s: float
    output: int

    def wall(self, runs: list[Tally]) -> float:
        return median(self._tokens(run) / run.wall_s for run in runs)

    def cpu(self, runs: list[Tally]) -> float:
        return median(self._tokens(run) / run.cpu_s for run in runs)

    def _tokens(self, run: Tally) -> float:
        served_s = run.prompts * self.prompt_s + run.tokens * self.token_s
        return served_s / (self.prompt_s / self.output + self.token_s)


def _off_speed(runs: list[Tally]) -> float:
    """Tokens a second of one request in mode off while in flight. Equal parts of the machine give it that of off alone.

    Relative to off alone this is also the tokens a second of all of mode off, relative to its share of what is in
    flight.
    """
    return sum(run.tokens - run.verified_tokens for run in runs) / sum(run.off_in_flight_s for run in runs)


def _verified(runs: list[Tally]) -> dict[str, float]:
    ended = max(1, sum(run.verified_completions for run in runs))
    drafted, rolled_back, windows, rollbacks = (
        sum(getattr(run.counts, name) for run in runs) for name in ("drafted", "rolled_back", "windows", "rollbacks")
    )
    return {
        "verified_token_share": sum(run.verified_tokens for run in runs) / sum(run.tokens for run in runs),
        "windows_each": windows / ended,
        "rollbacks_each": rollbacks / ended,
        "recomputed_share": rolled_back / max(1, drafted),
    }


def _costs(tallies: dict[Cell, list[Tally]], device: Device) -> RowCosts:
    """Seconds per row of each kind, from the cells in which that kind runs in full batches."""

    def per_row(cell: Cell, *kinds: Kind) -> float:
        found = [run.passes[kind] for run in tallies[cell] for kind in kinds if kind in run.passes]
        return sum(seconds for seconds, _, _ in found) / max(1, sum(rows for _, rows, _ in found))

    off = tallies[_OFF]
    outside = sum(
        (run.cpu_s if device == "cpu" else run.wall_s) - sum(seconds for seconds, _, _ in run.passes.values())
        for run in off
    )
    return RowCosts(
        fast_prompt=per_row(_OFF, "fast prompt"),
        fixed_prompt=per_row(_ALL_DRAFTED, "fixed prompt"),
        fast_decode=per_row(_OFF, "fast decode"),
        fixed_decode=per_row(_INVARIANT, "fast decode", "fixed decode"),
        window=per_row(_ALL_DRAFTED, "window"),
        other=outside / sum(run.tokens for run in off),
    )


def main() -> None:
    arguments = parser(__doc__, "share_table")
    workloads = [(32, 64), (256, 32)]
    arguments.add_argument("--workloads", nargs="+", type=shape, default=workloads, help="PROMPTxOUTPUT tokens, ...")
    arguments.add_argument(
        "--percents", nargs="+", type=int, choices=_PERCENTS, default=_PERCENTS, help="of requests that are verified"
    )
    arguments.add_argument("--shape", type=shape, default=(8, 32), help="GxW of a verify pass")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--completions", type=int, default=16, help="at least, for each cell and round")
    arguments.add_argument("--in-flight", type=int, default=16)
    arguments.add_argument("--temperature", type=float, default=0.0)
    options = arguments.parse_args()
    if options.quick:
        options.rounds, options.completions, options.workloads = 1, 4, [(32, 16)]
    result = in_processes("benchmarks.share_table", options, measure)
    if result is None:
        return
    result["published"] = {"source": published.SOURCE} | {
        name: {"batch_invariant": row.batch_invariant} | {f"{percent}%": r for percent, r in row.by_percent.items()}
        for name, row in published.OFFLINE.items()
    }
    for measurement in result["measurements"]:
        for workload in measurement["workloads"]:
            _print(measurement["dtype"], workload)
    print(f"\n{save(options, result)}")


def _print(dtype: str, workload: dict[str, Any]) -> None:
    rows: list[list[object]] = []
    for cell in workload["cells"]:
        name = f"{cell['way']} {cell['percent']}%" if cell["percent"] else cell["way"]
        llm42: list[object] = ["", ""]
        if cell["way"] in ("adaptive", "drafted"):
            llm42 = [published.OFFLINE[row].by_percent[cell["percent"]] for row in ("ShareGPT", "1K in, 256 out")]
        elif cell["way"] == "batch_invariant":
            llm42 = [published.OFFLINE[row].batch_invariant for row in ("ShareGPT", "1K in, 256 out")]
        limit = cell["bound"]
        bounds = [limit["ratio"], limit["way"], limit["reached"]] if cell["percent"] else ["", "", ""]
        off_speed = "" if cell["off_speed"] is None else cell["off_speed"]
        keys = ("tokens_per_s", "ratio", "cpu_ratio")
        rows.append([name, *(cell[key] for key in keys), off_speed, cell["recomputed_share"], *bounds, *llm42])
    head = ["way", "tok/s", "ratio", "CPU ratio", "off speed", "recomputed", "bound", "by", "of bound"]
    head += ["LLM-42 ShareGPT*", "LLM-42 1K/256*"]
    print_table(f"{dtype}, prompts of {workload['prompt_tokens']}, outputs of {workload['new_tokens']}", head, rows)
    for name in ("not_below_better_way", "above_llm42_sharegpt", "off_not_slowed_beyond_its_share"):
        missed = [f"{target['percent']}%" for target in workload["targets"] if target[name] is False]
        print(f"{name.replace('_', ' ')}: {'met at every share' if not missed else 'missed at ' + ', '.join(missed)}")
    print(f"* {published.SOURCE}")


if __name__ == "__main__":
    main()
