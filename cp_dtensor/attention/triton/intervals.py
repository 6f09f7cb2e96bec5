"""Intervals of columns, one for each row, and what kernels derive from them, which is computed once for all calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from cp_dtensor._torch import current_stream_handle, is_in_cuda_graph

_Derived = TypeVar("_Derived")


class Intervals:
    """Row i sees columns lo_i <= j < hi_i: int32, (S,) or (B, S), whose numbers do not change from now on.

    What is derived is kept for the stream that computed it: it is not ordered with others. Under CUDA graph capture
    nothing is taken from or kept for calls outside of it, so that a replay computes everything anew from the lo and hi
    that it finds.
    """

    def __init__(self, lo: torch.Tensor, hi: torch.Tensor) -> None:
        self.lo, self.hi = lo, hi
        self._captured = lo.is_cuda and is_in_cuda_graph(lo.device)
        self._derived: dict[Hashable, Any] = {}

    def derived(self, key: tuple[Hashable, ...], compute: Callable[[], _Derived]) -> _Derived:
        """What `compute` returns, from the first call with this key."""
        if self.lo.is_cuda:
            if is_in_cuda_graph(self.lo.device) != self._captured:
                return compute()
            key = (current_stream_handle(self.lo.device), *key)
        if key not in self._derived:
            self._derived[key] = compute()
        result: _Derived = self._derived[key]
        return result

    def lines(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(lo, hi)` as kernels read them: contiguous."""
        return self.derived(("lines",), lambda: (self.lo.contiguous(), self.hi.contiguous()))

    def padded_lines(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`(lo, hi)`, (1 or B, length): zeros, which are empty intervals, after the last row."""

        def padded(x: torch.Tensor) -> torch.Tensor:
            return F.pad(torch.atleast_2d(x), (0, length - x.size(-1)))

        return self.derived(("padded", length), lambda: (padded(self.lo), padded(self.hi)))

    def rows_of_columns(self, columns: int, block: int) -> torch.Tensor:
        """What the function of that name returns for these intervals."""
        return self.derived(("rows", columns, block), lambda: rows_of_columns(self.lo, self.hi, columns, block))

    def columns_of_rows(self, columns: int, block: int) -> list[tuple[int, int]]:
        """For each block of rows, in any batch row: columns from the first to the last that any of them sees.

        Waits for the GPU, once; under capture, where that cannot be, every block sees every column.

        >>> lo, hi = torch.tensor([0, 3, 2, 9], dtype=torch.int32), torch.tensor([2, 5, 2, 9], dtype=torch.int32)
        >>> Intervals(lo, hi).columns_of_rows(4, block=2)
        [(0, 4), (0, 0)]
        """
        rows = self.lo.size(-1)
        if rows == 0:
            return []
        if self.lo.is_cuda and torch.cuda.is_current_stream_capturing():
            return [(0, columns)] * -(-rows // block)

        def computed() -> list[tuple[int, int]]:
            lo, hi = self.lo.clamp(min=0), self.hi.clamp(max=columns)
            nothing = lo >= hi
            first = _blocks(lo.masked_fill(nothing, columns), block, columns).amin((0, 2))
            last = _blocks(hi.masked_fill(nothing, 0), block, 0).amax((0, 2))
            edges = torch.stack([torch.where(first < last, first, 0), last], 1)
            return [(start, stop) for start, stop in edges.tolist()]

        return self.derived(("columns", columns, block), computed)


def rows_of_columns(lo: torch.Tensor, hi: torch.Tensor, columns: int, block: int) -> torch.Tensor:
    """Which rows see each block of columns, for intervals [lo, hi) of rows (S,) or (B, S), int32.

    Returns:
        (4, 1 or B, blocks), int32: the rows that see any column of the block are in [0:1], those in [2:3] see all of
        it. Both as tight as can be if neither lo nor hi ever decreases among rows that see anything, and rows between
        them that see nothing have all columns of the rows before on one side; else safe.

    >>> lo, hi = torch.tensor([0, 0, 1, 4], dtype=torch.int32), torch.tensor([1, 2, 4, 5], dtype=torch.int32)
    >>> rows_of_columns(lo, hi, 5, 2)[:, 0].T.tolist()  # columns 0 and 1, 2 and 3, 4
    [[0, 3, 1, 2], [2, 3, 2, 3], [3, 4, 3, 4]]
    """
    lo, hi = torch.atleast_2d(lo), torch.atleast_2d(hi)
    start = torch.arange(0, columns, block, device=lo.device, dtype=torch.int32).expand(lo.size(0), -1).contiguous()
    stop = (start + block).clamp(max=columns)
    nothing = lo >= hi
    reached = hi.masked_fill(nothing, 0).cummax(-1).values
    first_seen = lo.masked_fill(nothing, 2**31 - 1)
    # An empty interval where the rows before have come to: so what follows, and what came before, is still in order.
    lo, hi = (torch.where(nothing, reached, x) for x in (lo, hi))
    edges = [
        torch.searchsorted(reached, start, right=True, out_int32=True),
        torch.searchsorted(first_seen.flip(-1).cummin(-1).values.flip(-1), stop, out_int32=True),
        torch.searchsorted(hi.flip(-1).cummin(-1).values.flip(-1), stop, out_int32=True),
        torch.searchsorted(lo.cummax(-1).values, start, right=True, out_int32=True),
    ]
    return torch.stack(edges)


def _blocks(x: torch.Tensor, block: int, fill: int) -> torch.Tensor:
    """(S,) or (B, S) as (1 or B, blocks, block)."""
    x = torch.atleast_2d(x)
    return F.pad(x, (0, -x.size(-1) % block), value=fill).unflatten(-1, (-1, block))
