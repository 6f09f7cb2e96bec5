"""Attention of one tile under any mask that is an interval for each row, with gradients, bias, sinks, dropout.

    forward:  out = softmax(scale q k^T + bias) v over the columns that a row sees,  lse = log of the denominator
    backward: dq, dk and dv from the out and lse of all tiles of these rows

Triton kernels on GPUs, plain torch operations in blocks of rows elsewhere (`uses_triton`). Nothing here is
differentiable by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cp_dtensor.kernels import TRITON_AVAILABLE
from cp_dtensor.kernels.attention_arguments import check_attention
from cp_dtensor.kernels.attention_bias_gradient import bias_gradient_twin
from cp_dtensor.kernels.attention_configs import has_tensor_cores
from cp_dtensor.kernels.attention_dropout import Dropout
from cp_dtensor.kernels.attention_intervals import Intervals
from cp_dtensor.kernels.attention_twin import attention_backward_twin, attention_forward_twin
from cp_dtensor.sinks import sinks_gradient

if TRITON_AVAILABLE:
    from cp_dtensor.kernels.attention_backward import launch_attention_backward, launch_attention_delta
    from cp_dtensor.kernels.attention_forward import launch_attention_forward

MAX_HEAD_DIM = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
"""Of the kernels, for each dtype that they take."""
Partial = tuple[torch.Tensor, torch.Tensor]
"""`(out, lse)`, see `merge`."""


@dataclass(frozen=True, eq=False)
class RowMask:
    """Which columns of a tile each of its rows sees: all, those up to its own, or an interval of its own.

    `RowMask()` hides nothing. With `causal_offset`, row i sees column j iff j <= i + causal_offset. With `lo` and `hi`,
    it sees lo_i <= j < hi_i: int32, (S,), or (B, S) for masks that differ in the batch. Any numbers are right, also
    such as are outside of the tile; what is not seen is skipped if, from row to row, neither lo nor hi decreases.

    What kernels derive from lo and hi, and tiles, are computed once for each mask: use one object in all layers, and
    do not change its lo and hi in place (under CUDA graphs, a replay takes them as they are then).
    """

    causal_offset: int | None = None
    lo: torch.Tensor | None = None
    hi: torch.Tensor | None = None
    intervals: Intervals | None = field(init=False, repr=False)
    """Of lo and hi; its own, so that what is derived is freed with the mask."""

    def __post_init__(self) -> None:
        if (self.lo is None) != (self.hi is None) or (self.lo is not None and self.causal_offset is not None):
            raise ValueError("a mask has a causal offset, or both lo and hi, or nothing")
        intervals = None if self.lo is None or self.hi is None else Intervals(self.lo, self.hi)
        object.__setattr__(self, "intervals", intervals)

    def __and__(self, other: RowMask) -> RowMask:
        """What both intervals let a row see: an interval again."""
        if self.lo is None or self.hi is None or other.lo is None or other.hi is None:
            raise ValueError("only masks with lo and hi can be combined: hi = row + 1 is the causal one")
        return RowMask(lo=torch.maximum(self.lo, other.lo), hi=torch.minimum(self.hi, other.hi))

    def tile(self, start: int, stop: int, first_column: int) -> RowMask:
        """The mask of rows [start, stop) in a tile whose column 0 is this mask's column `first_column`."""
        if self.intervals is not None:
            lo, hi = self.intervals.lo, self.intervals.hi
            if (start, stop, first_column) == (0, lo.size(-1), 0):
                return self
            rows = slice(start, stop)
            return self.intervals.derived(
                ("tile", start, stop, first_column),
                lambda: RowMask(lo=lo[..., rows] - first_column, hi=hi[..., rows] - first_column),
            )
        if self.causal_offset is not None:
            return RowMask(causal_offset=self.causal_offset + start - first_column)
        return self

    def arguments(self) -> dict[str, Any]:
        """As the kernels' launchers take it."""
        return {"causal_offset": self.causal_offset, "intervals": self.intervals}


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: RowMask,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    state: Partial | None = None,
    dropout: Dropout | None = None,
    out_dtype: torch.dtype | None = None,
    in_place: bool = False,
) -> Partial:
    """Partial result `(out, lse)` of a tile, or of it and all tiles that the state has seen.

    Args:
        q: (B, H, S, D), any floating dtype.
        k: (B, Hkv, T, D), Hkv divides H; query head h reads key head h // (H / Hkv).
        v: (B, Hkv, T, Dv).
        mask: which columns rows see.
        scale: > 0, of the logits.
        bias: broadcasts to (B, H, S, T), is not expanded in memory: added to the scaled logits (floating), or what
            may be seen (boolean).
        sinks: (H,), a logit of each query head that counts in the denominator alone. In one of a row's tiles.
        state: `(out, lse)` of the tiles before, `out` in float32.
        dropout: of the softmax that multiplies v, by global positions; not in lse.
        out_dtype: of `out`; None: that of q. float32 to hand it on as a state.
        in_place: write to the state, in its dtype, rather than to new tensors.

    Returns:
        out: (B, H, S, Dv); 0 for rows that have seen nothing.
        lse: (B, H, S), float32 (float64 for float64 inputs); -inf for such rows.
    """
    check_attention(q, k, v, scale, mask.intervals, bias, sinks, dropout)
    q, k, v = _last_dim_contiguous(q, k, v)
    if in_place:
        if state is None or state[0].dtype != (out_dtype or state[0].dtype):
            raise ValueError("in place means: in the state's tensors, in their dtype")
        out, lse = state
    else:
        out = _empty_in_order_of(q, v.size(3), out_dtype)
        lse = q.new_empty(q.shape[:3], dtype=_wide(q))
    forward = launch_attention_forward if uses_triton(q, v) else attention_forward_twin
    forward(
        out, lse, q, k, v, scale, **mask.arguments(), bias=bias, sinks=sinks, state=state, dropout=_effective(dropout)
    )
    return out, lse


def attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: RowMask,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """This tile's share of `(dq, dk, dv, dsinks)`, from the out and lse of all tiles of its rows. Deterministic.

    Args:
        grad_out: (B, H, S, Dv), in the dtype of q.
        q, k, v, mask, scale, bias: as in forward.
        out: (B, H, S, Dv); not read if `delta` is given.
        lse: (B, H, S).
        sinks: as in forward; None in all but one of a row's tiles: their gradient does not depend on the tile.
        delta: (B, H, S), what `attention_delta` gives, less the gradient of lse if there is one; None: computed here.
        dropout: as in forward; `out` and `delta` are those with dropout.
        grad_dtype: of dq, dk and dv; None: that of q, k and v.

    Returns:
        dq: (B, H, S, D), dk: (B, Hkv, T, D), dv: (B, Hkv, T, Dv); 0 where nothing is seen.
        dsinks: (H,), in lse's dtype; None without sinks.
    """
    check_attention(q, k, v, scale, mask.intervals, bias, sinks, dropout)
    grad_out, q, k, v = _last_dim_contiguous(grad_out, q, k, v)
    delta = attention_delta(grad_out, out) if delta is None else delta
    dq, dk, dv = (_empty_in_order_of(x, x.size(3), grad_dtype) for x in (q, k, v))
    backward = launch_attention_backward if uses_triton(q, v) else attention_backward_twin
    backward(
        dq, dk, dv, grad_out, q, k, v, lse, delta, scale, **mask.arguments(), bias=bias, dropout=_effective(dropout)
    )
    if sinks is None:
        return dq, dk, dv, None
    return dq, dk, dv, sinks_gradient(sinks, lse, delta)


def attention_bias_gradient(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    mask: RowMask,
    scale: float,
    *,
    bias: torch.Tensor,
    delta: torch.Tensor,
    dropout: Dropout | None = None,
    grad_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """This tile's share of an additive bias's gradient, in the bias's own shape: summed where it broadcasts.

    By torch operations on every device, with bounded memory: slower than `attention_backward`.

    Args:
        grad_out, q, k, v, lse, mask, scale, delta, dropout: as in `attention_backward`.
        bias: as in forward, floating.
        grad_dtype: of the result; None: the bias's. float32 to sum over tiles.
    """
    check_attention(q, k, v, scale, mask.intervals, bias, None, dropout)
    if not bias.is_floating_point():
        raise ValueError(f"a bias of {bias.dtype} has no gradient")
    gradient = bias_gradient_twin(
        grad_out, q, k, v, lse, delta, scale, bias=bias, **mask.arguments(), dropout=_effective(dropout)
    )
    return gradient.to(grad_dtype or bias.dtype)


def attention_delta(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """(B, H, S): sum(out * grad_out) over the last dim, in float32 or wider; the same for all tiles of these rows."""
    if not uses_triton(grad_out, out):
        return (grad_out.to(_wide(grad_out)) * out).sum(-1)
    delta = grad_out.new_empty(grad_out.shape[:3], dtype=torch.float32)
    launch_attention_delta(delta, *_last_dim_contiguous(grad_out, out))
    return delta


def uses_triton(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernels compute this rather than their twins."""
    head_dim = max(q.size(3), v.size(3))
    return TRITON_AVAILABLE and q.is_cuda and head_dim <= MAX_HEAD_DIM.get(q.dtype, 0) and has_tensor_cores(q.device)


def _empty_in_order_of(x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    """(B, H, S, dim) in the memory order of x: what takes it with x (a merge, a gradient of a leaf) copies nothing."""
    batch, heads, rows = x.shape[:3]
    if x.stride(1) < x.stride(2):  # row after row, as models have it
        return x.new_empty(batch, rows, heads, dim, dtype=dtype).transpose(1, 2)
    return x.new_empty(batch, heads, rows, dim, dtype=dtype)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _effective(dropout: Dropout | None) -> Dropout | None:
    """None if nothing is dropped: kernels without it are faster."""
    return None if dropout is None or dropout.p == 0 else dropout


def _last_dim_contiguous(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
