"""Tiny random models of each supported family, saved the way transformers saves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 272
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Far more than any model's, so that the logits would show a wrong one.
    "rms_norm_eps": 0.01,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama-tied": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-head-dim": lambda: LlamaConfig(**_SHAPE, head_dim=20),
    "llama3-rope": lambda: LlamaConfig(
        **_SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=16),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=None),
}


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with a handful of merges and two special tokens."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"<|im_start|>": 256, "<|im_end|>": 257}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    return tokenizer


def save_tiny(
    folder: Path, family: str, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB"
) -> PreTrainedModel:
    """Save a model whose every parameter is random, so that none can be left out or swapped unnoticed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough for peaked attention and distinct logits; transformers' own start has ones and zeros.
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return model


def ignore(share: float) -> None:
    pass


def same_weights(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
