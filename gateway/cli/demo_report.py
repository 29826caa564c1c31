"""What the demo found: how far answers to one question differ, and the tables that say so.

Pure: takes answers, gives numbers and text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_SNIPPET = 60


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion as the client saw it, token by token; `logprobs` compare bitwise."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    windows: int
    rollbacks: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Run:
    """All answers of one mode: by prompt, in the order asked. `elapsed_s` is the time all of them took."""

    mode: str
    answers: dict[str, list[Answer]]
    tokens: int
    elapsed_s: float


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Index of the first element that differs, a missing one included; None where equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def summary(run: Run) -> dict[str, Any]:
    """The figures of one mode, as JSON."""
    token_sets = [len({answer.tokens for answer in answers}) for answers in run.answers.values()]
    bit_sets = [len({(answer.tokens, answer.logprobs) for answer in answers}) for answers in run.answers.values()]
    token_places = _divergences(run, lambda answer: answer.tokens)
    logprob_places = _divergences(run, lambda answer: answer.logprobs)
    every = [answer for answers in run.answers.values() for answer in answers]
    return {
        "mode": run.mode,
        "fingerprints": sorted({answer.fingerprint for answer in every}),
        "prompts": len(run.answers),
        "answers": len(every),
        "distinct_tokens_per_prompt": {"mean": sum(token_sets) / len(token_sets), "max": max(token_sets)},
        "distinct_tokens_and_logprobs_per_prompt": {"mean": sum(bit_sets) / len(bit_sets), "max": max(bit_sets)},
        "prompts_with_one_token_sequence": token_sets.count(1),
        "prompts_with_one_answer_bitwise": bit_sets.count(1),
        "first_token_divergence": _places(token_places),
        "first_logprob_divergence": _places(logprob_places),
        "windows": sum(answer.windows for answer in every),
        "rollbacks": sum(answer.rollbacks for answer in every),
        "tokens": run.tokens,
        "elapsed_s": run.elapsed_s,
        "tokens_per_s": run.tokens / run.elapsed_s,
    }


def _divergences(run: Run, view: Callable[[Answer], Sequence[object]]) -> list[int]:
    """Where each answer first differs from its prompt's first answer."""
    places = [
        first_difference(view(answers[0]), view(answer)) for answers in run.answers.values() for answer in answers[1:]
    ]
    return [place for place in places if place is not None]


def _places(places: list[int]) -> dict[str, float] | None:
    return {"count": len(places), "min": min(places), "median": median(places)} if places else None


def render(runs: Sequence[Run]) -> RenderableType:
    """The two modes side by side, and one divergence spelled out."""
    figures = [summary(run) for run in runs]
    table = Table(title="One question, many companies", title_justify="left")
    table.add_column("")
    for figure in figures:
        table.add_column(f"mode {figure['mode']}", justify="right")
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("answers to each prompt, prompts", lambda f: f"{f['answers'] // f['prompts']} x {f['prompts']}"),
        ("distinct answers, tokens (mean, worst)", lambda f: _pair(f["distinct_tokens_per_prompt"])),
        ("distinct answers, logprobs too", lambda f: _pair(f["distinct_tokens_and_logprobs_per_prompt"])),
        ("prompts answered with the same tokens", lambda f: f"{f['prompts_with_one_token_sequence']} / {f['prompts']}"),
        ("prompts answered with the same bits", lambda f: f"{f['prompts_with_one_answer_bitwise']} / {f['prompts']}"),
        ("first token that differs (earliest, median)", lambda f: _where(f["first_token_divergence"])),
        ("first logprob that differs", lambda f: _where(f["first_logprob_divergence"])),
        ("windows verified, rolled back", lambda f: f"{f['windows']}, {f['rollbacks']}" if f["windows"] else "-"),
        ("tokens/s over all loads", lambda f: f"{f['tokens_per_s']:.0f}"),
    ]
    for name, cell in rows:
        table.add_row(name, *map(cell, figures))
    return Group(table, *(_example(run) for run in runs))


def _pair(figure: dict[str, float]) -> str:
    return f"{figure['mean']:.2f}, {figure['max']}"


def _where(places: dict[str, float] | None) -> str:
    return f"{places['min']:.0f}, {places['median']:.0f}" if places else "none"


def _example(run: Run) -> Text:
    """The prompt whose answers differ earliest, with the place marked; or that there is none."""
    found: tuple[int, str, Answer, Answer] | None = None
    for prompt, answers in run.answers.items():
        for answer in answers[1:]:
            place = first_difference(answers[0].tokens, answer.tokens)
            if place is not None and (found is None or place < found[0]):
                found = (place, prompt, answers[0], answer)
    text = Text(f"\nmode {run.mode}: ", style="bold")
    if found is None:
        return text.append("no two answers to a prompt differ in a token.", style="green")
    place, prompt, first, second = found
    text.append(prompt, style="italic")
    for answer in (first, second):
        text.append("\n    " + _one_line("".join(answer.tokens[:place]))[-_SNIPPET:])
        text.append(_one_line("".join(answer.tokens[place:]))[:_SNIPPET], style="bold red")
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split("\n"))
