"""The demo's figures, and that its proof can fail."""

from __future__ import annotations

import io

from rich.console import Console

from gateway.cli.demo import PROMPTS, Plan
from gateway.cli.demo_report import Answer, Run, first_difference, render, summary


def answer(*tokens: str, shift: float = 0.0, rollbacks: int = 0) -> Answer:
    return Answer(
        "".join(tokens), tokens, tuple(-0.5 - shift for _ in tokens), windows=3, rollbacks=rollbacks, fingerprint="f"
    )


def test_first_difference() -> None:
    assert first_difference("abc", "abc") is None
    assert first_difference("abc", "abd") == 2
    assert first_difference("ab", "abc") == 2
    assert first_difference([-0.5], [-0.5000000001]) == 0


def test_one_differing_bit_is_a_second_answer() -> None:
    same = Run("verified", {"p": [answer("a", "b"), answer("a", "b")]}, tokens=4, elapsed_s=2.0)
    figures = summary(same)
    assert figures["fingerprints"] == ["f"]
    assert figures["prompts_with_one_answer_bitwise"] == 1 and figures["first_logprob_divergence"] is None
    assert figures["tokens_per_s"] == 2.0 and figures["windows"] == 6
    bits = Run("verified", {"p": [answer("a", "b"), answer("a", "b", shift=1e-7)]}, tokens=4, elapsed_s=2.0)
    figures = summary(bits)
    assert figures["prompts_with_one_token_sequence"] == 1 and figures["prompts_with_one_answer_bitwise"] == 0
    assert figures["first_logprob_divergence"] == {"count": 1, "min": 0, "median": 0}


def test_divergence_is_shown_where_it_falls() -> None:
    answers = {"p": [answer("a", " b", " c"), answer("a", " x", " c")], "q": [answer("a"), answer("a")]}
    run = Run("off", answers, tokens=8, elapsed_s=1.0)
    figures = summary(run)
    assert figures["distinct_tokens_per_prompt"] == {"mean": 1.5, "max": 2}
    assert figures["first_token_divergence"] == {"count": 1, "min": 1, "median": 1}
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render([run, Run("verified", {"q": [answer("a")]}, tokens=1, elapsed_s=1.0)]))
    text = console.export_text()
    assert "mode off: p\n    a b c\n    a x c" in text
    assert "mode verified: no two answers to a prompt differ" in text


def test_a_plan_asks_every_prompt_equally_often_and_fills_its_load() -> None:
    plan = Plan(prompts=8, loads=(1, 8, 20), tokens=4, temperature=0, seed=1)
    for load, questions in plan.rounds():
        assert len(questions) >= load and len(questions) % 8 == 0
        assert {questions.count(prompt) for prompt in questions} == {len(questions) // 8}
    assert len(set(PROMPTS)) == len(PROMPTS) >= 30
