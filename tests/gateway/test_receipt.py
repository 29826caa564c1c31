"""A receipt as a file: one form, every byte of it covered, every field of it classified."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from receipts_made import KEY, PUBLIC, choice, statement

from backend.protocol import Grammar, Sampling
from gateway.receipts.chain import last_link, logprob_bits, prompt_digest
from gateway.receipts.keys import PublicKeys, SigningKey, read_jwks
from gateway.receipts.receipt import (
    Answer,
    Choice,
    Issued,
    Prompt,
    Receipt,
    ReceiptError,
    Request,
    Sampled,
    Signature,
    Statement,
    encode,
    parse,
    sampled,
    sampling_of,
)

IDS = st.integers(0, 2**32 - 1)
LOGPROBS = st.floats(width=32, allow_nan=False)

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=3).map(lambda d: tuple(sorted(d.items()))),
    min_tokens=st.integers(0, 1000),
    grammar=st.none() | st.builds(Grammar, kind=st.sampled_from(["regex", "json_schema"]), text=st.text(min_size=1)),
)


@st.composite
def statements(draw: st.DrawFn) -> Statement:
    prompt = draw(st.lists(IDS, min_size=1, max_size=5))
    sampling = draw(SAMPLINGS)
    tokens = st.lists(st.tuples(IDS, LOGPROBS), max_size=5)
    choices = [
        choice(prompt, [id_ for id_, _ in row], [logprob for _, logprob in row], sampling.seed)
        for row in draw(st.lists(tokens, min_size=1, max_size=3))
    ]
    made = statement(prompt, choices, sampling, holds_prompt=draw(st.booleans()))
    texts = st.text(st.characters(codec="utf-8"))
    answer = replace(made.answer, model=draw(texts), stops=tuple(draw(st.lists(texts, max_size=2))))
    return replace(made, answer=answer, request=replace(made.request, tenant=draw(texts)))


@given(statements())
def test_what_is_signed_is_read_back_and_holds(made: Statement) -> None:
    raw = encode(KEY.sign(made))
    receipt = PUBLIC.check(raw)
    assert receipt.statement == made
    assert encode(receipt) == raw


@given(statements())
def test_the_form_is_rfc_8785s(made: Statement) -> None:
    """Python's json module writes the same for what has no fractions and names in ASCII."""
    raw = encode(KEY.sign(made))

    def no_fraction(text: str) -> float:
        raise AssertionError(text)

    document = json.loads(raw, parse_float=no_fraction)
    assert json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() == raw
    assert b"e+" not in raw


@given(SAMPLINGS)
def test_a_sampling_survives(sampling: Sampling) -> None:
    made = statement(choices=[choice((1,), (), (), sampling.seed)], sampling=sampling)
    (only,) = made.answer.choices
    assert sampling_of(made.answer, only) == sampling
    assert encode_sampling(sampling_of(made.answer, only)) == encode_sampling(sampling)


def encode_sampling(sampling: Sampling) -> str:
    return repr(sampled(sampling))


# --- nothing can be changed ------------------------------------------------------------------------------------------

RAW = encode(KEY.sign(statement()))


def test_every_flipped_bit_of_every_byte_is_caught() -> None:
    PUBLIC.check(RAW)
    for at in range(len(RAW)):
        for bit in range(8):
            flipped = bytearray(RAW)
            flipped[at] ^= 1 << bit
            with pytest.raises(ReceiptError):
                PUBLIC.check(bytes(flipped))


@given(st.integers(0, len(RAW)), st.integers(0, len(RAW)), st.binary(max_size=3))
def test_nor_is_anything_left_out_or_put_in(start: int, end: int, between: bytes) -> None:
    changed = RAW[:start] + between + RAW[max(start, end) :]
    if changed != RAW:
        with pytest.raises(ReceiptError):
            PUBLIC.check(changed)


@pytest.mark.parametrize(
    "changed",
    [
        RAW + b"\n",
        b" " + RAW,
        RAW.replace(b'"version":1', b'"version": 1'),
        RAW.replace(b'"version":1', b'"version":1.0'),
        RAW.replace(b'{"signature"', b'{"more":1,"signature"'),
        RAW.replace(b'"tenant":"a"', b'"tenant":"a","tenant":"a"'),
        RAW.replace(b'"tenant":"a"', b'"tenant":"\\u0061"'),
        RAW.replace(b'"0.7"', b'"0.70"'),
        RAW.replace(b'"seed":"42"', b'"seed":"+42"'),
        RAW.replace(b'"seed":"42"', b'"seed":"042"'),
        json.dumps(json.loads(RAW)).encode(),
        b"",
        b"[]",
        b"\xff",
        b"[" * 10_000,
    ],
)
def test_other_texts_of_the_same_receipt_are_none(changed: bytes) -> None:
    with pytest.raises(ReceiptError):
        PUBLIC.check(changed)


