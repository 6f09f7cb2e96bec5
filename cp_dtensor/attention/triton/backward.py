"""Gradients of one tile of attention: the launchers of their kernels. Every sum has a fixed order."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from cp_dtensor._torch.triton_launch import Facts, Launch, cached_launch, facts
from cp_dtensor.attention.triton.backward_kv import attention_dkv_kernel
from cp_dtensor.attention.triton.backward_q import attention_delta_kernel, attention_dq_kernel, attention_rows_kernel
from cp_dtensor.attention.triton.common import INTERVALS, bias_argument, blocks_of_rows, mask_arguments
from cp_dtensor.attention.triton.configs import BackwardConfig, ForwardConfig, default_backward_config, padded
from cp_dtensor.attention.triton.dropout import Dropout
from cp_dtensor.attention.triton.intervals import Intervals
from cp_dtensor.attention.triton.philox import dropout_arguments

_BLOCK = 4096
"""Elements of a program of the small kernels, at most."""


def launch_attention_delta(delta: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor) -> None:
    """Writes sum(out * grad_out) over Dv to `delta`, in float32; one launch.

    Args:
        delta: (B, H, S), float32; the last dim contiguous, as in all of these.
        grad_out: (B, H, S, Dv), any floating dtype.
        out: (B, H, S, Dv), any floating dtype.
    """
    if out.numel() == 0:
        delta.zero_()
        return
    _delta_launch(facts(delta), facts(out), facts(grad_out))(delta, out, grad_out)


@cached_launch
def _delta_launch(delta: Facts, out: Facts, grad_out: Facts) -> Launch:
    batch, heads, rows, v_dim = out.shape
    block_v = padded(v_dim)
    block_rows = _BLOCK // block_v
    return Launch(
        attention_delta_kernel,
        (triton.cdiv(rows, block_rows), heads, batch),
        (rows, *delta.strides[:2], *out.strides[:3], *grad_out.strides[:3]),
        {"V_DIM": v_dim, "BLOCK_ROWS": block_rows, "BLOCK_V": block_v},
    )


def launch_attention_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    *,
    causal_offset: int | None = None,
    intervals: Intervals | None = None,
    bias: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    config: BackwardConfig | None = None,
) -> None:
    """Writes this tile's share of the gradients to `dq`, `dk` and `dv`; three launches.

    With P = exp(scale q k^T + bias - lse) where seen, else 0: dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K,
    dK = scale dS^T Q, summed over the query heads of a group. With dropout, P in dV and dO V^T are multiplied with its
    factors.

    Args:
        dq: (B, H, S, D), float32 or narrower, as `dk` and `dv`; rounded once. The last dim contiguous, as in all of
            these but the bias.
        dk: (B, Hkv, T, D).
        dv: (B, Hkv, T, Dv).
        grad_out: (B, H, S, Dv), dO, in the dtype of q, k and v.
        q, k, v: as given to `launch_attention_forward`.
        lse: (B, H, S), float32, of all tiles (and sinks) of these rows.
        delta: (B, H, S), float32: sum(out * grad_out) over Dv with the out of all tiles of these rows, less the
            gradient of lse if there is one.
        scale, causal_offset, intervals, bias, dropout: as given to `launch_attention_forward`.
        config: block sizes and the like; None: `default_backward_config`.
    """
    assert scale > 0
    assert q.is_cuda or q.dtype != torch.bfloat16, "Triton's interpreter multiplies bfloat16 as if it were integers"
    assert q.dtype == k.dtype == v.dtype == grad_out.dtype
    batch, heads, rows, _ = q.shape
    columns = v.size(2)
    if q.numel() == 0 or k.numel() == 0:
        for grad in (dq, dk, dv):
            grad.zero_()
        return
    draws_each = dropout is not None and not dropout.in_runs
    config = config or default_backward_config(q, k, v, grad_out, bias is not None, draws_each)
    mask, offset = mask_arguments(causal_offset, intervals, rows, columns)
    bias_kind, bias, bias_strides = bias_argument(bias, (batch, heads, rows, columns), lse)
    seed, q_position, kv_position, *drop = dropout_arguments(dropout, lse)
    # Kernels read whole blocks of rows' numbers, which begin at any row; descriptors want lines of 16 bytes.
    padded_rows = rows + max(config.dq.block_rows, config.dkv.block_rows)
    padded_rows += -padded_rows % 4
    shift, padded_delta = lse.new_empty((2, batch * heads, padded_rows), dtype=torch.float32).unbind()
    lo = hi = ranges = lse  # which the kernels do not look at then
    interval_strides = (0, 0, 0)
    if intervals is not None:
        lo, hi = intervals.padded_lines(padded_rows)
        ranges = intervals.rows_of_columns(columns, config.dkv.block_columns)
        interval_strides = (
            lo.stride(0) if lo.size(0) > 1 else 0, ranges.stride(0), ranges.stride(1) if ranges.size(1) > 1 else 0
        )  # fmt: skip
    others = (bias, seed, q_position, kv_position)
    launches = _launches(
        facts(dq), facts(dk), facts(dv), facts(grad_out), facts(q), facts(k), facts(v), facts(lse), facts(delta),
        tuple([x.dtype for x in others]), (mask, offset, *interval_strides), (bias_kind, *bias_strides), tuple(drop),
        1.0 if dropout is None else dropout.scale, dropout is not None, dropout is not None and dropout.in_runs,
        float(scale), padded_rows, config,
    )  # fmt: skip
    launches.rows(shift, padded_delta, lse, delta)
    launches.dkv(dk, dv, grad_out, q, k, v, shift, padded_delta, lo, hi, ranges, *others)
    launches.dq(dq, grad_out, q, k, v, shift, padded_delta, lo, hi, *others)


class _Launches(NamedTuple):
    """Those of a backward pass, in order."""

    rows: Launch
    dkv: Launch
    dq: Launch


@cached_launch
def _launches(
    dq: Facts,
    dk: Facts,
    dv: Facts,
    grad_out: Facts,
    q: Facts,
    k: Facts,
    v: Facts,
    lse: Facts,
    delta: Facts,
    _dtypes_of_others: tuple[torch.dtype, ...],
    mask: tuple[int, ...],
    bias: tuple[int, ...],
    dropout: tuple[float, ...],
    dropout_scale: float,
    has_dropout: bool,
    in_runs: bool,
    scale: float,
    padded_rows: int,
    config: BackwardConfig,
) -> _Launches:
    """For tensors such as these. Of mask, bias and dropout, the numbers."""
    batch, heads, rows, head_dim = q.shape
    kv_heads, columns, v_dim = v.shape[1:]
    block_dim, block_v = padded(head_dim), padded(v_dim)
    mask_kind, offset, intervals_stride, *ranges_strides = mask
    numbers = (rows, columns, offset, scale * math.log2(math.e), scale, heads // kv_heads, padded_rows)
    strides = (*grad_out.strides[:3], *q.strides[:3], *k.strides[:3], *v.strides[:3], intervals_stride)
    last = (*bias[1:], *dropout)
    constants = {"HEAD_DIM": head_dim, "V_DIM": v_dim, "BLOCK_DIM": block_dim, "BLOCK_V": block_v}
    constants |= {"MASK": mask_kind, "BIAS": bias[0], "DROPOUT": has_dropout, "IN_RUNS": in_runs}

    cut = config.dkv
    line = (1, cut.block_rows) if cut.tma else None
    of_intervals = line if mask_kind == INTERVALS.value else None
    dkv = Launch(
        attention_dkv_kernel,
        (kv_heads, triton.cdiv(columns, cut.block_columns), batch),
        (*numbers, *dk.strides[:3], *dv.strides[:3], *strides, *ranges_strides, *last),
        constants | _constants(cut),
        (
            *(None, None),
            blocks_of_rows(grad_out, cut.block_rows, block_v, cut.tma),
            blocks_of_rows(q, cut.block_rows, block_dim, cut.tma),
            *(None, None, line, line, of_intervals, of_intervals),
        ),
    )
    cut = config.dq
    of_dq = Launch(
        attention_dq_kernel,
        (heads, triton.cdiv(rows, cut.block_rows), batch),
        (*numbers, *dq.strides[:3], *strides, *last),
        constants | _constants(cut),
        (
            *(None, None, None),
            blocks_of_rows(k, cut.block_columns, block_dim, cut.tma),
            blocks_of_rows(v, cut.block_columns, block_v, cut.tma),
        ),
    )
    of_rows = Launch(
        attention_rows_kernel,
        (triton.cdiv(padded_rows, _BLOCK), heads, batch),
        (rows, padded_rows, math.log2(dropout_scale), 1 / dropout_scale, *lse.strides[:2], *delta.strides[:2]),
        {"BLOCK_ROWS": _BLOCK},
    )
    return _Launches(of_rows, dkv, of_dq)


def _constants(cut: ForwardConfig) -> dict[str, object]:
    return {
        "BLOCK_ROWS": cut.block_rows, "BLOCK_COLUMNS": cut.block_columns, "TMA": cut.tma, "PRECISION": cut.precision,
        "num_warps": cut.warps, "num_stages": cut.stages, "enable_fp_fusion": True,
    }  # fmt: skip
