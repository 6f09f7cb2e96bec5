"""Masks of one tile: of its rows and columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileMask:
    """A mask over the rows and columns of one tile.

    `block == 0`: nothing is masked. Otherwise row i sees column j iff `j // block <= i // block`; `block == 1` is the
    usual causal triangle, larger blocks make a staircase. Every row of a tile sees at least one column.
    """

    block: int = 0

    @property
    def is_full(self) -> bool:
        """Whether every row sees every column."""
        return self.block == 0

    @property
    def is_causal(self) -> bool:
        """Whether the tile is the plain causal triangle, which is always square here."""
        return self.block == 1


FULL_TILE = TileMask(0)
CAUSAL_TILE = TileMask(1)
