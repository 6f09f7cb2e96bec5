"""The Triton attention kernel that carries its state from tile to tile: as if all tiles had been one."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.attention_kernels import (
    INFINITY,
    NARROW,
    SCALE,
    SMALL,
    ForwardConfig,
    assert_close,
    attended,
    attention,
    carried,
    computed,
    draw,
    each_place,
    each_way_to_load,
    empty_result,
    interpreted,
    launch,
    seen_by,
)

CUTS = {"two": [20, 17], "three": [7, 1, 29], "four": [3, 16, 2, 16], "an empty one": [20, 0, 17]}


@interpreted
@pytest.mark.parametrize("lengths", CUTS.values(), ids=CUTS)
@each_place
@pytest.mark.parametrize("offset", [None, 7, -3])
def test_carrying_the_state_is_attention_over_all_keys(
    device: str, lengths: list[int], offset: int | None, in_place: bool
) -> None:
    q, k, v = draw(device, 33, sum(lengths))
    expected = attended(q, k, v, offset)
    assert_close(carried(q, k, v, lengths, offset, in_place=in_place), expected, q.dtype)


@interpreted
@each_way_to_load
def test_the_last_tile_rounds_once(device: str, tma: bool) -> None:
    dtype = NARROW[device]
    q, k, v = draw(device, 33, 37, dtype=dtype)
    config = replace(SMALL, tma=tma)
    wide, wide_lse = carried(q, k, v, [20, 1, 16], 7, in_place=True, config=config)
    narrow, lse = carried(q, k, v, [20, 1, 16], 7, in_place=True, dtype=dtype, config=config)
    assert narrow.dtype == dtype
    torch.testing.assert_close(lse, wide_lse, rtol=1e-6, atol=1e-6)
    half_a_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(narrow.double(), wide.double(), rtol=half_a_unit * 1.001, atol=1e-7)


@interpreted
def test_tiles_of_different_masks_in_one_state(device: str) -> None:
    """As head-tail has them: the triangle of the own rows, then rectangles, the last one of the second half only."""
    q, k, v = draw(device, 24, 40)
    first, second, third = (0, 24), (24, 35), (35, 40)
    out, lse = computed(q, k[:, :, slice(*first)], v[:, :, slice(*first)], 0)
    whole = out, lse
    launch(*whole, q, k[:, :, slice(*second)], v[:, :, slice(*second)], SCALE, state=whole, config=SMALL)
    half = out[:, :, 12:], lse[:, :, 12:]
    before = out[:, :, :12].clone(), lse[:, :, :12].clone()
    tile = q[:, :, 12:], k[:, :, slice(*third)], v[:, :, slice(*third)]
    launch(*half, *tile, SCALE, state=half, config=SMALL)
    seen = torch.cat([seen_by(24, 24, 0), seen_by(24, 11, None), seen_by(24, 5, None)], dim=1)
    seen[:12, 35:] = False
    assert_close(whole, attention(q, k, v, seen), q.dtype)
    assert torch.equal(out[:, :, :12], before[0])
    assert torch.equal(lse[:, :, :12], before[1])


@interpreted
def test_a_state_may_be_another_kernels_result(device: str) -> None:
    """In a narrow dtype, and then the result is as good as that."""
    q, k, v = draw(device, 20, 37, dtype=NARROW[device])
    out, lse = attended(q, k[:, :, :20], v[:, :, :20], 0)
    state = out.to(device, q.dtype), lse.to(device, torch.float32)
    got = computed(q, k[:, :, 20:], v[:, :, 20:], 5, state, dtype=q.dtype)
    expected = attention(q, k, v, torch.cat([seen_by(20, 20, 0), seen_by(20, 17, 5)], dim=1))
    assert_close(got, expected, q.dtype)


@interpreted
@each_place
def test_rows_that_see_nothing_keep_their_state(device: str, in_place: bool) -> None:
    q, k, v = draw(device, 37, 20)
    before = computed(q, k, v, None)
    state = before[0].clone(), before[1].clone()
    result = state if in_place else empty_result(q, v)
    launch(*result, q, k, v, SCALE, causal_offset=-37, state=state, config=SMALL)
    for got, expected in zip(result, before, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@interpreted
def test_the_state_of_rows_that_have_seen_nothing_is_not_looked_at(device: str) -> None:
    q, k, v = draw(device, 37, 20)
    nothing = empty_result(q, v)
    nothing[0].fill_(float("nan"))
    nothing[1].fill_(-INFINITY)
    assert_close(computed(q, k, v, -7, nothing), attended(q, k, v, -7), q.dtype)


@interpreted
def test_extreme_logits_do_not_overflow(device: str) -> None:
    """A row whose logits are 30000 times those of the others decides alone, in the tile and against the state."""
    q, k, v = draw(device, 20, 37, dtype=torch.float16)
    high, low = k.clone(), k.clone()
    high[:, :, 5] = 1e4 * q[:, :1, 3] / q[:, :1, 3].double().square().sum(-1, keepdim=True).to(q)
    low[:, :, :] = -high[:, :, 5:6]
    for first, second in ((high, low), (low, high)):
        got = computed(q, first, v, None, computed(q, second, v, None, scale=3.0), scale=3.0)
        assert got[0].isfinite().all()
        expected = attention(q, torch.cat([second, first], 2), torch.cat([v, v], 2), seen_by(20, 74, None), scale=3.0)
        torch.testing.assert_close(got[1].cpu().double(), expected[1], rtol=1e-5, atol=1e-4)
        # float32 resolves logits of 30000 to 0.002
        torch.testing.assert_close(got[0].cpu().double(), expected[0], rtol=0, atol=2e-2)


@interpreted
def test_the_numbers_of_the_docstring(device: str) -> None:
    """q 0 sees the values 1 and 3: out 2, lse log 2; after the state (5, log 2), out 3.5, lse log 4."""
    dtype = NARROW[device]
    zero, values = torch.zeros(1, 1, 2, 1, device=device, dtype=dtype), torch.tensor([1.0, 3.0], device=device)
    tile = zero[:, :, :1], zero, values.to(dtype).view(1, 1, 2, 1)
    out, lse = computed(*tile, None, scale=1.0)
    torch.testing.assert_close((out.item(), lse.exp().item()), (2.0, 2.0), rtol=1e-5, atol=0)
    state = torch.full_like(out, 5.0), torch.full_like(lse, 2.0).log()
    out, lse = computed(*tile, None, state, scale=1.0)
    torch.testing.assert_close((out.item(), lse.exp().item()), (3.5, 4.0), rtol=1e-5, atol=0)


@interpreted
@given(data=st.data())
@settings(max_examples=30)
def test_any_tiles(device: str, data: st.DataObject) -> None:
    """Any lengths, offset, groups and blocks, cut into any tiles."""
    rows = data.draw(st.integers(1, 40), "rows")
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4), "lengths of tiles")
    offset = data.draw(st.none() | st.integers(-50, 70), "offset")
    heads = data.draw(st.sampled_from([(2, 1), (1, 1), (3, 3)]), "heads")
    blocks = data.draw(st.sampled_from([(16, 16), (32, 16), (16, 32)]), "blocks")
    tma = data.draw(st.booleans(), "tma") and min(lengths) > 0
    in_place = data.draw(st.booleans(), "in place")
    q, k, v = draw(device, rows, sum(lengths), heads=heads)
    config = ForwardConfig(*blocks, warps=4, stages=2, tma=tma)
    assert_close(
        carried(q, k, v, lengths, offset, in_place=in_place, config=config), attended(q, k, v, offset), q.dtype
    )
