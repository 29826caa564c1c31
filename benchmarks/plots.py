"""Draws what the other benchmarks have written: one SVG beside each JSON file in benchmarks/results.

`python -m benchmarks.plots [NAME ...]`; without names, all that there are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import RESULTS

_COLOURS = {"float32": "C0", "bfloat16": "C1"}


def main() -> None:
    matplotlib.use("svg")
    # Text as text, and nothing that differs from run to run: files that git can compare.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "verbatim", "font.size": 8}
    for name in sys.argv[1:] or _PLOTS:
        source = RESULTS / f"{name}.json"
        if not source.exists():
            print(f"{name}: not measured yet")
            continue
        figure = _PLOTS[name.removesuffix(".quick")](json.loads(source.read_text()))
        figure.savefig(source.with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight")
        print(source.with_suffix(".svg"))


def share_table(result: dict[str, Any]) -> Figure:
    """Throughput by share: a panel for each dtype and workload."""
    panels = [(part["dtype"], workload) for part in result["measurements"] for workload in part["workloads"]]
    columns = max(len(part["workloads"]) for part in result["measurements"])
    figure, axes = _panels(len(panels), columns)
    published = result["published"]["ShareGPT"]
    for axis, (dtype, workload) in zip(axes, panels, strict=True):
        cells = workload["cells"]
        for way, style in (("adaptive", "o-"), ("drafted", "s-")):
            points = [(str(cell["percent"]), cell["ratio"]) for cell in cells if cell["way"] == way]
            axis.plot(*zip(*points, strict=True), style, label=way, markersize=3)
        bounds = [(str(c["percent"]), c["bound"]["ratio"]) for c in cells if c["way"] == "adaptive"]
        axis.plot(*zip(*bounds, strict=True), ":", color="black", label="bound by pass costs")
        for way in ("batch_invariant", "batch_of_one"):
            ratio = next(cell["ratio"] for cell in cells if cell["way"] == way)
            axis.axhline(ratio, linestyle="--", linewidth=0.8, color="gray" if way == "batch_of_one" else "green")
            axis.annotate(way, (0, ratio), fontsize=6, va="bottom")
        theirs = [(percent, published[f"{percent}%"]) for percent, _ in points]
        axis.plot(*zip(*theirs, strict=True), "x-", color="lightgray", label="LLM-42, H100, published")
        axis.set(title=f"{dtype}, {workload['prompt_tokens']} in, {workload['new_tokens']} out", ylim=(0, None))
        axis.set(xlabel="verified requests, %", ylabel="throughput, off = 1")
    axes[0].legend(fontsize=6)
    return figure


def rollbacks(result: dict[str, Any]) -> Figure:
    """Recomputed tokens, and throughput at 10 and 100 %, by window and group."""
    figure, axes = _panels(3 * len(result["measurements"]), 3)
    for row, part in enumerate(result["measurements"]):
        shapes = part["shapes"]
        panels: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
            ("recomputed share", lambda shape: float(shape["recomputed"])),
            ("throughput at 10 %", lambda shape: float(shape["cpu_ratios"]["10%"])),
            ("throughput at 100 %", lambda shape: float(shape["cpu_ratios"]["100%"])),
        ]
        for axis, (title, value) in zip(axes[3 * row :], panels, strict=False):
            for groups in sorted({shape["groups"] for shape in shapes}):
                points = [(str(shape["window"]), value(shape)) for shape in shapes if shape["groups"] == groups]
                axis.plot(*zip(*points, strict=True), "o-", label=f"G = {groups}", markersize=3)
            axis.set(title=f"{part['dtype']}: {title}", xlabel="window W", ylim=(0, None))
    axes[0].legend(fontsize=6)
    return figure


def spans(result: dict[str, Any]) -> Figure:
    """How many sequences have diverged by a token; the second span's distribution."""
    figure, axes = _panels(2, 2)
    for part in result["measurements"]:
        first, count = sorted(part["first_spans"]), len(part["first_spans"])
        # A sequence that never differs has its whole length as its first span.
        length = result["options"]["tokens"]
        reached = [0, *(span for span in first if span < length), length]
        share = [0.0, *((i + 1) / count for i in range(len(reached) - 2)), (len(reached) - 2) / count]
        style = {"where": "post", "label": part["dtype"], "color": _COLOURS[part["dtype"]]}
        axes[0].step(reached, share, **style)
        second = part["second_spans"]
        if second:
            longest = max(second)
            portion = [sum(span <= n for span in second) / len(second) for n in range(longest + 1)]
            axes[1].step(range(longest + 1), portion, **style)
    axes[0].set(title="unverified answers that have diverged", xlabel="by token", ylim=(0, 1))
    axes[1].set(title="second consistent span", xlabel="at most so many tokens", ylim=(0, 1.02))
    axes[0].legend(fontsize=6)
    return figure


def first_token(result: dict[str, Any]) -> Figure:
    """Time to the first token: the distribution at each share."""
    figure, axes = _panels(len(result["measurements"]), 2)
    for axis, part in zip(axes, result["measurements"], strict=True):
        for share in part["shares"]:
            times = sorted(1000 * timing["first_s"] for timing in share["timings"])
            axis.plot(times, [(i + 1) / len(times) for i in range(len(times))], label=f"{share['percent']} % verified")
        axis.set(title=part["dtype"], xlabel="time to the first token, ms", ylabel="share of requests", xscale="log")
    axes[0].legend(fontsize=6)
    return figure


def soak(result: dict[str, Any]) -> Figure:
    """Resident memory over the soak."""
    figure, axes = _panels(1, 1)
    for part in result["measurements"]:
        samples = part["samples"]
        minutes = [(sample["time_s"] - samples[0]["time_s"]) / 60 for sample in samples]
        axes[0].plot(minutes, [sample["resident_bytes"] / 2**20 for sample in samples], label=part["dtype"])
    axes[0].set(title="resident memory", xlabel="minutes", ylabel="MiB", ylim=(0, None))
    axes[0].legend(fontsize=6)
    return figure


def _panels(count: int, columns: int) -> tuple[Figure, list[Axes]]:
    rows = -(-count // columns)
    figure = Figure(figsize=(3.2 * columns, 2.4 * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(count)]


_PLOTS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "share_table": share_table,
    "share_table_long": share_table,
    "rollbacks": rollbacks,
    "spans": spans,
    "first_token": first_token,
    "soak": soak,
}


if __name__ == "__main__":
    main()
