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
    INTERVALS,
    LN_2,
    NO_BIAS,
    bias_argument,
    blocks_of_rows,
    load_bias,
    load_rows,
    mask_arguments,
    seen_columns,
)
from cp_dtensor.attention.triton.configs import BlockConfig, default_config, padded
from cp_dtensor.attention.triton.dropout import Dropout
from cp_dtensor.attention.triton.philox import (
    DROPOUT_NOT_ALIGNED,
    DROPOUT_NOT_SPECIALIZED,
    dropout_arguments,
    load_positions,
    which_are_kept,
)
from cp_dtensor.attention.triton.row_mask import RowMask


@triton.jit
def _attend(
    acc, total, largest, q, row, lo, hi, scale_log2,
    k, v, bias, batch, kv_head, first, count, before, gap, rows, columns, q_position, kv_positions, dropout, nothing,
    k_stride_s, v_stride_s, bias_stride_s, bias_stride_t,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    IN_RUNS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds `count` blocks of columns to a running softmax. `acc` and `total` are relative to exp2(`largest`).

    MASKED: the first `before` blocks begin at column `first`, the others `gap` blocks later; row i attends to
    [lo_i, hi_i). Otherwise all blocks follow each other from `first`, and all rows attend to all their columns.
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
        if MASKED or BIAS != NO_BIAS:  # a row may not have a key yet, and -inf - -inf would be NaN
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
        if DROPOUT:  # drops weights of values only: the denominator is that without dropout
            kv_position = load_positions(kv_positions, start, columns, BLOCK_COLUMNS, IN_RUNS, 4)
            kept = which_are_kept(q_position, kv_position, dropout, row.shape[0], BLOCK_COLUMNS, IN_RUNS)
            weights = tl.where(kept, weights, nothing)
        v_block = load_rows(v, batch, kv_head, start, columns, v_stride_s, V_DIM, BLOCK_COLUMNS, BLOCK_V, MASKED, TMA)
        acc = tl.dot(weights.to(v_block.dtype), v_block, acc, input_precision=PRECISION)
        largest = new_largest
    return acc, total, largest


# Triton does not specialise on these, so that tiles with other numbers share the compiled code.
_NOT_SPECIALIZED = ["rows", "columns", "offset", "group", "intervals_stride_b", *DROPOUT_NOT_SPECIALIZED]
_NOT_ALIGNED = ["lse_ptr", "lse_stride_b", "lse_stride_h", "lo_ptr", "hi_ptr", *DROPOUT_NOT_ALIGNED]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_NOT_ALIGNED)
def attention_forward_kernel(
    out_ptr, lse_ptr, q_ptr, k, v, lo_ptr, hi_ptr, bias_ptr,
    seed_ptr, q_position_ptr, kv_position_ptr,
    rows, columns, offset, scale_log2, group,
    out_stride_b, out_stride_h, out_stride_s, lse_stride_b, lse_stride_h,
    q_stride_b, q_stride_h, q_stride_s,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    intervals_stride_b, bias_stride_b, bias_stride_h, bias_stride_s, bias_stride_t,
    q_position_stride_b, kv_position_stride_b, first_batch, first_head, dropout_limit, dropout_scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, IN_RUNS: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one (batch, query head), all columns that they attend to.

    Example, head dim 1, scale 1: q 0 attends to keys with values 1 and 3: out 2, lse log 2.
    """
    head = tl.program_id(0)
    batch = tl.program_id(2)
    # Under a causal mask the last rows have the most work: they start first.
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
    # 0, but not a constant: with a constant, LLVM rounds weights before it selects, which took 7% longer.
    nothing = dropout_scale - dropout_scale

    acc = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
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

    safe_total = tl.where(total > 0.0, total, 1.0)  # of a row without keys, acc is 0 and largest -inf
    if DROPOUT:
        out = acc * (dropout_scale / safe_total)[:, None]
    else:
        out = acc * (1.0 / safe_total)[:, None]
    lse = (largest + tl.math.log2(safe_total)) * LN_2
    out_ptrs = out_ptr + batch_64 * out_stride_b + head_64 * out_stride_h
    tl.store(out_ptrs + row_64[:, None] * out_stride_s + v_dim[None, :], out.to(out_ptr.dtype.element_ty), mask=in_tile)
    tl.store(lse_ptr + batch_64 * lse_stride_b + head_64 * lse_stride_h + row_64, lse, mask=in_rows)


def launch_attention_forward(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float, *,
    bias: Tensor | None = None, dropout: Dropout | None = None, config: BlockConfig | None = None,
) -> None:  # fmt: skip
    """`masked.attention_forward` into `(out, lse)`; one launch.

    The last dim of all tensors but the bias is contiguous. `lse` is float32; `out`, in any floating dtype, is rounded
    once. q, k and v are bfloat16, float16 or float32 (in Triton's interpreter not bfloat16); D and Dv are at most 256,
    for float32 at most 128. The bias may have any strides. `config`: None means `default_config`.
    """
    assert scale > 0
    assert q.is_cuda or q.dtype != torch.bfloat16, "Triton's interpreter multiplies bfloat16 as if it were integers"
    batch, heads, rows, _ = q.shape
    columns = v.size(2)
    if q.numel() == 0:
        return
    config = config or default_config(k, v, bias is not None, dropout is not None and not dropout.in_runs)
    mask_kind, offset = mask_arguments(mask, rows, columns)
    lo, hi = [x.contiguous() for x in mask.intervals] if mask.intervals is not None else (lse, lse)
    intervals_stride = lo.stride(0) if mask.intervals is not None and lo.dim() == 2 else 0
    bias_kind, bias, bias_strides = bias_argument(bias, (batch, heads, rows, columns), lse)
    dropout_tensors, dropout_numbers, dropout_kind = dropout_arguments(dropout, lse)
    others = (bias, *dropout_tensors)
    launch = _launch(
        facts(out), facts(lse), facts(q), facts(k), facts(v), tuple([x.dtype for x in others]),
        (mask_kind, offset, intervals_stride), (bias_kind, *bias_strides), dropout_numbers, dropout_kind,
        float(scale), config,
    )  # fmt: skip
    launch(out, lse, q, k, v, lo, hi, *others)


@cached_launch
def _launch(
    out: Facts, lse: Facts, q: Facts, k: Facts, v: Facts, _dtypes_of_others: tuple[torch.dtype, ...],
    mask: tuple[int, int, int], bias: tuple[int, ...], dropout: tuple[int, ...],
    dropout_kind: tuple[bool, bool, float], scale: float, config: BlockConfig,
) -> Launch:  # fmt: skip
    """The launch for tensors of these shapes, strides and dtypes, and for these numbers of mask, bias and dropout."""
    batch, heads, rows, head_dim = q.shape
    columns, v_dim = v.shape[2:]
    block_dim, block_v = padded(head_dim), padded(v_dim)
    mask_kind, offset, intervals_stride = mask
    has_dropout, in_runs, dropout_scale = dropout_kind
    numbers = (
        rows, columns, offset, scale * math.log2(math.e), heads // k.shape[1],
        *out.strides[:3], *lse.strides[:2], *q.strides[:3], *k.strides[:3], *v.strides[:3],
        intervals_stride, *bias[1:], *dropout, dropout_scale,
    )  # fmt: skip
    constants = {
        "HEAD_DIM": head_dim, "V_DIM": v_dim, "BLOCK_DIM": block_dim, "BLOCK_V": block_v,
        "MASK": mask_kind, "BIAS": bias[0], "DROPOUT": has_dropout, "IN_RUNS": in_runs, **config.constants(),
    }  # fmt: skip
    blocks = (
        *(None, None, None),
        blocks_of_rows(k, config.block_columns, block_dim, config.tma),
        blocks_of_rows(v, config.block_columns, block_v, config.tma),
    )
    grid = (heads, triton.cdiv(rows, config.block_rows), batch)
    return Launch(attention_forward_kernel, grid, numbers, constants, blocks)
