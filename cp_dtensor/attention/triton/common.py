"""Functions shared by the attention kernels: loads of blocks, the blocks that a mask leaves, bias, and dropout.

Row i attends to columns [lo_i, hi_i). A block of rows therefore reads only columns from its smallest lo to its largest
hi, and applies the mask only in blocks that some row attends to in part.

Dropout is bit by bit equal to `dropout.kept_reference`. In a matrix product, a thread of an Ampere or Hopper GPU holds
rows i and i + 8 at columns j, j + 1, j + 8 and j + 9 (and others). The 8 elements of a counter are therefore in one
thread, which calls Philox once for them. In a transposed product, columns j and j + 1 are in two threads, and both make
the call. This needs positions in runs; otherwise there is one call for each element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_dtensor._torch.triton_launch import Facts
from cp_dtensor.attention.triton.dropout import PHILOX_FACTORS, PHILOX_KEY_STEPS, PHILOX_ROUNDS, RUN, Dropout
from cp_dtensor.attention.triton.row_mask import RowMask

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Kinds of masks.
FULL = tl.constexpr(0)
CAUSAL = tl.constexpr(1)
INTERVALS = tl.constexpr(2)

# Kinds of biases.
NO_BIAS = tl.constexpr(0)
ADDITIVE = tl.constexpr(1)
BOOLEAN = tl.constexpr(2)

_ROUNDS = tl.constexpr(PHILOX_ROUNDS)
_FACTOR_0 = tl.constexpr(PHILOX_FACTORS[0])
_FACTOR_1 = tl.constexpr(PHILOX_FACTORS[1])
_KEY_STEP_0 = tl.constexpr(PHILOX_KEY_STEPS[0])
_KEY_STEP_1 = tl.constexpr(PHILOX_KEY_STEPS[1])
_RUN = tl.constexpr(RUN)
_HALF_RUN = tl.constexpr(RUN // 2)
_QUARTER_RUN = tl.constexpr(RUN // 4)

attention_kernel = triton.jit(
    # Triton does not specialise on these, so that tiles with other numbers share the compiled code.
    do_not_specialize=[
        "rows", "columns", "offset", "heads", "group", "padded_rows", "intervals_stride_b", "ranges_stride",
        "ranges_stride_b", "q_position_stride_b", "kv_position_stride_b", "first_batch", "first_head", "dropout_limit",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr", "lse_stride_b", "lse_stride_h", "lse_stride_low", "lo_ptr", "hi_ptr", "lo", "hi",
        "seed_ptr", "q_position_ptr", "kv_position_ptr",
    ],
)  # fmt: skip
"""Decorator of the forward, dQ and dK/dV kernels."""


@triton.jit
def place_of_program(first, second):
    """Return the place of a program among `first` x `second` x any number, the first counting fastest.

    Axis x of the grid has all programs, since CUDA limits the other axes to 65,535: one tile has more blocks of rows.

    Example: program 7 among 2 x 3 x 4 is at (1, 0, 1).
    """
    program = tl.program_id(0)
    return program % first, program // first % second, program // first // second


@triton.jit
def addresses(ptr, batch, head, row, dim, stride_b, stride_h, stride_s):
    """Return (rows, dims): the addresses of elements of one (batch, head) of (B, H, S, D)."""
    of_head = ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    return of_head + row.to(tl.int64)[:, None] * stride_s + dim[None, :]


@triton.jit
def load_rows(
    source, batch, head, start, length, strides,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, RAGGED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load (BLOCK, BLOCK_DIM): rows from `start` of one (batch, head); 0 beyond `length` (if RAGGED) and beyond DIM.

    With TMA, `source` is a descriptor of the tensor, else a pointer to it. `strides` are those of batch, head and row.
    """
    if TMA:
        block = source.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_DIM)
    else:
        row = tl.arange(0, BLOCK)[:, None]
        dim = tl.arange(0, BLOCK_DIM)[None, :]
        stride_b, stride_h, stride_s = strides
        of_head = source + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        # Offsets inside a block fit 32 bits (asserted by the launcher) and do not change from block to block.
        ptrs = of_head + tl.cast(start, tl.int64) * stride_s + (row * stride_s + dim)
        if RAGGED:
            block = tl.load(ptrs, mask=(start + row < length) & (dim < DIM), other=0.0)
        elif DIM < BLOCK_DIM:
            block = tl.load(ptrs, mask=dim < DIM, other=0.0)
        else:
            block = tl.load(ptrs)
    return block


