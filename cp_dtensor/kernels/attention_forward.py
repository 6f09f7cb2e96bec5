"""Attention of one tile as a Triton kernel that continues from, and hands on, a partial result in float32.

FlashAttention-2 (arXiv 2307.08691, algorithm 1), with exp2 and the scale folded into one multiply-add per logit. Keys
that every row of a block of rows sees are read in a loop without masks; only the blocks on the diagonal and the last,
ragged one pay for a mask, and blocks that no row sees are not read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_rows(
    source, batch, head, start, length, stride_s,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr, RAGGED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(BLOCK, BLOCK_DIM): rows from `start` of one (batch, head); 0 beyond `length` (if RAGGED) and beyond DIM.

    `source` is a descriptor of the whole tensor with TMA, else a pointer to row 0 of this (batch, head).
    """
    if TMA:
        block = source.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_DIM)
    else:
        row = tl.arange(0, BLOCK)[:, None]
        dim = tl.arange(0, BLOCK_DIM)[None, :]
        # Offsets inside of a block fit 32 bits (the launcher sees to it) and do not change from block to block.
        ptrs = source + tl.cast(start, tl.int64) * stride_s + (row * stride_s + dim)
        if RAGGED:
            block = tl.load(ptrs, mask=(start + row < length) & (dim < DIM), other=0.0)
        elif DIM < BLOCK_DIM:
            block = tl.load(ptrs, mask=dim < DIM, other=0.0)
        else:
            block = tl.load(ptrs)
    return block


