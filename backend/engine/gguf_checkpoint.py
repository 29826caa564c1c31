"""Reads a GGUF file of the llama architecture: config, tokenizer and weights, dequantised to float32.

Owns the meaning of keys and tensors. Knows neither the container's bytes (see gguf_file) nor Hugging Face folders.

Two conventions matter. Converters to GGUF permute the rows of Q and K so that a rotated pair lies side by side; here
they are put back to the rotate-half layout. And a GGUF names its pre-tokenizer rather than describing it, so that a
name we have not checked is refused: the text would be cut at other places, quietly.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from backend.engine.checkpoint import Checkpoint, CheckpointError, ModelConfig, Progress
from backend.engine.checkpoint_reading import Keys, check_shape, digest_files, float32_copy, weight_shapes
from backend.engine.gguf_file import GgufFormatError, StoredTensor, read_gguf
from backend.protocol import TokenizerFiles

_TOP_TENSORS = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}
_LAYER_TENSORS = {
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
_Tensors: TypeAlias = dict[str, StoredTensor]

_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")

# Shares of the loading that are done after each step, as timed on a 135M model.
_PARSED, _WEIGHTS_READ, _TOKENIZER_BUILT = 0.1, 0.8, 0.9


def load_gguf(path: Path, progress: Progress) -> Checkpoint:
    """Read the model in `path`. Raises CheckpointError for a file that is damaged or holds what we do not implement."""
    progress(0.0)
    keys, tensors = _parse(path)
    config = _read_config(path, keys, tensors)
    progress(_PARSED)
    weights = {}
    shapes = weight_shapes(config, tied="output.weight" not in tensors, biases=False, qk_norms=False)
    _check_tensors(path, tensors, {_tensor_name(name) for name in shapes})
    for done, (name, shape) in enumerate(shapes.items(), start=1):
        values = _read_tensor(path, tensors, _tensor_name(name), shape)
        if name.endswith(".q_proj"):
            values = _unpermute(values, config.heads)
        elif name.endswith(".k_proj"):
            values = _unpermute(values, config.kv_heads)
        weights[name] = float32_copy(values)
        progress(_PARSED + (_WEIGHTS_READ - _PARSED) * done / len(shapes))
    tokenizer = _read_tokenizer(keys, config.vocab_size)
    progress(_TOKENIZER_BUILT)
    digest = digest_files([path], lambda share: progress(_TOKENIZER_BUILT + (1 - _TOKENIZER_BUILT) * share))
    return Checkpoint(config, weights, tokenizer, digest)


def _parse(path: Path) -> tuple[Keys, _Tensors]:
    try:
        metadata, tensors = read_gguf(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except GgufFormatError as error:
        raise CheckpointError(f"{path}: not a GGUF file, or a damaged or truncated one: {error}") from error
    return Keys(str(path), metadata), tensors


def _read_config(path: Path, keys: Keys, tensors: _Tensors) -> ModelConfig:
    architecture = keys.text("general.architecture")
    if architecture != "llama":
        raise keys.refuse("general.architecture", "; this loader reads llama")
    if keys.integer("llama.expert_count", 0, least=0) > 0:
        raise keys.refuse("llama.expert_count", "; mixtures of experts are not implemented")
    if keys.text("llama.rope.scaling.type", "none") != "none":
        raise keys.refuse("llama.rope.scaling.type", "; rotary scaling is not implemented for GGUF files")
    hidden, heads = keys.integer("llama.embedding_length"), keys.integer("llama.attention.head_count")
    if hidden % heads and "llama.attention.key_length" not in keys:
        raise keys.refuse("llama.attention.head_count", f", which does not divide llama.embedding_length ({hidden})")
    head_dim = keys.integer("llama.attention.key_length", hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.refuse(key, f"; only the head size ({head_dim}) is implemented")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: the tensor token_embd.weight is missing")
    config = ModelConfig(
        name=path.stem,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("llama.feed_forward_length"),
        layers=keys.integer("llama.block_count"),
        heads=heads,
        kv_heads=keys.integer("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=keys.integer("llama.context_length"),
        rms_eps=keys.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("llama.rope.freq_base", 10000.0),
    )
    return check_shape(
        keys,
        config,
        len(tensors),
        layers_key="llama.block_count",
        heads_key="llama.attention.head_count",
        kv_heads_key="llama.attention.head_count_kv",
    )


def _tensor_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_LAYER_TENSORS[part]}.weight"


def _check_tensors(path: Path, tensors: _Tensors, known: set[str]) -> None:
    for name in tensors:
        if name not in known:
            raise CheckpointError(f"{path}: the tensor {name} belongs to no model that this loader implements")


def _read_tensor(path: Path, tensors: _Tensors, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if name not in tensors:
        raise CheckpointError(f"{path}: the tensor {name} is missing")
    tensor = tensors[name]
    if tensor.shape != shape:
        raise CheckpointError(f"{path}: the tensor {name} has the shape {tensor.shape}, expected {shape}")
    try:
        return tensor.dequantise()
    except NotImplementedError as error:
        raise CheckpointError(f"{path}: the tensor {name} cannot be dequantised: {error}") from error


def _unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from (pair, half), as GGUF stores them, to (half, pair)."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _read_tokenizer(keys: Keys, vocab_size: int) -> TokenizerFiles:
    model = keys.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise keys.refuse("tokenizer.ggml.model", "; only gpt2 (byte-level BPE) is implemented")
    if keys.flag("tokenizer.ggml.add_eos_token", False):
        raise keys.refuse("tokenizer.ggml.add_eos_token", "; ending every prompt with EOS is not implemented")
    tokens = keys.texts("tokenizer.ggml.tokens")
    if len(tokens) > vocab_size:
        raise CheckpointError(
            f"{keys.file}: tokenizer.ggml.tokens holds {len(tokens)} tokens, token_embd.weight rows for {vocab_size}"
        )
    special = {role: _token_id(keys, key, tokens) for role, key in _SPECIAL_TOKENS.items() if key in keys}
    eos_ids = dict.fromkeys(_token_id(keys, key, tokens) for key in _EOS_KEYS if key in keys)
    tokenizer = Tokenizer(_bpe(keys, tokens))
    tokenizer.pre_tokenizer = _pre_tokenizer(keys)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(keys, tokens))
    if keys.flag("tokenizer.ggml.add_bos_token", False):
        if "bos_token" not in special:
            raise keys.refuse("tokenizer.ggml.add_bos_token", ", but tokenizer.ggml.bos_token_id is missing")
        bos = tokens[special["bos_token"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, special["bos_token"])]
        )
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=keys.text("tokenizer.chat_template") if "tokenizer.chat_template" in keys else None,
        eos_ids=list(eos_ids),
        special_tokens={role: tokens[token_id] for role, token_id in special.items()},
    )


def _token_id(keys: Keys, key: str, tokens: list[str]) -> int:
    token_id = keys.integer(key, least=0)
    if token_id >= len(tokens):
        raise keys.refuse(key, f", but there are {len(tokens)} tokens")
    return token_id


def _bpe(keys: Keys, tokens: list[str]) -> models.BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{keys.file}: tokenizer.ggml.tokens holds a token twice")
    merges = []
    for merge in keys.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(f"{keys.file}: tokenizer.ggml.merges holds {merge!r}, which joins no two tokens")
        merges.append((left, right))
    return models.BPE(vocab=vocab, merges=merges)


def _pre_tokenizer(keys: Keys) -> pre_tokenizers.PreTokenizer:
    if keys.text("tokenizer.ggml.pre") != "smollm":
        raise keys.refuse("tokenizer.ggml.pre", "; the only pre-tokenizer implemented for GGUF files is smollm")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _added_tokens(keys: Keys, tokens: list[str]) -> list[AddedToken]:
    """The tokens that are found in a text before it is cut into words; a special one is left out of decoded text."""
    types = keys.values.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"{keys.file}: tokenizer.ggml.token_type does not give one type for each token")
    return [
        AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN)
    ]
