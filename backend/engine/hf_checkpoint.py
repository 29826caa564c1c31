"""Reads a Hugging Face folder of the Llama family: config.json, safetensors weights and the tokenizer's files.

Owns the names, defaults and variants of the format, as transformers reads them. Knows nothing of GGUF files. Whatever
would change the arithmetic and is not implemented is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from backend.engine.checkpoint import Checkpoint, CheckpointError, ModelConfig, Progress, RopeScaling
from backend.engine.checkpoint_reading import Keys, check_shape, digest_files, float32_copy, weight_shapes
from backend.protocol import TokenizerFiles

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_TOP_TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attention_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o_proj": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
_TOKENIZER, _TOKENIZER_CONFIG, _CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_READ_FILES = (_CONFIG, _GENERATION_CONFIG, _TOKENIZER, _TOKENIZER_CONFIG, _CHAT_TEMPLATE)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# The share of the loading that is done when the weights are read; hashing the files is the rest.
_WEIGHTS_READ = 0.7


def load_hf(folder: Path, progress: Progress) -> Checkpoint:
    """Read the model in `folder`. Raises CheckpointError for damaged files and for what we do not implement."""
    progress(0.0)
    keys = _read_json(folder / _CONFIG)
    sources = _find_tensors(folder)
    config = _read_config(folder, keys, len(sources))
    tokenizer = _read_tokenizer(folder, keys)
    family = keys.text("model_type")
    shapes = weight_shapes(
        config,
        tied=keys.flag("tie_word_embeddings", False),
        biases=family == "qwen2",
        qk_norms=family == "qwen3",
    )
    _check_tensors(folder, sources, shapes)
    weights = {}
    for done, (name, shape) in enumerate(shapes.items(), start=1):
        weights[name] = _read_tensor(folder, sources, _tensor_name(name), shape)
        progress(_WEIGHTS_READ * done / len(shapes))
    stored = _TOP_TENSORS["lm_head"]
    if "lm_head" not in weights and stored in sources:
        lm_head = _read_tensor(folder, sources, stored, shapes["embedding"])
        if not torch.equal(lm_head, weights["embedding"]):
            raise keys.refuse("tie_word_embeddings", f", but the tensor {stored} differs from the embedding")
    files = {folder / name for name in _READ_FILES if (folder / name).is_file()} | set(sources.values())
    if folder / _WEIGHTS not in files:
        files.add(folder / _INDEX)
    digest = digest_files(files, lambda share: progress(_WEIGHTS_READ + (1 - _WEIGHTS_READ) * share))
    return Checkpoint(config, weights, tokenizer, digest)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: is not UTF-8 text: {error}") from error


def _read_json(file: Path, *, optional: bool = False) -> Keys:
    if optional and not file.exists():
        return Keys(str(file), {})
    try:
        values = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return Keys(str(file), values)


def _read_config(folder: Path, keys: Keys, tensors: int) -> ModelConfig:
    family = keys.text("model_type")
    if family not in FAMILIES:
        raise keys.refuse("model_type", f"; this engine loads {', '.join(FAMILIES)}")
    if keys.text("hidden_act", "silu") != "silu":
        raise keys.refuse("hidden_act", "; only silu is implemented")
    if "quantization_config" in keys:
        raise keys.refuse("quantization_config", "; quantised weights are not implemented")
    for key in ("attention_bias", "mlp_bias"):
        if keys.flag(key, False):
            raise keys.refuse(key, f"; these biases are not implemented for {family}")
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if "head_dim" in keys:
        head_dim = keys.integer("head_dim")
    elif family == "qwen3":
        head_dim = 128
    elif hidden % heads:
        raise keys.refuse("num_attention_heads", f", which does not divide hidden_size ({hidden})")
    else:
        head_dim = hidden // heads
    # An explicit null means as many as heads everywhere; an absent key only in Llama, the others have a fixed default.
    if "num_key_value_heads" in keys.values or family == "llama":
        kv_heads = keys.integer("num_key_value_heads", heads)
    else:
        kv_heads = keys.integer("num_key_value_heads")
    theta, scaling = _read_rope(keys)
    config = ModelConfig(
        name=folder.resolve().name,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        layers=keys.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=keys.integer("max_position_embeddings"),
        rms_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
    )
    _refuse_sliding_window(keys, family, config)
    return check_shape(
        keys,
        config,
        tensors,
        layers_key="num_hidden_layers",
        heads_key="num_attention_heads",
        kv_heads_key="num_key_value_heads",
    )


def _read_rope(keys: Keys) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    rope = keys.section("rope_scaling" if keys.values.get("rope_scaling") else "rope_parameters")
    theta = rope.number("rope_theta", keys.number("rope_theta", 10000.0))
    for section in (keys, rope):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise section.refuse("partial_rotary_factor", "; rotating a part of each head is not implemented")
    for key, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.refuse(key, "; rotary parameters that differ between layers are not implemented")
    key = "rope_type" if "rope_type" in rope else "type"
    match rope.text(key, "default"):
        case "default":
            return theta, None
        case "llama3":
            return theta, RopeScaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position=rope.integer("original_max_position_embeddings"),
            )
        case _:
            raise rope.refuse(key, "; only default and llama3 are implemented")


def _refuse_sliding_window(keys: Keys, family: str, config: ModelConfig) -> None:
    """Refuse a window that some position within max_position would notice."""
    layer_types = keys.texts("layer_types") if "layer_types" in keys else None
    for kind in layer_types or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise keys.refuse("layer_types", f"; {kind} is not implemented")
    if family == "mistral":
        # Mistral's default is a window, so that only an explicit null turns it off.
        if "sliding_window" in keys.values and keys.values["sliding_window"] is None:
            return
    elif family == "llama" or not keys.flag("use_sliding_window", False) or "sliding_window" not in keys:
        return
    elif layer_types is not None:
        if "sliding_attention" not in layer_types:
            return
    elif keys.integer("max_window_layers", 28, least=0) >= config.layers:
        return
    window = keys.integer("sliding_window", 4096)
    if window < config.max_position:
        raise keys.refuse(
            "sliding_window",
            f" ({window}), below max_position_embeddings ({config.max_position}); sliding windows are not implemented",
        )


def _find_tensors(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor: all are in one file, or the index says."""
    if (folder / _WEIGHTS).is_file():
        return dict.fromkeys(_tensor_names(folder / _WEIGHTS), folder / _WEIGHTS)
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"{folder}: holds neither {_WEIGHTS} nor {_INDEX}")
    index = _read_json(folder / _INDEX)
    sources = {}
    for tensor in index.section("weight_map").values:
        shard = index.section("weight_map").text(tensor)
        if Path(shard).name != shard:
            raise CheckpointError(f"{folder / _INDEX}: weight_map names {shard!r}, which is not a file of the folder")
        sources[tensor] = folder / shard
    for file in dict.fromkeys(sources.values()):
        missing = {tensor for tensor, source in sources.items() if source == file} - set(_tensor_names(file))
        if missing:
            raise CheckpointError(f"{file}: the tensor {min(missing)} is missing, which {_INDEX} places there")
    return sources


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not a safetensors file, or a damaged or truncated one: {error}") from error


