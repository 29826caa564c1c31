"""`verbatim demo`: the proof. Asks the same questions in changing company, in mode off and in mode verified.

A client like any other: everything it shows came over the OpenAI API. Each load keeps that many requests in flight;
their order and the moments at which they arrive are drawn at random, so that who shares a batch with whom is never the
same twice. The answers should be.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.progress import Progress

from gateway.cli.bearer import bearer
from gateway.cli.children import Children
from gateway.cli.demo_report import Answer, Run, render, summary

MODES = ("off", "verified")
_STAGGER_S = 0.3
_READY_POLL_S = 0.2

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short story about a clockmaker who loses her watch.",
    "List eight uses for an empty jar.",
    "How does a sailing boat move against the wind?",
    "Write a Python function that reverses a linked list.",
    "What caused the fall of the Roman Republic?",
    "Describe the life of a star.",
    "Give me a recipe for onion soup.",
    "What is the difference between a virus and a bacterium?",
    "Write a poem about the first snow.",
    "Explain compound interest with an example.",
    "How do bees find their way home?",
    "Summarise the story of Odysseus.",
    "What should I pack for a week in the mountains?",
    "Explain how a refrigerator works.",
    "Write a letter asking a neighbour to keep the noise down.",
    "What are the rules of tennis?",
    "Describe a market in a small town.",
    "How is paper made?",
    "Who was Ada Lovelace?",
    "Explain recursion to a ten year old.",
    "What are the advantages of public transport?",
    "Write a dialogue between the moon and the sea.",
    "How do I prepare for a job interview?",
    "What is a black hole?",
    "Plan a birthday party for a child.",
    "How do vaccines train the immune system?",
    "Write a product description for a wooden pencil.",
    "Explain the water cycle.",
    "What makes a good password?",
    "Describe the taste of a lemon to someone who never ate one.",
    "How do earthquakes happen?",
)


class _NoAnswer(click.ClickException):
    """Nobody listens there, or not any more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask. `loads` are numbers of requests in flight."""

    prompts: int
    loads: tuple[int, ...]
    tokens: int
    temperature: float
    seed: int

    def rounds(self) -> list[tuple[int, list[str]]]:
        """For each load its requests: every prompt equally often, and at least as many as are in flight."""
        prompts = list(islice(PROMPTS, self.prompts))
        return [(load, prompts * -(-load // len(prompts))) for load in self.loads]


def run_demo(
    plan: Plan, url: str | None, api_key: str | None, engine_argv: Sequence[str], port: int, report: Path | None
) -> int:
    """Run the demo against `url`, or against a stack of its own on `port`; returns the exit status."""
    console = Console()
    model, runs = asyncio.run(_ask_everything(plan, url, api_key, engine_argv, port, console))
    console.print(render(runs))
    figures = [summary(run) for run in runs]
    if report is not None:
        report.write_text(json.dumps({"model": model, "plan": asdict(plan), "runs": figures}, indent=2) + "\n")
    verified = figures[MODES.index("verified")]
    return 0 if verified["prompts_with_one_answer_bitwise"] == verified["prompts"] else 1


async def _ask_everything(
    plan: Plan, url: str | None, api_key: str | None, engine_argv: Sequence[str], port: int, console: Console
) -> tuple[str, list[Run]]:
    """The model's name and a run for each mode."""
    async with Children() as children:
        ended: asyncio.Future[int] | None = None
        if url is None:
            url = f"http://127.0.0.1:{port}"
            argv = [sys.executable, "-m", "gateway.cli", "up", "--port", str(port), *engine_argv]
            stack = await children.start("verbatim up", argv, grace_s=60, quiet=True)
            ended = asyncio.ensure_future(stack.wait())
        limits = httpx.Limits(max_connections=max(plan.loads) + 1)
        headers = {} if api_key is None else bearer(api_key, "--api-key")
        # Without a timeout: an answer takes as long as this machine takes, and Ctrl-C ends all.
        async with httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=None,  # noqa: S113
            limits=limits,
            trust_env=False,
        ) as client:
            model = await _until_ready(client, ended) if ended is not None else await _model(client)
            console.print(
                f"Asking {model} {plan.prompts} questions with {', '.join(map(str, plan.loads))} requests in flight,"
                f" {plan.tokens} tokens each, temperature {plan.temperature:g}, seed {plan.seed}."
            )
            runs = [await _ask_all(client, model, mode, plan, console) for mode in MODES]
        if ended is not None:
            ended.cancel()
    return model, runs


async def _until_ready(client: httpx.AsyncClient, ended: asyncio.Future[int]) -> str:
    """The model's name once the gateway that we started answers."""
    while not ended.done():
        try:
            return await _model(client)
        except _NoAnswer:
            await asyncio.sleep(_READY_POLL_S)
    raise click.ClickException("the server did not start")


async def _model(client: httpx.AsyncClient) -> str:
    model: str = (await _call(client, "GET", "/v1/models"))[0]["data"][0]["id"]
    return model


async def _call(client: httpx.AsyncClient, method: str, path: str, body: object = None) -> tuple[Any, httpx.Headers]:
    """The body and the headers of the answer; raises `ClickException` where there is none, or an error."""
    try:
        response = await client.request(method, path, json=body)
    except httpx.TransportError as error:
        raise _NoAnswer(f"no gateway answers at {client.base_url}: {error or type(error).__name__}") from error
    if response.is_error:
        raise click.ClickException(f"status {response.status_code}: {response.text}")
    return response.json(), response.headers


async def _ask_all(client: httpx.AsyncClient, model: str, mode: str, plan: Plan, console: Console) -> Run:
    rounds = plan.rounds()
    answers: dict[str, list[Answer]] = {prompt: [] for prompt in rounds[0][1]}
    started = time.perf_counter()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"mode {mode}", total=sum(len(questions) for _, questions in rounds))
        for load, questions in rounds:
            places = asyncio.Semaphore(load)
            random.shuffle(questions)

            async def ask(prompt: str, places: asyncio.Semaphore = places) -> None:
                async with places:
                    await asyncio.sleep(random.uniform(0, _STAGGER_S))  # noqa: S311  # not secret
                    answers[prompt].append(await _ask(client, model, mode, prompt, plan))
                progress.advance(bar)

            try:
                async with asyncio.TaskGroup() as group:
                    for prompt in questions:
                        group.create_task(ask(prompt))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from failed  # the others say the same
    elapsed_s = time.perf_counter() - started
    tokens = sum(len(answer.tokens) for each in answers.values() for answer in each)
    return Run(mode, answers, tokens, elapsed_s)


async def _ask(client: httpx.AsyncClient, model: str, mode: str, prompt: str, plan: Plan) -> Answer:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": plan.tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "logprobs": True,
        "is_deterministic": mode == "verified",
    }
    answer, headers = await _call(client, "POST", "/v1/chat/completions", body)
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    return Answer(
        text=choice["message"]["content"],
        tokens=tuple(entry["token"] for entry in entries),
        logprobs=tuple(entry["logprob"] for entry in entries),
        windows=int(headers.get("x-verbatim-windows", 0)),
        rollbacks=int(headers.get("x-verbatim-rollbacks", 0)),
        fingerprint=answer["system_fingerprint"],
    )
