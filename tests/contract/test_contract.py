"""What every backend promises, seen from outside: the six invariants, and that nothing a server goes through shows.

Everything is compared as it came over the wire: ids, logprobs, top logprobs, to the last digit.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import msgspec
import pytest

from backend.protocol import TokenizerFiles
from tests.contract.backends import GROUPS, POOL_TOKENS, WINDOW, Backend
from tests.contract.completions import GREEDY, Token, call, complete, draft, prompt, verify

SAMPLINGS: list[dict[str, Any]] = [
    GREEDY,
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "top_k": 12, "seed": 42},
    {"temperature": 0.7, "top_p": 0.9, "seed": 1},
    {"temperature": 1.2, "min_p": 0.05, "seed": -3},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 9, "logit_bias": [[11, 4.0], [200, -8.0]], "min_tokens": 5},
]

BAD_GRAMMAR = {"grammar": {"kind": "regex", "text": "("}}


async def test_it_says_what_it_is(backend: Backend, client: httpx.AsyncClient) -> None:
    info = backend.info
    assert (info.protocol, info.dtype, info.device) == (1, "float32", "cpu")
    assert info.roles[:2] == ["draft", "verify"]
    assert (info.verify.groups, info.verify.window) == (GROUPS, WINDOW)
    assert info.max_context > 2048 and info.fingerprint.startswith("vb1-")
    files = msgspec.json.decode((await client.get("/v1/tokenizer")).content, type=TokenizerFiles)
    assert files.chat_template and files.eos_ids and files.special_tokens


async def test_a_call_has_one_answer_in_any_company(backend: Backend, client: httpx.AsyncClient) -> None:
    """Slot, company, padding, sampling: 16 calls of all lengths, one by one, then at once in two orders."""
    vocab = backend.info.vocab_size
    calls = []
    for index in range(16):
        context = prompt(index, 1 + 23 * index, vocab)
        calls.append((context, prompt(100 + index, index % (2 * WINDOW), vocab), SAMPLINGS[index % len(SAMPLINGS)]))
    alone = [await verify(client, *each) for each in calls]
    rng = random.Random(1)
    for _ in range(2):
        order = list(range(len(calls)))
        rng.shuffle(order)
        together = await asyncio.gather(*(verify(client, *calls[index]) for index in order))
        assert [alone[index] for index in order] == together


@pytest.mark.parametrize("windows", [(1,), (3, 1), (WINDOW - 1,), (WINDOW,), (2 * WINDOW + 5, 2)])
async def test_windows_do_not_matter(backend: Backend, client: httpx.AsyncClient, windows: tuple[int, ...]) -> None:
    """Offset: wherever windows begin, and however long they are."""
    context = prompt(1, 61, backend.info.vocab_size)
    sampling = SAMPLINGS[1]
    assert await complete(client, context, 40, sampling, windows) == await complete(client, context, 40, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_poisoned_drafter_changes_nothing(
    backend: Backend, client: httpx.AsyncClient, sampling: dict[str, Any]
) -> None:
    vocab = backend.info.vocab_size
    context = prompt(2, 37, vocab)
    honest = await complete(client, context, 16, sampling)
    rng = random.Random(0)

    def half_wrong(ids: list[int]) -> list[int]:
        return [rng.randrange(vocab) if rng.random() < 0.5 else id_ for id_ in ids]

    def all_wrong(ids: list[int]) -> list[int]:
        return [(id_ + 1) % vocab for id_ in ids]

    assert await complete(client, context, 16, sampling, poison=half_wrong) == honest
    assert await complete(client, context, 16, sampling, poison=all_wrong) == honest


async def test_decoding_gives_what_verifying_gives(backend: Backend, client: httpx.AsyncClient) -> None:
    context = prompt(13, 33, backend.info.vocab_size)
    body = {"context": context, "generated": 0, "max_tokens": 20, "sampling": SAMPLINGS[1], "top_logprobs": 3}
    if "decode" not in backend.info.roles:
        assert (await client.post("/v1/decode", json=body)).status_code in (404, 409)
        return
    decoded = [token for event in await lines(client, "/v1/decode", body) for token in event.get("tokens", [])]
    assert decoded == await complete(client, context, 20, SAMPLINGS[1])


async def test_history_does_not_matter(backend: Backend, client: httpx.AsyncClient) -> None:
    """Prompts that share prefixes of every kind of length, computed, cached or drafted over before, in random order."""
    vocab = backend.info.vocab_size
    stem = prompt(3, 150, vocab)
    contexts = [stem[:shared] + prompt(shared, 9, vocab) for shared in (1, 15, 16, 63, 64, 65, 127, 130, 150)]
    first = [await verify(client, context) for context in contexts]
    rng = random.Random(3)
    for _ in range(3):
        for index in rng.sample(range(len(contexts)), len(contexts)):
            context = contexts[index]
            await draft(client, context[: rng.randrange(1, len(context))], rng.randrange(1, 12), SAMPLINGS[2])
            assert await verify(client, context) == first[index]
    await flood(backend, client)
    assert [await verify(client, context) for context in contexts] == first


async def test_evicted_in_mid_sequence(backend: Backend, client: httpx.AsyncClient) -> None:
    context = prompt(4, 300, backend.info.vocab_size)
    undisturbed = await complete(client, context, 48, SAMPLINGS[1])
    done: list[Token] = []
    for reached in (10, 17, 40, 48):
        await flood(backend, client)
        done = await complete(client, context, reached, SAMPLINGS[1], committed=done)
    assert done == undisturbed


async def test_sixteen_at_once_beside_noise(backend: Backend, client: httpx.AsyncClient) -> None:
    vocab = backend.info.vocab_size
    jobs = [(prompt(50 + index, 11 + 13 * index, vocab), SAMPLINGS[index % len(SAMPLINGS)]) for index in range(16)]
    alone = [await complete(client, context, 12, sampling) for context, sampling in jobs]

    async def noise(number: int) -> None:
        body = {"context": prompt(number, 30 + number, vocab), "max_tokens": 150, "sampling": SAMPLINGS[number % 5]}
        async with client.stream("POST", "/v1/stream", json=body) as response:
            async for line in response.aiter_lines():
                assert "error" not in line

    noises = [asyncio.create_task(noise(number)) for number in range(8)]
    together = await asyncio.gather(*(complete(client, context, 12, sampling, (5, 9)) for context, sampling in jobs))
    assert together == alone
    await asyncio.gather(*noises)


async def test_prompts_of_any_length(backend: Backend, client: httpx.AsyncClient) -> None:
    """From one token to two thousand, alone and all at once, more than the KV pool holds at a time."""
    vocab = backend.info.vocab_size
    lengths = (1, 2, 15, 16, 17, 63, 64, 65, 257, 512, 1000, 1999, 2000, 2000, 2000)
    contexts = [prompt(1000 + index, length, vocab) for index, length in enumerate(lengths)]
    alone = [await complete(client, context, 10, SAMPLINGS[3]) for context in contexts]
    together = await asyncio.gather(*(complete(client, context, 10, SAMPLINGS[3], (4,)) for context in contexts))
    assert together == alone
    assert sum(lengths) > POOL_TOKENS


async def test_drafts_follow_the_verifiers_rule(backend: Backend, client: httpx.AsyncClient) -> None:
    """In company of all kinds: a drafter whose noise or filters depended on its batch would hardly ever agree."""
    vocab = backend.info.vocab_size

    async def agreed(index: int) -> int:
        context = prompt(200 + index, 20, vocab)
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        answer = await verify(client, context, await draft(client, context, 12, sampling), sampling)
        return int(answer["agreed"])

    shares = await asyncio.gather(*(agreed(index) for index in range(2 * len(SAMPLINGS))))
    assert sum(shares) >= 0.9 * 12 * len(shares), shares


async def test_a_draft_reports_its_scores(backend: Backend, client: httpx.AsyncClient) -> None:
    context = prompt(6, 12, backend.info.vocab_size)
    for top_logits in (0, 1, 3):
        answer = await call(client, "/v1/draft", context=context, generated=0, count=5, top_logits=top_logits)
        assert answer["fingerprint"] == backend.info.fingerprint and len(answer["tokens"]) == 5
        for token in answer["tokens"]:
            scores = [score for _, score in token["top"]]
            assert len(scores) == top_logits and scores == sorted(scores, reverse=True)
            assert token["logprob"] <= 0 <= token["margin"]
            if top_logits > 1:
                assert token["margin"] == pytest.approx(scores[0] - scores[1], abs=1e-5)


async def test_stop_ids_end_drafts_streams_and_completions(backend: Backend, client: httpx.AsyncClient) -> None:
    context = prompt(7, 25, backend.info.vocab_size)
    ids = [token["id"] for token in await complete(client, context, 12)]
    stop = ids[6]
    cut = ids[: ids.index(stop) + 1]
    done = await complete(client, context, 12, stop_ids=[stop])
    assert [token["id"] for token in done] == cut
    answer = await verify(client, context, ids, stop_ids=[stop])
    assert (answer["finish"], answer["agreed"], len(answer["tokens"])) == ("stop", len(cut), len(cut))
    assert await draft(client, context, 12, stop_ids=[stop]) == cut
    events = await stream(client, context, 12, stop_ids=[stop])
    assert [token["id"] for event in events for token in event.get("tokens", [])] == cut
    assert events[-1]["finish"] == "stop"
    # A minimum length holds a stop id back.
    held = await complete(client, context, 12, GREEDY | {"min_tokens": 10}, stop_ids=[stop])
    assert stop not in [token["id"] for token in held[:10]]


async def test_the_context_limit_ends_a_completion(backend: Backend, client: httpx.AsyncClient) -> None:
    limit = backend.info.max_context
    context = prompt(8, limit - 3, backend.info.vocab_size)
    done = await complete(client, context, 10, windows=(1,))
    assert len(done) == 3
    answer = await verify(client, context, [token["id"] for token in done[:2]], stop_ids=[])
    assert (answer["finish"], answer["tokens"]) == ("length", done)
    assert len(await draft(client, context, 10)) == 3
    events = await stream(client, context, 10)
    assert sum(len(event.get("tokens", [])) for event in events) == 3 and events[-1]["finish"] == "length"


async def test_a_stream_reports_logprobs(backend: Backend, client: httpx.AsyncClient) -> None:
    context = prompt(9, 14, backend.info.vocab_size)
    events = await stream(client, context, 9, top_logprobs=2)
    tokens = [token for event in events for token in event.get("tokens", [])]
    assert len(tokens) == 9 and events[-1] == {"finish": "length"}
    for token in tokens:
        assert token["top"][0] == [token["id"], token["logprob"]] and token["top"][1][1] <= token["logprob"] <= 0


async def test_bad_calls_are_refused_with_their_field(backend: Backend, client: httpx.AsyncClient) -> None:
    vocab, limit = backend.info.vocab_size, backend.info.max_context
    good = {"context": [1, 2], "generated": 0}
    for path, body, field in (
        ("/v1/verify", good | {"draft": [vocab]}, "draft"),
        ("/v1/verify", good | {"draft": [], "context": [1] * limit}, "context"),
        ("/v1/verify", good | {"draft": [1] * limit}, "draft"),
        ("/v1/verify", good | {"draft": [], "sampling": {"top_p": 0}}, "sampling.top_p"),
        ("/v1/draft", good | {"count": 0}, "count"),
        ("/v1/draft", good | {"count": 1, "surprise": 1}, "surprise"),
        ("/v1/stream", {"context": [vocab], "max_tokens": 1}, "context"),
        ("/v1/draft", good | {"count": 1, "sampling": BAD_GRAMMAR, "stop_ids": [257]}, "sampling.grammar"),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 400, (path, field)
        error = response.json()["error"]
        # A grammar that is followed is at fault itself, one that is not as a whole.
        assert error["type"] == "invalid_request" and error["field"].startswith(field)


async def test_a_client_that_leaves_does_no_harm(backend: Backend, client: httpx.AsyncClient) -> None:
    vocab = backend.info.vocab_size
    context = prompt(10, 40, vocab)
    before = await complete(client, context, 16)
    for path, body in (
        ("/v1/draft", {"context": context, "generated": 0, "count": 2000}),
        ("/v1/verify", {"context": prompt(11, 2000, vocab), "generated": 0, "draft": []}),
        ("/v1/stream", {"context": context, "max_tokens": 2000}),
    ):
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", backend.port)
        writer.write(head.encode() + payload)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    assert await complete(client, context, 16) == before


async def test_restart_in_mid_sequence(backend: Backend, client: httpx.AsyncClient) -> None:
    """Killed as by a crash; what comes after has the same fingerprint, and goes on where the other was."""
    context = prompt(12, 90, backend.info.vocab_size)
    fingerprint = backend.info.fingerprint
    undisturbed = await complete(client, context, 30, SAMPLINGS[1])
    done = await complete(client, context, 13, SAMPLINGS[1])
    backend.kill()
    backend.start()
    assert backend.info.fingerprint == fingerprint
    assert await complete(client, context, 30, SAMPLINGS[1], committed=done) == undisturbed


async def stream(client: httpx.AsyncClient, context: list[int], count: int, **fields: Any) -> list[dict[str, Any]]:
    return await lines(client, "/v1/stream", {"context": context, "max_tokens": count, "sampling": GREEDY} | fields)


async def lines(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        return [json.loads(line) async for line in response.aiter_lines()]


async def flood(backend: Backend, client: httpx.AsyncClient) -> None:
    """Fill the KV pool with other contexts, so that whatever was cached is gone."""
    length = 1500
    for number in range(-(-POOL_TOKENS // length) + 1):
        await draft(client, prompt(5000 + number, length, backend.info.vocab_size), 1)
