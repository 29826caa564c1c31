"""Each Triton kernel: bitwise, one row alone against every place and company; and against PyTorch's ops.

Interpreted, this shows that the logic holds: masks, offsets, loop bounds and order. What a matrix unit adds shows on a
GPU, where the shapes are larger too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

from backend.kernels import elementwise, sampling
from backend.kernels.attention import BLOCK, Layout, attention_fixed
from backend.kernels.dense import DenseWeight
from backend.kernels.triton_ops import log_softmax as log_softmax_module
from backend.kernels.triton_ops import sample as sample_module
from backend.kernels.triton_ops.attention import attention
from backend.kernels.triton_ops.launch import INTERPRETED
from backend.kernels.triton_ops.linear import linear
from backend.kernels.triton_ops.log_softmax import log_softmax
from backend.kernels.triton_ops.rms_norm import rms_norm
from backend.kernels.triton_ops.rope import rope
from backend.kernels.triton_ops.sample import gumbel, mix32, sample
from backend.kernels.triton_ops.swiglu import swiglu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = torch.device("cpu" if INTERPRETED.value else "cuda")
LINEAR_SHAPES = [(77, 131), (200, 64), (5, 7)]
ROWS = [2, 33, 67]
if not INTERPRETED.value:
    LINEAR_SHAPES += [(6144, 4096), (4096, 14336), (960, 576)]
    ROWS += [1, 3, 4, 8, 16, 64, 128, 129, 512]
# Two units in the last place of each dtype, and the reference's own rounding.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with DEVICE:
        yield


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
@pytest.mark.parametrize("out", ["same", "float32"])
def test_a_linear_row_depends_on_itself_alone(dtype: torch.dtype, shape: tuple[int, int], out: str) -> None:
    generator = _seeded(shape[0])
    bias = torch.randn(shape[0], generator=generator) if out == "same" else None
    weight = DenseWeight(
        torch.randn(*shape, generator=generator), bias, dtype, dtype if out == "same" else torch.float32, DEVICE
    )
    row = torch.randn(shape[1], generator=generator).to(dtype)
    alone = linear(row[None], weight)
    assert alone.dtype == weight.out_dtype
    for rows in ROWS:
        x = (torch.randn(rows, shape[1], generator=generator) * 3).to(dtype)
        places = sorted({0, rows // 2, rows - 1})
        x[places] = row
        y = linear(x, weight)
        for place in places:
            assert torch.equal(y[place], alone[0]), f"{rows} rows, place {place}"
        expected = x.double() @ weight.matrix.double().T + (0 if bias is None else weight.bias.double())
        torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[y.dtype], atol=1e-6 * shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_row_does_not_depend_on_its_address(dtype: torch.dtype) -> None:
    weight = DenseWeight(torch.randn(20, 30), None, dtype, dtype, DEVICE)
    x = torch.randn(9, 30).to(dtype)
    moved = torch.empty(9 * 30 + 1, dtype=dtype)[1:].view(9, 30)
    moved.copy_(x)
    assert torch.equal(linear(moved, weight), linear(x, weight))
    assert torch.equal(linear(x.T.contiguous().T, weight), linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 14, 72, 576])
def test_an_elementwise_row_depends_on_itself_alone(dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(width).to(dtype) * 4, torch.randn(width)
    angles = torch.randn(1, 1, width)
    norm, gated = rms_norm(x[None], weight, 1e-5)[0], swiglu(x[None])[0]
    rotated = rope(x[None, None], angles.cos(), angles.sin())[0, 0]
    for rows in (2, 7):
        batch = (torch.randn(rows, width) * 4).to(dtype)
        batch[rows - 1] = x
        many = angles.expand(rows, 1, -1).contiguous()
        norms, gates = rms_norm(batch, weight, 1e-5), swiglu(batch)
        turned = rope(batch[:, None], many.cos(), many.sin())
        assert torch.equal(norms[-1], norm) and torch.equal(gates[-1], gated) and torch.equal(turned[-1, 0], rotated)
        near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(norms, elementwise.rms_norm(batch, weight, 1e-5), **near)
        torch.testing.assert_close(gates, elementwise.swiglu_fixed(batch), **near)
        torch.testing.assert_close(turned, elementwise.rope(batch[:, None], many.cos(), many.sin()), **near)


def test_parts_of_a_fused_projection_are_normalised_and_rotated_in_place() -> None:
    """Queries and keys are views into one tensor; their rows lie apart."""
    qkv = torch.randn(3, 10, 12)
    weight, angles = torch.randn(12), torch.randn(3, 1, 12)
    for part in torch.split(qkv, [6, 2, 2], dim=1):
        torch.testing.assert_close(rms_norm(part, weight, 1e-5), elementwise.rms_norm(part, weight, 1e-5))
        expected = elementwise.rope(part, angles.cos(), angles.sin())
        torch.testing.assert_close(rope(part, angles.cos(), angles.sin()), expected)


def _layout(starts: list[int], width: int, tables: torch.Tensor) -> Layout:
    first = torch.tensor(starts)
    positions = (first[:, None] + torch.arange(width)).flatten()
    return Layout(positions=positions, slots=positions, tables=tables, starts=first, width=width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 12), ((2, 2), 72), ((4, 1), 128)])
def test_an_attention_row_depends_on_its_prefix_alone(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    rng = random.Random(head_dim)
    generator = _seeded(head_dim)
    query_heads, kv_heads = heads
    pool_blocks = 12
    keys = torch.randn(pool_blocks, kv_heads, BLOCK, head_dim, generator=generator).to(dtype)
    values = torch.randn(pool_blocks, kv_heads, BLOCK, head_dim, generator=generator).to(dtype)
    for length in (1, BLOCK, BLOCK + 1, rng.randint(130, 190)):
        own = torch.randperm(pool_blocks, generator=generator)[: -(-length // BLOCK)]
        query = torch.randn(query_heads, head_dim, generator=generator).to(dtype)
        alone = attention(query[None], keys, values, _layout([length - 1], 1, own[None]))[0]
        for _ in range(2):
            batch, width = rng.choice([1, 2]), rng.choice([1, 2, 5, 9])
            slot, offset = rng.randrange(batch), rng.randrange(min(width, length))
            starts = [rng.randint(0, 130) for _ in range(batch)]
            starts[slot] = length - 1 - offset
            blocks = -(-(max(starts) + width) // BLOCK) + rng.randint(0, 2)
            tables = torch.randint(0, pool_blocks, (batch, blocks), generator=generator)
            tables[slot, : len(own)] = own
            q = torch.randn(batch * width, query_heads, head_dim, generator=generator).to(dtype)
            q[slot * width + offset] = query
            layout = _layout(starts, width, tables)
            out = attention(q, keys, values, layout)
            assert torch.equal(out[slot * width + offset], alone), (batch, width, slot, offset, length, blocks)
            expected = attention_fixed(q, keys, values, layout)
            torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_attention_of_ragged_rows_is_that_of_padded_rows() -> None:
    """Among them the last row of a block, beside a sequence of more rows than are left in that block."""
    keys, values = torch.randn(2, 6, 2, BLOCK, 16)
    q = torch.randn(1 + 9, 4, 16)
    tables = torch.tensor([[0, 1], [2, 3]])
    positions = torch.tensor([127, *range(9)])
    layout = Layout(positions, positions, tables, torch.tensor([127, 0]), 9, torch.tensor([0, *range(9, 18)]))
    together = attention(q, keys, values, layout)
    assert torch.equal(together[:1], attention(q[:1], keys, values, _layout([127], 1, tables[:1])))
    assert torch.equal(together[1:], attention(q[1:], keys, values, _layout([0], 9, tables[1:])))


def test_an_attention_row_ignores_what_stands_behind_it() -> None:
    """Other keys and values behind a row's position leave its bits alone, in its own block and in later ones."""
    keys, values = torch.randn(2, 4, 1, BLOCK, 16)
    q = torch.randn(2, 2, 16)
    layout = _layout([70], 2, torch.tensor([[0, 1, 2]]))
    before = attention(q, keys, values, layout)
    for pool in (keys, values):
        pool[1, :, 8:] = torch.randn(1, BLOCK - 8, 16) * 100
        pool[2] = torch.randn(1, BLOCK, 16) * 100
    assert torch.equal(attention(q, keys, values, layout), before)
    keys[1, :, 7] += 1
    assert torch.equal(attention(q, keys, values, layout)[0], before[0])
    assert not torch.equal(attention(q, keys, values, layout)[1], before[1])


