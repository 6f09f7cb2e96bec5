"""The Triton attention kernels, forward and backward, against their reference in float64: masks, biases, strides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.attention_kernels import (
    NARROW,
    SCALE,
    SMALL,
    BlockConfig,
    attention,
    biases_of,
    check,
    computed,
    configs,
    draw,
    each_way_to_load,
    masks_of,
    seen_by,
    through_kernels,
    through_reference,
    to,
)
from support.cases import examples
from support.devices import interpreted
from support.dropouts import dropout_of
from support.row_masks import window

from cp_dtensor.attention import masked
from cp_dtensor.attention.masked import RowMask

ROWS, COLUMNS, HEADS = 37, 53, 2
OFFSETS = {
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
}


def by_pointers_and(descriptors: str, cases: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize by case and by way to load; by descriptors some every time, separated by "; ", and all in sweeps."""
    often = descriptors.split("; ")
    ways = [
        pytest.param(case, tma, marks=pytest.mark.sweep if tma and case not in often else ())
        for case in cases
        for tma in (False, True)
    ]
    return pytest.mark.parametrize(("case", "tma"), ways)


@interpreted
@by_pointers_and("causal; any intervals", masks_of(ROWS, COLUMNS))
def test_masks(device: str, case: str, tma: bool) -> None:
    mask = masks_of(ROWS, COLUMNS)[case]
    check(draw(device, ROWS, COLUMNS, heads=(1, 1), batch=2), mask, config=replace(SMALL, tma=tma))


@interpreted
@by_pointers_and("full; after a prefix; blocks of rows see nothing; one row", OFFSETS)
def test_offsets_and_lengths(device: str, case: str, tma: bool) -> None:
    rows, columns, offset = OFFSETS[case]
    check(draw(device, rows, columns), RowMask(causal_offset=offset), config=replace(SMALL, tma=tma))


@interpreted
def test_float16(device: str) -> None:
    check(draw(device, 18, 21, dtype=torch.float16), RowMask(causal_offset=3))


@interpreted
@pytest.mark.parametrize(
    ("kind", "bias"), [*(("any intervals", bias) for bias in biases_of(HEADS, 20, 37)), ("full", "additive")]
)
def test_biases(device: str, kind: str, bias: str) -> None:
    check(draw(device, 20, 37, batch=2), masks_of(20, 37)[kind], biases_of(HEADS, 20, 37)[bias])


@interpreted
@pytest.mark.parametrize(
    ("heads", "dims", "tma"),
    [
        ((2, 2), (16, 16), False),
        ((4, 2), (80, 80), False),
        ((3, 1), (48, 20), False),
        ((4, 2), (16, 16), True),
        ((3, 1), (80, 80), True),
        ((2, 2), (32, 64), True),
    ],
    ids=str,
)
def test_groups_and_head_dims(device: str, heads: tuple[int, int], dims: tuple[int, int], tma: bool) -> None:
    tensors = draw(device, 18, 21, heads=heads, dims=dims, batch=2)
    tma = tma and configs.can_use_tma(*tensors)
    check(tensors, RowMask(causal_offset=3), config=replace(SMALL, tma=tma))


@interpreted
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_default_configs(device: str, dim: int) -> None:
    tensors = draw(device, 70, 75, heads=(2, 1), dims=(dim, dim), dtype=NARROW[device])
    check(tensors, window(torch.arange(70), 40, 3), config=None)


@interpreted
@each_way_to_load
def test_strides_are_free_but_for_the_last_dim(device: str, tma: bool) -> None:
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(device, 19, 23, batch=2)]
    check(tuple(tensors), RowMask(causal_offset=4), config=replace(SMALL, tma=tma))


