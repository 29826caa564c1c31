"""`verbatim replay` and `verbatim receipts`: an answer computed again is the same to the last bit, or is found out."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner
from engine_process import EngineProcess
from launched import Gateway, launch_gateway
from receipts_made import KEY, PUBLIC, choice, statement
from test_cli import free_ports
from test_receipts import ID, policy
from toy_backend import ToyBackend
from toy_model import EOS, ToyModel, ids

from backend.protocol import Sampling, VerifiedToken, VerifyRequest
from gateway.cli import main
from gateway.receipts.key_files import write_new_key
from gateway.receipts.receipt import Receipt, Statement, encode, parse


@dataclass
class Ran:
    code: int
    said: str


def invoke(*argv: str | Path, stdin: bytes = b"") -> Ran:
    result = CliRunner().invoke(main, list(map(str, argv)), input=stdin)
    return Ran(result.exit_code, result.output)


async def run(*argv: str | Path) -> Ran:
    """The command in a thread: the toy backend lives in this one's event loop."""
    return await asyncio.to_thread(invoke, *argv)


@asynccontextmanager
async def gateway_of(url: str, folder: Path, receipts: str = "{mode: always}", **more: Any) -> AsyncIterator[Gateway]:
    write_new_key(folder, datetime(2030, 1, 1, tzinfo=UTC))
    async with launch_gateway(url, policies=policy(receipts), receipt_keys=str(folder), **more) as gateway:
        yield gateway


async def fetch(gateway: Gateway, response: httpx.Response, path: Path) -> Receipt:
    """Its receipt, as a file too."""
    assert response.status_code == 200, response.text
    raw = (await gateway.http.get(f"/v1/receipts/{response.headers[ID]}")).content
    await asyncio.to_thread(path.write_bytes, raw)
    return parse(raw)


