"""The model that backends are under contract with: random, tiny, and awkward in its shapes."""

from __future__ import annotations

from dataclasses import replace

from backend.engine.checkpoint import Checkpoint
from backend.protocol import TokenizerFiles
from tests.backend.harness import TINY, tiny_checkpoint
from tests.backend.tiny_models import CHAT_TEMPLATE, tiny_tokenizer


def contract_checkpoint() -> Checkpoint:
    """Room for prompts of thousands of tokens, and a tokenizer."""
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = TokenizerFiles(tiny_tokenizer().to_str(), CHAT_TEMPLATE, [257], special)
    return replace(tiny_checkpoint(config=replace(TINY, max_position=4096)), tokenizer=tokenizer)
