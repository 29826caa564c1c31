"""Receipts for tests: small ones of any content, signed with a key that is nobody's."""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from backend.protocol import Sampling
from gateway.receipts.chain import last_link, logprob_bits, prompt_digest
from gateway.receipts.keys import PublicKeys, SigningKey
from gateway.receipts.receipt import Answer, Choice, Issued, Prompt, Request, Statement, sampled

KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
PUBLIC = PublicKeys([KEY.public])


def choice(prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], seed: int = 42) -> Choice:
    bits = logprob_bits(logprobs)
    chain = last_link(prompt_digest(prompt), ids, bits).hex()
    return Choice(0, str(seed), len(ids), "length", tuple(ids), bits.hex(), chain)


def statement(
    prompt: Sequence[int] = (1, 2, 3),
    choices: Sequence[Choice] | None = None,
    sampling: Sampling | None = None,
    *,
    holds_prompt: bool = True,
) -> Statement:
    if choices is None:
        choices = [choice(prompt, (7, 8), (-0.5, -1.25)), choice(prompt, (7, 9), (-0.5, -2.0), -(2**63))]
    kept = Prompt(prompt_digest(prompt).hex(), tuple(prompt) if holds_prompt else None)
    return Statement(
        version=1,
        answer=Answer(
            fingerprint="toy-1",
            model="toy",
            prompts=(kept,),
            sampling=sampled(sampling or Sampling(temperature=0.7, logit_bias=((3, 1e-07),))),
            stop_ids=(2,),
            stops=("\n", "Ende \N{SNOWMAN}"),
            choices=tuple(choices),
        ),
        request=Request("0" * 64, "/v1/completions", "a", "defaults.determinism.mode", "built-in", "cmpl-1"),
        issued=Issued("vr_1", 1_800_000_000, "lead", 3, 1),
    )