@interpreted
@pytest.mark.parametrize("offset", [0, 1], ids=["whole", "slices"])
@pytest.mark.parametrize("dims", [(5, 3), (8, 4)], ids=str)
def test_tensor_descriptors_can_read_what_kernels_get(
    device: str, dims: tuple[int, int], offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors with any head dims, which those of the results are, and at any addresses."""
    read: list[bool] = []

    def recorded(launch: Any, *arguments: Any, **options: Any) -> None:
        read.append(configs.can_use_tma(*(x for x in arguments if isinstance(x, torch.Tensor) and x.dim() == 4)))
        launch(*arguments, **options)

    for name in ("launch_attention_forward", "launch_attention_backward"):
        monkeypatch.setattr(masked, name, partial(recorded, getattr(masked, name)))
    monkeypatch.setattr(masked, "uses_triton", lambda q, v: True)
    q, k, v = (x[..., offset:] for x in draw(device, 18, 21, dims=(dims[0] + offset, dims[1] + offset), batch=2))
    mask, grad_out = RowMask(causal_offset=3), torch.randn(2, 2, 18, dims[1] + offset)[..., offset:]
    out, lse = masked.attention_forward(q, k, v, mask, SCALE)
    got = out, lse, *masked.attention_backward(grad_out, q, k, v, out, lse, mask, SCALE)
    for mine, wanted in zip(got, through_reference((q, k, v), grad_out, mask, None), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=0, atol=1e-4)
    assert read == [True, True]


@interpreted
@pytest.mark.parametrize("tma", [False, True])
def test_blocks_that_are_not_seen_are_not_read(device: str, tma: bool) -> None:
    """NaN in them would reach everything. Blocks begin with the first column that is seen, not at multiples of 16."""
    q, k, v = draw(device, 48, 80)
    grad_out = torch.ones_like(q)
    config = replace(SMALL, tma=tma)
    mask = to(window(torch.arange(48), 15, 0), device)
    for x in (k, v):
        x[:, :, 63:] = float("nan")
    results = through_kernels((q, k, v), grad_out, mask, None, config)
    assert all(x[:, :, :63].isfinite().all() for x in results)
    q, k, v = draw(device, 48, 64)
    mask = to(window(torch.arange(48) + 16, 0, 15), device)
    grad_out[:, :, 32:] = float("nan")
    gradients = through_kernels((q, k, v), grad_out, mask, None, config)[3:]
    assert all(x[:, :, :48].isfinite().all() for x in gradients)  # row 32 begins to see at column 48


@interpreted
def test_results_do_not_vary(device: str) -> None:
    tensors = draw(device, ROWS, COLUMNS)
    grad_out = torch.ones_like(tensors[0])
    first, second = (through_kernels(tensors, grad_out, RowMask(causal_offset=0), None, SMALL) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_descriptors_want_aligned_rows_and_some_keys() -> None:
    aligned = torch.zeros(2, 2, 8, 32, dtype=torch.float16)
    assert configs.can_use_tma(aligned, aligned)
    for other in (aligned[:, :, :0], aligned[..., 1:17], aligned[:, :1].expand(2, 2, 8, 32), torch.zeros(2, 2, 8, 33)):
        assert not configs.can_use_tma(aligned, other)
        assert not configs.default_config(other, aligned).tma
    assert configs.default_config(aligned, aligned).tma


@interpreted
@pytest.mark.parametrize(
    ("kind", "bias", "tma"), [("full", "none", False), ("causal", "boolean", True), ("any intervals", "additive", True)]
)
def test_capped_logits(device: str, kind: str, bias: str, tma: bool) -> None:
    tensors = draw(device, 20, 37, heads=(2, 1), batch=2)
    for softcap in (0.5, 30.0):
        check(tensors, masks_of(20, 37)[kind], biases_of(2, 20, 37)[bias], replace(SMALL, tma=tma), softcap=softcap)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's: the cap of large logits is 1 - 2 / inf
@interpreted
def test_capped_logits_beside_dropout_and_with_logits_far_beyond_the_cap(device: str) -> None:
    q, k, v = draw(device, 20, 37, heads=(2, 1), batch=2)
    check((q, k, v), RowMask(causal_offset=4), config=SMALL, dropout=dropout_of(20, 37), softcap=1.0)
    check((q * 1e4, k, v), RowMask(causal_offset=4), config=SMALL, softcap=1.0)


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


@given(data=st.data())
def test_rows_of_columns_are_all_of_them_and_tight(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 12), "rows"), data.draw(st.integers(1, 20), "columns")
    block = data.draw(st.integers(1, 8), "block")
    edge = st.lists(st.integers(-3, columns + 3), min_size=rows, max_size=rows)
    lo, hi = (torch.tensor(data.draw(edge, name), dtype=torch.int32) for name in ("lo", "hi"))
    ordered = data.draw(st.booleans(), "ordered")
    if ordered:
        lo, hi = lo.sort().values, hi.sort().values
    column = torch.arange(columns)
    seen = (lo.unsqueeze(1) <= column) & (column < hi.unsqueeze(1))
    ranges = RowMask(lo=lo, hi=hi).rows_of_columns(columns, block)[:, 0].T.tolist()
    for part, (first, last, whole_first, whole_last) in zip(seen.split(block, 1), ranges, strict=True):
        some, every = part.any(1).nonzero().flatten(), part.all(1).nonzero().flatten()
        assert all(first <= row < last for row in some.tolist())
        assert all(row in every for row in range(whole_first, whole_last))
        if ordered and (lo < hi).all():
            if len(some):
                assert (first, last) == (some[0], some[-1] + 1)
            if len(every):
                assert (whole_first, whole_last) == (every[0], every[-1] + 1)


@given(data=st.data())
def test_rows_that_see_nothing_between_documents_do_not_split_what_is_seen_wholly(data: st.DataObject) -> None:
    """Such masks come from keys of other ranks: some documents have keys there, those between have none."""
    documents = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=5))
    lo, hi, columns = [], [], 0
    for rows, length in documents:
        lo += [columns if length else 0] * rows
        hi += [columns + length if length else 0] * rows
        columns += length
    block = data.draw(st.integers(1, 4), "block")
    mask = RowMask(lo=torch.tensor(lo, dtype=torch.int32), hi=torch.tensor(hi, dtype=torch.int32))
    ranges = mask.rows_of_columns(columns, block)
    for index, (first, last, whole_first, whole_last) in enumerate(ranges[:, 0].T.tolist()):
        start, stop = index * block, min(index * block + block, columns)
        some = [row for row in range(len(lo)) if lo[row] < stop and start < hi[row]]
        every = [row for row in range(len(lo)) if lo[row] <= start and stop <= hi[row]]
        assert (first, last) == (some[0], some[-1] + 1)
        assert list(range(whole_first, whole_last)) == every


@interpreted
@given(data=st.data())
@settings(max_examples=examples(15))
def test_any_intervals_and_lengths(device: str, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 40), "rows"), data.draw(st.integers(1, 40), "columns")
    edge = st.lists(st.integers(-3, columns + 3), min_size=rows, max_size=rows)
    lo, hi = (torch.tensor(data.draw(edge, name), dtype=torch.int32) for name in ("lo", "hi"))
    if data.draw(st.booleans(), "ordered"):
        lo, hi = lo.sort().values, hi.sort().values
    blocks = data.draw(st.sampled_from([(16, 16), (32, 16), (16, 32)]), "blocks")
    config = BlockConfig(*blocks, warps=4, stages=2, tma=data.draw(st.booleans(), "tma"))
    check(draw(device, rows, columns), RowMask(lo=lo, hi=hi), config=config)
