"""Functions shared by the attention kernels: loads of blocks, and the ranges of blocks that a mask leaves.

Row i attends to columns [lo_i, hi_i). A block of rows therefore reads only columns from its smallest lo to its largest
hi, and applies the mask only in blocks that some row attends to in part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_dtensor._torch.triton_launch import Facts
from cp_dtensor.attention.triton.dropout import RUN
from cp_dtensor.attention.triton.row_mask import RowMask

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

_RUN = tl.constexpr(RUN)

# Kinds of masks.
FULL = tl.constexpr(0)
CAUSAL = tl.constexpr(1)
INTERVALS = tl.constexpr(2)

# Kinds of biases.
NO_BIAS = tl.constexpr(0)
ADDITIVE = tl.constexpr(1)
BOOLEAN = tl.constexpr(2)


@triton.jit
def load_rows(
    source, batch, head, start, length, stride_s,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, RAGGED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(BLOCK, BLOCK_DIM): rows from `start` of one (batch, head); 0 beyond `length` (if RAGGED) and beyond DIM.

    With TMA, `source` is a descriptor of the whole tensor, else a pointer to row 0 of this (batch, head).
    """
    if TMA:
        block = source.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_DIM)
    else:
        row = tl.arange(0, BLOCK)[:, None]
        dim = tl.arange(0, BLOCK_DIM)[None, :]
        # Offsets inside a block fit 32 bits (asserted by the launcher) and do not change from block to block.
        ptrs = source + tl.cast(start, tl.int64) * stride_s + (row * stride_s + dim)
        if RAGGED:
            block = tl.load(ptrs, mask=(start + row < length) & (dim < DIM), other=0.0)
        elif DIM < BLOCK_DIM:
            block = tl.load(ptrs, mask=dim < DIM, other=0.0)
        else:
            block = tl.load(ptrs)
    return block


