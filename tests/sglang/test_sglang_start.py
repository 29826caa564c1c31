"""What SGLang is started with, and what the adapter refuses to start with."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from backend.engine.hf_checkpoint import load_hf
from backend.protocol import TokenizerFiles, VerifyShape
from backend.sglang import version_gate
from backend.sglang.fingerprint import fingerprint
from backend.sglang.hf_folder import as_hf_folder, write_hf_folder
from backend.sglang.passes import ServerFacts
from backend.sglang.provenance import Provenance
from backend.sglang.serve import arguments, environment, main
from backend.sglang.settings import AdapterSettings
from tests.backend.harness import tiny_checkpoint
from tests.backend.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

FACTS = ServerFacts(
    version="0.5.23",
    device="cpu",
    hardware="AVX512",
    fixed_ops="cpu-fixed",
    dtype="float32",
    max_context=4090,
    pool_tokens=8192,
    vocab_size=331,
    groups=4,
    window=16,
    tensor_parallel=1,
    libraries={"torch": "2.13.0"},
)


def test_settings_survive_the_environment() -> None:
    settings = AdapterSettings(VerifyShape(groups=3, window=20))
    assert AdapterSettings.from_environment(settings.to_environment()) == settings
    assert AdapterSettings.from_environment({}) is None, "a plain SGLang beside Verbatim stays plain"


def test_the_users_flags_and_environment_win_on_a_cpu() -> None:
    flags = ["--device", "cpu", "--dtype", "bfloat16", "--tp=2"]
    assert arguments(flags)[-5:] == flags and "--sleep-on-idle" in arguments(flags)
    given = environment(flags, {"OMP_NUM_THREADS": "3", "HOME": "/x"})
    assert (given["OMP_NUM_THREADS"], given["HOME"], given["SGLANG_PLATFORM"]) == ("3", "/x", "verbatim_cpu")
    assert given["SGLANG_CPU_OMP_THREADS_BIND"] == "0|0", "one group for each rank"


def test_another_device_is_left_alone() -> None:
    assert "--sleep-on-idle" not in arguments(["--device=cuda"])
    assert environment(["--device=cuda"], {"HOME": "/x"}) == {"HOME": "/x"}


@pytest.mark.parametrize("installed", ["0.5.22", "0.5.24", "0.6.0", None])
def test_an_unknown_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, installed: str | None) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(version_gate, "version", version)
    result = CliRunner().invoke(main, ["--model-path", "."])
    assert result.exit_code == 1
    assert (f"SGLang {installed} is installed" if installed else "SGLang is not installed") in result.output


def test_every_fact_that_bits_depend_on_is_in_the_fingerprint() -> None:
    base = fingerprint("weights", FACTS, "probe")
    assert base == fingerprint("weights", FACTS, "probe")
    assert base != fingerprint("others", FACTS, "probe") and base != fingerprint("weights", FACTS, "other")
    for field in msgspec.structs.fields(ServerFacts):
        value = getattr(FACTS, field.name)
        other = value + 1 if isinstance(value, int) else value | {"x": "1"} if isinstance(value, dict) else value + "x"
        changed = fingerprint("weights", msgspec.structs.replace(FACTS, **{field.name: other}), "probe")
        assert (changed == base) == (field.name in {"max_context", "pool_tokens", "vocab_size"}), field.name


def test_provenance_follows_the_last_writer() -> None:
    bits = Provenance(10, "cpu")
    sequence = torch.tensor([7, 2, 5, 1])
    assert bits.fixed_prefix(sequence) == 0
    bits.wrote_fixed(torch.tensor([7, 2, 1]))
    assert bits.fixed_prefix(sequence) == 2
    bits.wrote_fixed(torch.tensor([5]))
    assert bits.fixed_prefix(sequence) == 4 and bits.fixed_prefix(sequence[:0]) == 0
    bits.wrote_fast(torch.tensor([2]))
    assert bits.fixed_prefix(sequence) == 1


def test_a_checkpoint_survives_being_written_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = TokenizerFiles(tiny_tokenizer().to_str(), CHAT_TEMPLATE, [257], special)
    checkpoint = replace(tiny_checkpoint(), tokenizer=tokenizer)
    write_hf_folder(checkpoint, tmp_path / "tiny")
    read = load_hf(tmp_path / "tiny", lambda share: None)
    assert read.config == checkpoint.config
    assert read.tokenizer.chat_template == CHAT_TEMPLATE and read.tokenizer.eos_ids == [257]
    assert read.tokenizer.special_tokens.items() >= special.items()
    assert read.weights.keys() == checkpoint.weights.keys()
    assert all(torch.equal(read.weights[name], checkpoint.weights[name]) for name in read.weights)
    assert as_hf_folder(str(tmp_path / "tiny")) == tmp_path / "tiny"
