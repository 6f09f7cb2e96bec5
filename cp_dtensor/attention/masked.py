"""Attention of one tile under a mask that is an interval of columns for each row, with gradients, bias and dropout.

    forward:  out = softmax(scale q k^T + bias) v over the columns that a row attends to,  lse = log of the denominator
    backward: dq, dk and dv from the out and lse of all tiles of these rows

Triton kernels on GPUs, plain torch operations in blocks of rows elsewhere (`uses_triton`). Nothing here is
differentiable by autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cp_dtensor._torch.tensors import TRITON_AVAILABLE, empty_in_order_of, unit_stride, wide_dtype
from cp_dtensor.attention.triton.configs import has_tensor_cores
from cp_dtensor.attention.triton.dropout import Dropout
from cp_dtensor.attention.triton.reference import (
    attention_backward_reference,
    attention_forward_reference,
    bias_gradient_reference,
)
from cp_dtensor.attention.triton.row_mask import RowMask
from cp_dtensor.spec.layouts import Segment

if TRITON_AVAILABLE:
    from cp_dtensor.attention.triton.backward import launch_attention_backward, launch_attention_delta
    from cp_dtensor.attention.triton.forward import launch_attention_forward

MAX_HEAD_DIM = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
"""Largest head dim of the Triton kernels, for each dtype that they take."""


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float, *, bias: Tensor | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Partial result `(out, lse)` of a tile.

    Args:
        q: (B, H, S, D), any floating dtype.
        k: (B, Hkv, T, D), Hkv divides H; query head h reads key head h // (H / Hkv).
        v: (B, Hkv, T, Dv).
        mask: the columns that each row attends to.
        scale: of the logits, > 0.
        bias: broadcasts to (B, H, S, T) and is not expanded in memory: added to the scaled logits (floating), or False
            where a row does not attend (boolean).
        dropout: of the softmax weights, by global positions; the lse is without dropout.

    Returns:
        out: (B, H, S, Dv), in q's dtype; 0 for rows that attend to nothing.
        lse: (B, H, S), float32 (float64 for float64 inputs); -inf for such rows.
    """
    dropout = _checked(q, k, v, mask, scale, bias, dropout)
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    out = empty_in_order_of(q, v.size(3))
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    forward = launch_attention_forward if uses_triton(q, v) else attention_forward_reference
    forward(out, lse, q, k, v, mask, scale, bias=bias, dropout=dropout)
    return out, lse


def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: RowMask, scale: float, *,
    bias: Tensor | None = None, delta: Tensor | None = None, dropout: Dropout | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """This tile's share of `(dq, dk, dv)`, from the out and lse of all tiles of its rows. Deterministic.

    Args:
        grad_out: (B, H, S, Dv), in the dtype of q.
        q, k, v, mask, scale, bias, dropout: as in `attention_forward`.
        out: (B, H, S, Dv); not read if `delta` is passed.
        lse: (B, H, S).
        delta: (B, H, S), the result of `attention_delta`, minus the gradient of lse if it has one; None: computed here.
        grad_dtype: of dq, dk and dv; None: the dtype of q, k and v.

    Returns:
        dq: (B, H, S, D), dk: (B, Hkv, T, D), dv: (B, Hkv, T, Dv); 0 for rows and columns without attended pairs.
    """
    dropout = _checked(q, k, v, mask, scale, bias, dropout)
    grad_out, q, k, v = (unit_stride(x) for x in (grad_out, q, k, v))
    delta = attention_delta(grad_out, out) if delta is None else delta
    dq, dk, dv = (empty_in_order_of(x, x.size(3), grad_dtype) for x in (q, k, v))
    backward = launch_attention_backward if uses_triton(q, v) else attention_backward_reference
    backward(dq, dk, dv, grad_out, q, k, v, lse, delta, mask, scale, bias=bias, dropout=dropout)
    return dq, dk, dv


