"""Sums of partial gradients as one Triton kernel: a base and up to two stacks of parts, accumulated in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from cp_dtensor._torch.triton_launch import Facts, Launch, cached_launch, facts
from cp_dtensor.attention.triton import MAX_PARTS
from cp_dtensor.spec.layouts import Span

_NO_PART_SIZES = (0, 0, 0, 0, 0, 0, 0)
_NOT_SPECIALIZED = [f"{size}{part}" for part in range(MAX_PARTS) for size in ("count", "start", "stop")]


@triton.jit
def _add_part(
    total, row, dim, dim_in_range, batch, head, ptr, count, start, stop, stride, stride_b, stride_h, stride_s,
):  # fmt: skip
    """`total` plus rows [start, stop) of each of `count` tensors, `stride` elements apart."""
    in_part = (row >= start) & (row < stop)
    mask = in_part[:, None] & dim_in_range[None, :]
    ptrs = ptr + batch * stride_b + head * stride_h + (row - start).to(tl.int64)[:, None] * stride_s + dim[None, :]
    for _ in range(count):
        total += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        ptrs += stride
    return total


@triton.jit(do_not_specialize=["rows", *_NOT_SPECIALIZED])
def part_sum_kernel(
    out_ptr, base_ptr, part0_ptr, part1_ptr,
    rows, head_dim,
    out_stride_b, out_stride_h, out_stride_s, base_stride_b, base_stride_h, base_stride_s,
    count0, start0, stop0, p0_n, p0_b, p0_h, p0_s,
    count1, start1, stop1, p1_n, p1_b, p1_h, p1_s,
    PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """One program sums BLOCK_ROWS rows of one (batch, head), always in the same order.

    Example, one row of head dim 1: base 1 and a stack of 2 and 3 become 6.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    row_64 = row.to(tl.int64)[:, None]
    dim_in_range = dim < head_dim
    in_tile = (row < rows)[:, None] & dim_in_range[None, :]

    base_ptrs = base_ptr + batch * base_stride_b + head * base_stride_h + row_64 * base_stride_s + dim[None, :]
    total = tl.load(base_ptrs, mask=in_tile, other=0.0).to(tl.float32)
    if PARTS > 0:
        total = _add_part(
            total, row, dim, dim_in_range, batch, head, part0_ptr, count0, start0, stop0, p0_n, p0_b, p0_h, p0_s
        )
    if PARTS > 1:
        total = _add_part(
            total, row, dim, dim_in_range, batch, head, part1_ptr, count1, start1, stop1, p1_n, p1_b, p1_h, p1_s
        )
    out_ptrs = out_ptr + batch * out_stride_b + head * out_stride_h + row_64 * out_stride_s + dim[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=in_tile)


def launch_sum(out: torch.Tensor, base: torch.Tensor, parts: Sequence[tuple[Span, torch.Tensor]]) -> None:
    """Writes a base plus up to MAX_PARTS stacks of parts to `out`, in one launch.

    Args:
        out: (B, H, S, D), float32, bfloat16 or float16; the last dim contiguous, as in all of these. May be `base`.
        base: (B, H, S, D).
        parts: `(rows, stack)` with stack (N, B, H, rows, D).
    """
    assert len(parts) <= MAX_PARTS
    stacks = [stack for _, stack in parts] + [base] * (MAX_PARTS - len(parts))
    launch = _launch(facts(out), facts(base), tuple((span, facts(stack)) for span, stack in parts))
    launch(out, base, *stacks)


@cached_launch
def _launch(out: Facts, base: Facts, parts: tuple[tuple[Span, Facts], ...]) -> Launch:
    """For tensors such as these."""
    batch, heads, rows, head_dim = out.shape
    sizes: list[int] = []
    for span, stack in parts:
        sizes += (stack.shape[0], *span, *stack.strides[:4])
    sizes += _NO_PART_SIZES * (MAX_PARTS - len(parts))
    block_dim = triton.next_power_of_2(head_dim)
    block_rows = max(1, min(4096 // block_dim, triton.next_power_of_2(rows)))
    return Launch(
        part_sum_kernel,
        (triton.cdiv(rows, block_rows), heads, batch),
        (rows, head_dim, *out.strides[:3], *base.strides[:3], *sizes),
        {"PARTS": len(parts), "BLOCK_ROWS": block_rows, "BLOCK_DIM": block_dim},
    )
