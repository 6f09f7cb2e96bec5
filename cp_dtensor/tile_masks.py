"""Masks of one tile: of its rows and columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from cp_dtensor.bands import Band, Layer, pairs_of, within
from cp_dtensor.key_runs import KeyRun
from cp_dtensor.layouts import Segment, Span


class TileMask(ABC):
    """A mask over the rows and columns of one tile."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether every row is known to see every column."""

    @property
    @abstractmethod
    def is_causal(self) -> bool:
        """Whether the tile is known to be the plain causal triangle, which is always square here."""

    @abstractmethod
    def intervals(self, rows: int, columns: int, batch_row: int = 0) -> list[Span]:
        """For each row of a tile of that size, the columns that it sees; empty if the end is not beyond the start.

        Row by row, which is slow: for pictures and tests.
        """


@dataclass(frozen=True)
class ShapedMask(TileMask):
    """A mask that follows from the numbers of rows and columns.

    `block == 0`: nothing is masked. Otherwise row i sees column j iff `j // block <= i // block`; `block == 1` is the
    usual causal triangle, larger blocks make a staircase. Every row of a tile sees at least one column.
    """

    block: int = 0

    @property
    def is_full(self) -> bool:
        return self.block == 0

    @property
    def is_causal(self) -> bool:
        return self.block == 1

    def intervals(self, rows: int, columns: int, batch_row: int = 0) -> list[Span]:
        if not self.block:
            return [(0, columns)] * rows
        return [(0, min((row // self.block + 1) * self.block, columns)) for row in range(rows)]


FULL_TILE = ShapedMask(0)
CAUSAL_TILE = ShapedMask(1)


_FEW_SEGMENTS = 16
"""Runs of no more are looked at one by one."""


@dataclass(frozen=True, eq=False)
class IntervalMask(TileMask):
    """Row i of a tile sees the columns whose keys lie in the interval of its query: columns lo_i <= j < hi_i.

    Looked up by identity: what devices keep of it goes with it.
    """

    layers: tuple[Layer, ...]
    """One, or one for each of the tile's batch rows."""
    queries: tuple[Segment, ...]
    """The shard whose rows `q` are the tile's."""
    q: Span
    keys: KeyRun
    kv: Span
    """The tile's columns, counted in `keys`."""

    @property
    def is_full(self) -> bool:
        return False

    @property
    def is_causal(self) -> bool:
        return False

    def intervals(self, rows: int, columns: int, batch_row: int = 0) -> list[Span]:
        layer = self.layers[batch_row if len(self.layers) > 1 else 0]
        positions = [position for segment in self.queries for position in segment.positions()]
        seen = []
        for position in positions[slice(*self.q)]:
            band = next((band for band in layer if band.first <= position < band.last), None)
            lo, hi = (0, 0) if band is None else map(self.keys.rows_before, band.keys(position))
            seen.append((max(lo - self.kv[0], 0), min(hi, self.kv[1]) - self.kv[0]))
        return seen

    @cached_property
    def pairs(self) -> int:
        """Number of (row, column) pairs that are seen, in a batch row on average; of stripes and many pieces, about."""
        total = 0.0
        for layer in self.layers:
            for segment in self.queries:
                share = segment.length / max(segment.last + 1 - segment.start, 1)  # of a stripe's range
                for band in within(layer, (segment.start, segment.last + 1), self.keys.positions):
                    total += share * self._pairs_of(band)
        return int(total) // len(self.layers)

    def _pairs_of(self, band: Band) -> float:
        """With all queries of a clipped band."""
        if len(self.keys.segments) > _FEW_SEGMENTS:
            lo, hi = band.shown
            return band.pairs * (self.keys.rows_before(hi) - self.keys.rows_before(lo)) / (hi - lo)
        return sum(
            _density(keys) * pairs_of(((band,),), (band.first, band.last), (keys.start, keys.last + 1))
            for keys in self.keys.meeting(band.shown)
        )


def _density(segment: Segment) -> float:
    return segment.length / (segment.last + 1 - segment.start)
