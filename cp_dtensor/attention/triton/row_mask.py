"""Masks of one tile as an interval of columns for each row, and the tables that kernels derive from the intervals."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor._torch import current_stream_handle, is_in_cuda_graph

_Derived = TypeVar("_Derived")


@dataclass(frozen=True, eq=False)
class RowMask:
    """The columns of a tile that each row attends to: all, those up to the diagonal, or one interval a row.

    - `RowMask()`: every row attends to every column.
    - `RowMask(causal_offset=n)`: row i attends to column j iff j <= i + n.
    - `RowMask(lo=lo, hi=hi)`: row i attends to columns lo_i <= j < hi_i. Both are int32, (S,), or (B, S) for masks that
      differ between batch rows. Any numbers are valid, also outside the tile. Kernels skip most masked columns if
      neither lo nor hi ever decreases from row to row.

    Derived tables are cached in the mask: use one object in all layers, and do not change lo and hi in place. Each CUDA
    stream has its own entries, since a table is ordered only with the stream that computed it. CUDA graph capture reads
    no entries from outside the graph and leaves none for calls outside, so that a replay derives its tables from the
    lo and hi of that time.
    """

    causal_offset: int | None = None
    lo: Tensor | None = None
    hi: Tensor | None = None
    _captured: bool = field(init=False, repr=False)
    _derived: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        captured = self.lo is not None and self.lo.is_cuda and is_in_cuda_graph(self.lo.device)
        object.__setattr__(self, "_captured", captured)

    @cached_property
    def intervals(self) -> tuple[Tensor, Tensor] | None:
        """`(lo, hi)`, None for the other kinds of masks."""
        return None if self.lo is None or self.hi is None else (self.lo, self.hi)

    def padded_intervals(self, length: int) -> list[Tensor]:
        """Return `[lo, hi]`, (1 or B, length): after the last row come zeros, which are empty intervals."""
        both = self._both()
        return self._cached(
            ("padded", length), lambda: [F.pad(torch.atleast_2d(x), (0, length - x.size(-1))) for x in both]
        )

    def rows_of_columns(self, columns: int, block: int) -> Tensor:
        """Return, for each block of columns, the rows that attend to some of its columns, and those that attend to all.

        Args:
            columns: number of columns.
            block: columns of a block.

        Returns:
            (4, 1 or B, blocks), int32: rows in [0:1] contain all rows that attend to some column of the block; all rows
            in [2:3] attend to every column of it. Both ranges are exact if neither lo nor hi decreases among rows with
            an interval that is not empty, and a row with an empty one has all columns of the rows before it on one
            side. They are safe otherwise.

        >>> lo, hi = torch.tensor([0, 0, 1, 4], dtype=torch.int32), torch.tensor([1, 2, 4, 5], dtype=torch.int32)
        >>> RowMask(lo=lo, hi=hi).rows_of_columns(5, 2)[:, 0].T.tolist()  # columns 0 and 1, 2 and 3, 4
        [[0, 3, 1, 2], [2, 3, 2, 3], [3, 4, 3, 4]]
        """

        def computed() -> Tensor:
            lo, hi = map(torch.atleast_2d, self._both())
            start = torch.arange(0, columns, block, device=lo.device, dtype=torch.int32)
            start = start.expand(lo.size(0), -1).contiguous()
            stop = (start + block).clamp(max=columns)
            empty = lo >= hi
            reached = hi.masked_fill(empty, 0).cummax(-1).values
            first_seen = lo.masked_fill(empty, 2**31 - 1)
            # Empty intervals move to the column that the rows before have reached, so that lo and hi stay in order.
            lo, hi = (torch.where(empty, reached, x) for x in (lo, hi))
            edges = [
                torch.searchsorted(reached, start, right=True, out_int32=True),
                torch.searchsorted(first_seen.flip(-1).cummin(-1).values.flip(-1), stop, out_int32=True),
                torch.searchsorted(hi.flip(-1).cummin(-1).values.flip(-1), stop, out_int32=True),
                torch.searchsorted(lo.cummax(-1).values, start, right=True, out_int32=True),
            ]
            return torch.stack(edges)

        return self._cached(("rows", columns, block), computed)

    def columns_of_rows(self, columns: int, block: int) -> list[tuple[int, int]]:
        """Return, for each block of rows, the columns from the first to the last that any row of any batch row sees.

        The first call waits for the GPU. During CUDA graph capture, which forbids that, the result is all columns.

        >>> lo, hi = torch.tensor([0, 3, 2, 9], dtype=torch.int32), torch.tensor([2, 5, 2, 9], dtype=torch.int32)
        >>> RowMask(lo=lo, hi=hi).columns_of_rows(4, block=2)
        [(0, 4), (0, 0)]
        """
        lo, hi = self._both()
        rows = lo.size(-1)
        if rows == 0:
            return []
        if lo.is_cuda and torch.cuda.is_current_stream_capturing():
            return [(0, columns)] * -(-rows // block)

        def computed() -> list[tuple[int, int]]:
            start, stop = lo.clamp(min=0), hi.clamp(max=columns)
            empty = start >= stop
            first = _blocks(start.masked_fill(empty, columns), block, columns).amin((0, 2))
            last = _blocks(stop.masked_fill(empty, 0), block, 0).amax((0, 2))
            edges = torch.stack([torch.where(first < last, first, 0), last], 1)
            return [(first, last) for first, last in edges.tolist()]

        return self._cached(("columns", columns, block), computed)

    def _both(self) -> tuple[Tensor, Tensor]:
        assert self.intervals is not None
        return self.intervals

    def _cached(self, key: tuple[Hashable, ...], compute: Callable[[], _Derived]) -> _Derived:
        """Return the result of the first call of `compute` with this key."""
        assert self.lo is not None
        if self.lo.is_cuda:
            if is_in_cuda_graph(self.lo.device) != self._captured:
                return compute()
            key = (current_stream_handle(self.lo.device), *key)
        if key not in self._derived:
            self._derived[key] = compute()
        result: _Derived = self._derived[key]
        return result


FULL_ROWS, CAUSAL_ROWS = RowMask(), RowMask(causal_offset=0)


def _blocks(x: Tensor, block: int, fill: int) -> Tensor:
    """Return (S,) or (B, S) as (1 or B, blocks, block)."""
    x = torch.atleast_2d(x)
    return F.pad(x, (0, -x.size(-1) % block), value=fill).unflatten(-1, (-1, block))
