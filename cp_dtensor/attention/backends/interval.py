"""Backend on the attention kernels of this package: tiles of any mask, and float32 gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cp_dtensor._torch.cache import Shared, capturing
from cp_dtensor._torch.tensors import wide_dtype
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.masked import (
    attention_backward,
    attention_bias_gradient,
    attention_delta,
    attention_forward,
    positions_of,
    seen_positions,
)
from cp_dtensor.attention.merge import merge
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.attention.triton import MAX_PARTS
from cp_dtensor.attention.triton.dropout import Dropout, are_in_runs
from cp_dtensor.attention.triton.row_mask import CAUSAL_ROWS, FULL_ROWS, RowMask
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import IntervalMask, KeyRun, ShapedMask, TileMask
from cp_dtensor.spec.cache import LRUCache


@dataclass(frozen=True)
class IntervalAttention(AttentionBackend):
    """Any dtype and head dim. Triton on GPUs up to head dim 256 (float32: 128), torch operations elsewhere.

    Deterministic, forward and backward.
    """

    modifiers: Modifiers = NO_MODIFIERS
    """Those of the tile."""
    delta: Tensor | None = None
    """(B, H, S), for backward: the delta of the tile's rows. All tiles of a row share it, so the ring computes it."""
    wide_gradients: bool = False
    """True for gradients in float32 (float64 for float64 inputs). Torch's kernels round those of each tile, so that a
    sum has several rounding errors; that of a rank's own tile, usually the largest term, is the largest of these."""

    name = "INTERVALS"
    takes_modifiers = True

    def refusal(self, spec: CallSpec) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
        masks, k, v, options = self._tile(mask, k, v)
        options["split_lse"] = self.modifiers.split_lse
        result, *others = [attention_forward(q, k, v, each, scale, **options) for each in masks]
        return _merged(result, others) if others else result

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        masks, k, v, options = self._tile(mask, k, v)
        options["delta"] = attention_delta(grad_out, out) if self.delta is None else self.delta
        options["grad_dtype"] = wide_dtype(q) if self.wide_gradients or len(masks) > 1 else None
        tile = grad_out, q, k, v, out, lse
        grads, *others = [attention_backward(*tile, each, scale, **options) for each in masks]
        for more in others:
            for total, grad in zip(grads, more, strict=True):
                total.add_(grad)
        return grads

    def add_bias_gradient(
        self, total: Tensor, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: TileMask, scale: float,
    ) -> None:  # fmt: skip
        (row_mask,), k, v, options = self._tile(mask, k, v)  # with a bias, rows see one interval
        assert self.delta is not None
        share = attention_bias_gradient(
            grad_out, q, k, v, lse, row_mask, scale, delta=self.delta, grad_dtype=total.dtype, **options
        )
        tile_rows(mask, k.device).add_to_bias_columns(total, share)

    def with_modifiers(self, modifiers: Modifiers, delta: Tensor | None) -> IntervalAttention:
        return IntervalAttention(modifiers, delta)

    def _tile(self, mask: TileMask, k: Tensor, v: Tensor) -> tuple[tuple[RowMask, ...], Tensor, Tensor, dict[str, Any]]:
        """Return a tile's row masks, k and v without hidden rows, and modifiers as arguments of kernels."""
        if isinstance(mask, ShapedMask):
            return (CAUSAL_ROWS if mask.is_causal else FULL_ROWS,), k, v, {}
        rows = tile_rows(mask, k.device)
        k, v = rows.without_hidden(k, v)
        modifiers, dropout = self.modifiers, None
        bias = None if modifiers.bias is None else rows.bias_columns(modifiers.bias)
        if modifiers.seed is not None:
            queries, keys, in_runs = rows.positions
            first = modifiers.first_batch, modifiers.first_head
            dropout = Dropout(modifiers.dropout_p, modifiers.seed, queries, keys, *first, in_runs)
        return rows.masks, k, v, modifiers.of_tile(bias, dropout)


