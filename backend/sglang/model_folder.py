"""What the HTTP side reads of the model's folder: the tokenizer's files for gateways, and the digest of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.engine.checkpoint_reading import digest_files
from backend.protocol import TokenizerFiles

_DIGESTED = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def digest_folder(folder: Path) -> str:
    """SHA-256 of the weight, config and tokenizer files."""
    files = {file for pattern in _DIGESTED for file in folder.glob(pattern)}
    return digest_files(files, lambda share: None)


def tokenizer_files(tokenizer: Any, eos_ids: set[int] | None) -> TokenizerFiles:
    """What a gateway needs of SGLang's own tokenizer, which is one of transformers' fast ones.

    `eos_ids` are the model's; the tokenizer's own one counts too. Raises ValueError for one without a fast form.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("the model's tokenizer has no tokenizer.json form")
    ids = set(eos_ids or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    template = tokenizer.chat_template
    special = {role: str(token) for role in _SPECIAL_TOKENS if (token := getattr(tokenizer, role, None)) is not None}
    return TokenizerFiles(
        tokenizer_json=backend.to_str(),
        chat_template=template if isinstance(template, str) else None,
        eos_ids=sorted(ids),
        special_tokens=special,
    )
