"""Delta of rows and gradients of one tile of attention: Triton kernels and their launchers.

FlashAttention-2 (arXiv 2307.08691, algorithm 2), with one kernel for dQ and one for dK and dV, so that every sum has a
fixed order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_dtensor._torch.triton_launch import Facts, Launch, cached_launch, facts
from cp_dtensor.attention.triton.common import (
    ADDITIVE,
    CAUSAL,
    FULL,
    INTERVALS,
    LOG2_E,
    NO_BIAS,
    addresses,
    attention_kernel,
    block_start,
    blocks_of_rows,
    capped,
    load_bias,
    load_positions,
    load_row_values,
    load_rows,
    lse_strides,
    mask_arguments,
    modifier_arguments,
    place_of_program,
    seeing_rows,
    seen_columns,
    slope_of_cap,
    which_are_kept,
    which_are_kept_transposed,
)
from cp_dtensor.attention.triton.configs import BackwardConfig, default_backward_config, padded
from cp_dtensor.attention.triton.dropout import Dropout
from cp_dtensor.attention.triton.row_mask import RowMask

_ROWS_BLOCK = 4096
"""Rows of a program of `attention_rows_kernel`."""


@triton.jit(do_not_specialize=["rows", "heads", "delta_stride_b", "delta_stride_h"])
def attention_delta_kernel(
    delta_ptr, out_ptr, grad_ptr, rows, heads,
    delta_stride_b, delta_stride_h, out_stride_b, out_stride_h, out_stride_s,
    grad_stride_b, grad_stride_h, grad_stride_s,
    V_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute, in one program, delta of BLOCK_ROWS rows of one (batch, head)."""
    block, head, batch = place_of_program(tl.cdiv(rows, BLOCK_ROWS), heads)
    head, batch = head.to(tl.int64), batch.to(tl.int64)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    v_dim = tl.arange(0, BLOCK_V)
    in_tile = (row < rows)[:, None] & (v_dim < V_DIM)[None, :]
    out_ptrs = addresses(out_ptr, batch, head, row, v_dim, out_stride_b, out_stride_h, out_stride_s)
    grad_ptrs = addresses(grad_ptr, batch, head, row, v_dim, grad_stride_b, grad_stride_h, grad_stride_s)
    out = tl.load(out_ptrs, mask=in_tile, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptrs, mask=in_tile, other=0.0).to(tl.float32)
    delta_ptrs = delta_ptr + batch * delta_stride_b + head * delta_stride_h + row.to(tl.int64)
    tl.store(delta_ptrs, tl.sum(out * grad, 1), mask=row < rows)


def launch_attention_delta(delta: Tensor, grad_out: Tensor, out: Tensor) -> None:
    """Compute `masked.attention_delta` into `delta`, float32; one launch. The last dim of all tensors is contiguous."""
    _delta_launch(facts(delta), facts(out), facts(grad_out))(delta, out, grad_out)


@cached_launch
def _delta_launch(delta: Facts, out: Facts, grad_out: Facts) -> Launch:
    batch, heads, rows, v_dim = out.shape
    block_v = padded(v_dim)
    block_rows = 4096 // block_v
    return Launch(
        attention_delta_kernel,
        triton.cdiv(rows, block_rows) * heads * batch,
        (rows, heads, *delta.strides[:2], *out.strides[:3], *grad_out.strides[:3]),
        {"V_DIM": v_dim, "BLOCK_ROWS": block_rows, "BLOCK_V": block_v},
    )