def _merged(result: tuple[Tensor, Tensor], others: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the LSE merge of results of the same rows, in float32 or wider."""
    out, lse = torch.empty_like(result[0], dtype=wide_dtype(result[0])), torch.empty_like(result[1])
    for index in range(0, len(others), MAX_PARTS):
        merge(out, lse, *result, [((0, out.size(2)), *other) for other in others[index : index + MAX_PARTS]])
        result = out, lse
    return result


class TileRows:
    """Row masks and positions of a tile on one device."""

    def __init__(self, tile: IntervalMask, device: torch.device) -> None:
        self._tile, self._device = tile, device
        self.masks, self._hidden = self._tables()
        """One for each interval that rows see."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the device."""
        tables = (*(table for mask in self.masks for table in (mask.lo, mask.hi)), self._hidden)
        yield from (table for table in tables if table is not None)

    @property
    def positions(self) -> tuple[Tensor, Tensor, bool]:
        """Global positions of rows (S,) and columns (T,), int32; True if both are in runs, for faster dropout."""
        return self._positions.read()

    @cached_property
    def _positions(self) -> Shared[tuple[Tensor, Tensor, bool]]:
        def made() -> tuple[Tensor, Tensor, bool]:
            both = self._queries(), positions_of(self._tile.keys.segments, "cpu")[slice(*self._tile.kv)]
            queries, keys = (self._on_device(x) for x in both)
            return queries, keys, all(map(are_in_runs, both))

        return Shared(self._device, made, lambda positions: positions[:2])

    def without_hidden(self, *of_columns: Tensor) -> tuple[Tensor, ...]:
        """Return K and V with 0 in columns that no row sees: kernels multiply them by weights of 0, and 0 NaN is NaN.

        Few tiles have such columns (those of batch rows with different masks), of others nothing is copied.
        """
        hidden = self._hidden
        return of_columns if hidden is None else tuple(x.masked_fill(hidden, 0) for x in of_columns)

    def bias_columns(self, bias: Tensor) -> Tensor:
        """Return the tile's columns of a bias (..., key positions or 1); a view if positions are evenly spaced."""
        columns = self._columns
        if bias.size(-1) == 1:
            return bias
        return bias[..., columns] if isinstance(columns, slice) else bias.index_select(-1, columns)

    def add_to_bias_columns(self, total: Tensor, share: Tensor) -> None:
        """Add a bias gradient to the tile's columns of `total`, which has the shape of the bias."""
        columns = self._columns
        if total.size(-1) == 1:
            total.add_(share)
        elif isinstance(columns, slice):
            total[..., columns].add_(share)
        else:
            total.index_add_(-1, columns, share.to(total.dtype))

    @cached_property
    def _columns(self) -> slice | Tensor:
        """Positions of the columns in the last dim of a bias."""
        keys, (start, stop) = self._tile.keys, self._tile.kv
        first, last = keys.position(start), keys.position(stop - 1)
        if last - first == stop - 1 - start:
            return slice(first, last + 1)
        if len(keys.segments) == 1 and keys.segments[0].block == 1:
            return slice(first, last + 1, keys.segments[0].period)
        return self.positions[1]

    def _queries(self) -> Tensor:
        """Return the global positions of rows, which ascend, on the host."""
        return positions_of(self._tile.queries, "cpu")[slice(*self._tile.q)]

    def _tables(self) -> tuple[tuple[RowMask, ...], Tensor | None]:
        """Return the row masks, and the columns that no row sees, (1 or B, 1, T, 1) boolean; None if there are none."""
        tile = self._tile
        queries, (start, stop) = self._queries(), tile.kv
        masks, edges = [], torch.zeros(len(tile.sets[0]), stop - start + 1, dtype=torch.int64, device="cpu")
        for of_batch in tile.sets:
            by_row = [_rows_before(tile.keys, seen_positions(bands, queries)) for bands in of_batch]
            lo, hi = torch.stack(by_row, 1).clamp_(start, stop).sub_(start)
            lo, hi = (torch.where(lo < hi, end, 0) for end in (lo, hi))
            # Rows that see a column: those that begin before its end, less those that end before.
            one = torch.ones_like(lo)
            edges.scatter_add_(1, lo, one).scatter_add_(1, hi, -one)
            masks.append(RowMask(lo=self._on_device(*lo), hi=self._on_device(*hi)))
        seen = edges.cumsum(1)[:, None, :-1, None]
        return tuple(masks), None if seen.all() else (seen == 0).to(self._device)

    def _on_device(self, *of_batch: Tensor) -> Tensor:
        together = of_batch[0] if len(of_batch) == 1 else torch.stack(of_batch)
        return together.to(torch.int32).to(self._device)


def _rows_before(keys: KeyRun, positions: Tensor) -> Tensor:
    """Return `keys.rows_before` of each position, or a negative number for 0.

    A search among segments is several times as fast as one among all keys.
    """
    # Before the first segment there is an empty one.
    facts = [(row, *segment) for row, segment in zip(keys.starts, keys.segments, strict=False)]
    table = torch.tensor([(0, 0, 0, 1, 1), *facts], dtype=torch.int64, device="cpu")
    row, first, length, block, period = table.t().contiguous()
    index = torch.searchsorted(first[1:], positions, right=True)
    if all(each.is_contiguous for each in keys.segments):
        return torch.minimum(positions + _at(row - first, index), _at(row + length, index))
    rows, of_block, of_period = positions - _at(first, index), _at(block, index), _at(period, index)
    blocks = rows // of_period
    rows = blocks * of_block + torch.minimum(rows - blocks * of_period, of_block)
    return torch.minimum(rows, _at(length, index)) + _at(row, index)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Return `values[index]` of one dim, in a fourth of the time."""
    return values.index_select(0, index.flatten()).view_as(index)


_MOST_BYTES = 64 << 20
"""Bytes of the tables, mostly on devices: 8 for each row of a tile, 16 with dropout, in each batch row."""
_cached_rows = LRUCache[Shared[TileRows]](_MOST_BYTES, pins=capturing)
"""Keys: mask (compared by identity) and device. Document masks are new with every batch: room for a few batches."""


def tile_rows(mask: TileMask, device: torch.device) -> TileRows:
    """Return the row mask and positions of a tile on a device, cached."""
    assert isinstance(mask, IntervalMask), "plans for this backend have interval masks"
    key = (mask, device)
    rows = _cached_rows.get(key)
    if rows is None:
        rows = _cached_rows.add(key, Shared(device, lambda: TileRows(mask, device), TileRows.tensors))
    return rows.read()
