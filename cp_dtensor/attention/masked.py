"""Attention of one tile under any mask that is an interval for each row, with gradients, bias, sinks, dropout.

    forward:  out = softmax(scale q k^T + bias) v over the columns that a row sees,  lse = log of the denominator
    backward: dq, dk and dv from the out and lse of all tiles of these rows

Triton kernels on GPUs, plain torch operations in blocks of rows elsewhere (`uses_triton`). Nothing here is
differentiable by autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from cp_dtensor import _torch
from cp_dtensor._torch.cache import KeptValues
from cp_dtensor._torch.tensors import TRITON_AVAILABLE
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.merge import sinks_gradient
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.attention.triton.arguments import check_attention
from cp_dtensor.attention.triton.bias_gradient import bias_gradient_reference
from cp_dtensor.attention.triton.configs import has_tensor_cores
from cp_dtensor.attention.triton.dropout import Dropout, are_in_runs
from cp_dtensor.attention.triton.intervals import Intervals
from cp_dtensor.attention.triton.reference import attention_backward_reference, attention_forward_reference
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import IntervalMask, KeyRun, TileMask
from cp_dtensor.spec.intervals import IntervalSet
from cp_dtensor.spec.layouts import Segment


def positions_of(segments: Iterable[Segment], device: torch.device | str | None = None) -> torch.Tensor:
    """The global positions of some segments' tokens, in local order: (tokens,) int64.

    >>> positions_of([Segment(start=2, length=5, block=2, period=8)]).tolist()
    [2, 3, 10, 11, 18]
    """
    parts: list[Any] = []
    for segment in segments:
        tokens: Any = torch.arange(segment.length, device=device)
        parts.append(segment.position(tokens))
    return torch.cat(parts)


if TRITON_AVAILABLE:
    from cp_dtensor.attention.triton.backward import launch_attention_backward, launch_attention_delta
    from cp_dtensor.attention.triton.forward import launch_attention_forward


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
    forward = launch_attention_forward if uses_triton(q, v) else attention_forward_reference
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
    backward = launch_attention_backward if uses_triton(q, v) else attention_backward_reference
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
    gradient = bias_gradient_reference(
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


# Attention of tiles whose rows see intervals of columns, with bias and dropout: our own kernels.


@dataclass(frozen=True)
class IntervalAttention(AttentionBackend):
    """Any dtype and head dim. Triton on GPUs up to head dim 256 (float32: 128), torch operations elsewhere.

    Deterministic, forward and backward.
    """

    modifiers: Modifiers = NO_MODIFIERS
    """Of the tile that is computed."""
    delta: torch.Tensor | None = None
    """(B, H, S) of its rows, for backward: the same for all tiles of a row, so the ring computes it, once."""

    @property
    def name(self) -> str:
        return "INTERVALS"

    def refusal(self, spec: CallSpec) -> str | None:
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = _rows(mask, q)
        return attention_forward(q, k, v, rows.mask, scale, bias=self._bias(rows), dropout=self._dropout(rows))

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: TileMask,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = _rows(mask, q)
        dq, dk, dv, _ = attention_backward(
            grad_out, q, k, v, out, lse, rows.mask, scale, bias=self._bias(rows), delta=self.delta,
            dropout=self._dropout(rows),
        )  # fmt: skip
        return dq, dk, dv

    def add_bias_gradient(
        self,
        total: torch.Tensor,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: TileMask,
        scale: float,
    ) -> None:
        """Adds this tile's share of the gradient of the bias to `total`, which is of the bias's shape."""
        rows = _rows(mask, q)
        bias = self._bias(rows)
        assert bias is not None
        assert self.delta is not None
        share = attention_bias_gradient(
            grad_out, q, k, v, lse, rows.mask, scale, bias=bias, delta=self.delta,
            dropout=self._dropout(rows), grad_dtype=total.dtype,
        )  # fmt: skip
        rows.add_to_bias_columns(total, share)

    def _bias(self, rows: TileRows) -> torch.Tensor | None:
        return None if self.modifiers.bias is None else rows.bias_columns(self.modifiers.bias)

    def _dropout(self, rows: TileRows) -> Dropout | None:
        modifiers = self.modifiers
        if modifiers.seed is None:
            return None
        return Dropout(
            modifiers.dropout_p, modifiers.seed, rows.q_positions, rows.kv_positions, modifiers.first_batch,
            modifiers.first_head,
            rows.in_runs,
        )  # fmt: skip


def _rows(mask: TileMask, q: torch.Tensor) -> TileRows:
    assert isinstance(mask, IntervalMask), "plans for this backend mask by row"
    return tile_rows(mask, q.device)


# What the rows of a tile see, on a device: computed once for each tile and device, and kept for later calls.


class TileRows:
    """Intervals and positions of a tile's rows and columns."""

    def __init__(self, mask: IntervalMask, device: torch.device) -> None:
        self._queries, self._q = mask.queries, mask.q
        self._keys, self._kv = mask.keys, mask.kv
        self._device = device
        # The mask too: what kernels derive from it is kept unless it is a mask of a CUDA graph.
        self.mask = _torch.prepared(lambda: self._row_mask(mask.layers))

    @cached_property
    def q_positions(self) -> torch.Tensor:
        """(S,), int32: positions of the rows in the whole sequence."""
        return _torch.prepared(lambda: self._on_device(self._rows()))

    @cached_property
    def kv_positions(self) -> torch.Tensor:
        """(T,), int32: positions of the columns."""
        return _torch.prepared(lambda: self._on_device(self._key_positions()))

    @cached_property
    def in_runs(self) -> bool:
        """Whether both are in runs, for which dropout is faster."""
        return _torch.prepared(lambda: are_in_runs(self._rows()) and are_in_runs(self._key_positions()))

    def bias_columns(self, bias: torch.Tensor) -> torch.Tensor:
        """The tile's columns of a bias (..., key positions or 1); a view where their positions are evenly spaced."""
        columns = self._columns
        if bias.size(-1) == 1:
            return bias
        return bias[..., columns] if isinstance(columns, slice) else bias.index_select(-1, columns)

    def add_to_bias_columns(self, total: torch.Tensor, share: torch.Tensor) -> None:
        """Adds to the tile's columns of `total`, which has the shape of the bias."""
        columns = self._columns
        if total.size(-1) == 1:
            total.add_(share)
        elif isinstance(columns, slice):
            total[..., columns].add_(share)
        else:
            total.index_add_(-1, columns, share.to(total.dtype))

    @cached_property
    def _columns(self) -> slice | torch.Tensor:
        first, last = self._keys.position(self._kv[0]), self._keys.position(self._kv[1] - 1)
        count = self._kv[1] - self._kv[0]
        stripe = self._keys.segments[0] if len(self._keys.segments) == 1 else None
        if last - first == count - 1:
            return slice(first, last + 1)
        if stripe is not None and stripe.block == 1:
            return slice(first, last + 1, stripe.period)
        return self.kv_positions

    def _row_mask(self, layers: Sequence[IntervalSet]) -> RowMask:
        lo, hi = zip(*(self._intervals(layer) for layer in layers), strict=True)
        return RowMask(lo=self._on_device(*lo), hi=self._on_device(*hi))

    def _rows(self) -> torch.Tensor:
        """Positions of the rows, on the host."""
        return positions_of(self._queries, "cpu")[slice(*self._q)]

    def _key_positions(self) -> torch.Tensor:
        """Positions of the columns, on the host."""
        return positions_of(self._keys.segments, "cpu")[slice(*self._kv)]

    def _intervals(self, layer: IntervalSet) -> tuple[torch.Tensor, torch.Tensor]:
        positions = self._rows()
        if not layer:
            return torch.zeros_like(positions), torch.zeros_like(positions)
        first, last, lo, hi, left, right = torch.tensor(layer, dtype=torch.int64, device="cpu").unbind(1)
        index = torch.searchsorted(first.contiguous(), positions, right=True) - 1
        is_inside = (index >= 0) & (positions < last[index])
        start = torch.maximum(lo[index], positions - left[index])
        stop = torch.minimum(hi[index], positions + right[index] + 1)
        first_column, columns = self._kv[0], self._kv[1] - self._kv[0]
        start, stop = ((_rows_before(self._keys, keys) - first_column).clamp(0, columns) for keys in (start, stop))
        sees = is_inside & (start < stop)
        return torch.where(sees, start, 0), torch.where(sees, stop, 0)

    def _on_device(self, *of_batch: torch.Tensor) -> torch.Tensor:
        together = of_batch[0] if len(of_batch) == 1 else torch.stack(of_batch)
        return together.to(torch.int32).to(self._device)


def _rows_before(run: KeyRun, positions: torch.Tensor) -> torch.Tensor:
    """`KeyRun.rows_before` of many positions."""
    columns = [(s.start, s.length, s.block, s.period) for s in run.segments]
    start, length, block, period = torch.tensor(columns, dtype=torch.int64, device="cpu").unbind(1)
    rows = torch.tensor(run.starts, dtype=torch.int64, device="cpu")
    index = torch.searchsorted(start.contiguous(), positions, right=True) - 1
    beyond = index.clamp(min=0)
    distance = (positions - start[beyond]).clamp(min=0)
    blocks, rest = distance // period[beyond], distance % period[beyond]
    within = torch.minimum(blocks * block[beyond] + torch.minimum(rest, block[beyond]), length[beyond])
    return torch.where(index < 0, 0, rows[beyond] + within)


_kept = KeptValues[TileRows](most=256)
"""By mask (which is looked up by identity) and device: of the masks of some steps, which come with every batch anew."""


def tile_rows(mask: IntervalMask, device: torch.device) -> TileRows:
    """What the rows of a tile see, on a device."""
    return _kept.get((mask, device)) or _kept.add((mask, device), TileRows(mask, device))