def test_a_receipt_of_nothing_is_none() -> None:
    """There would be nothing to compute again, and all of it the same."""
    made = statement()
    for answer in (replace(made.answer, choices=()), replace(made.answer, prompts=(), choices=())):
        with pytest.raises(ReceiptError, match="no receipt"):
            PUBLIC.check(encode(KEY.sign(replace(made, answer=answer))))


def test_another_key_is_not_believed() -> None:
    other = SigningKey(Ed25519PrivateKey.generate())
    raw = encode(other.sign(statement()))
    with pytest.raises(ReceiptError, match="not among those given"):
        PUBLIC.check(raw)
    posing = Receipt(statement(), Signature(KEY.public.kid, other.sign(statement()).signature.value))
    with pytest.raises(ReceiptError, match="signature"):
        PUBLIC.check(encode(posing))


# --- every field has its place ---------------------------------------------------------------------------------------

CHAINED = {
    Choice: {"tokens", "logprobs", "chain"},
    Prompt: {"digest", "tokens"},
}
"""What the chain covers: changed, it no longer agrees with itself, whoever signed it."""
SIGNED = {
    Choice: {"prompt", "seed", "max_tokens", "finish"},
    Sampled: {field.name for field in fields(Sampled)},
    Answer: {"fingerprint", "model", "prompts", "sampling", "stop_ids", "stops", "choices"},
    Request: {"digest", "route", "tenant", "rule", "policy", "response"},
    Issued: {"id", "at", "cache", "windows", "rollbacks"},
    Statement: {"version", "answer", "request", "issued"},
    Receipt: {"statement"},
}
"""What the signature covers."""
UNSIGNED = {
    Receipt: {"signature"},
    Signature: {"kid", "value"},
}
"""The signature itself, which holds or does not."""
TYPES = (Receipt, Signature, Statement, Issued, Request, Answer, Sampled, Choice, Prompt)


@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.__name__)
def test_every_field_is_classified(type_: type) -> None:
    places = [name for table in (CHAINED, SIGNED, UNSIGNED) for name in table.get(type_, ())]
    assert sorted(places) == sorted(field.name for field in fields(type_))


def test_a_receipt_says_all_of_a_sampling() -> None:
    assert {field.name for field in fields(Sampled)} | {"seed"} == set(Sampling.__struct_fields__)


CHANGES: list[tuple[type, str, Any]] = [
    (Choice, "prompt", 1),
    (Choice, "seed", "43"),
    (Choice, "max_tokens", 3),
    (Choice, "finish", "stop"),
    (Choice, "tokens", (7, 9)),
    (Choice, "logprobs", logprob_bits((-0.5, -1.5)).hex()),
    (Choice, "chain", "1" * 64),
    (Prompt, "digest", "1" * 64),
    (Prompt, "tokens", (1, 2, 4)),
    (Answer, "fingerprint", "toy-2"),
    (Answer, "model", "doll"),
    (Answer, "sampling", sampled(Sampling())),
    (Answer, "stop_ids", ()),
    (Answer, "stops", ()),
    *((Request, field.name, "1" * 64) for field in fields(Request)),
    *((Issued, name, value) for name, value in (("id", "x"), ("at", 1), ("cache", "x"), ("windows", 0))),
    (Issued, "rollbacks", 0),
    *((Signature, name, "1" * 128) for name in ("kid", "value")),
]


