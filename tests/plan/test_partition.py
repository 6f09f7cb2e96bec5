"""Partitions over two mesh axes: the tiles of all axes cover every allowed (query, key) pair exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.schedules import (
    Call,
    any_layout,
    count_covered,
    gathered,
    gathered_tiles,
    plain_masks,
    positions,
    ring,
    tiles_against,
)

from cp_dtensor.plan.partition import InnerPartition, LayoutPartition, MergedPartition, OuterPartition
from cp_dtensor.plan.plan import TilePlan, ring_plan
from cp_dtensor.plan.tiles import Tile
from cp_dtensor.plan.tiling import GatheredRows, GroupSegments, ShapeTiling
from cp_dtensor.spec.layouts import HeadTail, Layout, Segment, Striped
from cp_dtensor.spec.masks import Causal, Full, Mask

Groups = tuple[GroupSegments, ...]


@dataclass(frozen=True)
class TwoAxes:
    """A call over outer x inner ranks."""

    call: Call
    outer: int
    inner: int

    @property
    def whole(self) -> LayoutPartition:
        call = self.call
        return LayoutPartition(call.layout, call.q_len, call.kv_len, call.batch, call.ranks)

    @property
    def merged(self) -> MergedPartition:
        return MergedPartition(self.whole, self.inner)

    def nothing_counted(self) -> np.ndarray:
        """(batch rows, heads, queries, keys)"""
        return np.zeros((self.call.batch, 1, self.call.q_len, self.call.kv_len), dtype=np.int64)

    def check_covered_once(self, count: np.ndarray) -> None:
        np.testing.assert_array_equal(count, np.broadcast_to(self.call.allowed(), count.shape))


def two_axes(
    layout: Layout, q_len: int, kv_len: int, outer: int, inner: int, mask: Mask = Causal(), batch: int = 1
) -> TwoAxes:
    return TwoAxes(Call(layout, q_len, kv_len, batch, outer * inner, mask), outer, inner)


@st.composite
def cases(draw: st.DrawFn) -> TwoAxes:
    q_len = draw(st.integers(0, 40))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(0, 40)))
    layout, batch = draw(any_layout), draw(st.integers(1, 3))
    mask = draw(plain_masks(layout))
    return two_axes(layout, q_len, kv_len, draw(st.integers(1, 4)), draw(st.integers(1, 4)), mask, batch)


# The ends of stripes are unbroken ranges in some ranks' shards and not in others', or are missing.
BROKEN_STRIPES = [
    two_axes(Striped(1), 5, 5, 2, 2),
    two_axes(Striped(1), 5, 2, 2, 2),
    two_axes(Striped(1), 2, 5, 2, 2),
    two_axes(Striped(3), 13, 13, 2, 2, Full()),
    two_axes(Striped(2), 9, 1, 3, 2, Full()),
]


def with_examples(test: Callable[..., None]) -> Callable[..., None]:
    for case in BROKEN_STRIPES:
        test = example(case=case)(test)
    return test


# Ulysses inside of a ring: the rows of a whole inner axis together


def check_is_of_all_its_ranks(
    rows: GatheredRows, whole: tuple[tuple[Segment, ...], ...], merged: tuple[Segment, ...], first: int, inner: int
) -> None:
    """The merged rows of the inner ranks have the positions that the outer axis expects."""
    found = np.full(rows.total, -1)
    for inner_rank in range(inner):
        own = positions(whole[first + inner_rank])
        for part in range(len(rows.lengths[inner_rank])):
            found[slice(*rows.span(inner_rank, part))] = own[slice(*rows.local_span(inner_rank, part))]
    np.testing.assert_array_equal(found, positions(merged))


@with_examples
@given(case=cases())
def test_merged_rows_of_an_outer_rank_are_those_of_its_inner_ranks(case: TwoAxes) -> None:
    whole, merged = case.whole.groups(), case.merged.groups()
    assert [group.batch for group in merged] == [group.batch for group in whole]
    for outer_rank in range(case.outer):
        query_rows, key_rows = case.merged.rows(outer_rank)
        first = outer_rank * case.inner
        for of_whole, of_merged in zip(whole, merged, strict=True):
            assert of_merged.world_size == len(of_merged.q_by_rank) == case.outer
            check_is_of_all_its_ranks(
                query_rows, of_whole.q_by_rank, of_merged.q_by_rank[outer_rank], first, case.inner
            )
            check_is_of_all_its_ranks(
                key_rows, of_whole.kv_by_rank, of_merged.kv_by_rank[outer_rank], first, case.inner
            )


@given(cases())
def test_all_outer_ranks_have_as_many_parts_and_batch_groups_have_the_same_lengths(case: TwoAxes) -> None:
    """Parts are collectives, and the gathered buffer is one for all batch groups."""
    for partition in (case.merged, *(OuterPartition(case.whole, case.inner, rank) for rank in range(case.inner))):
        groups = partition.groups()
        for by_rank in ([group.kv_by_rank for group in groups], [group.q_by_rank for group in groups]):
            assert len({len(segments) for of_group in by_rank for segments in of_group}) == 1
            lengths = [[[segment.length for segment in parts] for parts in of_group] for of_group in by_rank]
            assert all(of_group == lengths[0] for of_group in lengths)


@pytest.mark.parametrize("tiles_of", [ring, gathered])
@settings(max_examples=150)
@with_examples
@given(case=cases())
def test_tiles_of_merged_rows_cover_every_allowed_pair_exactly_once(
    tiles_of: Callable[[Groups, int, Mask], tuple[Tile, ...]], case: TwoAxes
) -> None:
    count, groups = case.nothing_counted(), case.merged.groups()
    for outer_rank in range(case.outer):
        count_covered(count, groups, outer_rank, (0, 1), tiles_of(groups, outer_rank, case.call.mask), case.call.mask)
    case.check_covered_once(count)


@given(st.sampled_from((Full(), Causal())), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_even_head_tail_shards_unite_to_two_unbroken_ranges(mask: Mask, outer: int, inner: int, chunk: int) -> None:
    """So they take as few tiles as without an inner axis."""
    length = 2 * outer * inner * chunk
    case, plain = two_axes(HeadTail(), length, length, outer, inner, mask), HeadTail()
    (group,) = case.merged.groups()
    for outer_rank, (q, kv) in enumerate(zip(group.q_by_rank, group.kv_by_rank, strict=True)):
        assert q == kv
        expected = positions(plain.segments(length, outer_rank, outer))
        np.testing.assert_array_equal(positions(q), expected)
        assert len(q) == (1 if outer == 1 else 2)
        own = tiles_against((group,), outer_rank, outer_rank, mask)
        assert len(own) + len(gathered_tiles((group,), outer_rank, mask)) <= (3 if mask == Causal() else 4)


# Nested ring


def outer_plan(case: TwoAxes, outer_rank: int, inner_rank: int) -> TilePlan:
    partition = OuterPartition(case.whole, case.inner, inner_rank)
    return ring_plan(ShapeTiling(partition.groups(), case.call.mask), outer_rank, kv_heads=1)


def as_of_whole(tile: Tile, source: int, inner: int) -> Tile:
    """The tile of an inner ring, with its source counted among all ranks."""
    assert tile.source is not None
    return Tile(source * inner + tile.source, tile.batch, tile.q, tile.kv, tile.mask)


@settings(max_examples=150)
@with_examples
@given(case=cases())
def test_inner_rings_of_all_outer_hops_cover_every_allowed_pair_exactly_once(case: TwoAxes) -> None:
    count, whole, inner = case.nothing_counted(), case.whole.groups(), case.inner
    for outer_rank in range(case.outer):
        for source in range(case.outer):
            groups = InnerPartition(case.whole, inner, outer_rank, source).groups()
            for inner_rank in range(inner):
                tiles = [as_of_whole(tile, source, inner) for tile in ring(groups, inner_rank, case.call.mask)]
                count_covered(count, whole, outer_rank * inner + inner_rank, (0, 1), tiles, case.call.mask)
    case.check_covered_once(count)


@settings(max_examples=150)
@with_examples
@given(case=cases())
def test_inner_tiles_read_only_rows_that_the_outer_ring_has_brought(case: TwoAxes) -> None:
    """Each received part is read by some rank of the inner axis."""
    inner, mask = case.inner, case.call.mask
    for outer_rank in range(case.outer):
        plans = [outer_plan(case, outer_rank, inner_rank) for inner_rank in range(inner)]
        for hop in range(1, case.outer):
            source = (outer_rank - hop) % case.outer
            groups = InnerPartition(case.whole, inner, outer_rank, source).groups()
            for owner, plan in enumerate(plans):
                assert plan.forward[hop].transfer == plan.backward[hop].transfer
                transfer = plan.forward[hop].transfer
                assert transfer is not None
                assert transfer.sources(outer_rank, case.outer) == (source,)
                brought = {part: set(range(*plan.rows.local_span(source, part))) for part in plan.recv_parts[source]}
                read = {
                    row
                    for reader in range(inner)
                    for tile in tiles_against(groups, reader, owner, mask)
                    for row in range(*tile.kv)
                }
                assert read <= set().union(*brought.values())
                assert all(rows & read for rows in brought.values())
                seen_by_group = _seen_by_group(groups, owner, mask)
                gaps = any(rows - seen for seen in seen_by_group for rows in brought.values())
                assert plan.forward[hop].has_gaps == gaps


def _seen_by_group(groups: Groups, owner: int, mask: Mask) -> list[set[int]]:
    """Rows of `owner`'s shard that some queries of the inner axis see, of each batch group."""
    return [
        {
            row
            for reader in range(group.world_size)
            for tile in tiles_against((group,), reader, owner, mask)
            for row in range(*tile.kv)
        }
        for group in groups
    ]


@given(cases())
def test_between_outer_ranks_what_one_wants_the_other_gives(case: TwoAxes) -> None:
    for inner_rank in range(case.inner):
        plans = [outer_plan(case, outer_rank, inner_rank) for outer_rank in range(case.outer)]
        for plan in plans:
            assert [other.send_parts[plan.rank] for other in plans] == list(plan.recv_parts)