async def test_an_answer_is_computed_again_by_verification_alone(toy: ToyBackend, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    async with gateway_of(toy.url, tmp_path / "keys") as gateway:
        fields = {"n": 2, "max_tokens": 100, "temperature": 1, "seed": 5, "stop": "Zz", "ignore_eos": True}
        receipt = await fetch(gateway, await gateway.chat(**fields), path)
        tokens = sum(len(one.tokens) for one in receipt.statement.answer.choices)
        toy.calls.clear()
        toy.requests.clear()
        published = f"{gateway.url}/.well-known/verbatim-receipts.json"
        ran = await run("replay", path, "--backend", toy.url, "--keys", published)
    assert (ran.code, ran.said.partition(":")[0]) == (0, "the same to the last bit"), ran.said
    assert f"{tokens} tokens in 2 choices" in ran.said
    assert dict(toy.calls) == {"/v1/info": 1, "/v1/verify": 2 * -(-100 // (4 * toy.window))}
    assert all(isinstance(request, VerifyRequest) for request in toy.requests)


class Other(ToyModel):
    """Says something else at one position: another token, or another last bit of its logprob."""

    def __init__(self, position: int, *, token: bool) -> None:
        super().__init__()
        self._position, self._token = position, token

    def next(self, context: Sequence[int], generated: int, sampling: Sampling, top: int = 0) -> VerifiedToken:
        said = super().next(context, generated, sampling, top)
        if generated != self._position:
            return said
        if self._token:
            return msgspec.structs.replace(said, id=(said.id + 1) % 256)
        return msgspec.structs.replace(said, logprob=said.logprob - 2**-20)


@pytest.mark.parametrize("position", [0, 15, 62, 63, 64, 79])
@pytest.mark.parametrize("token", [True, False])
async def test_the_first_position_that_differs_is_named(
    toy: ToyBackend, tmp_path: Path, position: int, token: bool
) -> None:
    path = tmp_path / "receipt.json"
    async with gateway_of(toy.url, tmp_path / "keys") as gateway:
        await fetch(gateway, await gateway.chat(max_tokens=80), path)
    toy.model = Other(position, token=token)
    ran = await run("replay", path, "--backend", toy.url)
    assert ran.code == 1
    assert f"differs at choice 0, position {position}: {'token' if token else 'logprob'}" in ran.said


def signed(made: Statement, path: Path, **changes: Any) -> Path:
    """A receipt that agrees with itself and is well signed, and says what is not so."""
    (one, *_) = made.answer.choices
    (prompt,) = made.answer.prompts
    tokens = changes.pop("tokens", one.tokens)
    assert prompt.tokens is not None
    bits = bytes.fromhex(one.logprobs)[: 4 * len(tokens)]
    logprobs = struct.unpack(f">{len(tokens)}f", bits)
    forged = replace(choice(prompt.tokens, tokens, logprobs), seed=one.seed, max_tokens=one.max_tokens)
    forged = replace(forged, finish=one.finish)
    forged = replace(forged, **changes)
    path.write_bytes(encode(KEY.sign(replace(made, answer=replace(made.answer, choices=(forged,))))))
    return path


async def test_what_the_key_alone_cannot_tell_a_replay_does(toy: ToyBackend, tmp_path: Path) -> None:
    """Whoever holds the key can sign anything: not what the model would have said."""
    toy.model = ToyModel([*ids("Paris is"), EOS])
    path = tmp_path / "receipt.json"
    async with gateway_of(toy.url, tmp_path / "keys") as gateway:
        made = (await fetch(gateway, await gateway.chat(max_tokens=40), path)).statement
    tokens = made.answer.choices[0].tokens
    assert tokens == (*ids("Paris is"), EOS)
    other = (*tokens[:3], tokens[3] + 1, *tokens[4:])
    for changes, code, said in (
        ({}, 0, "the same"),
        ({"tokens": other}, 1, f"position 3: token {tokens[3]} came, {other[3]} is recorded"),
        ({"tokens": ()}, 1, "position 0: no token is recorded"),
        ({"tokens": tokens[:-2]}, 1, f"position {len(tokens) - 2}: finish stop is recorded, and nothing ends"),
        ({"tokens": tokens[:-2], "finish": "length"}, 1, "finish length is recorded"),
        ({"tokens": tokens[:-2], "finish": "length", "max_tokens": len(tokens) - 2}, 0, "the same"),
        ({"finish": "length"}, 1, "finish length is recorded"),
        ({"seed": "41"}, 1, "position 0: logprob"),
    ):
        file = signed(made, tmp_path / "forged.json", **changes)
        ran = await run("replay", file, "--backend", toy.url)
        assert (ran.code, said in ran.said) == (code, True), (changes, ran)


async def test_a_sequence_that_ends_before_what_is_recorded(toy: ToyBackend, tmp_path: Path) -> None:
    toy.model = ToyModel(ids("Paris is the"))
    path = tmp_path / "receipt.json"
    async with gateway_of(toy.url, tmp_path / "keys") as gateway:
        await fetch(gateway, await gateway.chat(max_tokens=10), path)
    toy.model = ToyModel([*ids("Paris"), EOS])
    ran = await run("replay", path, "--backend", toy.url)
    assert ran.code == 1 and "position 5: token" in ran.said


async def test_an_answer_that_filled_the_context(toy: ToyBackend, tmp_path: Path) -> None:
    toy.max_context = 100
    path = tmp_path / "receipt.json"
    async with gateway_of(toy.url, tmp_path / "keys") as gateway:
        made = (await fetch(gateway, await gateway.chat(ignore_eos=True), path)).statement
    (one,), (prompt,) = made.answer.choices, made.answer.prompts
    assert prompt.tokens is not None
    assert (len(prompt.tokens) + len(one.tokens), one.finish) == (100, "length")
    assert (await run("replay", path, "--backend", toy.url)).code == 0
    toy.max_context = 101
    longer = signed(made, tmp_path / "forged.json", max_tokens=one.max_tokens + 1)
    ran = await run("replay", longer, "--backend", toy.url)
    assert ran.code == 1 and "finish length is recorded" in ran.said


async def test_another_fingerprint_or_no_backend_says_nothing(toy: ToyBackend, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    async with gateway_of(toy.url, tmp_path / "keys") as gateway:
        await fetch(gateway, await gateway.chat(max_tokens=3), path)
    toy.fingerprint = "toy-2"
    ran = await run("replay", path, "--backend", toy.url)
    assert ran.code == 3 and "has the fingerprint toy-2, the receipt toy-1" in ran.said
    toy.fingerprint, toy.roles = "toy-1", ("draft",)
    assert (await run("replay", path, "--backend", toy.url)).code == 3
    (port,) = free_ports(1)
    ran = await run("replay", path, "--backend", f"http://127.0.0.1:{port}")
    assert ran.code == 3 and "cannot be reached" in ran.said


async def test_a_receipt_without_prompt_is_replayed_with_its_request(toy: ToyBackend, tmp_path: Path) -> None:
    path, request = tmp_path / "receipt.json", tmp_path / "request.json"
    request.write_text(json.dumps({"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}))
    async with gateway_of(toy.url, tmp_path / "keys", "{mode: always, prompt: digest}") as gateway:
        headers = {"content-type": "application/json"}
        content = request.read_bytes()
        await fetch(gateway, await gateway.http.post("/v1/chat/completions", content=content, headers=headers), path)
    argv = ("replay", path, "--backend", toy.url)
    assert (await run(*argv, "--request", request)).code == 0
    ran = await run(*argv)
    assert ran.code == 2 and "--request" in ran.said
    request.write_text(request.read_text() + " ")
    ran = await run(*argv, "--request", request)
    assert ran.code == 2 and "its digest is another" in ran.said


# --- offline ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    receipt, keys = tmp_path / "receipt.json", tmp_path / "keys.json"
    receipt.write_bytes(encode(KEY.sign(statement())))
    keys.write_text(json.dumps(PUBLIC.jwks()))
    return receipt, keys


def test_verify_says_what_holds_and_what_does_not(made: tuple[Path, Path]) -> None:
    receipt, keys = made
    ran = invoke("receipts", "verify", receipt, "--keys", keys)
    assert ran.code == 0 and ran.said.startswith("holds: vr_1, 4 tokens in 2 choices of toy, issued 2027-01-15")
    raw = receipt.read_bytes()
    assert invoke("receipts", "verify", "-", "--keys", keys, stdin=raw).code == 0
    ran = invoke("receipts", "verify", "-", "--keys", keys, stdin=raw.replace(b'"tenant":"a"', b'"tenant":"b"'))
    assert ran.code == 1 and "does not hold: the signature" in ran.said
    ran = invoke("receipts", "verify", "-", "--keys", keys, stdin=raw + b"\n")
    assert ran.code == 1 and f"not in the canonical form from byte {len(raw)} on" in ran.said
    assert invoke("receipts", "verify", "-", "--keys", keys, stdin=b"hello").code == 1
    assert invoke("receipts", "verify", receipt, "--keys", receipt).code == 2
    assert invoke("receipts", "verify", receipt, "--keys", "/none").code == 2
    assert invoke("receipts", "verify", "/none", "--keys", keys).code == 2


def test_what_does_not_hold_is_not_replayed(made: tuple[Path, Path]) -> None:
    receipt, keys = made
    nobody = "http://127.0.0.1:1"
    assert invoke("replay", receipt, "--backend", nobody).code == 3
    raw = receipt.read_bytes()
    forged = raw.replace(b'"tenant":"a"', b'"tenant":"b"')
    ran = invoke("replay", "-", "--backend", nobody, "--keys", keys, stdin=forged)
    assert ran.code == 2 and "signature" in ran.said
    ran = invoke("replay", "-", "--backend", nobody, stdin=raw.replace(b'"tokens":[7,8]', b'"tokens":[7,9]'))
    assert ran.code == 2 and "the chain of choice 0" in ran.said


def test_a_new_key_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    ran = invoke("receipts", "new-key", tmp_path / "keys")
    (path,) = (tmp_path / "keys").glob("*.pem")
    assert ran.said.startswith(f"{path}\nkid ")
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"PRIVATE KEY" in path.read_bytes() and "PRIVATE" not in ran.said


# --- the gateway as a process, the engine as itself ------------------------------------------------------------------


@pytest.mark.parametrize("command", [["up"], ["gateway", "--backend", "http://127.0.0.1:1"]])
def test_a_policy_of_receipts_without_a_key_stops_the_start(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\nanonymous: a\ntenants: {a: {receipts: {mode: always}}}\n")
    ran = invoke(*command, "--policy", path)
    assert ran.code == 2 and "tenants.a.receipts.mode asks for receipts, and there is no key" in ran.said
    ran = invoke(*command, "--policy", path, "--receipt-keys", tmp_path / "none")
    assert ran.code == 2 and "receipt_keys: cannot read" in ran.said
    (tmp_path / "empty").mkdir()
    ran = invoke(*command, "--policy", path, "--receipt-keys", tmp_path / "empty")
    assert ran.code == 2 and "holds no key" in ran.said


async def test_a_real_engine_gives_the_recorded_bits_again(engine: EngineProcess, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    async with gateway_of(engine.url, tmp_path / "keys", start_timeout_s=200.0) as gateway:
        fields = {"model": "tiny", "temperature": 1, "seed": 7, "ignore_eos": True, "n": 2, "presence_penalty": 0.5}
        made = (await fetch(gateway, await gateway.chat(**fields, max_tokens=90), path)).statement
        ran = await run("replay", path, "--backend", engine.url)
        assert (ran.code, "180 tokens in 2 choices" in ran.said) == (0, True), ran
        one = made.answer.choices[0]
        last = one.tokens[-1]
        forged = signed(made, tmp_path / "forged.json", tokens=(*one.tokens[:-1], (last + 1) % 32))
        ran = await run("replay", forged, "--backend", engine.url)
        assert (ran.code, f"position 89: token {last} came" in ran.said) == (1, True), ran
