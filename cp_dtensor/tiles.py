"""Tiles: rectangles and triangles of the attention matrix, each one attention call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from cp_dtensor.layouts import Span
from cp_dtensor.tile_masks import CAUSAL_TILE, FULL_TILE, TileMask


@dataclass(frozen=True)
class Tile:
    """One attention call: rows `q` of the local queries against rows `kv` of some keys and values.

    `kv` counts rows of `source`'s shard, or, in a gathered schedule, rows of the gathered buffer (`source` is then
    None). `batch` is the range of batch rows concerned.
    """

    source: int | None
    batch: Span
    q: Span
    kv: Span
    mask: TileMask


def joined(tiles: list[Tile]) -> list[Tile]:
    """Fewer and larger tiles that cover the same."""
    return _join_rows(_join_columns(tiles))


def _join_columns(tiles: list[Tile]) -> list[Tile]:
    """Joins unmasked tiles of the same queries whose keys are neighbours."""
    wider: list[Tile] = []
    for tile in sorted(tiles, key=lambda tile: (tile.q, tile.kv)):
        last = wider[-1] if wider else None
        if last and last.mask.is_full and tile.mask.is_full and last.q == tile.q and last.kv[1] == tile.kv[0]:
            wider[-1] = replace(last, kv=(last.kv[0], tile.kv[1]))
        else:
            wider.append(tile)
    return wider


def _join_rows(tiles: list[Tile]) -> list[Tile]:
    """Joins unmasked tiles of the same keys whose queries are neighbours."""
    wider: list[Tile] = []
    for _, same_kv in groupby(sorted(tiles, key=lambda tile: (tile.kv, tile.q)), key=lambda tile: tile.kv):
        for tile in same_kv:
            last = wider[-1] if wider else None
            if last and last.kv == tile.kv and last.mask.is_full and tile.mask.is_full and last.q[1] == tile.q[0]:
                wider[-1] = replace(last, q=(last.q[0], tile.q[1]))
            else:
                wider.append(tile)
    return sorted(wider, key=lambda tile: (tile.q, tile.kv))


def without_long_triangles(tiles: Iterable[Tile], longest: int) -> tuple[Tile, ...]:
    """The same pairs with every triangle of more than `longest` rows cut into two of half its size and a square.

    >>> [(t.q, t.kv) for t in without_long_triangles([Tile(0, (0, 1), (0, 4), (0, 4), CAUSAL_TILE)], 2)]
    [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((2, 4), (2, 4))]
    """
    cut: list[Tile] = []
    for tile in tiles:
        (first, last), columns = tile.q, tile.kv[0]
        if tile.mask != CAUSAL_TILE or last - first <= longest:
            cut.append(tile)
            continue
        half = (last - first) // 2
        upper = replace(tile, q=(first, first + half), kv=(columns, columns + half))
        square = replace(tile, q=(first + half, last), kv=upper.kv, mask=FULL_TILE)
        lower = replace(tile, q=square.q, kv=(columns + half, tile.kv[1]))
        cut += [*without_long_triangles([upper], longest), square, *without_long_triangles([lower], longest)]
    return tuple(cut)
