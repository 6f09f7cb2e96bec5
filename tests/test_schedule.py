"""Schedules: over all ranks, tiles cover every allowed (query, key) pair exactly once, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_dtensor.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Segment, Striped, TorchChunk
from cp_dtensor.masks import CAUSAL_TILE, FULL_TILE, Mask, TileMask
from cp_dtensor.schedule import (
    GatheredRows,
    GroupSegments,
    Steps,
    Tile,
    gathered_rows,
    gathered_steps,
    group_segments,
    ring_steps,
)

PADDING = -1


@st.composite
def calls(draw: st.DrawFn) -> tuple[Layout, int, int, int, int, Mask]:
    """(layout, q_len, kv_len, batch, ranks, mask)."""
    layouts = st.one_of(
        st.sampled_from([Contiguous(), HeadTail(), MirroredBatch(), TorchChunk()]),
        st.builds(Striped, st.integers(1, 5)),
    )
    q_len = draw(st.integers(0, 60))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(0, 60)))
    return (
        draw(layouts), q_len, kv_len, draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(st.sampled_from(Mask))
    )  # fmt: skip


def positions(segments: tuple[Segment, ...]) -> np.ndarray:
    return np.array([p for segment in segments for p in segment.positions()], dtype=np.int64)


def gathered_positions(group: GroupSegments, rows: GatheredRows) -> np.ndarray:
    """Global positions in the gathered buffer, row by row as `GatheredRows` describes it."""
    buffer = np.full(rows.part_starts[-1], PADDING)
    for rank, segments in enumerate(group.kv_by_rank):
        for part, segment in enumerate(segments):
            start = rows.row(rank, part)
            assert (buffer[start : start + segment.length] == PADDING).all(), "shards overlap in the buffer"
            buffer[start : start + segment.length] = positions((segment,))
    return buffer


def visible(mask: TileMask, rows: int, columns: int) -> np.ndarray:
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return np.ones((rows, columns), bool) if mask.block == 0 else column // mask.block <= row // mask.block


def times_covered(
    layout: Layout, q_len: int, kv_len: int, batch: int, ranks: int, mask: Mask, gathered: bool
) -> np.ndarray:
    """How often the tiles of all ranks cover each (batch row, query, key). Checks the tiles on the way."""
    count = np.zeros((batch, q_len, kv_len), dtype=np.int64)
    for rank in range(ranks):
        groups = group_segments(layout, q_len, kv_len, batch, rank, ranks)
        by_batch = {group.batch: group for group in groups}
        rows = gathered_rows(groups)
        for tile in (tile for step in steps_of(groups, rank, mask, gathered) for tile in step):
            group = by_batch[tile.batch]
            q = positions(group.q)[slice(*tile.q)]
            shard = gathered_positions(group, rows) if tile.source is None else positions(group.kv_by_rank[tile.source])
            kv = shard[slice(*tile.kv)]
            assert len(q) == tile.q[1] - tile.q[0], "the tile has queries that this rank does not own"
            assert len(kv) == tile.kv[1] - tile.kv[0], "the tile has keys that its source does not own"
            assert (kv != PADDING).all(), "the tile reads padding"
            seen = visible(tile.mask, len(q), len(kv))
            assert seen.any(axis=1).all(), "a row of the tile sees nothing"
            assert seen.size > 0, "the tile is empty"
            assert not tile.mask.is_causal or len(q) == len(kv), "a causal tile is not square"
            count[slice(*tile.batch), q[:, None], kv[None, :]] += seen
    return count


def steps_of(groups: tuple[GroupSegments, ...], rank: int, mask: Mask, gathered: bool) -> Steps:
    return (gathered_steps if gathered else ring_steps)(groups, rank, mask)


@pytest.mark.parametrize("gathered", [False, True], ids=["ring", "gathered"])
@settings(max_examples=200)
@given(call=calls())
def test_tiles_cover_every_allowed_pair_exactly_once(
    gathered: bool, call: tuple[Layout, int, int, int, int, Mask]
) -> None:
    _, q_len, kv_len, batch, _, mask = call
    allowed = np.ones((q_len, kv_len), dtype=np.int64)
    if mask is Mask.CAUSAL:
        allowed = np.tril(allowed)
    np.testing.assert_array_equal(
        times_covered(*call, gathered=gathered), np.broadcast_to(allowed, (batch, *allowed.shape))
    )


@given(calls())
def test_a_hop_of_the_ring_brings_the_shard_of_the_rank_that_many_before(
    call: tuple[Layout, int, int, int, int, Mask],
) -> None:
    layout, q_len, kv_len, batch, ranks, mask = call
    for rank in range(ranks):
        steps = ring_steps(group_segments(layout, q_len, kv_len, batch, rank, ranks), rank, mask)
        assert len(steps) == ranks
        for hop, tiles in enumerate(steps):
            assert {tile.source for tile in tiles} <= {(rank - hop) % ranks}


@given(calls())
def test_gathered_tiles_wait_for_the_parts_that_they_read(call: tuple[Layout, int, int, int, int, Mask]) -> None:
    layout, q_len, kv_len, batch, ranks, mask = call
    for rank in range(ranks):
        groups = group_segments(layout, q_len, kv_len, batch, rank, ranks)
        local, *parts = gathered_steps(groups, rank, mask)
        part_starts = gathered_rows(groups).part_starts
        assert {tile.source for tile in local} <= {rank}
        assert len(parts) == len(groups[0].q)
        for part, tiles in enumerate(parts):
            assert {tile.source for tile in tiles} <= {None}
            assert all(tile.kv[1] <= part_starts[part + 1] for tile in tiles)


@given(calls())
def test_the_own_shard_is_read_locally_and_not_from_the_buffer(call: tuple[Layout, int, int, int, int, Mask]) -> None:
    layout, q_len, kv_len, batch, ranks, mask = call
    for rank in range(ranks):
        groups = group_segments(layout, q_len, kv_len, batch, rank, ranks)
        rows = gathered_rows(groups)
        own = {
            row
            for part, length in enumerate(rows.lengths[rank])
            for row in range(rows.row(rank, part), rows.row(rank, part) + length)
        }
        for tile in (tile for step in gathered_steps(groups, rank, mask)[1:] for tile in step):
            assert not own & set(range(*tile.kv))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 32])
def test_head_tail_causal_gathers_into_at_most_four_tiles(ranks: int) -> None:
    most = 0
    for rank in range(ranks):
        groups = group_segments(HeadTail(), 8 * ranks, 8 * ranks, 1, rank, ranks)
        most = max(most, sum(map(len, gathered_steps(groups, rank, Mask.CAUSAL))))
    assert most == min(4, 2 * ranks - 1)


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(1), MirroredBatch()], ids=repr)
def test_without_a_mask_a_shard_is_one_tile_per_batch_group_and_part(layout: Layout) -> None:
    groups = group_segments(layout, 32, 32, 2, 1, 4)
    for tiles in gathered_steps(groups, 1, Mask.FULL)[1:]:
        assert len(tiles) <= 2 * len(groups)  # before and behind the rank's own rows
        assert {tile.q for tile in tiles} == {(0, 8)}


def test_head_tail_causal_by_hand() -> None:
    """Rank 1 of 2 owns positions 2 3 4 5, rank 0 owns 0 1 6 7; the buffer is 0 1 2 3 | 6 7 4 5."""
    groups = group_segments(HeadTail(), 8, 8, 1, 1, 2)
    local = Tile(1, (0, 1), (0, 4), (0, 4), CAUSAL_TILE)
    assert ring_steps(groups, 1, Mask.CAUSAL) == ((local,), (Tile(0, (0, 1), (0, 4), (0, 2), FULL_TILE),))
    assert gathered_steps(groups, 1, Mask.CAUSAL) == ((local,), (Tile(None, (0, 1), (0, 4), (0, 2), FULL_TILE),), ())


def test_stripes_of_one_token_make_triangles_shifted_by_a_row() -> None:
    """Rank 0 owns 0 2 4, rank 1 owns 1 3 5: rank 0's first query sees nothing of rank 1."""
    groups = group_segments(Striped(1), 6, 6, 1, 0, 2)
    _, (tile,) = ring_steps(groups, 0, Mask.CAUSAL)
    assert tile == Tile(1, (0, 1), (1, 3), (0, 2), CAUSAL_TILE)