@triton.jit
def load_row_values(source, line, stride, start, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """Load (BLOCK,): numbers of rows from `start` on, in a line of a matrix that is padded beyond the last row.

    With TMA, `source` is a descriptor of the matrix; else a pointer to it, and every thread holds the addresses of all
    its numbers.
    """
    if TMA:
        return source.load([line, start]).reshape(BLOCK)
    else:
        return tl.load(source + line.to(tl.int64) * stride + start + tl.arange(0, BLOCK))


@triton.jit
def load_bias(bias, row, column, rows, columns, stride_s, stride_t, BIAS: tl.constexpr):
    """Load the bias at rows and columns that broadcast; -inf where a boolean bias is False, and beyond the tile."""
    ptrs = bias + row.to(tl.int64) * stride_s + column.to(tl.int64) * stride_t
    in_tile = (row < rows) & (column < columns)
    if BIAS == BOOLEAN:
        return tl.where(tl.load(ptrs, mask=in_tile, other=0) != 0, 0.0, float("-inf"))
    else:
        return tl.load(ptrs, mask=in_tile, other=float("-inf")).to(tl.float32)


@triton.jit
def capped(logits, SOFTCAP: tl.constexpr):
    """Return SOFTCAP tanh(logits / SOFTCAP) of scaled logits, from tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
    return SOFTCAP - 2 * SOFTCAP / (tl.math.exp2(logits * (2 * LOG2_E / SOFTCAP)) + 1)


@triton.jit
def slope_of_cap(capped_logits, SOFTCAP: tl.constexpr):
    """Return the derivative of `capped`, 1 - tanh^2, from its result."""
    tanh = capped_logits * (1 / SOFTCAP)
    return 1 - tanh * tanh


@triton.jit
def seen_columns(
    lo_ptr, hi_ptr, first_row, rows, columns, offset,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return the blocks of columns that a block of rows attends to, as `(lo, hi, first, blocks, before, whole)`.

    Some row attends to each of `blocks` blocks of columns from column `first` on. After the first `before` of them come
    `whole` blocks all of whose columns every row attends to. `lo` and `hi` are the intervals of the rows. With DROPOUT,
    `first` is a multiple of the length of a run of positions.

    Example, 2 rows with [3, 40) and [5, 50), blocks of 8 columns: first 3, 6 blocks; the second row attends to the
    first block in part, and both rows to the next 3 (columns 11 to 34) entirely.
    """
    row = first_row + tl.arange(0, BLOCK_ROWS)
    lo = tl.zeros_like(row)
    hi = lo + columns
    first = 0
    last = columns
    whole_first = 0
    whole_last = columns
    if MASK == INTERVALS:
        in_rows = row < rows
        lo = tl.maximum(tl.load(lo_ptr + row, mask=in_rows, other=0), 0)
        hi = tl.minimum(tl.load(hi_ptr + row, mask=in_rows, other=0), columns)
        first = tl.min(tl.where(lo < hi, lo, columns))
        last = tl.max(tl.where(lo < hi, hi, 0))
        whole_first = tl.max(tl.where(in_rows, lo, 0))
        whole_last = tl.min(tl.where(in_rows, hi, columns))
    elif MASK == CAUSAL:
        hi = tl.minimum(row + offset + 1, columns)
        last = tl.minimum(tl.minimum(first_row + BLOCK_ROWS, rows) + offset, columns)
        whole_last = tl.minimum(first_row + offset + 1, columns)
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
    """Return the blocks of rows that see a block of columns, as `(first, blocks, before, whole)` of `seen_columns`.

    `ranges_ptr` points to the four numbers of this block, see `rows_of_columns`. All values of rows beyond the last are
    0, so that a ragged block counts as whole.
    """
    first = 0
    last = rows
    whole_first = 0
    whole_last = rows + BLOCK_ROWS - 1
    if MASK == INTERVALS:
        first = tl.load(ranges_ptr)
        last = tl.load(ranges_ptr + ranges_stride)
        whole_first = tl.load(ranges_ptr + 2 * ranges_stride)
        stop = tl.load(ranges_ptr + 3 * ranges_stride)
        whole_last = tl.where(stop == rows, whole_last, stop)
    elif MASK == CAUSAL:
        first = tl.minimum(tl.maximum(first_column - offset, 0), rows)
        whole_first = tl.maximum(tl.minimum(first_column + BLOCK_COLUMNS, columns) - 1 - offset, 0)
    first = first // 16 * 16  # descriptors of row values need alignment
    blocks = tl.cdiv(tl.maximum(last - first, 0), BLOCK_ROWS)
    before = tl.minimum(tl.cdiv(tl.maximum(whole_first - first, 0), BLOCK_ROWS), blocks)
    whole = tl.maximum(tl.maximum(whole_last - first, 0) // BLOCK_ROWS - before, 0)
    return first, blocks, before, tl.minimum(whole, blocks - before)


@triton.jit
def block_start(index, first, before, whole, BLOCK: tl.constexpr, MASKED: tl.constexpr, HAS_BEFORE: tl.constexpr):
    """Return the first row or column of a block, from `first`, `before` and `whole` of `seen_columns`.

    MASKED: `index` counts the blocks before and after the whole ones (HAS_BEFORE: False if none come before), otherwise
    the whole ones.
    """
    if MASKED and HAS_BEFORE:
        return first + tl.where(index < before, index, index + whole) * BLOCK
    elif MASKED:
        return first + (index + whole) * BLOCK
    else:
        return first + before * BLOCK + index * BLOCK


@triton.jit
def which_are_kept(q_position, kv_position, dropout, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_RUNS: tl.constexpr):
    """Return (ROWS, COLUMNS): True for kept weights at positions from `load_positions` (in runs: OF_RUN 8 and 4).

    `dropout` is (seed, batch row, query head, the largest word whose first 16 bits are dropped).
    """
    if IN_RUNS:
        words = _philox(q_position[:, None], kv_position[None, :], dropout, _ROUNDS)
        split: tl.constexpr = (ROWS // _RUN, 1, _HALF_RUN, COLUMNS // _RUN, 1, _QUARTER_RUN, 1)
        either = tl.arange(0, 2)
        word = _of_halves(
            words, either[None, :, None, None, None, None, None], either[None, None, None, None, :, None, None], split
        )
        word = (word << _shift(either)).reshape(ROWS, COLUMNS)
    else:
        word = _one_by_one(q_position[:, None], kv_position[None, :], dropout)
    return word > dropout[3].to(tl.uint32, bitcast=True)


@triton.jit
def which_are_kept_transposed(
    q_position, kv_position, dropout, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_RUNS: tl.constexpr
):  # fmt: skip
    """Return (COLUMNS, ROWS): the transpose of `which_are_kept`, from column positions with OF_RUN 8."""
    if IN_RUNS:
        words = _philox(q_position[None, :], (kv_position & ~1)[:, None], dropout, _ROUNDS)
        split: tl.constexpr = (COLUMNS // _RUN, 1, _HALF_RUN, ROWS // _RUN, 1, _HALF_RUN)
        either = tl.arange(0, 2)
        word = _of_halves(
            words, either[None, None, None, None, :, None], either[None, :, None, None, None, None], split
        )  # fmt: skip
        word = word.reshape(COLUMNS, ROWS) << _shift(tl.arange(0, COLUMNS))[:, None]
    else:
        word = _one_by_one(q_position[None, :], kv_position[:, None], dropout)
    return word > dropout[3].to(tl.uint32, bitcast=True)


@triton.jit
def _of_halves(words, q_half, kv_half, SHAPE: tl.constexpr):
    """Return the word of each half of a run of rows and of columns, from four words that reshape to SHAPE.

    Uses `tl.where` instead of `tl.join`, since every version of Triton keeps the thread layout through it.
    """
    first_rows = tl.where(kv_half == 0, words[0].reshape(SHAPE), words[1].reshape(SHAPE))
    second_rows = tl.where(kv_half == 0, words[2].reshape(SHAPE), words[3].reshape(SHAPE))
    return tl.where(q_half == 0, first_rows, second_rows)


@triton.jit
def _one_by_one(q_position, kv_position, dropout):
    """Return the word that begins with the number of each element; positions broadcast to the block."""
    c0, c1, c2, c3, key_0, key_1 = _philox(
        q_position & ~_HALF_RUN, kv_position & ~(_HALF_RUN + 1), dropout, _ROUNDS - 1
    )  # fmt: skip
    # The last round computes only the product that has the word, or half of it.
    is_second = (q_position & _HALF_RUN) != 0
    factor = tl.where(is_second, _FACTOR_0, _FACTOR_1).to(tl.uint32)
    product = tl.where(is_second, c0, c2).to(tl.uint64) * factor.to(tl.uint64)
    upper = (product >> 32).to(tl.uint32) ^ tl.where(is_second, c3 ^ key_1, c1 ^ key_0)
    return tl.where((kv_position & _HALF_RUN) != 0, product.to(tl.uint32), upper) << _shift(kv_position)


@triton.jit
def _shift(kv_position):
    """Return the bits by which to shift a word left so that it begins with the number of a column."""
    return (16 - 16 * (kv_position & 1)).to(tl.uint32)


@triton.jit
def _philox(q_position, kv_position, dropout, ROUNDS: tl.constexpr):
    """Return the four words of 32 bits after ROUNDS rounds of Philox4x32, and the keys of the next round.

    The counter is (query position, key position, batch row, query head), the key is the seed; `dropout` as in
    `which_are_kept`. Positions broadcast, one along rows and one along columns: the products of the first two rounds
    depend on a row, a column or neither, so they cost little.
    """
    seed, batch, head, _ = dropout
    key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = q_position.to(tl.uint32, bitcast=True)
    c1 = kv_position.to(tl.uint32, bitcast=True)
    c2 = batch.to(tl.uint32)
    c3 = head.to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        # One instruction gives both halves of a product of 64 bits.
        product_0 = c0.to(tl.uint64) * _FACTOR_0
        product_1 = c2.to(tl.uint64) * _FACTOR_1
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ key_0
        c1 = product_1.to(tl.uint32)
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ key_1
        c3 = product_0.to(tl.uint32)
        key_0 = tl.add(key_0, _KEY_STEP_0, sanitize_overflow=False)
        key_1 = tl.add(key_1, _KEY_STEP_1, sanitize_overflow=False)
    return c0, c1, c2, c3, key_0, key_1


@triton.jit
def load_positions(positions, start, length, BLOCK: tl.constexpr, IN_RUNS: tl.constexpr, OF_RUN: tl.constexpr):
    """Load positions of BLOCK rows or columns from `start` on, 0 beyond `length`.

    IN_RUNS: only the positions that `_philox` needs: the first half of each run (OF_RUN 8), or every other position of
    that half (OF_RUN 4).
    """
    if IN_RUNS:
        index = tl.arange(0, BLOCK // _RUN * OF_RUN)
        index = index // OF_RUN * _RUN + index % OF_RUN * (_HALF_RUN // OF_RUN)
    else:
        index = tl.arange(0, BLOCK)
    return tl.load(positions + start + index, mask=start + index < length, other=0)


def mask_arguments(mask: RowMask, rows: int, columns: int) -> tuple[int, int]:
    """Return `(MASK, offset)` as kernels take them."""
    if mask.intervals is not None:
        assert all(x.dtype == torch.int32 and x.size(-1) == rows for x in mask.intervals)
        return INTERVALS.value, 0
    if mask.causal_offset is None:
        return FULL.value, 0
    # Beyond these limits a row attends to all columns or to none, and kernels compute with 32 bits.
    return CAUSAL.value, max(-rows, min(mask.causal_offset, columns))


def modifier_arguments(
    bias: Tensor | None, dropout: Dropout | None, shape: tuple[int, int, int, int], unused: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, bool, bool, float]]:
    """Return tensors and numbers as kernels take them, and `(BIAS, DROPOUT, IN_RUNS, factor of kept weights)`.

    The bias broadcasts to `shape` (B, H, S, T) and is not expanded in memory.
    """
    bias_kind, bias_strides = NO_BIAS.value, (0,) * len(shape)
    if bias is None:
        bias = unused
    elif bias.dtype == torch.bool:
        bias_kind, bias = BOOLEAN.value, bias.view(torch.uint8).expand(shape)
        bias_strides = bias.stride()
    else:
        bias_kind, bias = ADDITIVE.value, (bias.float() if bias.dtype == torch.float64 else bias).expand(shape)
        bias_strides = bias.stride()
    if dropout is None:
        return (bias, unused, unused, unused), (*bias_strides, 0, 0, 0, 0, 0), (bias_kind, False, False, 1.0)
    assert dropout.p > 0, "no limit keeps everything"
    positions = (dropout.q_positions, dropout.kv_positions)
    strides = [x.stride(0) if x.dim() == 2 and x.size(0) > 1 else 0 for x in positions]
    limit = (dropout.threshold << 16) - 1
    if limit >= 2**31:  # Triton takes the signed 32-bit number with the same bits
        limit -= 2**32
    numbers = (*bias_strides, *strides, dropout.first_batch, dropout.first_head, limit)
    return (bias, dropout.seed, *positions), numbers, (bias_kind, True, dropout.in_runs, dropout.scale)


def lse_strides(lse: Facts) -> tuple[int, int, int]:
    """Return the strides of batch, head and the second float of an LSE (`attention.lse`), 0 if there is none."""
    assert lse.strides[2] == 1 or lse.shape[2] == 1
    stride_b, stride_h, _, *stride_low = lse.strides
    return stride_b, stride_h, stride_low[0] if stride_low else 0


def blocks_of_rows(x: Facts, block: int, width: int, tma: bool) -> tuple[int, ...] | None:
    """Return the shape of the blocks of (B, H, S, D) that `load_rows` reads by a descriptor, None for a pointer."""
    assert block * x.strides[2] < 2**31
    return (1, 1, block, width) if tma else None
