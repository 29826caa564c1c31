"""A language model small enough to read: what comes next is a pure function of context, sampling and seed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from backend.protocol import Sampling, ScoredToken, TokenizerFiles, VerifiedToken

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
MERGES = ["th", "he", "the", "Par", "is", "Paris", "Stop", "!!", "\n\n"]


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: one token a byte, a few words, two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space, newline = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", "\N{LATIN CAPITAL LETTER C WITH DOT ABOVE}"
    pieces = [*alphabet, *(word.replace("\n", newline) for word in MERGES), space + "Paris"]
    vocab = {piece: id_ for id_, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


TOKENIZER = build_tokenizer()
EOS = TOKENIZER.token_to_id("<|end|>")
VOCAB = TOKENIZER.get_vocab_size()
FILES = TokenizerFiles(TOKENIZER.to_str(), TEMPLATE, [EOS], {"eos_token": "<|end|>"})


def ids(text: str) -> list[int]:
    """One token a byte."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def piece(name: str) -> int:
    """The token of a whole word, a leading space written as it is."""
    id_ = TOKENIZER.token_to_id(name.replace(" ", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"))
    assert id_ is not None
    return id_


def float32(value: float) -> float:
    """The nearest float32, as the double it widens to."""
    widened: float = struct.unpack("f", struct.pack("f", value))[0]
    return widened


class ToyModel:
    """Says `script` and then EOS; without a script it wanders over the vocabulary for ever."""

    def __init__(self, script: Sequence[int] | None = None) -> None:
        self.script = script

    def next(self, context: Sequence[int], generated: int, sampling: Sampling, top: int = 0) -> VerifiedToken:
        seed = sampling.seed if sampling.temperature > 0 else 0
        digest = hashlib.sha256(f"{list(context)} {sampling.temperature} {seed}".encode()).digest()
        if self.script is None:
            id_ = int.from_bytes(digest[:4], "big") % 256
        else:
            id_ = self.script[generated] if generated < len(self.script) else EOS
        logprob = float32(-digest[4] / 256 - 1e-3 * digest[5])
        others = [ScoredToken((id_ + i) % VOCAB, float32(logprob - i * 0.3)) for i in range(top)]
        return VerifiedToken(id_, logprob, others)

    def sequence(self, prompt: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], limit: int) -> list[int]:
        """The whole answer, token by token: what any correct loop must commit."""
        out: list[int] = []
        while len(out) < limit and not (out and out[-1] in stop_ids):
            out.append(self.next([*prompt, *out], len(out), sampling).id)
        return out