def attention_bias_gradient(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mask: RowMask, scale: float, *, bias: Tensor,
    delta: Tensor, dropout: Dropout | None = None, grad_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """This tile's share of an additive bias's gradient, in the bias's shape: summed over dims that broadcast.

    Uses torch operations on every device, with bounded memory; slower than `attention_backward`.

    Args:
        grad_out, q, k, v, lse, mask, scale, delta, dropout: as in `attention_backward`.
        bias: as in `attention_forward`, floating.
        grad_dtype: of the result; None: the bias's. float32 to sum over tiles.
    """
    dropout = _checked(q, k, v, mask, scale, bias, dropout)
    if not bias.is_floating_point():
        raise ValueError(f"a bias of {bias.dtype} has no gradient")
    gradient = bias_gradient_reference(grad_out, q, k, v, lse, delta, mask, scale, bias=bias, dropout=dropout)
    return gradient.to(grad_dtype or bias.dtype)


def attention_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """(B, H, S): sum(out * grad_out) over the last dim, in float32 or wider; all tiles of a row share it."""
    if not uses_triton(grad_out, out):
        return (grad_out.to(wide_dtype(grad_out)) * out).sum(-1)
    delta = grad_out.new_empty(grad_out.shape[:3], dtype=torch.float32)
    launch_attention_delta(delta, unit_stride(grad_out), unit_stride(out))
    return delta


def uses_triton(q: Tensor, v: Tensor) -> bool:
    """True if the Triton kernels compute this, False if the reference implementation does."""
    head_dim = max(q.size(3), v.size(3))
    return TRITON_AVAILABLE and q.is_cuda and head_dim <= MAX_HEAD_DIM.get(q.dtype, 0) and has_tensor_cores(q.device)


def positions_of(segments: Iterable[Segment], device: torch.device | str | None = None) -> Tensor:
    """The global positions of the tokens of some segments, in local order: (tokens,) int64.

    >>> positions_of([Segment(start=2, length=5, block=2, period=8)]).tolist()
    [2, 3, 10, 11, 18]
    """
    parts: list[Any] = []
    for segment in segments:
        tokens: Any = torch.arange(segment.length, device=device)
        parts.append(segment.position(tokens))
    return torch.cat(parts)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float, bias: Tensor | None, dropout: Dropout | None
) -> Dropout | None:
    """Returns the dropout, None if it drops nothing (kernels without dropout are faster).

    Raises:
        ValueError: the arguments do not fit each other.
    """
    batch, heads, rows, head_dim = q.shape
    kv_heads, columns = k.shape[1:3]
    if k.shape != (batch, kv_heads, columns, head_dim) or v.shape[:3] != k.shape[:3] or heads % kv_heads:
        raise ValueError(f"q, k and v do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}: masks are applied before it")
    if mask.intervals is not None:
        lo, hi = mask.intervals
        if not lo.dtype == hi.dtype == torch.int32 or lo.shape != hi.shape or lo.shape not in ((rows,), (batch, rows)):
            raise ValueError(
                f"lo and hi must both be int32 of ({rows},) or ({batch}, {rows}), "
                f"got {lo.dtype} {tuple(lo.shape)} and {hi.dtype} {tuple(hi.shape)}"
            )
    shape = (batch, heads, rows, columns)
    if bias is not None and (
        bias.dim() > 4 or any(size not in (1, full) for size, full in zip(bias.shape[::-1], shape[::-1], strict=False))
    ):
        raise ValueError(f"bias {tuple(bias.shape)} does not broadcast to {shape}")
    if dropout is None:
        return None
    for x, length in ((dropout.q_positions, rows), (dropout.kv_positions, columns)):
        if x.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(f"positions must be ({length},) or ({batch}, {length}), got {tuple(x.shape)}")
    if dropout.seed.device != q.device:
        raise ValueError(f"the seed of dropout must be on {q.device}, got {dropout.seed.device}")
    return dropout if dropout.p > 0 else None