def test_stripes_of_blocks_make_stairs() -> None:
    """Rank 1 owns 2 3, 6 7, rank 0 owns 0 1, 4 5."""
    groups = group_segments(Striped(2), 8, 8, 1, 1, 2)
    _, (tile,) = ring_steps(groups, 1, Mask.CAUSAL)
    assert tile == Tile(0, (0, 1), (0, 4), (0, 4), TileMask(2))


def test_the_gathered_buffer_pads_each_part_to_its_longest_segment() -> None:
    rows = gathered_rows(group_segments(HeadTail(), 5, 5, 1, 0, 2))  # chunks of 2, 1, 1, 1 tokens
    assert rows.lengths == ((2, 1), (1, 1))
    assert rows.pitch == (2, 1)
    assert rows.part_starts == (0, 4, 6)
    assert [rows.row(1, part) for part in (0, 1)] == [2, 5]


def test_causal_tiles_between_stripes_of_different_shape_are_refused() -> None:
    q, kv = Segment(0, 8, 2, 4), Segment(0, 8, 1, 2)
    group = GroupSegments((0, 1), (q,), ((kv,),))
    with pytest.raises(NotImplementedError, match=r"stripes of different shape.*block=2.*block=1"):
        ring_steps([group], 0, Mask.CAUSAL)