@pytest.mark.parametrize("vocab", [7, 331, log_softmax_module.BLOCK, 2 * log_softmax_module.BLOCK + 5])
def test_log_softmax(vocab: int) -> None:
    logits = torch.randn(5, vocab) * 6
    together = log_softmax(logits)
    torch.testing.assert_close(together, sampling.logprobs(logits), rtol=1e-6, atol=5e-6)
    for row in range(5):
        # A slice of an odd vocabulary lies at any address.
        assert torch.equal(log_softmax(logits[row : row + 1])[0], together[row])


@triton.jit
def _noise_kernel(low: tl.tensor, high: tl.tensor, bits: tl.tensor, noise: tl.tensor, COUNT: tl.constexpr) -> None:
    i = tl.arange(0, COUNT)
    low_key, high_key = tl.load(low), tl.load(high)
    hashed = mix32(mix32(i.to(tl.uint32) ^ low_key.to(tl.uint32)) ^ high_key.to(tl.uint32))
    tl.store(bits + i, hashed.to(tl.int32))
    tl.store(noise + i, gumbel(i, low_key, high_key))


@pytest.mark.parametrize("key", [(42, 0), (0, 1), (2**63 - 1, 131071), (-1, 7)])
def test_the_noise_is_the_references(key: tuple[int, int]) -> None:
    """Its hash bit for bit; its logarithms as far as a GPU's approximations go."""
    count = 1 << 14
    low, high = sampling.noise_keys([key])
    bits, noise = torch.empty(count, dtype=torch.int32), torch.empty(count)
    _noise_kernel[(1,)](low, high, bits, noise, COUNT=count)
    assert torch.equal(bits, sampling.noise_bits([key], count)[0])
    torch.testing.assert_close(noise, sampling.gumbel([key], count)[0], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("vocab", [7, 331, 2 * sample_module.BLOCK + 1])
def test_sampling_chooses_as_the_reference_does(vocab: int) -> None:
    logits = torch.randn(12, vocab) * 4
    logits[3:6, : vocab // 2] = float("-inf")
    keys = [(seed, position) for seed in (1, 42, -3) for position in (0, 5, 900, 40000)]
    together = sample(logits, keys)
    assert torch.equal(together, sampling.sample(logits, keys))
    alone = torch.cat([sample(logits[row : row + 1], keys[row : row + 1]) for row in range(12)])
    assert torch.equal(alone, together)


@pytest.mark.parametrize("equal", [[3, 5], [5, 5 + sample_module.BLOCK], [1999, 2047]])
def test_of_equal_scores_the_lowest_id_wins(equal: list[int]) -> None:
    # Noise vanishes in logits of this size, which are therefore equal with it too.
    logits = torch.zeros(1, 2048)
    logits[0, equal] = 1e12
    assert sample(logits, [(42, 9)]).tolist() == [equal[0]]
