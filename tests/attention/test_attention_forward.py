"""The Triton attention kernel on one tile: masks, lengths, head dims, groups, strides."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.attention_kernels import (
    NARROW,
    SCALE,
    SMALL,
    BlockConfig,
    assert_close,
    attended,
    attention,
    computed,
    configs,
    draw,
    each_way_to_load,
    interpreted,
    launch,
    seen_by,
)
from support.cases import examples

from cp_dtensor.attention.masked import RowMask

MASKS = {
    # (rows, columns, offset): blocks have 16 rows and 16 columns
    "full": (37, 51, None),
    "full, whole blocks": (32, 48, None),
    "causal": (37, 37, 0),
    "causal, whole blocks": (32, 32, 0),
    "after a prefix": (21, 51, 30),
    "after a prefix that ends with a block": (21, 53, 32),
    "wide": (21, 70, 9),
    "tall": (50, 20, 3),
    "some rows see nothing": (37, 21, -7),
    "blocks of rows see nothing": (50, 40, -33),
    "no row sees anything": (20, 30, -20),
    "every row sees everything": (20, 30, 29),
    "far beyond the last key": (20, 30, 2**40),
    "far before the first key": (20, 30, -(2**40)),
    "one row": (1, 50, None),
    "one key": (50, 1, 0),
    "no keys": (20, 0, None),
}
each_mask = pytest.mark.parametrize(("rows", "columns", "offset"), MASKS.values(), ids=MASKS)


@interpreted
@each_way_to_load
@each_mask
def test_masks_and_lengths(device: str, rows: int, columns: int, offset: int | None, tma: bool) -> None:
    q, k, v = draw(device, rows, columns)
    tma = tma and columns > 0
    result = computed(q, k, v, offset, config=replace(SMALL, tma=tma))
    assert_close(result, attended(q, k, v, offset), q.dtype)


@interpreted
@each_way_to_load
@pytest.mark.parametrize("dims", [(16, 16), (32, 32), (64, 64), (80, 80), (128, 128), (256, 256), (64, 40)], ids=str)
def test_head_dims(device: str, dims: tuple[int, int], tma: bool) -> None:
    q, k, v = draw(device, 20, 37, dims=dims, dtype=NARROW[device])
    expected = attended(q, k, v, 5)
    assert_close(computed(q, k, v, 5, config=replace(SMALL, tma=tma)), expected, q.dtype)
    assert_close(computed(q, k, v, 5, config=replace(configs.default_config(k, v), tma=tma)), expected, q.dtype)


@interpreted
@each_way_to_load
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 2), (3, 1)], ids=str)
def test_query_heads_share_key_heads(device: str, heads: tuple[int, int], tma: bool) -> None:
    q, k, v = draw(device, 18, 21, heads=heads, batch=2)
    assert_close(computed(q, k, v, 3, config=replace(SMALL, tma=tma)), attended(q, k, v, 3), q.dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        q, k, v = draw(device, 18, 21, dtype=dtype)
        with pytest.raises(AssertionError, match="interpreter"):
            computed(q, k, v, 3)
        return
    q, k, v = draw(device, 18, 21, dtype=dtype)
    assert_close(computed(q, k, v, 3), attended(q, k, v, 3), dtype)


@interpreted
@each_way_to_load
def test_strides_are_free_but_for_the_last_dim(device: str, tma: bool) -> None:
    """Queries and results in (B, S, H, D) memory, keys and values in rows [K | V] of which only some are used."""
    heads, rows, columns, dim = 2, 19, 23, 32
    q, k, v = draw(device, rows, columns, heads=(heads, heads), batch=2)
    packed = q.new_empty(columns + 5, 2, 2 * heads * dim)
    packed_k, packed_v = (
        part.unflatten(-1, (heads, dim)).permute(1, 2, 0, 3)[:, :, 3:-2] for part in packed.chunk(2, dim=-1)
    )
    packed_k.copy_(k)
    packed_v.copy_(v)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = q.new_empty(2, rows, heads, dim + 16, dtype=torch.float32)[..., :dim].transpose(1, 2)
    lse = q.new_empty(rows, 2, heads, dtype=torch.float32).permute(1, 2, 0).contiguous()[..., :rows]
    assert configs.can_use_tma(packed_k, packed_v)
    launch(out, lse, q, packed_k, packed_v, RowMask(), SCALE, config=replace(SMALL, tma=tma))
    assert_close((out, lse), attended(q, k, v, None), q.dtype)


def test_descriptors_want_aligned_rows_and_some_keys() -> None:
    aligned = torch.zeros(2, 2, 8, 32, dtype=torch.float16)
    assert configs.can_use_tma(aligned, aligned)
    for other in (aligned[:, :, :0], aligned[..., 1:17], aligned[:, :1].expand(2, 2, 8, 32), torch.zeros(2, 2, 8, 33)):
        assert not configs.can_use_tma(aligned, other)
        assert not configs.default_config(other, aligned).tma
    assert configs.default_config(aligned, aligned).tma


@interpreted
@each_way_to_load
def test_blocks_that_no_row_sees_are_not_read(device: str, tma: bool) -> None:
    q, k, v = draw(device, 33, 80)
    config = replace(SMALL, tma=tma)
    expected = computed(q, k, v, -1, config=config)
    for x in (k, v):
        x[:, :, 32:] = float("nan")  # the last row sees columns up to 31
    assert all(map(torch.equal, computed(q, k, v, -1, config=config), expected))


@interpreted
def test_no_rows_are_no_work(device: str) -> None:
    q, k, v = draw(device, 0, 5)
    assert computed(q, k, v, None)[0].shape == (1, 2, 0, 32)


@interpreted
def test_extreme_logits_do_not_overflow(device: str) -> None:
    """A row whose logits are 30000 times those of the others decides alone, whichever block of columns comes first."""
    q, k, v = draw(device, 20, 37, dtype=torch.float16)
    high, low = k.clone(), k.clone()
    high[:, :, 5] = 1e4 * q[:, :1, 3] / q[:, :1, 3].double().square().sum(-1, keepdim=True).to(q)
    low[:, :, :] = -high[:, :, 5:6]
    for first, second in ((high, low), (low, high)):
        keys, values = torch.cat([first, second], 2), torch.cat([v, v], 2)
        got = computed(q, keys, values, None, scale=3.0)
        assert got[0].isfinite().all()
        expected = attention(q, keys, values, seen_by(20, 74, None), scale=3.0)
        torch.testing.assert_close(got[1].cpu().double(), expected[1], rtol=1e-5, atol=1e-4)
        # float32 resolves logits of 30000 to 0.002
        torch.testing.assert_close(got[0].cpu().double(), expected[0], rtol=0, atol=2e-2)


@interpreted
def test_the_numbers_of_the_docstring(device: str) -> None:
    """q 0 attends to the values 1 and 3: out 2, lse log 2."""
    dtype = NARROW[device]
    zero, values = torch.zeros(1, 1, 2, 1, device=device, dtype=dtype), torch.tensor([1.0, 3.0], device=device)
    out, lse = computed(zero[:, :, :1], zero, values.to(dtype).view(1, 1, 2, 1), None, scale=1.0)
    torch.testing.assert_close((out.item(), lse.exp().item()), (2.0, 2.0), rtol=1e-5, atol=0)


@interpreted
@given(data=st.data())
@settings(max_examples=examples(30))
def test_any_lengths_offset_groups_and_blocks(device: str, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 40), "rows"), data.draw(st.integers(0, 90), "columns")
    offset = data.draw(st.none() | st.integers(-50, 70), "offset")
    heads = data.draw(st.sampled_from([(2, 1), (1, 1), (3, 3)]), "heads")
    blocks = data.draw(st.sampled_from([(16, 16), (32, 16), (16, 32)]), "blocks")
    tma = data.draw(st.booleans(), "tma") and columns > 0
    q, k, v = draw(device, rows, columns, heads=heads)
    config = BlockConfig(*blocks, warps=4, stages=2, tma=tma)
    assert_close(computed(q, k, v, offset, config=config), attended(q, k, v, offset), q.dtype)
