"""Triton kernels that add up to two parts to a base in float32: LSE merges of results, and sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cp_dtensor._torch.triton_launch import Facts, Launch, cached_launch, facts
from cp_dtensor.attention.triton import MAX_PARTS
from cp_dtensor.attention.triton.common import addresses, lse_strides, place_of_program
from cp_dtensor.spec.layouts import Span

_SPANS = [f"{edge}{part}" for part in range(MAX_PARTS) for edge in ("start", "stop")]
_COUNTS = [f"count{part}" for part in range(MAX_PARTS)]
_LSES = ["lse_stride", "base_lse_stride", *(f"p{part}_lse" for part in range(MAX_PARTS))]
_LSE_STRIDES = [f"{name}_{dim}" for name in _LSES for dim in ("b", "h", "low")]  # numbers of rows
_LSE_POINTERS = ["lse_ptr", "base_lse_ptr", *(f"part{part}_lse_ptr" for part in range(MAX_PARTS))]


@triton.jit
def _tile(rows, head_dim, heads, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Return row, dim, batch and head of a program, with masks of rows, of dims and of both."""
    block, head, batch = place_of_program(tl.cdiv(rows, BLOCK_ROWS), heads)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    in_rows, in_dims = row < rows, dim < head_dim
    return row, dim, batch.to(tl.int64), head.to(tl.int64), in_rows, in_dims, in_rows[:, None] & in_dims[None, :]


@triton.jit(do_not_specialize=["rows", "heads", *_SPANS, *_LSE_STRIDES], do_not_specialize_on_alignment=_LSE_POINTERS)
def lse_merge_kernel(
    out_ptr, lse_ptr, base_ptr, base_lse_ptr,
    part0_ptr, part0_lse_ptr, part1_ptr, part1_lse_ptr,
    rows, head_dim, heads,
    out_stride_b, out_stride_h, out_stride_s, lse_stride_b, lse_stride_h, lse_stride_low,
    base_stride_b, base_stride_h, base_stride_s, base_lse_stride_b, base_lse_stride_h, base_lse_stride_low,
    start0, stop0, p0_b, p0_h, p0_s, p0_lse_b, p0_lse_h, p0_lse_low,
    start1, stop1, p1_b, p1_h, p1_s, p1_lse_b, p1_lse_h, p1_lse_low,
    SPLIT_LSE: tl.constexpr, PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Merge, in one program, BLOCK_ROWS rows of one (batch, head). SPLIT_LSE: an LSE has two floats (`attention.lse`).

    Example, one row of head dim 1: base (1, log 1) and a part (5, log 3) become out 4, lse log 4.
    """
    row, dim, batch, head, in_rows, in_dims, in_tile = _tile(rows, head_dim, heads, BLOCK_ROWS, BLOCK_DIM)
    base_lse_ptrs = base_lse_ptr + batch * base_lse_stride_b + head * base_lse_stride_h + row.to(tl.int64)
    lse = tl.load(base_lse_ptrs, mask=in_rows, other=float("-inf")).to(tl.float32)
    low = tl.zeros_like(lse)
    if SPLIT_LSE:
        low = tl.load(base_lse_ptrs + base_lse_stride_low, mask=in_rows, other=0.0).to(tl.float32)
    base_ptrs = addresses(base_ptr, batch, head, row, dim, base_stride_b, base_stride_h, base_stride_s)
    out = tl.load(base_ptrs, mask=in_tile, other=0.0).to(tl.float32)
    parts = (
        (part0_ptr, part0_lse_ptr, start0, stop0, p0_b, p0_h, p0_s, p0_lse_b, p0_lse_h, p0_lse_low),
        (part1_ptr, part1_lse_ptr, start1, stop1, p1_b, p1_h, p1_s, p1_lse_b, p1_lse_h, p1_lse_low),
    )
    for index in tl.static_range(PARTS):
        ptr, part_lse_ptr, start, stop, stride_b, stride_h, stride_s, lse_b, lse_h, lse_low = parts[index]
        in_part = (row >= start) & (row < stop)
        part_lse_ptrs = part_lse_ptr + batch * lse_b + head * lse_h + (row - start).to(tl.int64)
        part_lse = tl.load(part_lse_ptrs, mask=in_part, other=float("-inf")).to(tl.float32)
        ptrs = addresses(ptr, batch, head, row - start, dim, stride_b, stride_h, stride_s)
        part = tl.load(ptrs, mask=in_part[:, None] & in_dims[None, :], other=0.0).to(tl.float32)
        largest = tl.maximum(lse, part_lse)
        seen = (lse != float("-inf")) | (part_lse != float("-inf"))  # also of NaN, which `maximum` ignores
        shift = tl.where(largest > float("-inf"), largest, 0.0)  # -inf - -inf would be NaN
        if SPLIT_LSE:
            part_low = tl.load(part_lse_ptrs + lse_low, mask=in_part, other=0.0).to(tl.float32)
            weight = tl.exp(lse - shift + low)
            part_weight = tl.exp(part_lse - shift + part_low)
        else:
            weight = tl.exp(lse - shift)
            part_weight = tl.exp(part_lse - shift)
        total = weight + part_weight
        inverse = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)
        out = out * (weight * inverse)[:, None] + part * (part_weight * inverse)[:, None]
        log_total = tl.log(tl.where(seen, total, 1.0))
        lse = tl.where(seen, shift + log_total, float("-inf"))
        if SPLIT_LSE:
            low = tl.where(seen, (shift - lse) + log_total, 0.0)

    # Row values are replicated over the warps of a program: without this barrier one warp could store the merged LSE
    # in place before another has loaded the old one.
    tl.debug_barrier()
    out_ptrs = addresses(out_ptr, batch, head, row, dim, out_stride_b, out_stride_h, out_stride_s)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_tile)
    lse_ptrs = lse_ptr + batch * lse_stride_b + head * lse_stride_h + row.to(tl.int64)
    tl.store(lse_ptrs, lse, mask=in_rows)
    if SPLIT_LSE:
        tl.store(lse_ptrs + lse_stride_low, low, mask=in_rows)


def launch_merge(
    out: Tensor, lse: Tensor, base_out: Tensor, base_lse: Tensor, parts: Sequence[tuple[Span, Tensor, Tensor]]
) -> None:
    """Compute `attention.merge.merge` of float32, bfloat16 or float16; all last dims are contiguous."""
    assert len(parts) <= MAX_PARTS
    pointers = [x for _, *pair in parts for x in pair] + [out, lse] * (MAX_PARTS - len(parts))
    of_parts = tuple([(span, facts(part_out), facts(part_lse)) for span, part_out, part_lse in parts])
    launch = _merge_launch(facts(out), facts(lse), facts(base_out), facts(base_lse), of_parts)
    launch(out, lse, base_out, base_lse, *pointers)


@cached_launch
def _merge_launch(
    out: Facts, lse: Facts, base_out: Facts, base_lse: Facts, parts: tuple[tuple[Span, Facts, Facts], ...]
) -> Launch:
    """Return the launch for tensors of these shapes, strides and dtypes."""
    strides = (*out.strides[:3], *lse_strides(lse), *base_out.strides[:3], *lse_strides(base_lse))
    sizes = [(*span, *part_out.strides[:3], *lse_strides(part_lse)) for span, part_out, part_lse in parts]
    return _launch_of(lse_merge_kernel, out, strides, 8, sizes, {"SPLIT_LSE": len(lse.shape) == 4})


@triton.jit(do_not_specialize=["rows", "heads", *_SPANS, *_COUNTS])
def part_sum_kernel(
    out_ptr, base_ptr, part0_ptr, part1_ptr,
    rows, head_dim, heads,
    out_stride_b, out_stride_h, out_stride_s, base_stride_b, base_stride_h, base_stride_s,
    count0, start0, stop0, p0_n, p0_b, p0_h, p0_s,
    count1, start1, stop1, p1_n, p1_b, p1_h, p1_s,
    PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Sum, in one program, BLOCK_ROWS rows of one (batch, head), in a fixed order.

    Example, one row of head dim 1: base 1 and a stack of 2 and 3 become 6.
    """
    row, dim, batch, head, _, in_dims, in_tile = _tile(rows, head_dim, heads, BLOCK_ROWS, BLOCK_DIM)
    base_ptrs = addresses(base_ptr, batch, head, row, dim, base_stride_b, base_stride_h, base_stride_s)
    total = tl.load(base_ptrs, mask=in_tile, other=0.0).to(tl.float32)
    parts = (
        (part0_ptr, count0, start0, stop0, p0_n, p0_b, p0_h, p0_s),
        (part1_ptr, count1, start1, stop1, p1_n, p1_b, p1_h, p1_s),
    )
    for index in tl.static_range(PARTS):
        ptr, count, start, stop, stride, stride_b, stride_h, stride_s = parts[index]
        in_part = (row >= start) & (row < stop)
        ptrs = addresses(ptr, batch, head, row - start, dim, stride_b, stride_h, stride_s)
        for _ in range(count):
            total += tl.load(ptrs, mask=in_part[:, None] & in_dims[None, :], other=0.0).to(tl.float32)
            ptrs += stride
    out_ptrs = addresses(out_ptr, batch, head, row, dim, out_stride_b, out_stride_h, out_stride_s)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=in_tile)


