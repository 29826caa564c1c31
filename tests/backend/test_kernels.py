"""Each fixed-lane op, bitwise: one row alone against every number of rows, place, company, padding and thread count."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from backend.kernels.attention import BLOCK, Layout, attention_fast, attention_fixed
from backend.kernels.elementwise import rms_norm, rope, swiglu_fast, swiglu_fixed
from backend.kernels.linear import PackedWeight, linear_fast, linear_fixed

DTYPES = [torch.float32, torch.bfloat16]
# (out_features, in_features): SmolLM2-135M's projections, odd shapes, and a deep reduction.
LINEAR_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (77, 131), (5, 7), (256, 8960)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 256, 512]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
@pytest.mark.parametrize("out", ["same", "float32"])
def test_a_linear_row_depends_on_itself_alone(dtype: torch.dtype, shape: tuple[int, int], out: str) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(*shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    packed = PackedWeight(weight, bias, dtype, dtype if out == "same" else torch.float32)
    row = torch.randn(shape[1], generator=generator).to(dtype)
    alone = linear_fixed(row[None], packed)[0]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in ROWS:
            x = (torch.randn(rows, shape[1], generator=generator) * 3).to(dtype)
            places = sorted({0, rows // 3, rows // 2, rows - 1})
            x[places] = row
            y = linear_fixed(x, packed)
            for place in places:
                assert torch.equal(y[place], alone), f"{rows} rows, place {place}, {threads} threads"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_row_does_not_depend_on_its_address(dtype: torch.dtype) -> None:
    weight = PackedWeight(torch.randn(96, 200), None, dtype, dtype)
    x = torch.randn(9, 200).to(dtype)
    expected = linear_fixed(x, weight)
    for shift in (1, 2, 3, 5):
        moved = torch.empty(9 * 200 + shift, dtype=dtype)[shift:].view(9, 200)
        moved.copy_(x)
        assert torch.equal(linear_fixed(moved, weight), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_agrees_with_the_reference(dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(64, 300), torch.randn(64), torch.randn(20, 300)
    packed = PackedWeight(weight, bias, dtype, torch.float32)
    reference = x.to(dtype).double() @ weight.to(dtype).double().T + bias.to(dtype).double()
    for linear in (linear_fast, linear_fixed):
        torch.testing.assert_close(linear(x.to(dtype), packed).double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 199, 576])
def test_an_elementwise_row_depends_on_itself_alone(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(2 * width).to(dtype) * 4
    weight = torch.randn(2 * width)
    norm, gated = rms_norm(x[None], weight, 1e-5)[0], swiglu_fixed(x[None])[0]
    angles = torch.randn(1, 1, 2 * width)
    rotated = rope(x[None, None], angles.cos(), angles.sin())[0, 0]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in ROWS:
            batch = (torch.randn(rows, 2 * width) * 4).to(dtype)
            for place in {0, rows // 2, rows - 1}:
                batch[place] = x
                assert torch.equal(rms_norm(batch, weight, 1e-5)[place], norm)
                assert torch.equal(swiglu_fixed(batch)[place], gated)
                many = angles.expand(rows, 1, -1)
                assert torch.equal(rope(batch[:, None], many.cos(), many.sin())[place, 0], rotated)


def test_elementwise_ops_agree_with_the_reference() -> None:
    x, weight = torch.randn(5, 64), torch.randn(64)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5))
    expected = F.silu(x[:, :32]) * x[:, 32:]
    for swiglu in (swiglu_fast, swiglu_fixed):
        torch.testing.assert_close(swiglu(x), expected)
    # The rotation preserves length and turns the pair (x[i], x[i + half]) by the angle.
    angle = torch.full((1, 1, 2), 0.3)
    turned = rope(torch.tensor([[[1.0, 0.0]]]), angle.cos(), angle.sin())
    torch.testing.assert_close(
        turned, torch.tensor([[[0.3, 0.0]]]).cos() * torch.tensor([1.0, 0.0]) + torch.tensor([0.0, 0.3]).sin()
    )


def _layout(starts: list[int], width: int, tables: torch.Tensor) -> Layout:
    first = torch.tensor(starts)
    positions = (first[:, None] + torch.arange(width)).flatten()
    return Layout(positions=positions, slots=positions, tables=tables, starts=first, width=width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
def test_an_attention_row_depends_on_its_prefix_alone(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    rng = random.Random(heads[0])
    generator = torch.Generator().manual_seed(heads[0])
    query_heads, kv_heads = heads
    head_dim, pool_blocks = 32, 60
    keys = torch.randn(pool_blocks, kv_heads, BLOCK, head_dim, generator=generator).to(dtype)
    values = torch.randn(pool_blocks, kv_heads, BLOCK, head_dim, generator=generator).to(dtype)
    for _ in range(40):
        length = rng.randint(1, 600)
        own = torch.randperm(pool_blocks, generator=generator)[: -(-length // BLOCK)]
        query = torch.randn(query_heads, head_dim, generator=generator).to(dtype)
        alone = attention_fixed(query[None], keys, values, _layout([length - 1], 1, own[None]))[0]
        for _ in range(6):
            torch.set_num_threads(rng.choice([1, 2]))
            batch, width = rng.choice([1, 2, 3, 8, 33]), rng.choice([1, 2, 3, 5, 8, 16, 33])
            slot, offset = rng.randrange(batch), rng.randrange(min(width, length))
            starts = [rng.randint(0, 600) for _ in range(batch)]
            starts[slot] = length - 1 - offset
            blocks = -(-(max(starts) + width) // BLOCK) + rng.randint(0, 2)
            tables = torch.randint(0, pool_blocks, (batch, blocks), generator=generator)
            tables[slot, : len(own)] = own
            q = torch.randn(batch * width, query_heads, head_dim, generator=generator).to(dtype)
            q[slot * width + offset] = query
            out = attention_fixed(q, keys, values, _layout(starts, width, tables))
            assert torch.equal(out[slot * width + offset], alone), (batch, width, slot, offset, length, blocks)


def test_attention_of_ragged_rows_is_that_of_padded_rows() -> None:
    keys, values = torch.randn(2, 6, 2, BLOCK, 16)
    q = torch.randn(7, 4, 16)
    counts, starts, width = [4, 1, 2], [3, 70, 0], 4
    tables = torch.tensor([[0, 1], [2, 3], [4, 5]])
    cells = torch.tensor([row * width + i for row, count in enumerate(counts) for i in range(count)])
    positions = torch.tensor([start + i for start, count in zip(starts, counts, strict=True) for i in range(count)])
    ragged = Layout(positions, positions, tables, torch.tensor(starts), width, cells)
    full = torch.zeros(12, 4, 16)
    full[cells] = q
    padded = _layout(starts, width, tables)
    assert torch.equal(attention_fixed(q, keys, values, ragged), attention_fixed(full, keys, values, padded)[cells])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [(1, 1), (1 << 13, 1 << 12), (1 << 30, 1 << 30)])
def test_how_much_is_attended_to_at_a_time_does_not_matter(
    dtype: torch.dtype, held: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(held[0])
    keys, values = torch.randn(2, 60, 3, BLOCK, 32).to(dtype)
    for _ in range(20):
        batch, width = rng.choice([1, 3, 17]), rng.choice([1, 2, 33, 150])
        counts = [rng.randint(1, width) for _ in range(batch)]
        starts = [rng.randint(0, 600) for _ in range(batch)]
        blocks = -(-(max(starts) + width) // BLOCK)
        tables = torch.randint(0, 60, (batch, blocks))
        cells = torch.tensor([row * width + i for row, count in enumerate(counts) for i in range(count)])
        positions = torch.tensor([start + i for start, count in zip(starts, counts, strict=True) for i in range(count)])
        layout = Layout(positions, positions, tables, torch.tensor(starts), width, cells)
        q = torch.randn(len(cells), 9, 32).to(dtype)
        fixed, fast = (attention(q, keys, values, layout) for attention in (attention_fixed, attention_fast))
        with monkeypatch.context() as context:
            context.setattr("backend.kernels.attention._KEYS_HELD", held[0])
            context.setattr("backend.kernels.attention._SCORES_HELD", held[1])
            assert torch.equal(attention_fixed(q, keys, values, layout), fixed)
            torch.testing.assert_close(attention_fast(q, keys, values, layout), fast)
        torch.testing.assert_close(fast, fixed)


@pytest.mark.parametrize("attention", [attention_fast, attention_fixed])
def test_sequences_without_rows_are_passed_over(attention: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.kernels.attention._KEYS_HELD", 1)
    keys, values = torch.randn(2, 2, 1, BLOCK, 16)
    q = torch.randn(1, 2, 16)
    place, tables = torch.tensor([5]), torch.tensor([[0], [1], [1]])
    ragged = Layout(place, place, tables, torch.tensor([5, 0, 0]), 3, torch.tensor([0]))
    alone = _layout([5], 1, tables[:1])
    together = attention(q, keys, values, ragged)  # type: ignore[operator]
    torch.testing.assert_close(together, attention(q, keys, values, alone))  # type: ignore[operator]


def test_a_block_behind_every_row_is_not_read() -> None:
    keys, values = torch.randn(2, 8, 1, BLOCK, 16)
    q = torch.randn(130, 2, 16)
    tables = torch.arange(8)[None]
    out = attention_fixed(q, keys, values, _layout([62], 130, tables))
    keys[3:], values[3:] = torch.nan, torch.nan
    assert torch.equal(attention_fixed(q, keys, values, _layout([62], 130, tables)), out)


@pytest.mark.parametrize("attention", [attention_fast, attention_fixed])
def test_a_long_sequence_of_few_rows_stands_beside_a_short_one_of_many(attention: object) -> None:
    """The last row of a block, beside a sequence of more rows than are left in that block."""
    keys, values = torch.randn(2, 6, 2, BLOCK, 16)
    q = torch.randn(1 + 9, 4, 16)
    tables = torch.tensor([[0, 1], [2, 3]])
    positions = torch.tensor([127, *range(9)])
    layout = Layout(positions, positions, tables, torch.tensor([127, 0]), 9, torch.tensor([0, *range(9, 18)]))
    together = attention(q, keys, values, layout)  # type: ignore[operator]
    alone = attention(q[:1], keys, values, _layout([127], 1, tables[:1]))  # type: ignore[operator]
    torch.testing.assert_close(together[:1], alone)


@pytest.mark.parametrize("attention", [attention_fast, attention_fixed])
def test_attention_agrees_with_the_reference(attention: object) -> None:
    keys, values = torch.randn(2, 4, 2, BLOCK, 16)
    q = torch.randn(6, 4, 16)
    tables = torch.tensor([[2, 0], [3, 1]])
    out = attention(q, keys, values, _layout([60, 5], 3, tables))  # type: ignore[operator]
    for row, (sequence, position) in enumerate([(0, 60), (0, 61), (0, 62), (1, 5), (1, 6), (1, 7)]):
        for head in range(4):
            k = keys[tables[sequence], head // 2].reshape(-1, 16)[: position + 1]
            v = values[tables[sequence], head // 2].reshape(-1, 16)[: position + 1]
            expected = torch.softmax(k @ q[row, head] / 4, dim=0) @ v
            torch.testing.assert_close(out[row, head * 16 : head * 16 + 16], expected)
