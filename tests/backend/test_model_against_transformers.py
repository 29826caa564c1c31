"""The model against an independent implementation: transformers, in float32, from the same files.

Transformers computes linear layers and attention with other kernels and hence adds in another order, so that logits can
agree only to rounding: float32 rounds at 6e-8 of a value, at every step of up to 30 layers. Seen were differences of at
most 1.7e-4 on SmolLM2, whose logits reach 41, and of 1.7e-5 on the tiny models, whose logits reach 7. The tolerances
are six times that, for other CPUs. They are also less than half the smallest margin between the best two of SmolLM2's
logits (2.7e-3), so that the same tokens are no luck; and the last test shows what mistakes look like: each moves the
logits by a thousand times the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend.engine import open_checkpoint as opening
from backend.engine.checkpoint import Checkpoint
from backend.engine.hf_checkpoint import load_hf
from backend.engine.kv_pool import RESERVED_BLOCKS, KvPool
from backend.engine.model import Model
from backend.kernels.attention import BLOCK, Layout
from backend.kernels.ops import CPU_FAST, CPU_FIXED, Ops
from tests.backend.tiny_models import FAMILIES, VOCAB, ignore, save_tiny

_SMOLLM2_TOLERANCE = 1e-3
_TINY_TOLERANCE = 1e-4
_NEW_TOKENS = 32

_PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "What is 17 times 23?",
    "Write a Python function that reverses a string.",
    "Translate 'good morning' into Spanish.",
    "Name three moons of Jupiter.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "Summarise the plot of Romeo and Juliet in one sentence.",
    "¿Cuál es la capital de Perú?",
    "List the first ten prime numbers.",
    "Why is the sky blue?",
    "Tell me a joke about cats.",
    "def fibonacci(n):",
    "Continue: 1, 1, 2, 3, 5, 8,",
    "What should I pack for a week in Norway in winter?",
    "Is a tomato a fruit or a vegetable? Answer with one word.",
    "Write an email that asks a colleague to move a meeting from Tuesday to Thursday, and keep it short and polite.",
    "🙂 means what?",
]


class Sequences:
    """Token sequences that grow together over our model, each with blocks of its own."""

    def __init__(self, model: Model, ops: Ops, count: int, capacity: int):
        self._model = model
        self._ops = ops
        self._blocks = -(-capacity // BLOCK)
        self._kv = KvPool(model.config, torch.float32, count * self._blocks)
        self._lengths = [0] * count

    def extend(self, added: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Append tokens to each sequence, in one pass; the logits [len(added[i]), vocab] behind each."""
        width = max(len(tokens) for tokens in added)
        ids, positions, slots, cells = [], [], [], []
        tables = []
        for i, (tokens, start) in enumerate(zip(added, self._lengths, strict=True)):
            first = RESERVED_BLOCKS + i * self._blocks
            own = range(start, start + len(tokens))
            ids += tokens
            positions += own
            slots += [first * BLOCK + position for position in own]
            cells += range(i * width, i * width + len(tokens))
            tables.append(list(range(first, first + self._blocks)))
        layout = Layout(
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            tables=torch.tensor(tables),
            starts=torch.tensor(self._lengths),
            width=width,
            cells=None if len(cells) == len(added) * width else torch.tensor(cells),
        )
        logits = self._model.forward(self._ops, torch.tensor(ids), layout, self._kv, torch.arange(len(ids)))
        self._lengths = [start + len(tokens) for start, tokens in zip(self._lengths, added, strict=True)]
        return list(logits.split([len(tokens) for tokens in added]))