@triton.jit
def load_row_values(source, index, start, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """(BLOCK,): numbers of rows from `start` on; the memory is padded beyond the last row.

    With TMA, `source` is a descriptor of a matrix and `index` a line of it; else `source` points to that line, and
    every thread holds the addresses of all its numbers.
    """
    if TMA:
        return source.load([index, start]).reshape(BLOCK)
    else:
        return tl.load(source + start + tl.arange(0, BLOCK))


@triton.jit
def load_bias(bias, row, column, rows, columns, stride_s, stride_t, BIAS: tl.constexpr):
    """The bias at rows and columns that broadcast, in units of log 2; -inf where a boolean bias is False."""
    ptrs = bias + row.to(tl.int64) * stride_s + column.to(tl.int64) * stride_t
    block = tl.load(ptrs, mask=(row < rows) & (column < columns), other=0)
    if BIAS == BOOLEAN:
        return tl.where(block != 0, 0.0, float("-inf"))
    else:
        return block.to(tl.float32) * LOG2_E


@triton.jit
def load_intervals(lo_ptr, hi_ptr, row, rows, columns):
    """[lo, hi) of rows, inside [0, columns); empty beyond `rows`."""
    in_rows = row < rows
    lo = tl.load(lo_ptr + row, mask=in_rows, other=0)
    hi = tl.load(hi_ptr + row, mask=in_rows, other=0)
    return tl.maximum(lo, 0), tl.minimum(hi, columns)


@triton.jit
def seen_columns(
    lo_ptr, hi_ptr, first_row, rows, columns, offset,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """The blocks of columns that a block of rows attends to, as `(lo, hi, first, blocks, before, whole)`.

    Some row attends to each of `blocks` blocks of columns from column `first` on. After the first `before` of them come
    `whole` blocks all of whose columns every row attends to. `lo` and `hi` are the intervals of the rows. With DROPOUT,
    `first` is a multiple of the length of a run of positions.

    Example, 2 rows with [3, 40) and [5, 50), blocks of 8 columns: first 3, 6 blocks; the second row attends to the
    first block in part, and both rows to the next 3 (columns 11 to 34) entirely.
    """
    row = first_row + tl.arange(0, BLOCK_ROWS)
    if MASK == INTERVALS:
        in_rows = row < rows
        lo, hi = load_intervals(lo_ptr, hi_ptr, row, rows, columns)
        first = tl.min(tl.where(lo < hi, lo, columns))
        last = tl.max(tl.where(lo < hi, hi, 0))
        whole_first = tl.max(tl.where(in_rows, lo, 0))
        whole_last = tl.min(tl.where(in_rows, hi, columns))
    elif MASK == CAUSAL:
        lo = tl.zeros_like(row)
        hi = tl.minimum(row + offset + 1, columns)
        first = 0
        last = tl.minimum(tl.minimum(first_row + BLOCK_ROWS, rows) + offset, columns)
        whole_first = 0
        whole_last = tl.minimum(first_row + offset + 1, columns)
    else:
        lo = tl.zeros_like(row)
        hi = lo + columns
        first = 0
        last = columns
        whole_first = 0
        whole_last = columns
    if DROPOUT and MASK == INTERVALS:
        first = first // _RUN * _RUN
    blocks = tl.cdiv(tl.maximum(last - first, 0), BLOCK_COLUMNS)
    if MASK == INTERVALS:
        before = tl.minimum(tl.cdiv(tl.maximum(whole_first - first, 0), BLOCK_COLUMNS), blocks)
    else:
        before = 0
    whole = tl.maximum(tl.maximum(whole_last - first, 0) // BLOCK_COLUMNS - before, 0)
    return lo, hi, first, blocks, before, tl.minimum(whole, blocks - before)


@triton.jit
def seeing_rows(
    ranges_ptr, ranges_stride, first_column, rows, columns, offset,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The blocks of rows that attend to a block of columns, as `(first, blocks, before, whole)` of `seen_columns`.

    `ranges_ptr` points to the four numbers of this block, see `rows_of_columns`. All values of rows beyond the last are
    0, so that a ragged block counts as whole.
    """
    if MASK == INTERVALS:
        first = tl.load(ranges_ptr)
        last = tl.load(ranges_ptr + ranges_stride)
        whole_first = tl.load(ranges_ptr + 2 * ranges_stride)
        whole_last = tl.load(ranges_ptr + 3 * ranges_stride)
        whole_last = tl.where(whole_last == rows, rows + BLOCK_ROWS - 1, whole_last)
    elif MASK == CAUSAL:
        first = tl.minimum(tl.maximum(first_column - offset, 0), rows)
        last = rows
        whole_first = tl.maximum(tl.minimum(first_column + BLOCK_COLUMNS, columns) - 1 - offset, 0)
        whole_last = rows + BLOCK_ROWS - 1
    else:
        first = 0
        last = rows
        whole_first = 0
        whole_last = rows + BLOCK_ROWS - 1
    first = first // 16 * 16  # descriptors of row values need alignment
    blocks = tl.cdiv(tl.maximum(last - first, 0), BLOCK_ROWS)
    before = tl.minimum(tl.cdiv(tl.maximum(whole_first - first, 0), BLOCK_ROWS), blocks)
    whole = tl.maximum(tl.maximum(whole_last - first, 0) // BLOCK_ROWS - before, 0)
    return first, blocks, before, tl.minimum(whole, blocks - before)


def mask_arguments(mask: RowMask, rows: int, columns: int) -> tuple[int, int]:
    """`(MASK, offset)` as kernels take them."""
    if mask.intervals is not None:
        assert all(x.dtype == torch.int32 and x.size(-1) == rows for x in mask.intervals)
        return INTERVALS.value, 0
    if mask.causal_offset is None:
        return FULL.value, 0
    # Beyond these limits a row attends to all columns or to none, and kernels compute with 32 bits.
    return CAUSAL.value, max(-rows, min(mask.causal_offset, columns))


def bias_argument(
    bias: Tensor | None, shape: tuple[int, int, int, int], unused: Tensor
) -> tuple[int, Tensor, tuple[int, ...]]:
    """`(BIAS, tensor, strides)` of a bias that broadcasts to `shape` (B, H, S, T); it is not expanded in memory."""
    if bias is None:
        return NO_BIAS.value, unused, (0, 0, 0, 0)
    if bias.dtype == torch.float64:
        bias = bias.float()
    expanded = bias.expand(shape)
    if bias.dtype == torch.bool:
        return BOOLEAN.value, expanded.view(torch.uint8), expanded.stride()
    return ADDITIVE.value, expanded, expanded.stride()


def blocks_of_rows(x: Facts, block: int, width: int, tma: bool) -> tuple[int, ...] | None:
    """Shape of the blocks of (B, H, S, D) that `load_rows` reads by a descriptor, None if it takes a pointer."""
    assert block * x.strides[2] < 2**31
    return (1, 1, block, width) if tma else None
