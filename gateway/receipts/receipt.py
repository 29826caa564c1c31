"""What a receipt says, and the one form in which it is written.

A receipt is a statement and a signature of it. The statement has three parts:

- `answer`: what came out and all that it depends on. A chain of hashes covers each choice's prompt, tokens and
  logprobs; a replay computes these again. Two answers to one request have the same part, wherever they came from.
- `request`: who asked for it, by which rule of which policy, and the digests that tie it to request and response.
- `issued`: what was so this one time: the receipt's name, the time, what the answer took.

Only `signature` is outside of what is signed.

The form is JSON as RFC 8785 has it: keys sorted, no white space, no escape that is not needed, UTF-8. Numbers are whole
and below 2^53, where all JSON libraries agree on how to write them; what is larger or has a fraction is a string, and
bytes are lower-case hexadecimal. What is read has to be in this form to the last byte, so no two texts are one receipt.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from backend.protocol import Grammar, Sampling
from gateway.domain import Finish
from gateway.receipts.chain import LOGPROB_BYTES, last_link, prompt_digest

VERSION: Final = 1

Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256, in hexadecimal."""
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]
Real: TypeAlias = str
"""A double in the fewest digits that read back as it, as Python's `repr` writes it."""


class ReceiptError(ValueError):
    """A receipt does not hold; the message says where."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was gone on from. `tokens` None where the policy keeps prompts out of receipts."""

    digest: Digest
    tokens: Annotated[tuple[TokenId, ...], Meta(min_length=1)] | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence behind `prompts[prompt]`: the tokens that the answer consists of, and their logprobs' bits.

    `chain` is the last link of its chain. `seed` is a signed 64-bit integer in decimal.
    """

    prompt: Count
    seed: Annotated[str, Meta(pattern=r"^-?[0-9]{1,19}\Z")]
    max_tokens: Count
    finish: Finish
    tokens: tuple[TokenId, ...]
    logprobs: Annotated[str, Meta(pattern=r"^([0-9a-f]{8})*\Z")]
    chain: Digest


@dataclass(frozen=True, slots=True)
class Sampled:
    """The window protocol's sampling without the seed, which is each choice's own."""

    temperature: Real
    top_p: Real
    top_k: Count
    min_p: Real
    presence_penalty: Real
    frequency_penalty: Real
    repetition_penalty: Real
    logit_bias: tuple[tuple[TokenId, Real], ...]
    min_tokens: Count
    grammar: Grammar | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out, and all that it depends on."""

    fingerprint: str
    model: str
    prompts: Annotated[tuple[Prompt, ...], Meta(min_length=1)]
    sampling: Sampled
    stop_ids: tuple[TokenId, ...]
    stops: tuple[str, ...]
    choices: Annotated[tuple[Choice, ...], Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Request:
    """Whose request it was. `digest` is of its body as it was sent, `response` the id in the answer's body."""

    digest: Digest
    route: str
    tenant: str
    rule: str
    policy: str
    response: str


@dataclass(frozen=True, slots=True)
class Issued:
    """What was so this one time. `at` counts seconds since 1970, by the gateway's clock."""

    id: str
    at: Annotated[int, Meta(ge=0, lt=253_402_300_800)]  # up to the year 9999
    cache: str
    windows: Count
    rollbacks: Count


@dataclass(frozen=True, slots=True)
class Statement:
    """All that is signed."""

    version: Literal[1]
    answer: Answer
    request: Request
    issued: Issued


@dataclass(frozen=True, slots=True)
class Signature:
    """An Ed25519 signature of the statement's form, and the thumbprint of the key that made it."""

    kid: str
    value: Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The file."""

    statement: Statement
    signature: Signature


def encode(value: Receipt | Statement) -> bytes:
    """The one form."""
    return msgspec.json.encode(value, order="sorted")


def parse(raw: bytes) -> Receipt:
    """A receipt in its one form, whose parts agree with each other; raises `ReceiptError`.

    The signature is not looked at.
    """
    try:
        receipt = msgspec.json.decode(raw, type=Receipt)
        again = encode(receipt)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
        raise ReceiptError(f"it is no receipt: {error}") from error
    if again != raw:
        at = next((at for at, (one, other) in enumerate(zip(raw, again, strict=False)) if one != other), len(again))
        raise ReceiptError(f"it is not in the canonical form from byte {at} on")
    _check(receipt.statement.answer)
    return receipt


def sampled(sampling: Sampling) -> Sampled:
    """What a receipt says of a sampling."""
    return Sampled(
        temperature=_real(sampling.temperature),
        top_p=_real(sampling.top_p),
        top_k=sampling.top_k,
        min_p=_real(sampling.min_p),
        presence_penalty=_real(sampling.presence_penalty),
        frequency_penalty=_real(sampling.frequency_penalty),
        repetition_penalty=_real(sampling.repetition_penalty),
        logit_bias=tuple((id_, _real(bias)) for id_, bias in sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        grammar=sampling.grammar,
    )


def sampling_of(answer: Answer, choice: Choice) -> Sampling:
    """The sampling of a choice; raises `ReceiptError` where it is none, or not written in its one form."""
    said = answer.sampling
    values = {field.name: getattr(said, field.name) for field in fields(said)}
    try:
        values |= {name: float(value) for name, value in values.items() if isinstance(value, str)}
        biases = tuple((id_, float(bias)) for id_, bias in said.logit_bias)
        sampling = Sampling(**values | {"logit_bias": biases, "seed": int(choice.seed)})
    except ValueError as error:
        raise ReceiptError(f"it holds no sampling: {error}") from error
    if sampled(sampling) != said or str(sampling.seed) != choice.seed:
        raise ReceiptError("its sampling is not in the canonical form")
    return sampling


def _real(value: float) -> Real:
    return repr(float(value) + 0.0)  # no -0.0


def _check(answer: Answer) -> None:
    for prompt in answer.prompts:
        if prompt.tokens is not None and prompt_digest(prompt.tokens).hex() != prompt.digest:
            raise ReceiptError("the digest of a prompt is not that of its tokens")
    for index, choice in enumerate(answer.choices):
        if choice.prompt >= len(answer.prompts):
            raise ReceiptError(f"choice {index} names a prompt that is not there")
        bits = bytes.fromhex(choice.logprobs)
        if len(bits) != LOGPROB_BYTES * len(choice.tokens):
            raise ReceiptError(f"choice {index} has not one logprob for each of its tokens")
        first = bytes.fromhex(answer.prompts[choice.prompt].digest)
        if last_link(first, choice.tokens, bits).hex() != choice.chain:
            raise ReceiptError(f"the chain of choice {index} is not that of its tokens and logprobs")
        sampling_of(answer, choice)