def continue_greedily(
    model: Model, ops: Ops, prompts: Sequence[Sequence[int]], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` tokens after each prompt, ids [prompts, count], and the logits [prompts, count, vocab] behind them."""
    sequences = Sequences(model, ops, len(prompts), max(map(len, prompts)) + count)
    chosen, seen = [], []
    added = [list(prompt) for prompt in prompts]
    for _ in range(count):
        last = torch.stack([logits[-1] for logits in sequences.extend(added)])
        seen.append(last)
        chosen.append(last.argmax(-1))
        added = [[token] for token in chosen[-1].tolist()]
    return torch.stack(chosen, dim=1), torch.stack(seen, dim=1)


def continue_with_transformers(
    model: Any, prompts: Sequence[Sequence[int]], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by transformers' own generation, prompts padded on the left; the end of a turn stops nothing."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[:, width:], torch.stack(out.logits, dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2, from its GGUF file


@pytest.fixture(scope="module")
def smollm2_reference() -> Any:
    path = opening._find_smollm2()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    path = opening._find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    conversations = [[{"role": "user", "content": prompt}] for prompt in _PROMPTS]
    return [
        list(ids) for ids in tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=False)
    ]


@pytest.fixture(scope="module")
def smollm2_continued(smollm2_reference: Any, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return continue_with_transformers(smollm2_reference, prompts, _NEW_TOKENS)


@pytest.mark.slow
def test_smollm2_has_the_weights_that_transformers_reads(smollm2: Checkpoint, smollm2_reference: Any) -> None:
    """Every tensor, bit for bit: dequantised, and Q and K in the rotate-half layout."""
    theirs = smollm2_reference.state_dict()
    names = {
        "embedding": "embed_tokens",
        "final_norm": "norm",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{f"{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
        **{f"{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
    for name, weight in smollm2.weights.items():
        prefix, _, part = name.rpartition(".")
        stored = ".".join(filter(None, ("model", prefix, names[part], "weight")))
        assert torch.equal(weight, theirs[stored]), name
    assert len(smollm2.weights) == len(theirs) - 1  # The head, which is the embedding again.


@pytest.mark.slow
@pytest.mark.parametrize("ops", [CPU_FAST, CPU_FIXED], ids=lambda ops: ops.name)
def test_smollm2_says_what_transformers_says(
    ops: Ops, smollm2: Checkpoint, prompts: list[list[int]], smollm2_continued: tuple[torch.Tensor, torch.Tensor]
) -> None:
    assert len(prompts) == 20
    tokens, logits = continue_greedily(Model(smollm2, torch.float32, ignore), ops, prompts, _NEW_TOKENS)
    expected_tokens, expected_logits = smollm2_continued
    assert torch.equal(tokens, expected_tokens)
    assert (logits - expected_logits).abs().max() < _SMOLLM2_TOLERANCE


# ---------------------------------------------------------------------------------------------------------------------
# Every family, tiny and random


def run_over_two_passes(checkpoint: Checkpoint, ops: Ops, sequence: torch.Tensor) -> torch.Tensor:
    """Logits [len(sequence), vocab], with all keys and values of the second pass's past coming from the pool."""
    sequences = Sequences(Model(checkpoint, torch.float32, ignore), ops, 1, len(sequence))
    first = len(sequence) * 2 // 3
    return torch.cat([sequences.extend([part.tolist()])[0] for part in (sequence[:first], sequence[first:])])


@pytest.fixture(scope="module")
def sequence() -> torch.Tensor:
    """Longer than three blocks of keys, and than the positions that the llama3 scaling calls original."""
    return torch.randint(VOCAB, (200,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ops", [CPU_FAST, CPU_FIXED], ids=lambda ops: ops.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_transformers_computes(
    family: str, ops: Ops, sequence: torch.Tensor, tmp_path: Path
) -> None:
    reference = save_tiny(tmp_path, family)
    checkpoint = load_hf(tmp_path, ignore)
    with torch.inference_mode():
        expected = reference(sequence[None]).logits[0]
    logits = run_over_two_passes(checkpoint, ops, sequence)
    assert (logits - expected).abs().max() < _TINY_TOLERANCE

    prompts = [sequence[start : start + length].tolist() for start, length in ((0, 5), (10, 70), (90, 1), (100, 64))]
    model = Model(checkpoint, torch.float32, ignore)
    tokens, logits = continue_greedily(model, ops, prompts, _NEW_TOKENS)
    expected_tokens, expected_logits = continue_with_transformers(reference, prompts, _NEW_TOKENS)
    assert torch.equal(tokens, expected_tokens)
    assert (logits - expected_logits).abs().max() < _TINY_TOLERANCE


def without(checkpoint: Checkpoint, part: str) -> Checkpoint:
    weights = {name: weight for name, weight in checkpoint.weights.items() if not name.endswith(part)}
    assert len(weights) < len(checkpoint.weights)
    return replace(checkpoint, weights=weights)


def with_config(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    return replace(checkpoint, config=replace(checkpoint.config, **changes))


def with_interleaved_keys(checkpoint: Checkpoint) -> Checkpoint:
    """The rows of K as a GGUF file keeps them."""
    heads = checkpoint.config.kv_heads
    weights = {
        name: weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) if name.endswith("k_proj") else weight
        for name, weight in checkpoint.weights.items()
    }
    return replace(checkpoint, weights=weights)


@pytest.mark.parametrize(
    ("family", "spoil"),
    [
        pytest.param("llama", lambda model: with_config(model, rope_theta=9000.0), id="rope theta"),
        pytest.param("llama", lambda model: with_config(model, rms_eps=0.011), id="rms eps"),
        pytest.param("llama", with_interleaved_keys, id="interleaved keys"),
        pytest.param("llama", lambda model: without(model, "lm_head"), id="tied"),
        pytest.param("llama3-rope", lambda model: with_config(model, rope_scaling=None), id="rope scaling"),
        pytest.param("qwen2", lambda model: without(model, "_bias"), id="biases"),
        pytest.param("qwen3", lambda model: without(model, "k_norm"), id="norms of keys"),
    ],
)
def test_a_mistake_would_be_noticed(
    family: str, spoil: Callable[[Checkpoint], Checkpoint], sequence: torch.Tensor, tmp_path: Path
) -> None:
    reference = save_tiny(tmp_path, family)
    with torch.inference_mode():
        expected = reference(sequence[None]).logits[0]
    logits = run_over_two_passes(spoil(load_hf(tmp_path, ignore)), CPU_FIXED, sequence)
    assert (logits - expected).abs().max() > 1000 * _TINY_TOLERANCE