@triton.jit(
    do_not_specialize=[
        "rows", "padded_rows", "heads",
        "lse_stride_b", "lse_stride_h", "lse_stride_low", "delta_stride_b", "delta_stride_h",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "delta_ptr"],
)  # fmt: skip
def attention_rows_kernel(
    shift_ptr, low_ptr, padded_delta_ptr, lse_ptr, delta_ptr,
    rows, padded_rows, heads, log_scale, kept_share,
    lse_stride_b, lse_stride_h, lse_stride_low, delta_stride_b, delta_stride_h,
    ADDITIVE_BIAS: tl.constexpr, SPLIT_LSE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write LSE (in units of log 2) and delta of each (batch, head) as lines of `padded_rows` numbers.

    ADDITIVE_BIAS: the LSE is in natural units, and its second float (or 0), in units of log 2, is written to `low_ptr`.

    The LSE of rows without keys, and of padding, is infinity: every weight is exp2(x - inf) = 0. Dropout's scale s is
    folded into both, since P (s dP - delta) = s P (dP - delta / s): `log_scale` is log2(s), `kept_share` is 1 / s.
    """
    block, head, batch = place_of_program(tl.cdiv(padded_rows, BLOCK_ROWS), heads)
    head, batch = head.to(tl.int64), batch.to(tl.int64)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    lse_ptrs = lse_ptr + batch * lse_stride_b + head * lse_stride_h + row
    delta_ptrs = delta_ptr + batch * delta_stride_b + head * delta_stride_h + row
    lse = tl.load(lse_ptrs, mask=row < rows, other=float("-inf")).to(tl.float32)
    delta = tl.load(delta_ptrs, mask=row < rows, other=0.0).to(tl.float32)
    at = (batch * heads + head) * padded_rows + row
    if ADDITIVE_BIAS:
        low = tl.zeros_like(lse)
        if SPLIT_LSE:
            low = tl.load(lse_ptrs + lse_stride_low, mask=row < rows, other=0.0).to(tl.float32)
        tl.store(low_ptr + at, low * LOG2_E - log_scale, mask=row < padded_rows)
        shift = lse
    else:
        shift = lse * LOG2_E - log_scale
    tl.store(shift_ptr + at, tl.where(lse == float("-inf"), float("inf"), shift), mask=row < padded_rows)
    tl.store(padded_delta_ptr + at, delta * kept_share, mask=row < padded_rows)


@triton.jit
def _weights(logits, bias_block, shift, low, scale_log2, scale, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return softmax weights of logits from the bias (if BIAS) and lines of `attention_rows_kernel`, which broadcast.

    The logits are q k^T, or with SOFTCAP the capped ones, which are scaled.
    """
    if SOFTCAP != 0.0:
        scale_log2, scale = LOG2_E, 1.0
    if BIAS == ADDITIVE:
        return tl.math.exp2((logits * scale + bias_block - shift) * LOG2_E - low)
    elif BIAS == NO_BIAS:
        return tl.math.exp2(logits * scale_log2 - shift)
    else:
        return tl.math.exp2(logits * scale_log2 + bias_block - shift)


@attention_kernel
def attention_dq_kernel(
    dq_ptr, grad_ptr, q_ptr, k, v, shift_ptr, low_ptr, delta_ptr, lo_ptr, hi_ptr, bias_ptr,
    seed_ptr, q_position_ptr, kv_position_ptr,
    rows, columns, offset, scale_log2, scale, heads, group, padded_rows,
    dq_stride_b, dq_stride_h, dq_stride_s, grad_stride_b, grad_stride_h, grad_stride_s,
    q_stride_b, q_stride_h, q_stride_s,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    intervals_stride_b, bias_stride_b, bias_stride_h, bias_stride_s, bias_stride_t,
    q_position_stride_b, kv_position_stride_b, first_batch, first_head, dropout_limit,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, IN_RUNS: tl.constexpr,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute, in one program, dQ of BLOCK_ROWS rows of one (batch, query head), over the columns that they see."""
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    head, row_block, batch = place_of_program(heads, row_blocks)
    head_64, batch_64 = head.to(tl.int64), batch.to(tl.int64)
    kv_head = head // group
    first_row = (row_blocks - 1 - row_block) * BLOCK_ROWS  # the most work first, as in forward
    row = first_row + tl.arange(0, BLOCK_ROWS)
    in_rows = row < rows
    dim, v_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_V)
    in_q = in_rows[:, None] & (dim < HEAD_DIM)[None, :]
    k_strides, v_strides = (k_stride_b, k_stride_h, k_stride_s), (v_stride_b, v_stride_h, v_stride_s)
    bias_ptr += batch_64 * bias_stride_b + head_64 * bias_stride_h
    lo_ptr += batch_64 * intervals_stride_b
    hi_ptr += batch_64 * intervals_stride_b
    q_ptrs = addresses(q_ptr, batch, head, row, dim, q_stride_b, q_stride_h, q_stride_s)
    grad_ptrs = addresses(grad_ptr, batch, head, row, v_dim, grad_stride_b, grad_stride_h, grad_stride_s)
    q = tl.load(q_ptrs, mask=in_q, other=0.0)
    grad = tl.load(grad_ptrs, mask=in_rows[:, None] & (v_dim < V_DIM)[None, :], other=0.0)
    at = (batch_64 * heads + head_64) * padded_rows + row.to(tl.int64)
    shift = tl.load(shift_ptr + at)
    low = tl.load(low_ptr + at) if BIAS == ADDITIVE else shift
    delta = tl.load(delta_ptr + at)
    if DROPOUT:
        q_position_ptr += batch_64 * q_position_stride_b
        kv_position_ptr += batch_64 * kv_position_stride_b
        q_position = load_positions(q_position_ptr, first_row, rows, BLOCK_ROWS, IN_RUNS, 8)
        dropout = (tl.load(seed_ptr), first_batch + batch, first_head + head, dropout_limit)
    lo, hi, first, blocks, before, whole = seen_columns(
        lo_ptr, hi_ptr, first_row, rows, columns, offset, BLOCK_ROWS, BLOCK_COLUMNS, MASK, DROPOUT
    )

    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for MASKED in tl.static_range(2):  # two loops, as in forward
        for index in tl.range(0, blocks - whole if MASKED else whole):
            start = block_start(index, first, before, whole, BLOCK_COLUMNS, MASKED, MASK == INTERVALS)
            k_block = load_rows(
                k, batch, kv_head, start, columns, k_strides, HEAD_DIM, BLOCK_COLUMNS, BLOCK_DIM, MASKED, TMA
            )
            v_block = load_rows(
                v, batch, kv_head, start, columns, v_strides, V_DIM, BLOCK_COLUMNS, BLOCK_V, MASKED, TMA
            )
            logits = tl.dot(q, tl.trans(k_block), input_precision=PRECISION)
            if SOFTCAP != 0.0:
                logits = capped(logits * scale, SOFTCAP)
                slope = slope_of_cap(logits, SOFTCAP)
            column = start + tl.arange(0, BLOCK_COLUMNS)
            bias_block = logits
            if BIAS != NO_BIAS:
                bias_block = load_bias(
                    bias_ptr, row[:, None], column[None, :], rows, columns, bias_stride_s, bias_stride_t, BIAS
                )
            weights = _weights(logits, bias_block, shift[:, None], low[:, None], scale_log2, scale, BIAS, SOFTCAP)
            if MASKED:
                seen = column[None, :] < hi[:, None]
                if MASK == INTERVALS:
                    seen = seen & (column[None, :] >= lo[:, None])
                weights = tl.where(seen, weights, 0.0)
            grad_weights = tl.dot(grad, tl.trans(v_block), input_precision=PRECISION)
            if DROPOUT:
                kv_position = load_positions(kv_position_ptr, start, columns, BLOCK_COLUMNS, IN_RUNS, 4)
                kept = which_are_kept(q_position, kv_position, dropout, BLOCK_ROWS, BLOCK_COLUMNS, IN_RUNS)
                grad_weights = tl.where(kept, grad_weights, 0.0)
            grad_logits = weights * (grad_weights - delta[:, None])
            if SOFTCAP != 0.0:
                grad_logits *= slope
            acc = tl.dot(grad_logits.to(k_block.dtype), k_block, acc, input_precision=PRECISION)
    dq_ptrs = addresses(dq_ptr, batch, head, row, dim, dq_stride_b, dq_stride_h, dq_stride_s)
    tl.store(dq_ptrs, (acc * scale).to(dq_ptr.dtype.element_ty), mask=in_q)


@attention_kernel
def attention_dkv_kernel(
    dk_ptr, dv_ptr, grad, q, k_ptr, v_ptr, shift, low, delta, lo, hi, ranges_ptr, bias_ptr,
    seed_ptr, q_position_ptr, kv_position_ptr,
    rows, columns, offset, scale_log2, scale, heads, group, padded_rows,
    dk_stride_b, dk_stride_h, dk_stride_s, dv_stride_b, dv_stride_h, dv_stride_s,
    grad_stride_b, grad_stride_h, grad_stride_s, q_stride_b, q_stride_h, q_stride_s,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    intervals_stride_b, ranges_stride, ranges_stride_b,
    bias_stride_b, bias_stride_h, bias_stride_s, bias_stride_t,
    q_position_stride_b, kv_position_stride_b, first_batch, first_head, dropout_limit,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, IN_RUNS: tl.constexpr,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute, in one program, dK and dV of BLOCK_COLUMNS columns of one (batch, kv head), over rows of query heads.

    Logits are transposed, (columns, rows): each thread then has the operands of the next product.
    """
    kv_head, column_block, batch = place_of_program(heads // group, tl.cdiv(columns, BLOCK_COLUMNS))
    batch_64 = batch.to(tl.int64)
    first_column = column_block * BLOCK_COLUMNS  # under a causal mask, the first columns have the most work
    column = first_column + tl.arange(0, BLOCK_COLUMNS)
    dim, v_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_V)
    in_k = (column < columns)[:, None] & (dim < HEAD_DIM)[None, :]
    in_v = (column < columns)[:, None] & (v_dim < V_DIM)[None, :]
    k_ptrs = addresses(k_ptr, batch, kv_head, column, dim, k_stride_b, k_stride_h, k_stride_s)
    v_ptrs = addresses(v_ptr, batch, kv_head, column, v_dim, v_stride_b, v_stride_h, v_stride_s)
    k_block = tl.load(k_ptrs, mask=in_k, other=0.0)
    v_block = tl.load(v_ptrs, mask=in_v, other=0.0)
    interval_line = tl.where(intervals_stride_b > 0, batch, 0)
    bias_ptr += batch_64 * bias_stride_b
    q_strides, grad_strides = (q_stride_b, q_stride_h, q_stride_s), (grad_stride_b, grad_stride_h, grad_stride_s)
    if DROPOUT:
        seed = tl.load(seed_ptr)
        q_position_ptr += batch_64 * q_position_stride_b
        kv_position_ptr += batch_64 * kv_position_stride_b
        kv_position = load_positions(kv_position_ptr, first_column, columns, BLOCK_COLUMNS, IN_RUNS, 8)
    first, blocks, before, whole = seeing_rows(
        ranges_ptr + batch_64 * ranges_stride_b + column_block, ranges_stride,
        first_column, rows, columns, offset, BLOCK_ROWS, BLOCK_COLUMNS, MASK,
    )  # fmt: skip

    grad_k = tl.zeros([BLOCK_COLUMNS, BLOCK_DIM], tl.float32)
    grad_v = tl.zeros([BLOCK_COLUMNS, BLOCK_V], tl.float32)
    # Two loops, without a mask one: whole blocks come last. Each runs over all heads, so that loads stay ahead from
    # head to head.
    for MASKED in tl.static_range(1 if MASK != FULL else 0, -1, -1):
        head = kv_head * group
        index = 0
        count = blocks - whole if MASKED else whole
        for _ in tl.range(0, count * group):
            start = block_start(index, first, before, whole, BLOCK_ROWS, MASKED, True)
            row = start + tl.arange(0, BLOCK_ROWS)
            line = batch * heads + head
            q_block = load_rows(q, batch, head, start, rows, q_strides, HEAD_DIM, BLOCK_ROWS, BLOCK_DIM, True, TMA)
            row_shift = load_row_values(shift, line, padded_rows, start, BLOCK_ROWS, TMA)
            row_low = load_row_values(low, line, padded_rows, start, BLOCK_ROWS, TMA) if BIAS == ADDITIVE else row_shift
            logits = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION)
            if SOFTCAP != 0.0:
                logits = capped(logits * scale, SOFTCAP)
                slope = slope_of_cap(logits, SOFTCAP)
            bias_block = logits
            if BIAS != NO_BIAS:
                bias_block = load_bias(
                    bias_ptr + head.to(tl.int64) * bias_stride_h, row[None, :], column[:, None], rows, columns,
                    bias_stride_s, bias_stride_t, BIAS,
                )  # fmt: skip
            row_shift, row_low = row_shift[None, :], row_low[None, :]
            weights = _weights(logits, bias_block, row_shift, row_low, scale_log2, scale, BIAS, SOFTCAP)
            if MASKED and MASK == CAUSAL:
                weights = tl.where(column[:, None] <= row[None, :] + offset, weights, 0.0)
            elif MASKED:
                row_lo = load_row_values(lo, interval_line, intervals_stride_b, start, BLOCK_ROWS, TMA)
                row_hi = load_row_values(hi, interval_line, intervals_stride_b, start, BLOCK_ROWS, TMA)
                seen = (column[:, None] >= row_lo[None, :]) & (column[:, None] < row_hi[None, :])
                weights = tl.where(seen, weights, 0.0)
            grad_block = load_rows(grad, batch, head, start, rows, grad_strides, V_DIM, BLOCK_ROWS, BLOCK_V, True, TMA)
            row_delta = load_row_values(delta, line, padded_rows, start, BLOCK_ROWS, TMA)
            grad_weights = tl.dot(v_block, tl.trans(grad_block), input_precision=PRECISION)
            if DROPOUT:
                q_position = load_positions(q_position_ptr, start, rows, BLOCK_ROWS, IN_RUNS, 8)
                dropout = (seed, first_batch + batch, first_head + head, dropout_limit)
                kept = which_are_kept_transposed(q_position, kv_position, dropout, BLOCK_ROWS, BLOCK_COLUMNS, IN_RUNS)
                dropped = tl.where(kept, weights, 0.0)
            else:
                dropped = weights
            grad_v = tl.dot(dropped.to(grad_block.dtype), grad_block, grad_v, input_precision=PRECISION)
            if DROPOUT:  # `kept` is used only once, which saves registers
                grad_logits = dropped * grad_weights - weights * row_delta[None, :]
            else:
                grad_logits = weights * (grad_weights - row_delta[None, :])
            if SOFTCAP != 0.0:
                grad_logits *= slope
            grad_k = tl.dot(grad_logits.to(q_block.dtype), q_block, grad_k, input_precision=PRECISION)
            index += 1
            head = tl.where(index == count, head + 1, head)
            index = tl.where(index == count, 0, index)
    dk_ptrs = addresses(dk_ptr, batch, kv_head, column, dim, dk_stride_b, dk_stride_h, dk_stride_s)
    dv_ptrs = addresses(dv_ptr, batch, kv_head, column, v_dim, dv_stride_b, dv_stride_h, dv_stride_s)
    tl.store(dk_ptrs, (grad_k * scale).to(dk_ptr.dtype.element_ty), mask=in_k)
    tl.store(dv_ptrs, grad_v.to(dv_ptr.dtype.element_ty), mask=in_v)


def launch_attention_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    mask: RowMask, scale: float, *, bias: Tensor | None = None, dropout: Dropout | None = None, softcap: float = 0.0,
    config: BackwardConfig | None = None,
) -> None:  # fmt: skip
    """Compute `masked.attention_backward` into `dq`, `dk` and `dv`, of float32 or narrower dtypes; three launches.

    With P = exp(scale q k^T + bias - lse) where a row attends, else 0: dV = P^T dO, dS = P * (dO V^T - delta),
    dQ = scale dS K, dK = scale dS^T Q, summed over the query heads of a group. With dropout, P in dV and dO V^T are
    multiplied by the dropout factors. With softcap, dS in dQ and dK is multiplied by its derivative.

    Arguments as in `launch_attention_forward`. `lse` is the final one of these rows. `delta`, float32,
    is `launch_attention_delta` of their out, minus the gradient of lse if it has one.
    """
    assert q.is_cuda or q.dtype != torch.bfloat16, "Triton's interpreter multiplies bfloat16 as if it were integers"
    assert q.dtype == k.dtype == v.dtype == grad_out.dtype
    (batch, heads, rows, _), columns = q.shape, v.size(2)
    if q.numel() == 0 or k.numel() == 0:
        for grad in (dq, dk, dv):
            grad.zero_()
        return
    takes_registers = softcap > 0 or (dropout is not None and not dropout.in_runs)
    config = config or default_backward_config(q, k, v, grad_out, bias is not None, takes_registers)
    mask_kind, offset = mask_arguments(mask, rows, columns)
    unused = dq  # begins at a multiple of 16 bytes; LSE of a part of the rows may not, which compiles another form
    others, numbers, kinds = modifier_arguments(bias, dropout, (batch, heads, rows, columns), unused)
    # Kernels read LSE and delta in whole blocks, which begin at any row; descriptors need lines of 16 bytes.
    padded_rows = rows + max(config.dq.block_rows, config.dkv.block_rows)
    padded_rows += -padded_rows % 4
    is_additive = kinds[0] == ADDITIVE.value
    lines = lse.new_empty((2 + is_additive, batch * heads, padded_rows), dtype=torch.float32).unbind()
    shift, low, padded_delta = lines[0], lines[-2], lines[-1]  # without an additive bias, `low` is not read
    lo = hi = ranges = unused
    interval_strides = (0, 0, 0)
    if mask.lo is not None:
        lo, hi = mask.padded_intervals(padded_rows)
        ranges = mask.rows_of_columns(columns, config.dkv.block_columns)
        of_batch = lo.size(0) > 1
        interval_strides = (of_batch * lo.stride(0), ranges.stride(0), of_batch * ranges.stride(1))
    launch_rows, launch_dkv, launch_dq = _launches(
        facts(dq), facts(dk), facts(dv), facts(grad_out), facts(q), facts(k), facts(v), facts(lse), facts(delta),
        tuple([x.dtype for x in others]), (mask_kind, offset, *interval_strides), numbers, (*kinds, float(softcap)),
        float(scale), padded_rows, config,
    )  # fmt: skip
    launch_rows(shift, low, padded_delta, lse, delta)
    launch_dkv(dk, dv, grad_out, q, k, v, shift, low, padded_delta, lo, hi, ranges, *others)
    launch_dq(dq, grad_out, q, k, v, shift, low, padded_delta, lo, hi, *others)