def launch_sum(out: Tensor, base: Tensor, parts: Sequence[tuple[Span, Tensor]]) -> None:
    """Compute `attention.merge.add_parts` of float32, bfloat16 or float16; all last dims are contiguous."""
    assert len(parts) <= MAX_PARTS
    stacks = [stack for _, stack in parts] + [base] * (MAX_PARTS - len(parts))
    launch = _sum_launch(facts(out), facts(base), tuple([(span, facts(stack)) for span, stack in parts]))
    launch(out, base, *stacks)


@cached_launch
def _sum_launch(out: Facts, base: Facts, parts: tuple[tuple[Span, Facts], ...]) -> Launch:
    """Return the launch for tensors of these shapes, strides and dtypes."""
    sizes = [(stack.shape[0], *span, *stack.strides[:4]) for span, stack in parts]
    return _launch_of(part_sum_kernel, out, (*out.strides[:3], *base.strides[:3]), 7, sizes, {})


def _launch_of(
    kernel: Any, out: Facts, strides: tuple[int, ...], count: int, sizes: Sequence[tuple[int, ...]],
    constants: dict[str, object],
) -> Launch:  # fmt: skip
    """Return the launch of either kernel, with the `count` numbers of each part in `sizes`."""
    batch, heads, rows, head_dim = out.shape
    block_dim = triton.next_power_of_2(head_dim)
    block_rows = max(1, min(4096 // block_dim, triton.next_power_of_2(rows)))
    return Launch(
        kernel,
        triton.cdiv(rows, block_rows) * heads * batch,
        (rows, head_dim, heads, *strides, *sum(sizes, ()), *(0,) * count * (MAX_PARTS - len(sizes))),
        {**constants, "PARTS": len(sizes), "BLOCK_ROWS": block_rows, "BLOCK_DIM": block_dim},
    )
