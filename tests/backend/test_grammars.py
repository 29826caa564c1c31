"""The grammars of a backend: compiled once and aside, bounded, and refused over HTTP with their field."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx
import msgspec
import pytest
import uvicorn

from backend.engine.grammar import MAX_MASKS, Compiled, Compiler
from backend.protocol import ErrorBody, ErrorDetail, Grammar, TokenizerFiles, VerifyResponse
from backend.server.app import Backend, create_app
from backend.server.errors import CallError
from backend.server.grammars import MAX_KEPT, MAX_WAITING, Grammars
from tests.backend.harness import TINY, running_engine, tiny_checkpoint
from tests.backend.tiny_models import VOCAB, tiny_tokenizer

EOS = 257
STOP = frozenset({EOS})
TOKENIZER = tiny_tokenizer()
FILES = TokenizerFiles(TOKENIZER.to_str(), None, [EOS], {})
COMPILER = Compiler(FILES, VOCAB)


class Slow:
    """Compiles when it is told to, and counts."""

    def __init__(self) -> None:
        self.ends = STOP
        self.go = threading.Event()
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> Compiled:
        assert self.go.wait(60)
        self.compiled.append(grammar.text)
        return COMPILER.compile(grammar)


def quick() -> Slow:
    compiler = Slow()
    compiler.go.set()
    return compiler


def regexes(count: int) -> list[Grammar]:
    return [Grammar("regex", f"a{{{i + 1}}}") for i in range(count)]


async def test_equal_grammars_that_come_together_are_compiled_once() -> None:
    compiler = Slow()
    grammars = Grammars(compiler)
    (grammar,) = regexes(1)
    asked = [asyncio.create_task(grammars.constrain(grammar, STOP)) for _ in range(5)]
    await asyncio.sleep(0)
    compiler.go.set()
    constraints = await asyncio.gather(*asked)
    assert compiler.compiled == [grammar.text] and len(set(map(id, constraints))) == 5
    assert await grammars.constrain(None, frozenset()) is None


async def test_the_loop_goes_on_while_a_grammar_is_compiled() -> None:
    compiler = Slow()
    grammars = Grammars(compiler)
    first, second = regexes(2)
    known = Grammars(quick())
    waiting = [asyncio.create_task(grammars.constrain(grammar, STOP)) for grammar in (first, second)]
    assert await known.constrain(first, STOP) is not None
    assert not any(task.done() for task in waiting) and compiler.compiled == []
    compiler.go.set()
    await asyncio.gather(*waiting)


async def test_too_many_that_wait_are_turned_away() -> None:
    compiler = Slow()
    grammars = Grammars(compiler)
    waiting = [asyncio.create_task(grammars.constrain(grammar, STOP)) for grammar in regexes(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(CallError) as caught:
        await grammars.constrain(Grammar("regex", "b"), STOP)
    assert caught.value.detail.type == "overloaded"
    compiler.go.set()
    await asyncio.gather(*waiting)
    await grammars.constrain(Grammar("regex", "b"), STOP)


async def test_the_least_recently_used_makes_room() -> None:
    compiler = quick()
    grammars = Grammars(compiler)
    all_ = regexes(MAX_KEPT + 1)
    for grammar in all_[:-1]:
        await grammars.constrain(grammar, STOP)
    await grammars.constrain(all_[0], STOP)
    await grammars.constrain(all_[-1], STOP)
    await grammars.constrain(all_[0], STOP)
    assert len(compiler.compiled) == MAX_KEPT + 1
    await grammars.constrain(all_[1], STOP)
    assert compiler.compiled[-1] == all_[1].text and len(compiler.compiled) == MAX_KEPT + 2


async def test_one_that_is_worn_is_compiled_anew() -> None:
    compiler = quick()
    grammars = Grammars(compiler)
    (grammar,) = regexes(1)
    first = await grammars.constrain(grammar, STOP)
    assert first is not None
    first._compiled.masks = MAX_MASKS
    second = await grammars.constrain(grammar, STOP)
    assert len(compiler.compiled) == 2
    assert second is not None and second.allowed([]) == first.allowed([])


async def test_a_refusal_is_remembered() -> None:
    compiler = quick()
    grammars = Grammars(compiler)
    for _ in range(3):
        with pytest.raises(CallError) as caught:
            await grammars.constrain(Grammar("regex", "("), STOP)
        assert (caught.value.status, caught.value.detail.field) == (400, "sampling.grammar")
    assert compiler.compiled == ["("]


async def test_a_bug_of_the_compiler_is_not_remembered() -> None:
    compiler = quick()
    grammars = Grammars(compiler)
    compiler.compile = _broken  # type: ignore[method-assign]
    (grammar,) = regexes(1)
    with pytest.raises(ZeroDivisionError):
        await grammars.constrain(grammar, STOP)
    compiler.compile = COMPILER.compile  # type: ignore[method-assign]
    assert await grammars.constrain(grammar, STOP) is not None


def _broken(grammar: Grammar) -> Compiled:
    raise ZeroDivisionError


async def test_without_a_compiler_there_is_a_reason() -> None:
    with pytest.raises(CallError, match="no tokenizer") as caught:
        await Grammars(None, "no tokenizer").constrain(Grammar("regex", "a"), STOP)
    assert caught.value.detail.field == "sampling.grammar"


# --- over HTTP -------------------------------------------------------------------------------------------------------

PROMPT = [7, 200, 21, 21, 5]
CALLS: dict[str, dict[str, object]] = {
    "/v1/draft": {"context": PROMPT, "generated": 0, "count": 30},
    "/v1/verify": {"context": PROMPT, "generated": 0, "draft": []},
    "/v1/decode": {"context": PROMPT, "generated": 0, "max_tokens": 30},
    "/v1/stream": {"context": PROMPT, "max_tokens": 30},
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    checkpoint = tiny_checkpoint(config=replace(TINY, vocab_size=VOCAB))
    with running_engine(checkpoint) as calls:
        backend = Backend()
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(backend), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        backend.ready(calls.engine, FILES)
        # The socket listens already: a request waits until the server has started.
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as opened:
            yield opened
        server.should_exit = True
        thread.join()


def call(client: httpx.Client, path: str, grammar: dict[str, object], stop_ids: list[int]) -> httpx.Response:
    sampling = {"temperature": 0.0, "grammar": grammar}
    return client.post(path, json=CALLS[path] | {"sampling": sampling, "stop_ids": stop_ids})


def tokens_of(path: str, response: httpx.Response) -> list[int]:
    lines = [json.loads(line) for line in response.text.splitlines()]
    return [token["id"] for line in lines for token in line.get("tokens", [])]


@pytest.mark.parametrize("path", CALLS)
def test_every_call_keeps_to_its_grammar(client: httpx.Client, path: str) -> None:
    grammar = {"kind": "regex", "text": "the (in|th){3,5}"}
    ids = tokens_of(path, call(client, path, grammar, [EOS]))
    while ids[-1] != EOS:
        assert path in ("/v1/verify", "/v1/decode"), "a token a call, or fewer than asked for"
        sampling = {"temperature": 0.0, "grammar": grammar}
        body = CALLS[path] | {"context": PROMPT + ids, "generated": len(ids), "sampling": sampling, "stop_ids": [EOS]}
        ids += tokens_of(path, client.post(path, json=body))
    text = TOKENIZER.decode(ids[:-1])
    assert text.startswith("the ") and set(text[4:]) <= set("inth")


def test_a_sequence_goes_on_in_its_grammar(client: httpx.Client) -> None:
    grammar = {"kind": "json_schema", "text": '{"enum": ["in the end"]}'}
    done: list[int] = []
    while not done or done[-1] != EOS:
        body = {"context": PROMPT + done, "generated": len(done), "draft": [5, 6], "stop_ids": [EOS]}
        response = client.post("/v1/verify", json=body | {"sampling": {"temperature": 0.0, "grammar": grammar}})
        done += [token.id for token in msgspec.json.decode(response.content, type=VerifyResponse).tokens]
    assert TOKENIZER.decode(done[:-1]) == '"in the end"'


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("grammar", "stop_ids", "field"),
    [
        ({"kind": "regex", "text": "("}, [EOS], "sampling.grammar"),
        ({"kind": "json_schema", "text": "{"}, [EOS], "sampling.grammar"),
        ({"kind": "json_schema", "text": '{"not": {}}'}, [EOS], "sampling.grammar"),
        ({"kind": "json_schema", "text": ""}, [EOS], "sampling.grammar.text"),
        ({"kind": "regex", "text": "x" * 70_000}, [EOS], "sampling.grammar.text"),
        ({"kind": "lark", "text": "start: x"}, [EOS], "sampling.grammar.kind"),
        ({"kind": "regex"}, [EOS], "sampling.grammar.text"),
        ({"kind": "regex", "text": "x", "flags": "i"}, [EOS], "sampling.grammar.flags"),
        ({"kind": "regex", "text": "x"}, [], "stop_ids"),
        ({"kind": "regex", "text": "x"}, [5], "stop_ids"),
    ],
)
def test_a_bad_grammar_is_refused_before_anything_runs(
    client: httpx.Client, path: str, grammar: dict[str, object], stop_ids: list[int], field: str
) -> None:
    response = call(client, path, grammar, stop_ids)
    assert response.status_code == 400
    error = msgspec.json.decode(response.content, type=ErrorBody).error
    assert (error.type, error.field) == ("invalid_request", field)
    assert error.message.startswith(("sampling.grammar: ", "text must", "stop_ids must")) or field.count(".") == 2


def test_a_grammar_that_gets_stuck_fails_its_call(client: httpx.Client) -> None:
    endless = {"$ref": "#/$defs/e"}
    schema = {"type": "array", "items": endless, "minItems": 1, "$defs": {"e": endless}}
    begun = TOKENIZER.encode("[").ids
    sampling = {"temperature": 0.0, "grammar": {"kind": "json_schema", "text": json.dumps(schema)}}
    body = {"context": PROMPT + begun, "generated": len(begun), "draft": [], "stop_ids": [EOS], "sampling": sampling}
    response = client.post("/v1/verify", json=body)
    assert response.status_code == 400
    error = msgspec.json.decode(response.content, type=ErrorBody).error
    assert error == ErrorDetail(
        "invalid_request", "sampling.grammar: the grammar leaves no token to go on with", "sampling.grammar"
    )


def test_a_backend_whose_tokenizer_is_not_understood_serves_all_else() -> None:
    checkpoint = tiny_checkpoint(config=replace(TINY, vocab_size=VOCAB))
    with running_engine(checkpoint) as calls:
        backend = Backend()
        backend.ready(calls.engine, TokenizerFiles("{}", None, [2], {}))
        with pytest.raises(CallError, match="not understood"):
            asyncio.run(backend.grammars.constrain(Grammar("regex", "a"), frozenset({2})))
        assert asyncio.run(backend.grammars.constrain(None, frozenset())) is None