@pytest.mark.parametrize(("type_", "name", "value"), CHANGES, ids=lambda item: getattr(item, "__name__", str(item))[:9])
def test_every_field_is_covered(type_: type, name: str, value: object) -> None:
    receipt = KEY.sign(statement())
    made, answer = receipt.statement, receipt.statement.answer
    holders = {
        Choice: lambda: replace(
            receipt,
            statement=replace(
                made,
                answer=replace(answer, choices=(replace(answer.choices[0], **{name: value}), *answer.choices[1:])),
            ),
        ),
        Prompt: lambda: replace(
            receipt,
            statement=replace(made, answer=replace(answer, prompts=(replace(answer.prompts[0], **{name: value}),))),
        ),
        Answer: lambda: replace(receipt, statement=replace(made, answer=replace(answer, **{name: value}))),
        Request: lambda: replace(receipt, statement=replace(made, request=replace(made.request, **{name: value}))),
        Issued: lambda: replace(receipt, statement=replace(made, issued=replace(made.issued, **{name: value}))),
        Signature: lambda: replace(receipt, signature=replace(receipt.signature, **{name: value})),
    }
    changed = holders[type_]()
    assert changed != receipt
    with pytest.raises(ReceiptError):
        PUBLIC.check(encode(changed))
    if name in CHAINED.get(type_, ()):
        # Not even who has the key can make it agree with itself.
        with pytest.raises(ReceiptError):
            PUBLIC.check(encode(KEY.sign(changed.statement)))


# --- the chain -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(IDS, LOGPROBS), max_size=4), st.lists(st.tuples(IDS, LOGPROBS), max_size=4))
def test_different_tokens_have_different_chains(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> None:
    def chain(row: list[tuple[int, float]]) -> bytes:
        return last_link(prompt_digest((1,)), [id_ for id_, _ in row], logprob_bits([logprob for _, logprob in row]))

    # 0.0 and -0.0 are equal, and are different bits.
    assert (chain(one) == chain(other)) == (repr(one) == repr(other))


def test_the_chain_is_as_documented() -> None:
    link = hashlib.sha256(struct.pack(">3I", 1, 2, 3)).digest()
    for position, (id_, logprob) in enumerate(((7, -0.5), (8, -1.25))):
        link = hashlib.sha256(link + struct.pack(">IIf", position, id_, logprob)).digest()
    assert statement().answer.choices[0].chain == link.hex()


# --- keys ------------------------------------------------------------------------------------------------------------


def test_thumbprints_are_rfc_8037s() -> None:
    """The example of RFC 8037, appendix A.3."""
    x = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
    keys = read_jwks(json.dumps({"keys": [{"kty": "OKP", "crv": "Ed25519", "x": x, "kid": "posing"}]}))
    assert keys.kids == ("kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k",)


def test_a_key_set_is_read_back() -> None:
    other = {"kty": "RSA", "n": "x", "e": "AQAB"}
    document = {"keys": [*PUBLIC.jwks()["keys"], other]}  # type: ignore[misc]
    keys = read_jwks(json.dumps(document))
    assert keys.kids == PUBLIC.kids
    keys.check(RAW)
    (jwk,) = keys.jwks()["keys"]  # type: ignore[misc]
    raw = base64.urlsafe_b64decode(jwk["x"] + "=")
    assert Ed25519PublicKey.from_public_bytes(raw).public_bytes_raw() == KEY.public.raw


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"keys": 1}', '{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": 1}]}']
)
def test_what_is_no_key_set(text: str) -> None:
    with pytest.raises(ValueError):
        read_jwks(text)


def test_parsing_alone_finds_no_forged_signature() -> None:
    """Parsing says that a receipt agrees with itself; whose it is only its signature says."""
    forged = encode(SigningKey(Ed25519PrivateKey.generate()).sign(statement()))
    assert parse(forged).statement == statement()
    with pytest.raises(ReceiptError):
        PUBLIC.check(forged)


def test_no_keys_check_nothing() -> None:
    with pytest.raises(ReceiptError):
        PublicKeys(()).check(RAW)


def test_the_documented_lines_check_a_receipt(tmp_path: Path) -> None:
    """docs/receipts.md shows how to do without Verbatim."""
    docs = (Path(__file__).parents[2] / "docs/receipts.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", docs, re.DOTALL)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps(PUBLIC.jwks()))

    def runs(raw: bytes) -> bool:
        path = tmp_path / "receipt.json"
        path.write_bytes(raw)
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", script, path, keys], capture_output=True)
        return done.returncode == 0

    assert runs(RAW)
    assert not runs(RAW.replace(b'"tenant":"a"', b'"tenant":"b"'))
    answer = statement().answer
    broken = replace(answer, choices=(replace(answer.choices[0], tokens=(7, 9)),))
    assert not runs(encode(KEY.sign(replace(statement(), answer=broken))))
