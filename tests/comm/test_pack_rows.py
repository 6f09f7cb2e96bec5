"""Packing of K/V rows by groups of heads, of all rows or of those that other ranks attend to."""

import pytest
import torch
from support.devices import all_devices

from cp_dtensor._torch.tensors import cut
from cp_dtensor.comm.transport import HeadBlocks, pack_rows, row_width
from cp_dtensor.plan.partition import LayoutPartition
from cp_dtensor.plan.plan import Stages, gathered_plan
from cp_dtensor.plan.tiling import Masking, tiling_of
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Span
from cp_dtensor.spec.masks import Causal, Mask, SlidingWindow


@pytest.mark.parametrize("stages", [[(0, 2), (2, 4)], [(0, 3), (3, 4)]], ids=["equal", "unequal"])
def test_some_rows_are_packed_where_all_would_put_them(stages: list[Span]) -> None:
    k, v = torch.randn(2, 4, 6, 3), torch.randn(2, 4, 6, 5)
    pitch = 8  # rows of the longest shard
    total = pitch * sum(row_width(k, v, heads) for heads in stages)
    whole, some = torch.zeros(total), torch.zeros(total)
    head_counts = [stop - start for start, stop in stages]
    HeadBlocks((k, v), head_counts, pitch, whole).write((k, v), stages)
    for span in ((0, 1), (3, 6)):
        rows = [cut(x, None, None, span) for x in (k, v)]
        HeadBlocks((k, v), head_counts, pitch, some).write(rows, stages, span[0])
    start = 0
    for heads in stages:
        width = row_width(k, v, heads)
        of_all, of_some = (rows[start : start + pitch * width].view(pitch, width) for rows in (whole, some))
        assert torch.equal(of_all[:6], pack_rows(k, v, heads))
        for span, packed in (((0, 1), True), ((1, 3), False), ((3, 6), True), ((6, 8), False)):
            expected = of_all[slice(*span)] if packed else torch.zeros_like(of_all[slice(*span)])
            assert torch.equal(of_some[slice(*span)], expected)
        start += pitch * width


@pytest.mark.parametrize(
    ("layout", "mask", "masking", "sent"),
    [
        (Contiguous(), SlidingWindow(4, 0), Masking.INTERVALS, [((12, 16),), ((12, 16),), ((12, 16),), ()]),
        (HeadTail(), Causal(), Masking.BY_SHAPE, [((0, 8),), ((0, 16),), ((0, 16),), ((0, 16),)]),
        (
            HeadTail(),
            SlidingWindow(2, 0),
            Masking.INTERVALS,
            [((6, 8),), ((6, 8), (14, 16)), ((6, 8), (14, 16)), ((14, 16),)],
        ),
    ],
)
def test_the_rows_that_other_ranks_attend_to(
    layout: Contiguous | HeadTail, mask: Mask, masking: Masking, sent: list[tuple[Span, ...]]
) -> None:
    tiling = tiling_of(LayoutPartition(layout, 64, 64, 1, 4).groups(), mask, masking, (64, 64))
    plans = [gathered_plan(tiling, rank, 1, Stages(1, 1), Stages(1, 1)) for rank in range(4)]
    assert [plan.send_spans for plan in plans] == sent


@all_devices
@pytest.mark.parametrize("stage_heads", [1, 2, 4])
@pytest.mark.parametrize("dims", [(4, 4), (24, 16)], ids=str)
def test_one_launch_writes_the_same_rows(dims: tuple[int, int], stage_heads: int, device: str) -> None:
    """In any memory order of K and V; rows outside of the span stay as they are."""
    kernels = pytest.importorskip("cp_dtensor.comm.triton_kernels")
    batch, heads, length, pitch, span = 2, 4, 70, 72, (1, 69)
    k = torch.randn(batch, length, heads, dims[0], device=device).transpose(1, 2)
    v = torch.randn(batch, heads, length, dims[1], device=device)
    stages = [(start, start + stage_heads) for start in range(0, heads, stage_heads)]
    expected, written = (torch.full((pitch * batch * heads * sum(dims),), 7.0, device=device) for _ in range(2))
    blocks = HeadBlocks((k, v), [stage_heads] * len(stages), pitch, expected)
    blocks.write([cut(x, None, None, span) for x in (k, v)], stages, span[0])
    kernels.launch_rows(k, v, written, span, pitch, stage_heads)
    assert torch.equal(written, expected)