def _tensor_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_LAYER_TENSORS[part]}"


def _check_tensors(folder: Path, sources: dict[str, Path], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse tensors that the model would leave unused, except those that repeat what the config says."""
    known = {_tensor_name(name) for name in shapes} | {_TOP_TENSORS["lm_head"]}
    for name, file in sources.items():
        if name not in known and not name.endswith(".rotary_emb.inv_freq"):
            raise CheckpointError(f"{file}: the tensor {name} belongs to no model that this engine implements")


def _read_tensor(folder: Path, sources: dict[str, Path], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name not in sources:
        raise CheckpointError(f"{folder}: the tensor {name} is missing")
    file = sources[name]
    try:
        with safe_open(file, framework="pt") as tensors:
            values: torch.Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: the tensor {name} cannot be read: {error}") from error
    if tuple(values.shape) != shape:
        raise CheckpointError(f"{file}: the tensor {name} has the shape {tuple(values.shape)}, expected {shape}")
    if values.dtype not in _DTYPES:
        raise CheckpointError(f"{file}: the tensor {name} holds {values.dtype}, expected float32, float16 or bfloat16")
    return float32_copy(values)


def _read_tokenizer(folder: Path, config: Keys) -> TokenizerFiles:
    text = _read_text(folder / _TOKENIZER)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # The library raises plain Exception for a malformed file.
        raise CheckpointError(f"{folder / _TOKENIZER}: is not a tokenizer: {error}") from error
    keys = _read_json(folder / _TOKENIZER_CONFIG, optional=True)
    special = {role: token for role in _SPECIAL_TOKENS if (token := _special_token(keys, role)) is not None}
    eos_ids = [*_eos_ids(_read_json(folder / _GENERATION_CONFIG, optional=True)), *_eos_ids(config)]
    if "eos_token" in special and (token_id := tokenizer.token_to_id(special["eos_token"])) is not None:
        eos_ids.append(token_id)
    return TokenizerFiles(
        tokenizer_json=text,
        chat_template=_read_chat_template(folder, keys),
        eos_ids=list(dict.fromkeys(eos_ids)),
        special_tokens=special,
    )


def _special_token(keys: Keys, role: str) -> str | None:
    """A special token is written as its text or as an object that holds the text."""
    if role not in keys:
        return None
    return keys.section(role).text("content") if isinstance(keys.values[role], dict) else keys.text(role)


def _eos_ids(keys: Keys) -> list[int]:
    """One id or a list of ids."""
    value = keys.values.get("eos_token_id")
    if not isinstance(value, list):
        return [keys.integer("eos_token_id", least=0)] if "eos_token_id" in keys else []
    return [Keys(keys.file, {"eos_token_id": item}).integer("eos_token_id", least=0) for item in value]


def _read_chat_template(folder: Path, keys: Keys) -> str | None:
    """The template of the chat_template.jinja file, which goes before the one in tokenizer_config.json."""
    if (folder / _CHAT_TEMPLATE).is_file():
        return _read_text(folder / _CHAT_TEMPLATE)
    if "chat_template" not in keys:
        return None
    named = keys.values["chat_template"]
    if not isinstance(named, list):
        return keys.text("chat_template")
    for entry in named:
        if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
            return str(entry["template"])
    raise keys.refuse("chat_template", ", a list that holds no template named default")
