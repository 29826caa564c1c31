"""GGUF files: what is read is what was written, bit for bit, and what we cannot read is refused by name."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from backend.engine import open_checkpoint as opening
from backend.engine.checkpoint import CheckpointError
from backend.engine.gguf_checkpoint import load_gguf
from backend.engine.gguf_file import read_gguf
from tests.backend.tiny_gguf import HEAD_DIM, tiny_weights, write_gguf
from tests.backend.tiny_models import ignore, same_weights


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_read_bit_for_bit(tied: bool, tmp_path: Path) -> None:
    checkpoint = load_gguf(write_gguf(tmp_path / "tiny.gguf", tied=tied), ignore)
    expected = {name: torch.from_numpy(weight) for name, weight in tiny_weights(tied=tied).items()}
    assert same_weights(checkpoint.weights, expected)
    assert all(weight.data_ptr() % 64 == 0 and weight.is_contiguous() for weight in checkpoint.weights.values())
    config = checkpoint.config
    assert (config.name, config.head_dim, config.max_position) == ("tiny", HEAD_DIM, 128)
    assert (config.rope_theta, config.rope_scaling) == (50000.0, None)
    assert checkpoint.tokenizer.eos_ids == [257]
    assert checkpoint.tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert checkpoint.tokenizer.chat_template is None


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_near_what_was_quantised(kind: str, tmp_path: Path) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    weights = load_gguf(write_gguf(tmp_path / "tiny.gguf", quantisation=quantisation), ignore).weights
    for name, original in tiny_weights().items():
        # Four bits cut a range of about 7 into 15 steps.
        assert np.abs(weights[name].numpy() - original).max() < 0.5


def test_gguf_keys_that_change_the_tokenizer(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.eot_token_id": 256,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{x}}",
    }
    tokenizer = load_gguf(write_gguf(tmp_path / "tiny.gguf", keys), ignore).tokenizer
    assert tokenizer.eos_ids == [257, 256]
    assert tokenizer.chat_template == "{{x}}"
    built = Tokenizer.from_str(tokenizer.tokenizer_json)
    assert built.encode("the").ids == [256, built.token_to_id("the")]
    assert built.encode("the", add_special_tokens=False).ids == [built.token_to_id("the")]

    types = [3 if i == 257 else 4 if i == 256 else 1 for i in range(262)]
    tokenizer = load_gguf(write_gguf(tmp_path / "u.gguf", {"tokenizer.ggml.token_type": types}), ignore).tokenizer
    built = Tokenizer.from_str(tokenizer.tokenizer_json)
    assert built.encode("a<|im_start|><|im_end|>").ids[1:] == [256, 257]
    assert built.decode([256, 257]) == "<|im_start|>"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length"),
        ({"llama.attention.head_count": 5}, "llama.attention.head_count"),
        ({"llama.attention.head_count_kv": 3}, "llama.attention.head_count_kv"),
        ({"llama.attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv"),
        ({"llama.block_count": ...}, "llama.block_count"),
        ({"llama.block_count": "2"}, "llama.block_count"),
        ({"llama.block_count": 2**32 - 1}, "llama.block_count"),
        ({"llama.block_count": 3}, "blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "blk.1."),
        ({"llama.feed_forward_length": 32}, "blk.0.ffn_gate.weight"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.pre": ...}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": ...}, "tokenizer.ggml.add_bos_token"),
        ({"tokenizer.ggml.eos_token_id": 262}, "tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.tokens": ["a"] * 262}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(300)]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["t h", "q q"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type"),
    ],
)
def test_a_gguf_file_we_do_not_implement_is_refused_by_key(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", changes)
    with pytest.raises(CheckpointError) as refusal:
        load_gguf(path, ignore)
    assert str(path) in str(refusal.value)
    assert key in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rope_freqs.weight": np.ones(4, dtype=np.float32)}, "rope_freqs.weight"),
        ({"blk.0.attn_q.bias": np.ones(32, dtype=np.float32)}, "blk.0.attn_q.bias"),
        ({"blk.1.ffn_up.weight": None}, "blk.1.ffn_up.weight"),
        ({"token_embd.weight": None}, "token_embd.weight"),
        ({"output_norm.weight": np.ones(3, dtype=np.float32)}, "output_norm.weight"),
        ({"output_norm.weight": np.ones(32, dtype=np.int32)}, "output_norm.weight"),
    ],
)
def test_gguf_tensors_must_be_those_of_the_model(
    changes: dict[str, np.ndarray | None], name: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tensors=changes)
    with pytest.raises(CheckpointError) as refusal:
        load_gguf(path, ignore)
    assert str(path) in str(refusal.value)
    assert name in str(refusal.value)


def test_a_gguf_file_cut_anywhere_is_named(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    # The last tensor is a multiple of the alignment long, so that there is no padding to cut off.
    for length in [*range(0, 400, 7), *range(400, len(whole), len(whole) // 60), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            load_gguf(cut, ignore)
    for content in (b"", b"GGUF", b"not a model", whole[::-1]):
        cut.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            load_gguf(cut, ignore)


def test_a_damaged_byte_is_refused_or_read_but_nothing_else(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    header = len(whole) - sum(weight.nbytes for weight in tiny_weights().values())
    rng = random.Random(0)
    damaged, refused = tmp_path / "damaged.gguf", 0
    for _ in range(400):
        content = bytearray(whole)
        content[rng.randrange(header)] = rng.choice((0, 1, 9, 127, 255, rng.randrange(256)))
        damaged.write_bytes(content)
        try:
            load_gguf(damaged, ignore)
        except CheckpointError as refusal:
            assert str(damaged) in str(refusal)
            refused += 1
    assert refused > 200


def test_the_container_is_read_as_the_gguf_library_reads_it(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "general.alignment": 64,
        "a.flag": True,
        "a.negative": [-1, 2],
        "a.floats": [0.5, 2.0],
        "a.text": "é🙂",
        "a.texts": ["", "x"],
    }
    for path in (write_gguf(tmp_path / "tiny.gguf", keys), opening._find_smollm2()):
        metadata, tensors = read_gguf(path)
        reader = gguf.GGUFReader(path)
        assert metadata == {
            key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
        }
        assert list(tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            ours = tensors[tensor.name]
            assert ours.kind == tensor.tensor_type
            assert ours.shape == tuple(reversed(tensor.shape.tolist()))
            assert ours.rows.tobytes() == tensor.data.tobytes()


def test_a_container_of_another_kind_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "other.gguf"
    path.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(CheckpointError, match="its version is 1, expected 2 or 3"):
        load_gguf(path, ignore)
    path.write_bytes(whole[:4] + struct.pack(">I", 3) + whole[8:])
    with pytest.raises(CheckpointError, match="its version is 50331648"):
        load_gguf(path, ignore)
    doubled = write_gguf(path, {"xyzzy.b": 1, "xyzzy.c": 2}).read_bytes().replace(b"xyzzy.c", b"xyzzy.b")
    path.write_bytes(doubled)
    with pytest.raises(CheckpointError, match=r"it has the key xyzzy\.b twice"):
        load_gguf(path, ignore)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_gguf(tmp_path, ignore)
