"""Backend of interval-masked tiles, with bias and dropout: the attention kernels of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from cp_dtensor import _torch
from cp_dtensor._torch.cache import LRUCache
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.masked import attention_backward, attention_bias_gradient, attention_forward, positions_of
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.attention.triton.dropout import Dropout, are_in_runs
from cp_dtensor.attention.triton.row_mask import RowMask
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import IntervalMask, KeyRun, TileMask
from cp_dtensor.spec.intervals import IntervalSet


@dataclass(frozen=True)
class IntervalAttention(AttentionBackend):
    """Any dtype and head dim. Triton on GPUs up to head dim 256 (float32: 128), torch operations elsewhere.

    Deterministic, forward and backward.
    """

    modifiers: Modifiers = NO_MODIFIERS
    """Bias and dropout of the tile."""
    delta: torch.Tensor | None = None
    """(B, H, S), for backward: the delta of the tile's rows. All tiles of a row share it, so the ring computes it."""

    name = "INTERVALS"

    def refusal(self, spec: CallSpec) -> str | None:
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = _tile_rows(mask, q.device)
        return attention_forward(q, k, v, rows.mask, scale, bias=self._bias(rows), dropout=self._dropout(rows))

    def backward(
        self, grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, mask: TileMask, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        rows = _tile_rows(mask, q.device)
        return attention_backward(
            grad_out, q, k, v, out, lse, rows.mask, scale, bias=self._bias(rows), delta=self.delta,
            dropout=self._dropout(rows),
        )  # fmt: skip

    def add_bias_gradient(
        self, total: torch.Tensor, grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, mask: TileMask, scale: float,
    ) -> None:  # fmt: skip
        """Adds this tile's share of the bias gradient to `total`, which has the shape of the bias."""
        rows = _tile_rows(mask, q.device)
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
            modifiers.first_head, rows.in_runs,
        )  # fmt: skip


class TileRows:
    """Row mask and positions of a tile on one device."""

    def __init__(self, mask: IntervalMask, device: torch.device) -> None:
        self._queries, self._q = mask.queries, mask.q
        self._keys, self._kv = mask.keys, mask.kv
        self._device = device
        # Made outside of CUDA graph capture where possible, so that later calls share the tables cached in the mask.
        self.mask = _torch.prepared(lambda: self._row_mask(mask.interval_sets))

    @cached_property
    def q_positions(self) -> torch.Tensor:
        """(S,), int32: global positions of the rows."""
        return _torch.prepared(lambda: self._on_device(self._rows()))

    @cached_property
    def kv_positions(self) -> torch.Tensor:
        """(T,), int32: global positions of the columns."""
        return _torch.prepared(lambda: self._on_device(self._key_positions()))

    @cached_property
    def in_runs(self) -> bool:
        """True if the positions of rows and columns are in runs, which makes dropout faster."""
        return _torch.prepared(lambda: are_in_runs(self._rows()) and are_in_runs(self._key_positions()))

    def bias_columns(self, bias: torch.Tensor) -> torch.Tensor:
        """The tile's columns of a bias (..., key positions or 1); a view if their positions are evenly spaced."""
        columns = self._columns
        if bias.size(-1) == 1:
            return bias
        return bias[..., columns] if isinstance(columns, slice) else bias.index_select(-1, columns)

    def add_to_bias_columns(self, total: torch.Tensor, share: torch.Tensor) -> None:
        """Adds a bias gradient to the tile's columns of `total`, which has the shape of the bias."""
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
        """Global positions of the rows, on the host."""
        return positions_of(self._queries, "cpu")[slice(*self._q)]

    def _key_positions(self) -> torch.Tensor:
        """Global positions of the columns, on the host."""
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
    """`KeyRun.rows_before` for a tensor of positions."""
    columns = [(s.start, s.length, s.block, s.period) for s in run.segments]
    start, length, block, period = torch.tensor(columns, dtype=torch.int64, device="cpu").unbind(1)
    rows = torch.tensor(run.starts, dtype=torch.int64, device="cpu")
    index = torch.searchsorted(start.contiguous(), positions, right=True) - 1
    beyond = index.clamp(min=0)
    distance = (positions - start[beyond]).clamp(min=0)
    blocks, rest = distance // period[beyond], distance % period[beyond]
    within = torch.minimum(blocks * block[beyond] + torch.minimum(rest, block[beyond]), length[beyond])
    return torch.where(index < 0, 0, rows[beyond] + within)


_cached_rows = LRUCache[TileRows](most=256)
"""Keys: mask (compared by identity) and device. Document masks are new with every batch: room for a few batches."""


def _tile_rows(mask: TileMask, device: torch.device) -> TileRows:
    """The row mask and positions of a tile on a device, cached."""
    assert isinstance(mask, IntervalMask), "plans for this backend have interval masks"
    key = (mask, device)
    return _cached_rows.get(key) or _cached_rows.add(key, TileRows(mask, device))
