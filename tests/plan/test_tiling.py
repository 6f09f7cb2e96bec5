"""Tilings: over all ranks, tiles cover every allowed (query, key) pair exactly once and no other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedules import (
    Call,
    calls,
    count_covered,
    gathered_positions,
    gathered_rows,
    gathered_tiles,
    recv_parts,
    ring,
    tiles_against,
)

from cp_dtensor.plan.partition import LayoutPartition
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE, Tile, without_long_triangles
from cp_dtensor.plan.tiling import GroupSegments
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Segment, Striped
from cp_dtensor.spec.masks import Causal, Full


@settings(max_examples=200)
@given(call=calls())
def test_tiles_of_short_triangles_cover_every_allowed_pair_exactly_once(call: Call) -> None:
    """Those of whole triangles are in plans: tests/plan/test_plan.py."""
    count = np.zeros((call.batch, 1, call.q_len, call.kv_len), dtype=np.int64)
    for rank in range(call.ranks):
        tiles = without_long_triangles(ring(call.groups, rank, call.mask), longest=3)
        count_covered(count, call.groups, rank, (0, 1), tiles, call.mask)
    np.testing.assert_array_equal(count, np.broadcast_to(call.allowed(), count.shape))


@given(calls(), st.integers(1, 60))
def test_long_triangles_are_cut_until_none_is_too_long(call: Call, longest: int) -> None:
    for rank in range(call.ranks):
        tiles = ring(call.groups, rank, call.mask)
        cut = without_long_triangles(tiles, longest)
        assert all(tile.q[1] - tile.q[0] <= longest for tile in cut if tile.mask == CAUSAL_TILE)
        short = [tile for tile in tiles if tile.mask != CAUSAL_TILE or tile.q[1] - tile.q[0] <= longest]
        assert set(short) <= set(cut), "what is short enough stays as it is"


@given(calls())
def test_the_buffer_has_the_parts_of_others_that_are_read_and_no_gap(call: Call) -> None:
    for rank in range(call.ranks):
        rows = gathered_rows(call.groups, rank, call.mask)
        read = {
            (source, part) for source in range(call.ranks) for part in recv_parts(call.groups, rank, source, call.mask)
        }
        assert {*rows.places} == read
        assert rows.total == sum(rows.lengths[source][part] for source, part in read)
        for source in range(call.ranks):
            assert {tile.source for tile in tiles_against(call.groups, rank, source, call.mask)} <= {source}
        assert {tile.source for tile in gathered_tiles(call.groups, rank, call.mask)} <= {None}


@given(calls())
def test_the_buffer_is_in_natural_order_where_segments_are_unbroken(call: Call) -> None:
    """Of the first batch group: `MirroredBatch` has the ranks in reversed order in the second."""
    first = call.groups[0]
    for rank in range(call.ranks):
        rows = gathered_rows(call.groups, rank, call.mask)
        found = gathered_positions(first, rows).tolist()
        if all(segment.is_contiguous for segments in first.kv_by_rank for segment in segments):
            assert found == sorted(found)
        else:  # stripes cannot be
            segments = sorted((first.kv_by_rank[owner][part] for owner, part in rows.places), key=lambda it: it.start)
            assert found == [position for segment in segments for position in segment.positions()]


@given(st.integers(0, 200), st.integers(1, 32))
def test_head_tail_causal_gathers_into_at_most_two_tiles(length: int, ranks: int) -> None:
    """Also where the length does not divide evenly, or there are more chunks than tokens."""
    call = Call(HeadTail(), length, length, 1, ranks, Causal())
    for rank in range(ranks):
        assert len(tiles_against(call.groups, rank, rank, Causal())) <= 1
        assert len(gathered_tiles(call.groups, rank, Causal())) <= 2


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(1), MirroredBatch()], ids=repr)
def test_without_a_mask_all_queries_see_all_that_is_gathered_in_one_tile(layout: Layout) -> None:
    groups = LayoutPartition(layout, 32, 32, 2, 4).groups()
    tiles = gathered_tiles(groups, 1, Full())
    assert [(tile.batch, tile.q, tile.kv, tile.mask) for tile in tiles] == [
        (group.batch, (0, 8), (0, 24), FULL_TILE) for group in groups
    ]


def test_stripes_of_one_token_make_triangles_shifted_by_a_row() -> None:
    """Rank 0 owns 0 2 4, rank 1 owns 1 3 5: rank 0's first query sees nothing of rank 1."""
    (tile,) = tiles_against(LayoutPartition(Striped(1), 6, 6, 1, 2).groups(), 0, 1, Causal())
    assert tile == Tile(1, (0, 1), (1, 3), (0, 2), CAUSAL_TILE)


@pytest.mark.parametrize(
    ("q", "kv"), [(Segment(0, 8, 1, 2), Segment(0, 8, 1, 3)), (Segment(0, 8, 2, 4), Segment(2, 8, 2, 4))]
)
def test_causal_tiles_between_other_stripes_are_refused(q: Segment, kv: Segment) -> None:
    groups = [GroupSegments((0, 1), ((q,),), ((kv,),))]
    with pytest.raises(NotImplementedError, match="need stripes of one token and of equal periods"):
        tiles_against(groups, 0, 0, Causal())
