"""Figures that LLM-42's authors published (arXiv 2601.17768), to be shown beside ours: another model, another machine.

Throughput of offline runs as a ratio to stock SGLang, Llama-3.1-8B on one H100: batch-invariant kernels for all, and
decode-verify-rollback by the share of deterministic requests in per cent.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "LLM-42, arXiv 2601.17768: Llama-3.1-8B, one H100, ratio to stock SGLang"


@dataclass(frozen=True, slots=True)
class Row:
    """One workload of the published table."""

    batch_invariant: float
    by_percent: dict[int, float]


def _row(batch_invariant: float, *ratios: float) -> Row:
    return Row(batch_invariant, dict(zip((2, 5, 10, 20, 50, 100), ratios, strict=True)))


OFFLINE = {
    "ShareGPT": _row(0.82, 0.89, 0.82, 0.71, 0.64, 0.56, 0.46),
    "ArXiv": _row(0.83, 0.93, 0.93, 0.92, 0.92, 0.88, 0.77),
    "1K in, 256 out": _row(0.84, 0.99, 0.98, 0.97, 0.93, 0.84, 0.74),
    "1K in, 1K out": _row(0.87, 0.93, 0.93, 0.91, 0.87, 0.80, 0.70),
    "4K in, 1K out": _row(0.90, 0.95, 0.93, 0.94, 0.94, 0.90, 0.85),
    "4K in, 4K out": _row(0.96, 0.98, 0.97, 0.97, 0.92, 0.94, 0.90),
}

RECOMPUTED = {"16x64": 0.139, "8x64": 0.140, "4x64": 0.142, "1x64": 0.166}
"""Its share of recomputed tokens by G x W; W = 16 about 0.03-0.04, W = 32 0.07-0.08, W = 128 0.30, W = 512 0.92."""

DIVERGED_BY = {64: 0.2, 512: 0.8}
"""The share of its unverified sequences that differ by token."""
SECOND_SPAN_AT_MOST_1 = 0.87
"""Of those, the share whose second consistent span is at most one token."""
FIRST_TOKEN_P99 = (10, 25)
"""P99 time to the first token with all requests deterministic, as a multiple of plain SGLang's: from, to."""
