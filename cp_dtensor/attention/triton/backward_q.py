"""Gradient of the queries of one tile as a Triton kernel, and what is needed of each row before: FlashAttention-2
(arXiv 2307.08691, algorithm 2), with a kernel for each side, so that every sum has one order."""

from __future__ import annotations

import triton
import triton.language as tl

from cp_dtensor.attention.triton.common import INTERVALS, LOG2_E, NO_BIAS, load_bias, load_rows, seen_columns
from cp_dtensor.attention.triton.philox import (
    DROPOUT_NOT_ALIGNED,
    DROPOUT_NOT_SPECIALIZED,
    load_positions,
    which_are_kept,
)


@triton.jit(do_not_specialize=["rows"])
def attention_delta_kernel(
    delta_ptr, out_ptr, grad_ptr, rows,
    delta_stride_b, delta_stride_h, out_stride_b, out_stride_h, out_stride_s,
    grad_stride_b, grad_stride_h, grad_stride_s,
    V_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """delta = sum(out * gradient) of BLOCK_ROWS rows of one (batch, head)."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_64 = row.to(tl.int64)
    v_dim = tl.arange(0, BLOCK_V)[None, :]
    in_tile = (row < rows)[:, None] & (v_dim < V_DIM)
    out_ptrs = out_ptr + batch * out_stride_b + head * out_stride_h + row_64[:, None] * out_stride_s + v_dim
    grad_ptrs = grad_ptr + batch * grad_stride_b + head * grad_stride_h + row_64[:, None] * grad_stride_s + v_dim
    out = tl.load(out_ptrs, mask=in_tile, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptrs, mask=in_tile, other=0.0).to(tl.float32)
    delta_ptrs = delta_ptr + batch * delta_stride_b + head * delta_stride_h + row_64
    tl.store(delta_ptrs, tl.sum(out * grad, 1), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "padded_rows"])
def attention_rows_kernel(
    shift_ptr, padded_delta_ptr, lse_ptr, delta_ptr,
    rows, padded_rows, log_scale, kept_share, lse_stride_b, lse_stride_h, delta_stride_b, delta_stride_h,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Lines of `padded_rows` for each (batch, head): of the LSE in units of log 2, and of delta.

    Rows that see nothing, and rows that are not there, get infinity for the LSE: every weight is exp2(x - inf) = 0.
    Dropout's scale s is in both: P (s dP - delta) is s P (dP - delta / s). Without it, `log_scale` is 0, the share 1.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    lse_ptrs = lse_ptr + batch * lse_stride_b + head * lse_stride_h + row
    delta_ptrs = delta_ptr + batch * delta_stride_b + head * delta_stride_h + row
    lse = tl.load(lse_ptrs, mask=row < rows, other=float("-inf")).to(tl.float32)
    delta = tl.load(delta_ptrs, mask=row < rows, other=0.0).to(tl.float32)
    at = (batch * tl.num_programs(1) + head) * padded_rows + row
    shift = lse * LOG2_E - log_scale
    tl.store(shift_ptr + at, tl.where(lse > float("-inf"), shift, float("inf")), mask=row < padded_rows)
    tl.store(padded_delta_ptr + at, delta * kept_share, mask=row < padded_rows)


@triton.jit
def _add_columns(
    acc, q, grad, shift, delta, row, lo, hi, scale_log2,
    k, v, bias, batch, kv_head, first, count, before, gap, rows, columns, q_position, kv_positions, dropout,
    k_stride_s, v_stride_s, bias_stride_s, bias_stride_t,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    IN_RUNS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`acc` and what `count` blocks of columns add to it; which ones they are, forward's `_attend` says."""
    for index in tl.range(0, count):
        if MASKED and MASK == INTERVALS:
            start = first + tl.where(index < before, index, index + gap) * BLOCK_COLUMNS
        elif MASKED:
            start = first + (index + gap) * BLOCK_COLUMNS
        else:
            start = first + index * BLOCK_COLUMNS
        k_block = load_rows(
            k, batch, kv_head, start, columns, k_stride_s, HEAD_DIM, BLOCK_COLUMNS, BLOCK_DIM, MASKED, TMA
        )
        v_block = load_rows(v, batch, kv_head, start, columns, v_stride_s, V_DIM, BLOCK_COLUMNS, BLOCK_V, MASKED, TMA)
        logits = tl.dot(q, tl.trans(k_block), input_precision=PRECISION) * scale_log2
        column = start + tl.arange(0, BLOCK_COLUMNS)
        if BIAS != NO_BIAS:
            logits += load_bias(
                bias, row[:, None], column[None, :], rows, columns, bias_stride_s, bias_stride_t, BIAS
            )  # fmt: skip
        weights = tl.math.exp2(logits - shift[:, None])
        if MASKED:
            seen = column[None, :] < hi[:, None]
            if MASK == INTERVALS:
                seen = seen & (column[None, :] >= lo[:, None])
            weights = tl.where(seen, weights, 0.0)
        grad_weights = tl.dot(grad, tl.trans(v_block), input_precision=PRECISION)
        if DROPOUT:
            kv_position = load_positions(kv_positions, start, columns, BLOCK_COLUMNS, IN_RUNS, 4)
            kept = which_are_kept(q_position, kv_position, dropout, row.shape[0], BLOCK_COLUMNS, IN_RUNS)
            grad_weights = tl.where(kept, grad_weights, 0.0)
        grad_logits = weights * (grad_weights - delta[:, None])
        acc = tl.dot(grad_logits.to(k_block.dtype), k_block, acc, input_precision=PRECISION)
    return acc


_NOT_SPECIALIZED = ["rows", "columns", "offset", "group", "padded_rows", "intervals_stride_b", *DROPOUT_NOT_SPECIALIZED]
_NOT_ALIGNED = ["lo_ptr", "hi_ptr", *DROPOUT_NOT_ALIGNED]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_NOT_ALIGNED)
def attention_dq_kernel(
    dq_ptr, grad_ptr, q_ptr, k, v, shift_ptr, delta_ptr, lo_ptr, hi_ptr, bias_ptr,
    seed_ptr, q_position_ptr, kv_position_ptr,
    rows, columns, offset, scale_log2, scale, group, padded_rows,
    dq_stride_b, dq_stride_h, dq_stride_s, grad_stride_b, grad_stride_h, grad_stride_s,
    q_stride_b, q_stride_h, q_stride_s,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    intervals_stride_b, bias_stride_b, bias_stride_h, bias_stride_s, bias_stride_t,
    q_position_stride_b, kv_position_stride_b, first_batch, first_head, dropout_limit,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, IN_RUNS: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dQ of BLOCK_ROWS rows of one (batch, query head), over all columns that they see."""
    head = tl.program_id(0)
    batch = tl.program_id(2)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_ROWS  # the most work first, as in forward
    kv_head = head // group
    head_64, batch_64, kv_head_64 = head.to(tl.int64), batch.to(tl.int64), kv_head.to(tl.int64)
    row = first_row + tl.arange(0, BLOCK_ROWS)
    row_64 = row.to(tl.int64)
    dim = tl.arange(0, BLOCK_DIM)
    v_dim = tl.arange(0, BLOCK_V)
    in_rows = row < rows
    in_q = in_rows[:, None] & (dim < HEAD_DIM)[None, :]
    if not TMA:
        k += batch_64 * k_stride_b + kv_head_64 * k_stride_h
        v += batch_64 * v_stride_b + kv_head_64 * v_stride_h
    bias_ptr += batch_64 * bias_stride_b + head_64 * bias_stride_h
    lo_ptr += batch_64 * intervals_stride_b
    hi_ptr += batch_64 * intervals_stride_b
    q = tl.load(
        q_ptr + batch_64 * q_stride_b + head_64 * q_stride_h + row_64[:, None] * q_stride_s + dim[None, :],
        mask=in_q, other=0.0,
    )  # fmt: skip
    grad_ptr += batch_64 * grad_stride_b + head_64 * grad_stride_h
    grad = tl.load(
        grad_ptr + row_64[:, None] * grad_stride_s + v_dim[None, :],
        mask=in_rows[:, None] & (v_dim < V_DIM)[None, :], other=0.0,
    )  # fmt: skip
    at = (batch_64 * tl.num_programs(0) + head_64) * padded_rows + row_64
    shift = tl.load(shift_ptr + at)
    delta = tl.load(delta_ptr + at)
    seed, q_position = 0, row
    if DROPOUT:
        seed = tl.load(seed_ptr)
        kv_position_ptr += batch_64 * kv_position_stride_b
        q_position_ptr += batch_64 * q_position_stride_b
        q_position = load_positions(q_position_ptr, first_row, rows, BLOCK_ROWS, IN_RUNS, 8)
    dropout = (seed, first_batch + batch, first_head + head, dropout_limit)

    lo, hi, first, blocks, before, whole = seen_columns(
        lo_ptr, hi_ptr, first_row, rows, columns, offset, BLOCK_ROWS, BLOCK_COLUMNS, MASK, DROPOUT
    )
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    acc = _add_columns(
        acc, q, grad, shift, delta, row, lo, hi, scale_log2,
        k, v, bias_ptr, batch, kv_head, first + before * BLOCK_COLUMNS, whole, 0, 0, rows, columns,
        q_position, kv_position_ptr, dropout,
        k_stride_s, v_stride_s, bias_stride_s, bias_stride_t,
        HEAD_DIM, V_DIM, BLOCK_COLUMNS, BLOCK_DIM, BLOCK_V, MASK, False, BIAS, DROPOUT, IN_RUNS, TMA, PRECISION,
    )  # fmt: skip
    acc = _add_columns(
        acc, q, grad, shift, delta, row, lo, hi, scale_log2,
        k, v, bias_ptr, batch, kv_head, first, blocks - whole, before, whole, rows, columns,
        q_position, kv_position_ptr, dropout,
        k_stride_s, v_stride_s, bias_stride_s, bias_stride_t,
        HEAD_DIM, V_DIM, BLOCK_COLUMNS, BLOCK_DIM, BLOCK_V, MASK, True, BIAS, DROPOUT, IN_RUNS, TMA, PRECISION,
    )  # fmt: skip
    dq_ptrs = dq_ptr + batch_64 * dq_stride_b + head_64 * dq_stride_h + row_64[:, None] * dq_stride_s + dim[None, :]
    tl.store(dq_ptrs, (acc * scale).to(dq_ptr.dtype.element_ty), mask=in_q)
