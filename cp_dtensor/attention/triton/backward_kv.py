"""Gradients of the keys and values of one tile as a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from cp_dtensor.attention.triton.common import (
    CAUSAL,
    FULL,
    INTERVALS,
    NO_BIAS,
    load_bias,
    load_row_values,
    load_rows,
    seeing_rows,
)
from cp_dtensor.attention.triton.philox import (
    DROPOUT_NOT_ALIGNED,
    DROPOUT_NOT_SPECIALIZED,
    load_positions,
    which_are_kept_transposed,
)


@triton.jit
def _add_rows(
    grad_k, grad_v, k_block, v_block, column, scale_log2,
    q, grad, shift, delta, lo, hi, bias, batch, kv_head, heads, group, interval_line,
    first, count, before, gap, rows, columns, offset, padded_rows, q_positions, kv_position, dropout,
    q_stride_h, q_stride_s, grad_stride_h, grad_stride_s, bias_stride_h, bias_stride_s, bias_stride_t,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    IN_RUNS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums and what `count` blocks of rows of each of the group's query heads add to them.

    MASKED: `before` of them begin at row `first`, the others come `gap` blocks later. Otherwise they begin at `first`,
    and all of their rows see all of these columns. Logits are transposed: (columns, rows), so that what is multiplied
    with the rows next is where it is needed. One loop over all heads, so that loads stay ahead from head to head.
    """
    head = kv_head * group
    index = 0
    for _ in tl.range(0, count * group):
        if MASKED:
            start = first + tl.where(index < before, index, index + gap) * BLOCK_ROWS
        else:
            start = first + index * BLOCK_ROWS
        row = start + tl.arange(0, BLOCK_ROWS)
        line = batch * heads + head
        if TMA:
            head_q, head_grad, head_shift, head_delta = q, grad, shift, delta
        else:
            head_q = q + head.to(tl.int64) * q_stride_h
            head_grad = grad + head.to(tl.int64) * grad_stride_h
            head_shift = shift + line.to(tl.int64) * padded_rows
            head_delta = delta + line.to(tl.int64) * padded_rows
        q_block = load_rows(head_q, batch, head, start, rows, q_stride_s, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM, True, TMA)
        row_shift = load_row_values(head_shift, line, start, BLOCK_ROWS, TMA)
        logits = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION) * scale_log2
        if BIAS != NO_BIAS:
            logits += load_bias(
                bias + head.to(tl.int64) * bias_stride_h, row[None, :], column[:, None], rows, columns,
                bias_stride_s, bias_stride_t, BIAS,
            )  # fmt: skip
        weights = tl.math.exp2(logits - row_shift[None, :])
        if MASKED and MASK == CAUSAL:
            weights = tl.where(column[:, None] <= row[None, :] + offset, weights, 0.0)
        elif MASKED and MASK == INTERVALS:
            row_lo = load_row_values(lo, interval_line, start, BLOCK_ROWS, TMA)
            row_hi = load_row_values(hi, interval_line, start, BLOCK_ROWS, TMA)
            seen = (column[:, None] >= row_lo[None, :]) & (column[:, None] < row_hi[None, :])
            weights = tl.where(seen, weights, 0.0)
        grad_block = load_rows(
            head_grad, batch, head, start, rows, grad_stride_s, V_DIM, BLOCK_ROWS, BLOCK_V, True, TMA
        )
        row_delta = load_row_values(head_delta, line, start, BLOCK_ROWS, TMA)
        grad_weights = tl.dot(v_block, tl.trans(grad_block), input_precision=PRECISION)
        if DROPOUT:
            seed, counted_batch, first_head, dropout_limit = dropout
            q_position = load_positions(q_positions, start, rows, BLOCK_ROWS, IN_RUNS, 8)
            kept = which_are_kept_transposed(
                q_position, kv_position, (seed, counted_batch, first_head + head, dropout_limit),
                BLOCK_ROWS, column.shape[0], IN_RUNS,
            )  # fmt: skip
            dropped = tl.where(kept, weights, 0.0)
        else:
            dropped = weights
        grad_v = tl.dot(dropped.to(grad_block.dtype), grad_block, grad_v, input_precision=PRECISION)
        if DROPOUT:  # what is kept is used only once, and so need not be held
            grad_logits = dropped * grad_weights - weights * row_delta[None, :]
        else:
            grad_logits = weights * (grad_weights - row_delta[None, :])
        grad_k = tl.dot(grad_logits.to(q_block.dtype), q_block, grad_k, input_precision=PRECISION)
        index += 1
        head = tl.where(index == count, head + 1, head)
        index = tl.where(index == count, 0, index)
    return grad_k, grad_v


