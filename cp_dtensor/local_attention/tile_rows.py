"""What the rows of a tile see, on a device: computed once for each tile and device, and kept for later calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from cp_dtensor import _torch_private
from cp_dtensor.bands import Layer
from cp_dtensor.kept_values import KeptValues
from cp_dtensor.kernels.attention_dropout import are_in_runs
from cp_dtensor.key_runs import KeyRun
from cp_dtensor.masked_attention import RowMask
from cp_dtensor.tensors import positions_of
from cp_dtensor.tile_masks import IntervalMask


class TileRows:
    """Intervals and positions of a tile's rows and columns."""

    def __init__(self, mask: IntervalMask, device: torch.device) -> None:
        self._queries, self._q = mask.queries, mask.q
        self._keys, self._kv = mask.keys, mask.kv
        self._device = device
        # The mask too: what kernels derive from it is kept unless it is a mask of a CUDA graph.
        self.mask = _torch_private.prepared(lambda: self._row_mask(mask.layers))

    @cached_property
    def q_positions(self) -> torch.Tensor:
        """(S,), int32: positions of the rows in the whole sequence."""
        return _torch_private.prepared(lambda: self._on_device(self._rows()))

    @cached_property
    def kv_positions(self) -> torch.Tensor:
        """(T,), int32: positions of the columns."""
        return _torch_private.prepared(lambda: self._on_device(self._key_positions()))

    @cached_property
    def in_runs(self) -> bool:
        """Whether both are in runs, for which dropout is faster."""
        return _torch_private.prepared(lambda: are_in_runs(self._rows()) and are_in_runs(self._key_positions()))

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

    def _row_mask(self, layers: Sequence[Layer]) -> RowMask:
        lo, hi = zip(*(self._intervals(layer) for layer in layers), strict=True)
        return RowMask(lo=self._on_device(*lo), hi=self._on_device(*hi))

    def _rows(self) -> torch.Tensor:
        """Positions of the rows, on the host."""
        return positions_of(self._queries, "cpu")[slice(*self._q)]

    def _key_positions(self) -> torch.Tensor:
        """Positions of the columns, on the host."""
        return positions_of(self._keys.segments, "cpu")[slice(*self._kv)]

    def _intervals(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
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