@cached_launch
def _launches(
    dq: Facts, dk: Facts, dv: Facts, grad_out: Facts, q: Facts, k: Facts, v: Facts, lse: Facts, delta: Facts,
    _dtypes_of_others: tuple[torch.dtype, ...], mask: tuple[int, ...], modifiers: tuple[int, ...],
    kinds: tuple[int, bool, bool, float, float], scale: float, padded_rows: int, config: BackwardConfig,
) -> tuple[Launch, Launch, Launch]:  # fmt: skip
    """Return the launches in order, for tensors of these shapes, strides and dtypes, and numbers of the others."""
    batch, heads, rows, head_dim = q.shape
    kv_heads, columns, v_dim = v.shape[1:]
    block_dim, block_v = padded(head_dim), padded(v_dim)
    mask_kind, offset, intervals_stride, *ranges_strides = mask
    bias_kind, has_dropout, in_runs, dropout_scale, softcap = kinds
    numbers = (rows, columns, offset, scale * math.log2(math.e), scale, heads, heads // kv_heads, padded_rows)
    strides = (*grad_out.strides[:3], *q.strides[:3], *k.strides[:3], *v.strides[:3], intervals_stride)
    constants: dict[str, float] = {"HEAD_DIM": head_dim, "V_DIM": v_dim, "BLOCK_DIM": block_dim, "BLOCK_V": block_v}
    constants |= {"MASK": mask_kind, "BIAS": bias_kind, "DROPOUT": has_dropout, "IN_RUNS": in_runs}
    constants |= {"SOFTCAP": softcap}

    cut = config.dkv
    line = (1, cut.block_rows) if cut.tma else None
    interval_line = line if mask_kind == INTERVALS.value else None
    launch_dkv = Launch(
        attention_dkv_kernel,
        kv_heads * triton.cdiv(columns, cut.block_columns) * batch,
        (*numbers, *dk.strides[:3], *dv.strides[:3], *strides, *ranges_strides, *modifiers),
        constants | cut.constants(),
        (
            *(None, None),
            blocks_of_rows(grad_out, cut.block_rows, block_v, cut.tma),
            blocks_of_rows(q, cut.block_rows, block_dim, cut.tma),
            *(None, None, line, line if bias_kind == ADDITIVE.value else None, line, interval_line, interval_line),
        ),
    )
    cut = config.dq
    launch_dq = Launch(
        attention_dq_kernel,
        heads * triton.cdiv(rows, cut.block_rows) * batch,
        (*numbers, *dq.strides[:3], *strides, *modifiers),
        constants | cut.constants(),
        (
            *(None, None, None),
            blocks_of_rows(k, cut.block_columns, block_dim, cut.tma),
            blocks_of_rows(v, cut.block_columns, block_v, cut.tma),
        ),
    )
    launch_rows = Launch(
        attention_rows_kernel,
        triton.cdiv(padded_rows, _ROWS_BLOCK) * heads * batch,
        (rows, padded_rows, heads, math.log2(dropout_scale), 1 / dropout_scale, *lse_strides(lse), *delta.strides[:2]),
        {"ADDITIVE_BIAS": bias_kind == ADDITIVE.value, "SPLIT_LSE": len(lse.shape) == 4, "BLOCK_ROWS": _ROWS_BLOCK},
    )
    return launch_rows, launch_dkv, launch_dq
