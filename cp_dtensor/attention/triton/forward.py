"""Attention of one tile: Triton kernel and its launcher.

FlashAttention-2 (arXiv 2307.08691, algorithm 1), with exp2 and the scale folded into one multiply-add per logit. A
block of rows reads blocks of keys in two loops: without a mask those that every row attends to entirely, with a mask
the others. Blocks that no row attends to are not read.
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
    INTERVALS,
    LN_2,
    LOG2_E,
    NO_BIAS,
    addresses,
    attention_kernel,
    block_start,
    blocks_of_rows,
    capped,
    load_bias,
    load_positions,
    load_rows,
    lse_strides,
    mask_arguments,
    modifier_arguments,
    place_of_program,
    seen_columns,
    which_are_kept,
)
from cp_dtensor.attention.triton.configs import BlockConfig, default_config, padded
from cp_dtensor.attention.triton.dropout import Dropout
from cp_dtensor.attention.triton.row_mask import RowMask


@attention_kernel
def attention_forward_kernel(
    out_ptr, lse_ptr, q_ptr, k, v, lo_ptr, hi_ptr, bias_ptr,
    seed_ptr, q_position_ptr, kv_position_ptr,
    rows, columns, offset, scale_log2, scale, heads, group,
    out_stride_b, out_stride_h, out_stride_s, lse_stride_b, lse_stride_h, lse_stride_low,
    q_stride_b, q_stride_h, q_stride_s,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    intervals_stride_b, bias_stride_b, bias_stride_h, bias_stride_s, bias_stride_t,
    q_position_stride_b, kv_position_stride_b, first_batch, first_head, dropout_limit, dropout_scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, IN_RUNS: tl.constexpr,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, SPLIT_LSE: tl.constexpr,
):  # fmt: skip
    """Compute, in one program, BLOCK_ROWS rows of one (batch, query head), all columns that they attend to.

    Logits and `largest` are in units of log 2, with an additive bias in natural ones: finfo.min * LOG2_E is -inf.

    Example, head dim 1, scale 1: q 0 attends to keys with values 1 and 3: out 2, lse log 2.
    """
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    head, row_block, batch = place_of_program(heads, row_blocks)
    head_64, batch_64 = head.to(tl.int64), batch.to(tl.int64)
    kv_head = head // group
    # Under a causal mask the last rows have the most work: they start first.
    first_row = (row_blocks - 1 - row_block) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    in_rows = row < rows
    dim, v_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_V)
    k_strides, v_strides = (k_stride_b, k_stride_h, k_stride_s), (v_stride_b, v_stride_h, v_stride_s)
    bias_ptr += batch_64 * bias_stride_b + head_64 * bias_stride_h
    lo_ptr += batch_64 * intervals_stride_b
    hi_ptr += batch_64 * intervals_stride_b
    if DROPOUT:
        q_position_ptr += batch_64 * q_position_stride_b
        kv_position_ptr += batch_64 * kv_position_stride_b
        q_position = load_positions(q_position_ptr, first_row, rows, BLOCK_ROWS, IN_RUNS, 8)
        dropout = (tl.load(seed_ptr), first_batch + batch, first_head + head, dropout_limit)
        # 0, but not a constant: with a constant, LLVM rounds weights before it selects, which took 7% longer.
        nothing = dropout_scale - dropout_scale

    acc = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)  # as `total`, relative to the exponential of `largest`
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    q = tl.load(
        addresses(q_ptr, batch, head, row, dim, q_stride_b, q_stride_h, q_stride_s),
        mask=in_rows[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    lo, hi, first, blocks, before, whole = seen_columns(
        lo_ptr, hi_ptr, first_row, rows, columns, offset, BLOCK_ROWS, BLOCK_COLUMNS, MASK, DROPOUT
    )
    if SOFTCAP != 0.0:
        logit_scale, logit_scale_log2 = 1.0, LOG2_E  # after the cap
    else:
        logit_scale, logit_scale_log2 = scale, scale_log2
    # With a bias, the scale is applied before it is added, else together with the shift.
    late_scale = logit_scale_log2 if BIAS == NO_BIAS else 1.0
    for MASKED in tl.static_range(2):  # two loops: whole blocks, then the others
        for index in tl.range(0, blocks - whole if MASKED else whole):
            start = block_start(index, first, before, whole, BLOCK_COLUMNS, MASKED, MASK == INTERVALS)
            k_block = load_rows(
                k, batch, kv_head, start, columns, k_strides, HEAD_DIM, BLOCK_COLUMNS, BLOCK_DIM, MASKED, TMA
            )
            logits = tl.dot(q, tl.trans(k_block), input_precision=PRECISION)
            if SOFTCAP != 0.0:
                logits = capped(logits * scale, SOFTCAP)
            column = start + tl.arange(0, BLOCK_COLUMNS)
            if BIAS != NO_BIAS:
                logits = logits * (logit_scale if BIAS == ADDITIVE else logit_scale_log2) + load_bias(
                    bias_ptr, row[:, None], column[None, :], rows, columns, bias_stride_s, bias_stride_t, BIAS
                )
            if MASKED:
                seen = column[None, :] < hi[:, None]
                if MASK == INTERVALS:
                    seen = seen & (column[None, :] >= lo[:, None])
                logits = tl.where(seen, logits, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(logits, 1) * late_scale)
            if MASKED or BIAS != NO_BIAS:  # a row may not have a key yet, and -inf - -inf would be NaN
                shift = tl.where(new_largest > float("-inf"), new_largest, 0.0)
            else:
                shift = new_largest
            if BIAS == ADDITIVE:
                weights = tl.math.exp2((logits - shift[:, None]) * LOG2_E)
                decay = tl.math.exp2((largest - shift) * LOG2_E)
            else:
                weights = tl.math.exp2(logits * late_scale - shift[:, None])
                decay = tl.math.exp2(largest - shift)
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None]
            if DROPOUT:  # drops weights of values only: the denominator is that without dropout
                kv_position = load_positions(kv_position_ptr, start, columns, BLOCK_COLUMNS, IN_RUNS, 4)
                kept = which_are_kept(q_position, kv_position, dropout, BLOCK_ROWS, BLOCK_COLUMNS, IN_RUNS)
                weights = tl.where(kept, weights, nothing)
            v_block = load_rows(
                v, batch, kv_head, start, columns, v_strides, V_DIM, BLOCK_COLUMNS, BLOCK_V, MASKED, TMA
            )
            acc = tl.dot(weights.to(v_block.dtype), v_block, acc, input_precision=PRECISION)
            largest = new_largest

    safe_total = tl.where(total == 0.0, 1.0, total)  # of a row without keys, acc is 0 and largest -inf; NaN stays
    out = acc * ((dropout_scale if DROPOUT else 1.0) / safe_total)[:, None]
    log_total = tl.math.log2(safe_total)
    if BIAS == ADDITIVE:
        log_total = log_total * LN_2
        lse = largest + log_total
    else:
        lse = (largest + log_total) * LN_2
    out_ptrs = addresses(out_ptr, batch, head, row, v_dim, out_stride_b, out_stride_h, out_stride_s)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & (v_dim < V_DIM)[None, :])
    lse_ptrs = lse_ptr + batch_64 * lse_stride_b + head_64 * lse_stride_h + row.to(tl.int64)
    tl.store(lse_ptrs, lse, mask=in_rows)
    if SPLIT_LSE:
        rest = largest - tl.where(lse == float("-inf"), 0.0, lse)
        low = tl.where(lse == float("-inf"), 0.0, rest + log_total)
        tl.store(lse_ptrs + lse_stride_low, low, mask=in_rows)


def launch_attention_forward(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float, *,
    bias: Tensor | None = None, dropout: Dropout | None = None, softcap: float = 0.0,
    config: BlockConfig | None = None,
) -> None:  # fmt: skip
    """Compute `masked.attention_forward` into `(out, lse)`; one launch.

    The last dim of all tensors but the bias is contiguous. `lse`, of one float or two (`attention.lse`), is float32;
    `out`, in any floating dtype, is rounded once. q, k and v are bfloat16, float16 or float32 (in Triton's interpreter
    not bfloat16); D and Dv are at most 256, for float32 at most 128. The bias may have any strides. `config`: None
    means `default_config`.
    """
    assert q.is_cuda or q.dtype != torch.bfloat16, "Triton's interpreter multiplies bfloat16 as if it were integers"
    batch, heads, rows, _ = q.shape
    columns = v.size(2)
    if q.numel() == 0:
        return
    config = config or default_config(k, v, bias is not None, dropout is not None and not dropout.in_runs)
    mask_kind, offset = mask_arguments(mask, rows, columns)
    lo, hi = [x.contiguous() for x in mask.intervals] if mask.intervals is not None else (lse, lse)
    intervals_stride = lo.stride(0) if mask.intervals is not None and lo.dim() == 2 else 0
    others, numbers, kinds = modifier_arguments(bias, dropout, (batch, heads, rows, columns), lse)
    launch = _launch(
        facts(out), facts(lse), facts(q), facts(k), facts(v), tuple([x.dtype for x in others]),
        (mask_kind, offset, intervals_stride), numbers, (*kinds, float(softcap)), float(scale), config,
    )  # fmt: skip
    launch(out, lse, q, k, v, lo, hi, *others)


@cached_launch
def _launch(
    out: Facts, lse: Facts, q: Facts, k: Facts, v: Facts, _dtypes_of_others: tuple[torch.dtype, ...],
    mask: tuple[int, int, int], modifiers: tuple[int, ...], kinds: tuple[int, bool, bool, float, float], scale: float,
    config: BlockConfig,
) -> Launch:  # fmt: skip
    """Return the launch for tensors of these shapes, strides and dtypes, and these numbers of mask and modifiers."""
    batch, heads, rows, head_dim = q.shape
    columns, v_dim = v.shape[2:]
    block_dim, block_v = padded(head_dim), padded(v_dim)
    mask_kind, offset, intervals_stride = mask
    bias_kind, has_dropout, in_runs, dropout_scale, softcap = kinds
    numbers = (
        rows, columns, offset, scale * math.log2(math.e), scale, heads, heads // k.shape[1],
        *out.strides[:3], *lse_strides(lse), *q.strides[:3], *k.strides[:3], *v.strides[:3],
        intervals_stride, *modifiers, dropout_scale,
    )  # fmt: skip
    constants = {
        "HEAD_DIM": head_dim, "V_DIM": v_dim, "BLOCK_DIM": block_dim, "BLOCK_V": block_v,
        "MASK": mask_kind, "BIAS": bias_kind, "DROPOUT": has_dropout, "IN_RUNS": in_runs,
        "SOFTCAP": softcap, "SPLIT_LSE": len(lse.shape) == 4, **config.constants(),
    }  # fmt: skip
    blocks = (
        *(None, None, None),
        blocks_of_rows(k, config.block_columns, block_dim, config.tma),
        blocks_of_rows(v, config.block_columns, block_v, config.tma),
    )
    programs = heads * triton.cdiv(rows, config.block_rows) * batch
    return Launch(attention_forward_kernel, programs, numbers, constants, blocks)
