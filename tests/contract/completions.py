"""A gateway's part of the window protocol, in a few lines, with a drafter that can be made to lie."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx

Token = dict[str, Any]
"""A committed token as it came over the wire: id, logprob, top."""
Poison = Callable[[list[int]], list[int]]
"""Takes the drafted ids, returns what is handed to the verifier instead."""

GREEDY: dict[str, Any] = {"temperature": 0.0}


async def call(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def verify(
    client: httpx.AsyncClient,
    context: Sequence[int],
    draft: Sequence[int] = (),
    sampling: dict[str, Any] = GREEDY,
    generated: int = 0,
    **fields: Any,
) -> dict[str, Any]:
    """The answer without the backend's advice, which is about the moment."""
    body = {"context": list(context), "draft": list(draft), "sampling": sampling, "generated": generated}
    answer = await call(client, "/v1/verify", **body, top_logprobs=3, **fields)
    return {key: value for key, value in answer.items() if not key.startswith("wants_")}


async def draft(
    client: httpx.AsyncClient,
    context: Sequence[int],
    count: int,
    sampling: dict[str, Any] = GREEDY,
    generated: int = 0,
    **fields: Any,
) -> list[int]:
    body = {"context": list(context), "count": count, "sampling": sampling, "generated": generated}
    answer = await call(client, "/v1/draft", **body, **fields)
    return [token["id"] for token in answer["tokens"]]


async def complete(
    client: httpx.AsyncClient,
    prompt: Sequence[int],
    count: int,
    sampling: dict[str, Any] = GREEDY,
    windows: Sequence[int] = (8,),
    poison: Poison = list,
    committed: Sequence[Token] = (),
    **fields: Any,
) -> list[Token]:
    """`count` committed tokens, going on from `committed`, drafted and verified in windows of these lengths in turn."""
    done = list(committed)
    turn = 0
    while len(done) < count:
        context = [*prompt, *(token["id"] for token in done)]
        drafted: list[int] = []
        if done:
            drafted = await draft(client, context, windows[turn % len(windows)], sampling, len(done), **fields)
        answer = await verify(client, context, poison(drafted), sampling, len(done), **fields)
        done += answer["tokens"]
        turn += 1
        if answer["finish"] is not None:
            break
    return done[:count]


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    """A prompt of its own for each seed."""
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]
