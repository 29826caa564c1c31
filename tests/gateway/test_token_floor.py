"""No text makes fewer tokens than the floor says, and where that is not sure there is no floor."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from toy_model import TOKENIZER, build_tokenizer

from gateway.text.token_bytes import SPIECE_SPACE, read_token_bytes
from gateway.text.token_floor import TokenFloor, read_token_floor


def floor(tokenizer: Tokenizer) -> TokenFloor:
    spec = tokenizer.to_str()
    return read_token_floor(spec, read_token_bytes(spec).names)


def without_some_bytes() -> Tokenizer:
    """SmolLM2's vocabulary, for one, lacks control characters and bytes that begin unassigned ones."""
    missing = {"\u0104", "\u0106", "a", "\u00f1"}  # U+0104 and U+0106 stand for the bytes 4 and 6
    pieces = [piece for piece in sorted(pre_tokenizers.ByteLevel.alphabet()) if piece not in missing]
    tokenizer = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate([*pieces, "bc"])}, merges=[("b", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def composing() -> Tokenizer:
    tokenizer = build_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def sentencepiece(*, byte_fallback: bool = True) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), SPIECE_SPACE, "a", "aa", SPIECE_SPACE * 2]
    merges = [("a", "a"), (SPIECE_SPACE, SPIECE_SPACE)]
    vocab = {piece: id_ for id_, piece in enumerate(pieces)}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPIECE_SPACE), normalizers.Replace(" ", SPIECE_SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPIECE_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


KNOWN: dict[str, Tokenizer] = {
    "byte-level": TOKENIZER,
    "byte-level without some bytes": without_some_bytes(),
    "NFC": composing(),
    "SentencePiece": sentencepiece(),
}


@pytest.mark.parametrize("tokenizer", KNOWN.values(), ids=KNOWN.keys())
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.text("a\u0315\u0300\u05ae\u0062\u03b1\u0313\u0345\u1100\u1161\u11a8", max_size=60),
        st.text("ab c\x04\x06\N{SNOWMAN}\U00040000" + SPIECE_SPACE, max_size=60),
    )
)
def test_no_text_makes_fewer(tokenizer: Tokenizer, text: str) -> None:
    assert floor(tokenizer).of(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_what_it_knows() -> None:
    longest = len("<|start|>")
    assert floor(TOKENIZER) == TokenFloor(longest)
    assert floor(TOKENIZER).of("x" * 100) == -(-100 // longest)
    assert floor(composing()) == TokenFloor(4 * longest)
    assert floor(without_some_bytes()) == TokenFloor(2, "\x04\x06a")
    assert floor(without_some_bytes()).of("xa" * 100) == 50
    assert floor(sentencepiece()) == TokenFloor(len("<unk>"))
    assert TokenFloor(0).of("x" * 100) == 0


def _taking_space(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def _dropping_space(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])


def _dropping_dashes(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("-", "removed"), pre_tokenizers.ByteLevel()]
    )


def _stripping(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Strip()


def _shortening(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace("aa", "a")


@pytest.mark.parametrize("change", [_taking_space, _dropping_space, _dropping_dashes, _stripping, _shortening])
def test_where_text_may_be_lost_there_is_no_floor(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = build_tokenizer()
    change(tokenizer)
    assert floor(tokenizer) == TokenFloor(0)


def test_where_unknown_text_becomes_one_token_there_is_no_floor() -> None:
    spec: dict[str, Any] = json.loads(sentencepiece(byte_fallback=False).to_str())
    assert len(sentencepiece(byte_fallback=False).encode("z" * 100).ids) == 2
    names = [piece.encode() for piece in spec["model"]["vocab"]]
    assert read_token_floor(json.dumps(spec), names) == TokenFloor(0)


@pytest.mark.parametrize("behavior", ["isolated", "merged_with_previous", "merged_with_next", "contiguous"])
def test_splitting_alone_loses_nothing(behavior: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.Split("-", behavior), pre_tokenizers.ByteLevel()]
    )
    assert floor(tokenizer).chars_per_token > 0
