"""Attention of one tile as a Triton kernel that continues from, and hands on, a partial result in float32.

FlashAttention-2 (arXiv 2307.08691, algorithm 1), with exp2 and the scale folded into one multiply-add per logit. Blocks
of keys that every row of a block of rows sees wholly are read in a loop without masks; only those that some row sees in
part pay for a mask, and blocks that no row sees are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cp_dtensor.attention.triton.common import INTERVALS, LN_2, LOG2_E, NO_BIAS, load_bias, load_rows, seen_columns
from cp_dtensor.attention.triton.philox import (
    DROPOUT_NOT_ALIGNED,
    DROPOUT_NOT_SPECIALIZED,
    load_positions,
    which_are_kept,
)


@triton.jit
def _attend(
    acc, total, largest, q, row, lo, hi, scale_log2,
    k, v, bias, batch, kv_head, first, count, before, gap, rows, columns, q_position, kv_positions, dropout, nothing,
    k_stride_s, v_stride_s, bias_stride_s, bias_stride_t,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    IN_RUNS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes on with `count` blocks of columns. `acc` and `total` are relative to exp2(`largest`).

    MASKED: `before` of them begin at column `first`, the others come `gap` blocks later; row i sees [lo_i, hi_i).
    Otherwise they begin at `first`, and all rows see all of them.
    """
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
        logits = tl.dot(q, tl.trans(k_block), input_precision=PRECISION)
        column = start + tl.arange(0, BLOCK_COLUMNS)
        if BIAS != NO_BIAS:
            logits = logits * scale_log2 + load_bias(
                bias, row[:, None], column[None, :], rows, columns, bias_stride_s, bias_stride_t, BIAS
            )
        if MASKED:
            seen = column[None, :] < hi[:, None]
            if MASK == INTERVALS:
                seen = seen & (column[None, :] >= lo[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        if BIAS != NO_BIAS:
            new_largest = tl.maximum(largest, tl.max(logits, 1))
        else:
            new_largest = tl.maximum(largest, tl.max(logits, 1) * scale_log2)
        if MASKED or BIAS != NO_BIAS:  # a row may have seen nothing yet, and -inf - -inf would be NaN
            shift = tl.where(new_largest > float("-inf"), new_largest, 0.0)
        else:
            shift = new_largest
        if BIAS != NO_BIAS:
            weights = tl.math.exp2(logits - shift[:, None])
        else:
            weights = tl.math.exp2(logits * scale_log2 - shift[:, None])
        decay = tl.math.exp2(largest - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if DROPOUT:  # of what is multiplied with the values alone: the sum of the softmax is that without
            kv_position = load_positions(kv_positions, start, columns, BLOCK_COLUMNS, IN_RUNS, 4)
            kept = which_are_kept(q_position, kv_position, dropout, row.shape[0], BLOCK_COLUMNS, IN_RUNS)
            weights = tl.where(kept, weights, nothing)
        v_block = load_rows(v, batch, kv_head, start, columns, v_stride_s, V_DIM, BLOCK_COLUMNS, BLOCK_V, MASKED, TMA)
        acc = tl.dot(weights.to(v_block.dtype), v_block, acc, input_precision=PRECISION)
        largest = new_largest
    return acc, total, largest


# What differs from tile to tile and does not make the code better is not specialised on: tiles share their code.
_NOT_SPECIALIZED = ["rows", "columns", "offset", "group", "intervals_stride_b", *DROPOUT_NOT_SPECIALIZED]
_LSE = ["lse_ptr", "lse_stride_b", "lse_stride_h", "state_lse_ptr", "state_lse_stride_b", "state_lse_stride_h"]
_NOT_ALIGNED = [*_LSE, "sinks_ptr", "lo_ptr", "hi_ptr", *DROPOUT_NOT_ALIGNED]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_NOT_ALIGNED)
def attention_forward_kernel(
    out_ptr, lse_ptr, q_ptr, k, v, state_ptr, state_lse_ptr, lo_ptr, hi_ptr, bias_ptr, sinks_ptr,
    seed_ptr, q_position_ptr, kv_position_ptr,
    rows, columns, offset, scale_log2, group,
    out_stride_b, out_stride_h, out_stride_s, lse_stride_b, lse_stride_h,
    q_stride_b, q_stride_h, q_stride_s,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    state_stride_b, state_stride_h, state_stride_s, state_lse_stride_b, state_lse_stride_h,
    intervals_stride_b, bias_stride_b, bias_stride_h, bias_stride_s, bias_stride_t,
    q_position_stride_b, kv_position_stride_b, first_batch, first_head, dropout_limit, dropout_scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, IN_RUNS: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_STATE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one (batch, query head), all columns that they see.

    Example, head dim 1, scale 1: q 0 sees keys with values 1 and 3: out 2, lse log 2. With the state (5, log 2) before
    that: out (2 * 5 + 1 + 3) / 4 = 3.5, lse log 4. With a sink of log 2 instead: out (1 + 3) / 4 = 1, lse log 4.
    """
    head = tl.program_id(0)
    batch = tl.program_id(2)
    # Under a causal mask the last rows have the most work: begun first, they do not keep the others waiting.
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_ROWS
    kv_head = head // group
    head_64, batch_64, kv_head_64 = head.to(tl.int64), batch.to(tl.int64), kv_head.to(tl.int64)
    row = first_row + tl.arange(0, BLOCK_ROWS)
    row_64 = row.to(tl.int64)
    dim = tl.arange(0, BLOCK_DIM)
    v_dim = tl.arange(0, BLOCK_V)
    in_rows = row < rows
    in_tile = in_rows[:, None] & (v_dim < V_DIM)[None, :]
    if not TMA:
        k += batch_64 * k_stride_b + kv_head_64 * k_stride_h
        v += batch_64 * v_stride_b + kv_head_64 * v_stride_h
    bias_ptr += batch_64 * bias_stride_b + head_64 * bias_stride_h
    lo_ptr += batch_64 * intervals_stride_b
    hi_ptr += batch_64 * intervals_stride_b
    seed, q_position = 0, row
    if DROPOUT:
        seed = tl.load(seed_ptr)
        kv_position_ptr += batch_64 * kv_position_stride_b
        q_position_ptr += batch_64 * q_position_stride_b
        q_position = load_positions(q_position_ptr, first_row, rows, BLOCK_ROWS, IN_RUNS, 8)
    dropout = (seed, first_batch + batch, first_head + head, dropout_limit)
    # 0, but no constant: with one, LLVM rounds weights before it selects, which took 7% longer.
    nothing = dropout_scale - dropout_scale

    if HAS_STATE:
        state_lse = tl.load(
            state_lse_ptr + batch_64 * state_lse_stride_b + head_64 * state_lse_stride_h + row_64,
            mask=in_rows, other=float("-inf"),
        ).to(tl.float32)  # fmt: skip
        state_ptrs = state_ptr + batch_64 * state_stride_b + head_64 * state_stride_h
        acc = tl.load(
            state_ptrs + row_64[:, None] * state_stride_s + v_dim[None, :], mask=in_tile, other=0.0
        ).to(tl.float32)  # fmt: skip
        # A normalised result is one whose sum is 1 relative to exp(lse).
        seen = state_lse > float("-inf")
        acc = tl.where(seen[:, None], acc, 0.0)
        if DROPOUT:  # it is multiplied with that in the end
            acc *= 1.0 / dropout_scale
        total = tl.where(seen, 1.0, 0.0)
        largest = state_lse * LOG2_E
    else:
        acc = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    if HAS_SINKS:  # a key of that logit whose value is 0
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        new_largest = tl.maximum(largest, sink)
        shift = tl.where(new_largest > float("-inf"), new_largest, 0.0)
        decay = tl.math.exp2(largest - shift)
        total = total * decay + tl.math.exp2(sink - shift)
        acc = acc * decay[:, None]
        largest = new_largest
    q = tl.load(
        q_ptr + batch_64 * q_stride_b + head_64 * q_stride_h + row_64[:, None] * q_stride_s + dim[None, :],
        mask=in_rows[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip

    lo, hi, first, blocks, before, whole = seen_columns(
        lo_ptr, hi_ptr, first_row, rows, columns, offset, BLOCK_ROWS, BLOCK_COLUMNS, MASK, DROPOUT
    )
    acc, total, largest = _attend(
        acc, total, largest, q, row, lo, hi, scale_log2,
        k, v, bias_ptr, batch, kv_head, first + before * BLOCK_COLUMNS, whole, 0, 0, rows, columns,
        q_position, kv_position_ptr, dropout, nothing,
        k_stride_s, v_stride_s, bias_stride_s, bias_stride_t,
        HEAD_DIM, V_DIM, BLOCK_COLUMNS, BLOCK_DIM, BLOCK_V, MASK, False, BIAS, DROPOUT, IN_RUNS, TMA, PRECISION,
    )  # fmt: skip
    acc, total, largest = _attend(
        acc, total, largest, q, row, lo, hi, scale_log2,
        k, v, bias_ptr, batch, kv_head, first, blocks - whole, before, whole, rows, columns,
        q_position, kv_position_ptr, dropout, nothing,
        k_stride_s, v_stride_s, bias_stride_s, bias_stride_t,
        HEAD_DIM, V_DIM, BLOCK_COLUMNS, BLOCK_DIM, BLOCK_V, MASK, True, BIAS, DROPOUT, IN_RUNS, TMA, PRECISION,
    )  # fmt: skip

    safe_total = tl.where(total > 0.0, total, 1.0)  # of a row that has seen nothing, acc is 0 and largest -inf
    if DROPOUT:
        out = acc * (dropout_scale / safe_total)[:, None]
    else:
        out = acc * (1.0 / safe_total)[:, None]
    lse = (largest + tl.math.log2(safe_total)) * LN_2
    if HAS_STATE:
        # Row values are replicated over the warps of a program: without this barrier one warp could store the new LSE
        # in place before another has loaded the old one.
        tl.debug_barrier()
    out_ptrs = out_ptr + batch_64 * out_stride_b + head_64 * out_stride_h
    tl.store(out_ptrs + row_64[:, None] * out_stride_s + v_dim[None, :], out.to(out_ptr.dtype.element_ty), mask=in_tile)
    tl.store(lse_ptr + batch_64 * lse_stride_b + head_64 * lse_stride_h + row_64, lse, mask=in_rows)