_NOT_SPECIALIZED = ["rows", "columns", "offset", "group", "padded_rows", "intervals_stride_b"]
_NOT_SPECIALIZED += ["ranges_stride", "ranges_stride_b", *DROPOUT_NOT_SPECIALIZED]
_NOT_ALIGNED = ["lo", "hi", *DROPOUT_NOT_ALIGNED]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_NOT_ALIGNED)
def attention_dkv_kernel(
    dk_ptr, dv_ptr, grad, q, k_ptr, v_ptr, shift, delta, lo, hi, ranges_ptr, bias_ptr,
    seed_ptr, q_position_ptr, kv_position_ptr,
    rows, columns, offset, scale_log2, scale, group, padded_rows,
    dk_stride_b, dk_stride_h, dk_stride_s, dv_stride_b, dv_stride_h, dv_stride_s,
    grad_stride_b, grad_stride_h, grad_stride_s, q_stride_b, q_stride_h, q_stride_s,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    intervals_stride_b, ranges_stride, ranges_stride_b,
    bias_stride_b, bias_stride_h, bias_stride_s, bias_stride_t,
    q_position_stride_b, kv_position_stride_b, first_batch, first_head, dropout_limit,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, IN_RUNS: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of BLOCK_COLUMNS columns of one (batch, kv head), over all rows of its query heads."""
    kv_head = tl.program_id(0)
    batch = tl.program_id(2)
    first_column = tl.program_id(1) * BLOCK_COLUMNS  # under a causal mask, the first columns have the most work
    batch_64, kv_head_64 = batch.to(tl.int64), kv_head.to(tl.int64)
    column = first_column + tl.arange(0, BLOCK_COLUMNS)
    column_64 = column.to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    v_dim = tl.arange(0, BLOCK_V)[None, :]
    in_k = (column < columns)[:, None] & (dim < HEAD_DIM)
    in_v = (column < columns)[:, None] & (v_dim < V_DIM)
    k_block = tl.load(
        k_ptr + batch_64 * k_stride_b + kv_head_64 * k_stride_h + column_64 * k_stride_s + dim, mask=in_k, other=0.0
    )
    v_block = tl.load(
        v_ptr + batch_64 * v_stride_b + kv_head_64 * v_stride_h + column_64 * v_stride_s + v_dim, mask=in_v, other=0.0
    )
    interval_line = tl.where(intervals_stride_b > 0, batch, 0)
    bias_ptr += batch_64 * bias_stride_b
    if not TMA:
        q += batch_64 * q_stride_b
        grad += batch_64 * grad_stride_b
        lo += batch_64 * intervals_stride_b
        hi += batch_64 * intervals_stride_b
    seed, kv_position = 0, column
    if DROPOUT:
        seed = tl.load(seed_ptr)
        q_position_ptr += batch_64 * q_position_stride_b
        kv_position_ptr += batch_64 * kv_position_stride_b
        kv_position = load_positions(kv_position_ptr, first_column, columns, BLOCK_COLUMNS, IN_RUNS, 8)
    dropout = (seed, first_batch + batch, first_head, dropout_limit)
    first, blocks, before, whole = seeing_rows(
        ranges_ptr + batch_64 * ranges_stride_b + tl.program_id(1), ranges_stride,
        first_column, rows, columns, offset, BLOCK_ROWS, BLOCK_COLUMNS, MASK,
    )  # fmt: skip

    grad_k = tl.zeros([BLOCK_COLUMNS, BLOCK_DIM], tl.float32)
    grad_v = tl.zeros([BLOCK_COLUMNS, BLOCK_V], tl.float32)
    heads = tl.num_programs(0) * group
    if MASK != FULL:
        grad_k, grad_v = _add_rows(
            grad_k, grad_v, k_block, v_block, column, scale_log2,
            q, grad, shift, delta, lo, hi, bias_ptr, batch, kv_head, heads, group, interval_line,
            first, blocks - whole, before, whole, rows, columns, offset, padded_rows,
            q_position_ptr, kv_position, dropout,
            q_stride_h, q_stride_s, grad_stride_h, grad_stride_s, bias_stride_h, bias_stride_s, bias_stride_t,
            HEAD_DIM, V_DIM, BLOCK_ROWS, BLOCK_DIM, BLOCK_V, MASK, True, BIAS, DROPOUT, IN_RUNS, TMA, PRECISION,
        )  # fmt: skip
    grad_k, grad_v = _add_rows(
        grad_k, grad_v, k_block, v_block, column, scale_log2,
        q, grad, shift, delta, lo, hi, bias_ptr, batch, kv_head, heads, group, interval_line,
        first + before * BLOCK_ROWS, whole, 0, 0, rows, columns, offset, padded_rows,
        q_position_ptr, kv_position, dropout,
        q_stride_h, q_stride_s, grad_stride_h, grad_stride_s, bias_stride_h, bias_stride_s, bias_stride_t,
        HEAD_DIM, V_DIM, BLOCK_ROWS, BLOCK_DIM, BLOCK_V, MASK, False, BIAS, DROPOUT, IN_RUNS, TMA, PRECISION,
    )  # fmt: skip
    tl.store(
        dk_ptr + batch_64 * dk_stride_b + kv_head_64 * dk_stride_h + column_64 * dk_stride_s + dim,
        (grad_k * scale).to(dk_ptr.dtype.element_ty), mask=in_k,
    )  # fmt: skip
    tl.store(
        dv_ptr + batch_64 * dv_stride_b + kv_head_64 * dv_stride_h + column_64 * dv_stride_s + v_dim,
        grad_v.to(dv_ptr.dtype.element_ty), mask=in_v,
    )  # fmt: skip