@triton.jit
def _attend(
    acc, total, largest, q, seen_columns, scale_log2,
    k, v, batch, kv_head, first, last, columns, k_stride_s, v_stride_s,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Goes on with columns [first, last). `acc` and `total` are relative to exp2(`largest`).

    MASKED: row i sees columns below `seen_columns[i]` only; otherwise all rows see all of these columns.
    """
    for start in tl.range(first, last, BLOCK_COLUMNS):
        k_block = _load_rows(
            k, batch, kv_head, start, columns, k_stride_s, HEAD_DIM, BLOCK_COLUMNS, BLOCK_DIM, MASKED, TMA
        )
        logits = tl.dot(q, tl.trans(k_block), input_precision="ieee")
        if MASKED:
            column = start + tl.arange(0, BLOCK_COLUMNS)
            logits = tl.where(column[None, :] < seen_columns[:, None], logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1) * scale_log2)
        if MASKED:  # a row may have seen nothing yet, and -inf - -inf would be NaN
            shift = tl.where(new_largest > float("-inf"), new_largest, 0.0)
        else:
            shift = new_largest
        weights = tl.math.exp2(logits * scale_log2 - shift[:, None])
        decay = tl.math.exp2(largest - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        v_block = _load_rows(v, batch, kv_head, start, columns, v_stride_s, V_DIM, BLOCK_COLUMNS, BLOCK_V, MASKED, TMA)
        acc = tl.dot(weights.to(v_block.dtype), v_block, acc, input_precision="ieee")
        largest = new_largest
    return acc, total, largest


# What differs from tile to tile and does not make the code better is not specialised on: tiles share their code.
_NOT_SPECIALIZED = ["rows", "columns", "offset", "group"]
_LSE = ["lse_ptr", "lse_stride_b", "lse_stride_h", "state_lse_ptr", "state_lse_stride_b", "state_lse_stride_h"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_LSE)
def attention_forward_kernel(
    out_ptr, lse_ptr, q_ptr, k, v, state_ptr, state_lse_ptr,
    rows, columns, offset, scale_log2, group,
    out_stride_b, out_stride_h, out_stride_s, lse_stride_b, lse_stride_h,
    q_stride_b, q_stride_h, q_stride_s,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    state_stride_b, state_stride_h, state_stride_s, state_lse_stride_b, state_lse_stride_h,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_STATE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one (batch, query head), all columns that they see.

    Example, head dim 1, scale 1: q 0 sees keys with values 1 and 3: out 2, lse log 2. With the state (5, log 2) before
    that: out (2 * 5 + 1 + 3) / 4 = 3.5, lse log 4.
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
        total = tl.where(seen, 1.0, 0.0)
        largest = state_lse * _LOG2_E
    else:
        acc = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    q = tl.load(
        q_ptr + batch_64 * q_stride_b + head_64 * q_stride_h + row_64[:, None] * q_stride_s + dim[None, :],
        mask=in_rows[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip

    if CAUSAL:
        seen_columns = tl.minimum(row + offset + 1, columns)
        seen_by_all = tl.minimum(tl.maximum(first_row + offset + 1, 0), columns)
        seen_by_any = tl.minimum(tl.maximum(tl.minimum(first_row + BLOCK_ROWS, rows) + offset, 0), columns)
    else:
        seen_columns = tl.zeros_like(row) + columns
        seen_by_all = columns
        seen_by_any = columns
    unmasked = seen_by_all // BLOCK_COLUMNS * BLOCK_COLUMNS
    acc, total, largest = _attend(
        acc, total, largest, q, seen_columns, scale_log2,
        k, v, batch, kv_head, 0, unmasked, columns, k_stride_s, v_stride_s,
        HEAD_DIM, V_DIM, BLOCK_COLUMNS, BLOCK_DIM, BLOCK_V, False, TMA,
    )  # fmt: skip
    acc, total, largest = _attend(
        acc, total, largest, q, seen_columns, scale_log2,
        k, v, batch, kv_head, unmasked, seen_by_any, columns, k_stride_s, v_stride_s,
        HEAD_DIM, V_DIM, BLOCK_COLUMNS, BLOCK_DIM, BLOCK_V, True, TMA,
    )  # fmt: skip

    safe_total = tl.where(total > 0.0, total, 1.0)  # of a row that has seen nothing, acc is 0 and largest -inf
    out = acc * (1.0 / safe_total)[:, None]
    lse = (largest + tl.math.log2(safe_total)) * _LN_2
    if HAS_STATE:
        # Row values are replicated over the warps of a program: without this barrier one warp could store the new LSE
        # in place before another has loaded the old one.
        tl.debug_barrier()
    out_ptrs = out_ptr + batch_64 * out_stride_b + head_64 * out_stride_h
    tl.store(out_ptrs + row_64[:, None] * out_stride_s + v_dim[None, :], out.to(out_ptr.dtype.element_ty), mask=in_tile)
    tl.store(lse_ptr + batch_64 * lse_stride_b + head_64 * lse_stride_h + row_64, lse, mask=in_rows)


@dataclass(frozen=True)
class ForwardConfig:
    """How the kernel cuts up a tile; what it computes does not depend on it."""

    block_rows: int
    block_columns: int
    warps: int
    stages: int
    """Blocks of K and V in flight or in use at once."""
    tma: bool = False
    """Read K and V by tensor descriptors, which takes fewer registers; only where `can_use_tma` says so."""


_HOPPER_CONFIGS = {
    16: ForwardConfig(128, 128, 8, 3),
    32: ForwardConfig(128, 128, 8, 3),
    64: ForwardConfig(128, 128, 8, 3),
    128: ForwardConfig(128, 128, 8, 2),
    256: ForwardConfig(128, 64, 8, 2),
}
"""By padded head dim, for 16-bit dtypes: with descriptors, as much as registers hold without spilling."""


def default_config(k: torch.Tensor, v: torch.Tensor) -> ForwardConfig:
    """A config for keys (B, Hkv, T, D) and values (B, Hkv, T, Dv) that fits a Hopper GPU."""
    config = _HOPPER_CONFIGS[_padded(max(k.size(3), v.size(3)))]
    return replace(config, tma=can_use_tma(k, v))


def can_use_tma(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether tensor descriptors of K and V can be made: they want at least one row, and 16-byte alignment."""
    return all(
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and all(stride > 0 and stride * x.itemsize % 16 == 0 for stride in x.stride()[:3])
        for x in (k, v)
    )


def launch_attention_forward(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal_offset: int | None = None,
    state: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: ForwardConfig | None = None,
) -> None:
    """Writes attention over the keys of a tile, and over those that the state has seen, to `(out, lse)`; one launch.

    Without a state, out = softmax(scale q k^T + mask) v and lse = log sum exp(scale q k^T + mask). With one, the result
    is that over the keys of both, as if they had been in one call. Rows that see nothing have out = 0, lse = -inf.

    Args:
        out: (B, H, S, Dv), float32 to hand on to a next tile, or the dtype of the result: rounded once. The last dim
            contiguous, as in all of these.
        lse: (B, H, S), float32: natural log of the softmax denominator of the scaled logits.
        q: (B, H, S, D), bfloat16 or float16 (in the interpreter: float16 or float32). D at most 256, as Dv.
        k: (B, Hkv, T, D); query head h reads key head h // (H / Hkv).
        v: (B, Hkv, T, Dv).
        scale: > 0, since masks are applied before it.
        causal_offset: row i sees column j iff j <= i + causal_offset; None: every row sees every column.
        state: `(out, lse)` of the tiles before, as this writes them; may be `(out, lse)` itself. Its `out` is not
            looked at where its lse is -inf. To continue some rows only, pass slices of them throughout.
        config: block sizes and the like; None: `default_config`.
    """
    assert scale > 0
    assert q.is_cuda or q.dtype != torch.bfloat16, "Triton's interpreter multiplies bfloat16 as if it were integers"
    batch, heads, rows, head_dim = q.shape
    if q.numel() == 0:
        return
    config = config or default_config(k, v)
    v_dim, block_dim, block_v = v.size(3), _padded(head_dim), _padded(v.size(3))
    assert config.block_columns * max(k.stride(2), v.stride(2)) < 2**31
    sources: list[Any] = [k, v]
    if config.tma:
        shapes = [[1, 1, config.block_columns, width] for width in (block_dim, block_v)]
        sources = [TensorDescriptor.from_tensor(x, shape) for x, shape in zip((k, v), shapes, strict=True)]
    state_out, state_lse = (out, lse) if state is None else state
    # Beyond these all or none are seen anyway, and the kernel computes with 32 bits.
    offset = 0 if causal_offset is None else max(-rows, min(causal_offset, k.size(2)))
    attention_forward_kernel[heads, triton.cdiv(rows, config.block_rows), batch](
        out, lse, q, *sources, state_out, state_lse,
        rows, k.size(2), offset, scale * math.log2(math.e), heads // k.size(1),
        *out.stride()[:3], *lse.stride()[:2], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *state_out.stride()[:3], *state_lse.stride()[:2],
        HEAD_DIM=head_dim, V_DIM=v_dim, BLOCK_DIM=block_dim, BLOCK_V=block_v,
        BLOCK_ROWS=config.block_rows, BLOCK_COLUMNS=config.block_columns,
        CAUSAL=causal_offset is not None, HAS_STATE=state is not None, TMA=config.tma,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))  # tl.dot takes no less
