"""Which tiles a rank computes, and which keys travel for them: of plain masks by shape, of others by row.

A tiling is of all ranks of an axis, and the same on each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cp_dtensor.masks import Mask
from cp_dtensor.schedule import (
    GatheredRows,
    GroupSegments,
    gathered_rows,
    gathered_tiles,
    tiles_against,
    wanted_parts,
)
from cp_dtensor.tiles import Tile

RUN = 16
"""Positions: a run of so many that begins at a multiple of it holds whole groups of those that share random numbers."""


class Masking(Enum):
    """How tiles are masked."""

    BY_SHAPE = "by shape"
    """Rectangles and triangles, of which every backend has fast kernels. For plain masks."""
    BY_ROW = "by row"
    """Every row sees an interval of columns. For any mask."""
    BY_ROW_IN_RUNS = "by row, in runs of positions"
    """Likewise, and where shards are in runs of `RUN` positions, so are tiles: dropout is faster."""
    BY_ROW_UNBROKEN = "by row, of unbroken columns"
    """Likewise, and the columns of a tile have neighbouring positions, so that a bias can be cut."""


class Tiling(ABC):
    """Tiles, and transfers of what they read."""

    @property
    @abstractmethod
    def groups(self) -> Sequence[GroupSegments]:
        """What all ranks have."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def tiles_against(self, rank: int, source: int) -> tuple[Tile, ...]:
        """Tiles of `rank`'s queries against the shard of `source` (its own too), whose rows they count."""

    @abstractmethod
    def gathered_tiles(self, rank: int) -> tuple[Tile, ...]:
        """Tiles of `rank`'s queries against all other ranks' keys, counting rows of `gathered_rows`."""

    @abstractmethod
    def gathered_rows(self, rank: int) -> GatheredRows:
        """The buffer of `rank` that `gathered_tiles` speaks of. Lengths of parts are the same for all ranks."""

    @abstractmethod
    def wanted(self, rank: int, source: int) -> tuple[int, ...]:
        """The parts of `source`'s shard of which `rank`'s queries see anything: only these travel. None of its own."""

    def most_rows(self) -> int:
        """Rows of the longest of all ranks' buffers."""
        return max(self.gathered_rows(rank).total for rank in range(self.world_size))


@dataclass(frozen=True)
class TilingByShape(Tiling):
    """Rectangles and triangles; parts are segments. Every rank's buffer has room for all keys."""

    _groups: tuple[GroupSegments, ...]
    mask: Mask

    @property
    def groups(self) -> Sequence[GroupSegments]:
        return self._groups

    @property
    def world_size(self) -> int:
        return self._groups[0].world_size

    def tiles_against(self, rank: int, source: int) -> tuple[Tile, ...]:
        return tiles_against(self._groups, rank, source, self.mask)

    def gathered_tiles(self, rank: int) -> tuple[Tile, ...]:
        return gathered_tiles(self._groups, rank, self.mask)

    def gathered_rows(self, rank: int) -> GatheredRows:
        return gathered_rows(self._groups)

    def wanted(self, rank: int, source: int) -> tuple[int, ...]:
        return wanted_parts(self._groups, rank, source, self.mask) if rank != source else ()
