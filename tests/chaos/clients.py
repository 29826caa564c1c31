"""Clients that ask, are let down, and ask again elsewhere; and what they were told, held against the truth.

Many ask the same at a time, for more or less of it, streamed or whole. An attempt that fails (no connection, a 5xx or
429, an answer that breaks off) is made again as OpenAI's clients do it, with growing pauses, at another gateway; but
with more patience, so that a request is lost only where nobody will ever answer it. What a broken stream had said by
then must have been true as well.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

LENGTHS = (20, 120)
SHARED_BY = 8
"""So many requests in a row ask the same."""
OLD = 0.15
"""The share of requests that ask what was asked long before."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
DEFAULT_RETRIES = 2
"""OpenAI's clients give up after these."""
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    """What an answer depends on."""

    number: int
    length: int

    def body(self, *, stream: bool) -> dict[str, Any]:
        return {
            "model": "model",
            "messages": [{"role": "user", "content": f"question {self.number}"}],
            "is_deterministic": True,
            "temperature": 1,
            "seed": self.number,
            "logprobs": True,
            "max_tokens": self.length,
            "stream": stream,
        }


@dataclass
class Told:
    """An answer, whole or as far as it came."""

    text: str = ""
    tokens: list[Any] = field(default_factory=list)
    finish: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        said = choice.get("message") or choice["delta"]
        self.text += said.get("content") or ""
        self.tokens += (choice["logprobs"] or {"content": []})["content"]
        self.finish = choice["finish_reason"] or self.finish

    def begins(self, whole: Told) -> bool:
        """Whether the whole answer goes on like this."""
        if self.finish is not None:
            return self == whole
        return whole.text.startswith(self.text) and whole.tokens[: len(self.tokens)] == self.tokens


class LetDown(Exception):
    """An attempt failed; `why` in a word, and what had been said by then."""

    def __init__(self, why: str, told: Told) -> None:
        super().__init__(why)
        self.why = why
        self.told = told


async def attempt(http: httpx.AsyncClient, url: str, question: Question, *, stream: bool) -> tuple[Told, str]:
    """Ask once: the answer, and what the log did for it. Raises `LetDown`."""
    told = Told()
    try:
        request = http.build_request("POST", f"{url}/v1/chat/completions", json=question.body(stream=stream))
        response = await http.send(request, stream=True)
        try:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                raise LetDown(f"{response.status_code} {error['code']}", told)
            if not stream:
                told.add(json.loads(await response.aread())["choices"][0])
            else:
                await _read_events(response, told)
        finally:
            await response.aclose()
    except (httpx.TransportError, ValueError) as error:
        raise LetDown(type(error).__name__, told) from error
    return told, response.headers["x-verbatim-cache"]


async def _read_events(response: httpx.Response, told: Told) -> None:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise LetDown(f"stream: {event['error']['code']}", told)
            for choice in event["choices"]:
                told.add(choice)
    raise LetDown("stream without an end", told)


class Truth:
    """Undisturbed answers, of a gateway that nobody kills and that keeps nothing. Each is asked for once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = httpx.AsyncClient(trust_env=False, timeout=300)
        self._known: dict[Question, asyncio.Task[tuple[Told, str]]] = {}

    async def of(self, question: Question) -> Told:
        if question not in self._known:
            asking = attempt(self._http, self._url, question, stream=False)
            self._known[question] = asyncio.create_task(asking)
        return (await self._known[question])[0]

    async def aclose(self) -> None:
        await asyncio.gather(*self._known.values(), return_exceptions=True)
        await self._http.aclose()


@dataclass
class Tally:
    """What became of the requests."""

    answers: int = 0
    attempts: int = 0
    given_up: int = 0
    """Requests that a client with OpenAI's default of two retries would have given up."""
    lost: int = 0
    let_down: Counter[str] = field(default_factory=Counter)
    log: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Clients:
    """So many clients, each with one request at a time."""

    def __init__(self, urls: Sequence[str], truth: Truth, chance: random.Random) -> None:
        self._urls = urls
        self._truth = truth
        self._chance = chance
        self._asked = 0
        self._over = asyncio.Event()
        self.tally = Tally()

    async def run(self, count: int) -> None:
        """Ask until told to stop; what is under way then is brought to its end."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=count)
        async with (
            httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(count):
                tasks.create_task(self._ask_on(http))

    def stop(self) -> None:
        self._over.set()

    async def _ask_on(self, http: httpx.AsyncClient) -> None:
        while not self._over.is_set():
            await self._ask(http, self._question(), stream=self._chance.random() < 0.6)

    def _question(self) -> Question:
        self._asked += 1
        newest = self._asked // SHARED_BY
        number = self._chance.randrange(newest + 1) if self._chance.random() < OLD else newest
        return Question(number, self._chance.choice(LENGTHS))

    async def _ask(self, http: httpx.AsyncClient, question: Question, *, stream: bool) -> None:
        expected = await self._truth.of(question)
        tally, began, attempts, url = self.tally, time.monotonic(), 0, ""
        while time.monotonic() - began < PATIENCE_S:
            url = self._chance.choice([one for one in self._urls if one != url])
            attempts += 1
            tally.attempts += 1
            try:
                told, log = await attempt(http, url, question, stream=stream)
            except LetDown as error:
                tally.let_down[error.why] += 1
                if not error.told.begins(expected):
                    tally.wrong.append(f"{question} broken off: {error.told.text!r}, not {expected.text!r}")
                pause = min(FIRST_PAUSE_S * 2 ** (attempts - 1), LONGEST_PAUSE_S)
                await asyncio.sleep(pause * self._chance.uniform(0.75, 1))
                continue
            tally.answers += 1
            tally.log[log] += 1
            if told != expected:
                tally.wrong.append(f"{question}: {told.text!r}, not {expected.text!r}")
            break
        else:
            tally.lost += 1
        tally.given_up += attempts > 1 + DEFAULT_RETRIES
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)
