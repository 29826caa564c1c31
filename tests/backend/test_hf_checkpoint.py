"""Hugging Face folders: what is read is what was saved, bit for bit, and what we cannot read is refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from backend.engine.checkpoint import CheckpointError, RopeScaling
from backend.engine.hf_checkpoint import load_hf
from tests.backend.tiny_models import CHAT_TEMPLATE, FAMILIES, ignore, same_weights, save_tiny


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
    assert (config.max_position, config.rms_eps) == (256, 0.01)
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
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
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
