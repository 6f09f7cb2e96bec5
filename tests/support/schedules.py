"""Calls described by layouts and masks, and counts of the pairs that tiles cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from cp_dtensor.plan.partition import LayoutPartition
from cp_dtensor.plan.tiles import ShapedMask, Tile, TileMask
from cp_dtensor.plan.tiling import GatheredRows, GroupSegments, ShapeTiling
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Segment, Span, Striped, TorchChunk
from cp_dtensor.spec.masks import Causal, Full, Mask

NOBODYS = -1


@dataclass(frozen=True)
class Call:
    """Facts of a call that determine the tiles of all ranks."""

    layout: Layout
    q_len: int
    kv_len: int
    batch: int
    ranks: int
    mask: Mask

    @property
    def groups(self) -> tuple[GroupSegments, ...]:
        return LayoutPartition(self.layout, self.q_len, self.kv_len, self.batch, self.ranks).groups()

    def allowed(self) -> np.ndarray:
        """Returns 1 for (query, key) pairs that the mask allows, 0 for others."""
        pairs = np.ones((self.q_len, self.kv_len), dtype=np.int64)
        return np.tril(pairs) if self.mask == Causal() else pairs


def tiles_against(groups: Sequence[GroupSegments], rank: int, source: int, mask: Mask) -> tuple[Tile, ...]:
    return ShapeTiling(tuple(groups), mask).tiles_against(rank, source)


def gathered_tiles(groups: Sequence[GroupSegments], rank: int, mask: Mask) -> tuple[Tile, ...]:
    return ShapeTiling(tuple(groups), mask).gathered_tiles(rank)


def recv_parts(groups: Sequence[GroupSegments], rank: int, source: int, mask: Mask) -> tuple[int, ...]:
    return ShapeTiling(tuple(groups), mask).reading.parts(rank, source)


def gathered_rows(groups: Sequence[GroupSegments], rank: int, mask: Mask) -> GatheredRows:
    return ShapeTiling(tuple(groups), mask).gathered_rows(rank)


def ring(groups: Sequence[GroupSegments], rank: int, mask: Mask) -> tuple[Tile, ...]:
    """Returns the tiles of a rank against the shards of all ranks."""
    return tuple(tile for source in range(groups[0].world_size) for tile in tiles_against(groups, rank, source, mask))


def gathered(groups: Sequence[GroupSegments], rank: int, mask: Mask) -> tuple[Tile, ...]:
    """Returns the tiles of a rank against its own shard and the gathered buffer."""
    return tiles_against(groups, rank, rank, mask) + gathered_tiles(groups, rank, mask)


any_layout = st.one_of(
    st.sampled_from([Contiguous(), HeadTail(), MirroredBatch(), TorchChunk()]), st.builds(Striped, st.integers(1, 5))
)


def plain_masks(layout: Layout) -> st.SearchStrategy[Mask]:
    """Returns the masks that tiles by shape can cover: for stripes of several tokens only the full mask."""
    stripes_of_blocks = isinstance(layout, Striped) and layout.block > 1
    return st.just(Full()) if stripes_of_blocks else st.sampled_from((Full(), Causal()))


@st.composite
def calls(draw: st.DrawFn, longest: int = 60) -> Call:
    q_len = draw(st.integers(0, longest))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(0, longest)))
    layout = draw(any_layout)
    return Call(layout, q_len, kv_len, draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(plain_masks(layout)))


def positions(segments: tuple[Segment, ...]) -> np.ndarray:
    """Returns the global positions of the rows of a shard, in local order."""
    return np.array([p for segment in segments for p in segment.positions()], dtype=np.int64)


def gathered_positions(group: GroupSegments, rows: GatheredRows) -> np.ndarray:
    """Returns the global positions of the rows of the gathered buffer, by `GatheredRows`."""
    buffer = np.full(rows.total, NOBODYS)
    for rank, segments in enumerate(group.kv_by_rank):
        for part, segment in enumerate(segments):
            if rows.starts[rank][part] < 0:
                continue
            place = slice(*rows.span(rank, part))
            assert (buffer[place] == NOBODYS).all(), "shards overlap in the buffer"
            buffer[place] = positions((segment,))
    return buffer


def seen_by(mask: TileMask, rows: int, columns: int, batch_row: int = 0) -> np.ndarray:
    """Returns the columns of a tile that its rows see."""
    if isinstance(mask, ShapedMask):
        return np.tri(rows, columns, dtype=bool) if mask.is_causal else np.ones((rows, columns), bool)
    q, kv = positions(mask.queries)[slice(*mask.q), None], positions(mask.keys.segments)[slice(*mask.kv)]
    seen = np.zeros((rows, columns), int)
    for of_batch in mask.sets:
        for first, last, lo, hi, left, right in of_batch[batch_row if len(of_batch) > 1 else 0]:
            lo, hi = np.maximum(lo, q - left), np.minimum(hi, q + right + 1)
            seen += (first <= q) & (q < last) & (lo <= kv) & (kv < hi)
    assert seen.max(initial=0) <= 1, "a pair is in one interval of a row"
    return seen > 0


def count_covered(
    count: np.ndarray, groups: tuple[GroupSegments, ...], rank: int, heads: Span, tiles: Iterable[Tile], mask: Mask
) -> None:
    """Adds the pairs of a rank's tiles to `count` (batch rows, heads, queries, keys), and checks each tile."""
    by_batch = {group.batch: group for group in groups}
    rows = gathered_rows(groups, rank, mask)
    for tile in tiles:
        group = by_batch[tile.batch]
        q = positions(group.q_by_rank[rank])[slice(*tile.q)]
        shard = gathered_positions(group, rows) if tile.source is None else positions(group.kv_by_rank[tile.source])
        kv = shard[slice(*tile.kv)]
        assert len(q) == tile.q[1] - tile.q[0], "the tile has queries that this rank does not own"
        assert len(kv) == tile.kv[1] - tile.kv[0], "the tile has keys that its source does not own"
        assert (kv != NOBODYS).all(), "the tile reads a gap in the buffer"
        seen = seen_by(tile.mask, len(q), len(kv))
        assert seen.size > 0, "the tile is empty"
        assert seen.any(axis=1).all(), "a row of the tile sees nothing"
        assert seen.any(axis=0).all(), "a column of the tile is seen by nothing"
        assert not tile.mask.is_causal or len(q) == len(kv), "a causal tile is not square"
        for head in range(*heads):
            count[slice(*tile.batch), head, q[:, None], kv[None, :]] += seen
