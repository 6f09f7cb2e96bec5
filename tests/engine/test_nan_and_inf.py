"""NaN and infinity in keys and values: those of keys that no query sees reach nothing, others are not lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.attention_kernels import backward_kernel, kernel, replace_functions_once_a_launch
from support.masked_problems import MaskedProblem, shown
from support.problems import shard
from support.splits import SPLITS, Tensors, over_ranks, size_of

from cp_dtensor import Batched, Causal, Contiguous, Documents, HeadTail, Layout, Mask
from cp_dtensor.attention import masked
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.merge import merge_reference, sinks_gradient
from cp_dtensor.plan.tiles import IntervalMask, KeyRun
from cp_dtensor.spec.intervals import IntervalBand
from cp_dtensor.spec.layouts import Segment

NAN, INF = float("nan"), float("inf")
NAMES = ("out", "lse", "dq", "dk", "dv")
INPUTS = ("query", "key", "value", "gradient")
each_input = pytest.mark.parametrize("of", INPUTS)
each_split = pytest.mark.parametrize("split", SPLITS)

# Batch row 0 sees keys 0 to 39 of 50, batch row 1 keys 0 to 29.
PADDED = Batched([Documents([0, 17, 40], within=Causal()), Documents([0, 30], within=Causal())])


def _check_nothing_reached(dirty: Tensors, clean: Tensors, where: object = "") -> None:
    for name, got, wanted in zip(NAMES, dirty, clean, strict=True):
        assert torch.equal(got, wanted), f"{name} {where}"
        assert not got.isnan().any(), f"{name} {where}"


@pytest.mark.parametrize(("layout", "value"), [(Contiguous(), INF), (HeadTail(), NAN), (HeadTail(), INF)], ids=str)
@each_split
def test_keys_that_no_query_sees_reach_nothing(split: str, layout: Layout, value: float) -> None:
    q, k, v, grad_out = MaskedProblem(50, 50, PADDED, batch=2, q_heads=4).draw(seed=1)
    seen = shown(PADDED, 50, 50, 2).any(2)[:, :, :, None]
    dirty, clean = (
        over_ranks(SPLITS[split], (q, *(x.masked_fill(~seen, hidden) for x in (k, v)), grad_out), layout, mask=PADDED)
        for hidden in (value, 0.0)
    )
    for here, results in dirty.items():
        _check_nothing_reached(results, clean[here], f"of rank {here}")


@each_input
@pytest.mark.parametrize("mask", [Causal(), PADDED], ids=["causal", "padded"])
@each_split
def test_nan_reaches_what_it_reaches_on_one_device(split: str, mask: Mask, of: str) -> None:
    at = 21
    tensors = MaskedProblem(50, 50, mask, batch=2, q_heads=4).draw(seed=2)
    tensors[INPUTS.index(of)][:, :, at] = NAN
    layout, size = HeadTail(), size_of(SPLITS[split])
    for here, got in over_ranks(SPLITS[split], tensors, layout, mask=mask).items():
        _check_reached(got, shown(mask, 50, 50, 2), at, of, partial(shard, layout=layout, rank=here, world_size=size))


def _check_reached(results: Tensors, seen: torch.Tensor, at: int, of: str, cut: Any = lambda x: x) -> None:
    """Checks that NaN is where it must be: P of the rows that see the key, and all sums over these rows or of P."""
    rows = seen[..., at]  # (B, 1, S)
    if of in ("query", "gradient"):
        rows = torch.zeros_like(rows).index_fill(2, torch.tensor(at), True)
    columns = (seen & rows[..., None]).any(2)  # the keys that these rows see
    out, lse, dq, dk, dv = results
    rows, columns = cut(rows), cut(columns)
    assert rows.any() or columns.any()
    must = {"dq": (dq, rows), "dk": (dk, columns)}
    if of != "gradient":
        must["out"] = out, rows
    if of != "value":
        must["dv"] = dv, columns
    if of in ("key", "query"):
        must["lse"] = lse, rows
    for name, (got, where) in must.items():
        where = (where[..., None] if got.dim() == 4 else where).expand(got.shape)
        assert got[where].isnan().all(), name


# One tile, by the reference implementation and by the kernels


@pytest.fixture(params=["reference", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        replace_functions_once_a_launch()
        monkeypatch.setattr(masked, "uses_triton", lambda q, v: True)
        assert masked.launch_attention_forward is kernel.launch_attention_forward
        assert masked.launch_attention_backward is backward_kernel.launch_attention_backward
    return request.param


def tile(*bands: IntervalBand) -> IntervalMask:
    positions, rows = Segment.contiguous(0, 40), (0, 40)
    return IntervalMask(((bands,),), (positions,), rows, KeyRun((positions,)), rows)


def run_tile(mask: IntervalMask, tensors: Tensors) -> Tensors:
    q, k, v, grad_out = tensors
    backend = IntervalAttention()
    out, lse = backend.forward(q, k, v, mask, 0.5)
    return out, lse, *backend.backward(grad_out, q, k, v, out, lse, mask, 0.5)


def draw() -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(1, heads, 40, 16, generator=generator) for heads in (2, 1, 1, 2))


@pytest.mark.parametrize("value", [NAN, INF])
def test_columns_that_no_row_sees(kernels: str, value: float) -> None:
    """Columns before, between and after those that rows see; some are in blocks with seen ones."""
    first = IntervalBand(first=2, last=20, lo=3, hi=11, left=40, right=40)
    mask = tile(first, IntervalBand(first=20, last=38, lo=18, hi=35, left=40, right=0))
    hidden = torch.tensor([*range(3), *range(11, 18), *range(35, 40)])
    q, k, v, grad_out = draw()
    clean = run_tile(mask, (q, k.index_fill(2, hidden, 0), v.index_fill(2, hidden, 0), grad_out))
    dirty = run_tile(mask, (q, k.index_fill(2, hidden, value), v.index_fill(2, hidden, value), grad_out))
    _check_nothing_reached(dirty, clean)
    assert all((grad[:, :, hidden] == 0).all() for grad in dirty[3:])


@each_input
def test_nan_in_a_tile(kernels: str, of: str) -> None:
    mask = tile(IntervalBand(first=0, last=36, lo=0, hi=40, left=20, right=1))
    q, k, v, grad_out = draw()
    (q, k, v, grad_out)[INPUTS.index(of)][:, :, 9] = NAN
    row, column = torch.arange(40)[:, None], torch.arange(40)[None, :]
    seen = (column >= row - 20) & (column <= row + 1) & (row < 36)
    _check_reached(run_tile(mask, (q, k, v, grad_out)), seen.expand(1, 1, 40, 40), 9, of)


def test_merges_keep_nan() -> None:
    """Also if the other part has no keys, and whichever of the two is NaN."""
    from cp_dtensor.attention.triton.merge import launch_merge

    lse = torch.tensor([[[NAN, -INF, 1.0, NAN]]])
    part_lse = torch.tensor([[[-INF, NAN, NAN, 2.0]]])
    ones = torch.ones(1, 1, 4, 16)
    for merge in (merge_reference, launch_merge):
        out, merged = torch.zeros_like(ones), torch.zeros_like(lse)
        merge(out, merged, ones, lse, [((0, 4), ones, part_lse)])
        assert out.isnan().all()
        assert merged.isnan().all()


def test_gradients_of_sinks_keep_nan() -> None:
    lse = torch.tensor([[[NAN, -INF]], [[1.0, 2.0]]])
    assert sinks_gradient(torch.zeros(1), lse, torch.ones_like(lse)).isnan().all()
    assert sinks_gradient(torch.zeros(1), lse[:, :, 1:], torch.ones(2, 1, 1)).isfinite().all()
