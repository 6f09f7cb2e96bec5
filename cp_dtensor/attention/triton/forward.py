"""Attention of one tile: the launcher of its kernel."""

from __future__ import annotations

import math

import torch
import triton

from cp_dtensor._torch.triton_launch import Facts, Launch, cached_launch, facts
from cp_dtensor.attention.triton.common import bias_argument, blocks_of_rows, mask_arguments
from cp_dtensor.attention.triton.configs import ForwardConfig, can_use_tma, default_config, padded
from cp_dtensor.attention.triton.dropout import Dropout
from cp_dtensor.attention.triton.forward_kernel import attention_forward_kernel
from cp_dtensor.attention.triton.intervals import Intervals
from cp_dtensor.attention.triton.philox import dropout_arguments

__all__ = ["ForwardConfig", "attention_forward_kernel", "can_use_tma", "default_config", "launch_attention_forward"]


def launch_attention_forward(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal_offset: int | None = None,
    intervals: Intervals | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    state: tuple[torch.Tensor, torch.Tensor] | None = None,
    dropout: Dropout | None = None,
    config: ForwardConfig | None = None,
) -> None:
    """Writes attention over the keys of a tile, and over those that the state has seen, to `(out, lse)`; one launch.

    Without a state, out = softmax(scale q k^T + mask) v and lse = log sum exp(scale q k^T + mask). With one, the result
    is that over the keys of both, as if they had been in one call. Rows that see nothing have out = 0, lse = -inf.

    Args:
        out: (B, H, S, Dv), float32 to hand on to a next tile, or the dtype of the result: rounded once. The last dim
            contiguous, as in all of these but the bias.
        lse: (B, H, S), float32: natural log of the softmax denominator of the scaled logits.
        q: (B, H, S, D), bfloat16, float16 or float32 (in the interpreter: the last two). D at most 256, as Dv; 128 for
            float32.
        k: (B, Hkv, T, D); query head h reads key head h // (H / Hkv).
        v: (B, Hkv, T, Dv).
        scale: > 0, since masks are applied before it.
        causal_offset: row i sees column j iff j <= i + causal_offset; None: every row sees every column.
        intervals: instead of `causal_offset`: row i sees columns lo_i <= j < hi_i. Any numbers are right; little is
            read that is not seen if neither lo nor hi ever decreases.
        bias: broadcasts to (B, H, S, T), with any strides; added to the scaled logits (any floating dtype, -inf
            hides), or boolean (False hides).
        sinks: (H,), floating: a logit for each query head that counts in the denominator alone. Once for each row: in
            one of the tiles that are carried.
        state: `(out, lse)` of the tiles before, as this writes them; may be `(out, lse)` itself. Its `out` is not
            looked at where its lse is -inf. To continue some rows only, pass slices of them throughout.
        dropout: of the softmax that the values are multiplied with; not in lse.
        config: block sizes and the like; None: `default_config`.
    """
    assert scale > 0
    assert q.is_cuda or q.dtype != torch.bfloat16, "Triton's interpreter multiplies bfloat16 as if it were integers"
    batch, heads, rows, _ = q.shape
    columns = v.size(2)
    if q.numel() == 0:
        return
    config = config or default_config(k, v, bias is not None, dropout is not None and not dropout.in_runs)
    mask, offset = mask_arguments(causal_offset, intervals, rows, columns)
    lo, hi = (lse, lse) if intervals is None else intervals.lines()
    intervals_stride = lo.stride(0) if intervals is not None and lo.dim() == 2 else 0
    bias_kind, bias, bias_strides = bias_argument(bias, (batch, heads, rows, columns), lse)
    seed, q_position, kv_position, *drop = dropout_arguments(dropout, lse)
    state_out, state_lse = (out, lse) if state is None else state
    others = (bias, lse if sinks is None else sinks.contiguous(), seed, q_position, kv_position)
    launch = _launch(
        facts(out), facts(lse), facts(q), facts(k), facts(v), facts(state_out), facts(state_lse),
        tuple([x.dtype for x in others]), (mask, offset, intervals_stride), (bias_kind, *bias_strides),
        (*drop, 1.0 if dropout is None else dropout.scale), state is not None, sinks is not None,
        dropout is not None, dropout is not None and dropout.in_runs, float(scale), config,
    )  # fmt: skip
    launch(out, lse, q, k, v, state_out, state_lse, lo, hi, *others)


@cached_launch
def _launch(
    out: Facts,
    lse: Facts,
    q: Facts,
    k: Facts,
    v: Facts,
    state_out: Facts,
    state_lse: Facts,
    _dtypes_of_others: tuple[torch.dtype, ...],
    mask: tuple[int, int, int],
    bias: tuple[int, ...],
    dropout: tuple[float, ...],
    has_state: bool,
    has_sinks: bool,
    has_dropout: bool,
    in_runs: bool,
    scale: float,
    config: ForwardConfig,
) -> Launch:
    """For tensors such as these. Of mask, bias and dropout, the numbers."""
    batch, heads, rows, head_dim = q.shape
    columns, v_dim = v.shape[2:]
    block_dim, block_v = padded(head_dim), padded(v_dim)
    mask_kind, offset, intervals_stride = mask
    numbers = (
        rows, columns, offset, scale * math.log2(math.e), heads // k.shape[1],
        *out.strides[:3], *lse.strides[:2], *q.strides[:3], *k.strides[:3], *v.strides[:3],
        *state_out.strides[:3], *state_lse.strides[:2], intervals_stride, *bias[1:], *dropout,
    )  # fmt: skip
    constants = {
        "HEAD_DIM": head_dim, "V_DIM": v_dim, "BLOCK_DIM": block_dim, "BLOCK_V": block_v,
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLUMNS": config.block_columns,
        "MASK": mask_kind, "BIAS": bias[0], "DROPOUT": has_dropout, "IN_RUNS": in_runs, "HAS_SINKS": has_sinks,
        "HAS_STATE": has_state, "TMA": config.tma, "PRECISION": config.precision,
        "num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True,
    }  # fmt: skip
    blocks = (
        *(None, None, None),
        blocks_of_rows(k, config.block_columns, block_dim, config.tma),
        blocks_of_rows(v, config.block_columns, block_v, config.tma),
    )
    grid = (heads, triton.cdiv(rows, config.block_rows), batch)
    return Launch(attention_forward_kernel, grid, numbers, constants, blocks)
