"""Tiles of any mask: every allowed pair once, of received keys, and few unneeded keys."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.masked_problems import any_mask, fits, shown
from support.schedules import any_layout, positions, seen_by

from cp_dtensor.plan.partition import LayoutPartition
from cp_dtensor.plan.plan import Stages, TilePlan, gathered_plan, ring_plan
from cp_dtensor.plan.tiles import IntervalMask, Tile
from cp_dtensor.plan.tiling import GroupSegments, Masking, Tiling, tiling_of
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, Striped
from cp_dtensor.spec.masks import Batched, Causal, Full, Mask, SlidingWindow
from cp_dtensor.spec.model_masks import Keys

ONE_STAGE = Stages(1, 1)


@dataclass(frozen=True)
class Case:
    layout: Layout
    mask: Mask
    q_len: int
    kv_len: int
    batch: int
    ranks: int
    masking: Masking = Masking.INTERVALS

    @property
    def groups(self) -> tuple[GroupSegments, ...]:
        return LayoutPartition(self.layout, self.q_len, self.kv_len, self.batch, self.ranks).groups()

    @property
    def tiling(self) -> Tiling:
        return tiling_of(self.groups, self.mask, self.masking, (self.q_len, self.kv_len))

    def plans(self, gathered: bool) -> list[TilePlan]:
        return [
            gathered_plan(self.tiling, rank, 1, ONE_STAGE, ONE_STAGE) if gathered else ring_plan(self.tiling, rank, 1)
            for rank in range(self.ranks)
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    q_len, batch = draw(st.integers(0, 24)), draw(st.integers(1, 3))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(0, 24)))
    mask = draw(any_mask(q_len, kv_len, batch).filter(lambda mask: fits(mask, q_len, kv_len, batch)))
    masking = draw(st.sampled_from(list(Masking)[1:]))
    return Case(draw(any_layout), mask, q_len, kv_len, batch, draw(st.integers(1, 6)), masking)


def keys_of(tile: Tile, group: GroupSegments, plan: TilePlan) -> np.ndarray:
    """Positions of the rows that a tile counts in, -1 where nothing was received."""
    if tile.source == plan.rank:
        return positions(group.kv_by_rank[plan.rank])
    sources = range(plan.world_size) if tile.source is None else (tile.source,)
    place = plan.rows.span if tile.source is None else plan.rows.local_span
    length = plan.rows.total if tile.source is None else sum(plan.rows.lengths[tile.source])
    keys = np.full(length, -1)
    for source in sources:
        shard = positions(group.kv_by_rank[source])
        for part in plan.recv_parts[source]:
            keys[slice(*place(source, part))] = shard[slice(*plan.rows.local_span(source, part))]
    return keys


@settings(max_examples=150, deadline=None)
@given(cases(), st.booleans())
def test_tiles_cover_every_allowed_pair_once(case: Case, gathered: bool) -> None:
    plans = case.plans(gathered)
    count = np.zeros((case.batch, case.q_len, case.kv_len), dtype=np.int64)
    for plan in plans:
        for tile in (tile for step in plan.forward for tile in step.tiles):
            group = next(group for group in case.groups if group.batch == tile.batch)
            q = positions(group.q_by_rank[plan.rank])[slice(*tile.q)]
            kv = keys_of(tile, group, plan)[slice(*tile.kv)]
            assert len(q) == tile.q[1] - tile.q[0] > 0
            assert len(kv) == tile.kv[1] - tile.kv[0] > 0
            assert (kv >= 0).all(), "the tile reads what has not come"
            if case.masking is Masking.INTERVALS_UNBROKEN:
                assert len(set(np.diff(kv))) <= 1 or not isinstance(case.layout, Striped) or case.layout.block > 1
            for row in range(*tile.batch):
                seen = seen_by(tile.mask, len(q), len(kv), row - tile.batch[0])
                count[row][np.ix_(q, kv)] += seen
    assert (count == shown(case.mask, case.q_len, case.kv_len, case.batch)[:, 0].numpy()).all()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_one_wants_the_other_gives(case: Case) -> None:
    plans = case.plans(True)
    for reader in plans:
        assert reader.most_rows == max(plan.rows.total for plan in plans)
        for owner in plans:
            assert reader.rows.lengths == owner.rows.lengths
            assert reader.recv_parts[owner.rank] == owner.send_parts[reader.rank]
            starts = [reader.rows.starts[owner.rank][part] for part in owner.send_parts[reader.rank]]
            assert list(owner.send_starts[reader.rank]) == starts
            assert all(start >= 0 for start in starts)


def received(plan: TilePlan) -> int:
    return sum(plan.rows.lengths[source][part] for source, parts in enumerate(plan.recv_parts) for part in parts)


def test_a_window_brings_a_window_of_keys() -> None:
    case = Case(Contiguous(), SlidingWindow(4, 0), 64, 64, 1, 4)
    assert [received(plan) for plan in case.plans(True)] == [0, 4, 4, 4]
    assert [plan.rows.total for plan in case.plans(True)] == [0, 4, 4, 4]


def test_documents_bring_what_lies_before_in_the_same_document() -> None:
    case = Case(Contiguous(), Documents([0, 20, 64], within=Causal()), 64, 64, 1, 4)  # shards of 16
    assert [received(plan) for plan in case.plans(True)] == [0, 16, 12, 28]


@pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(20, 3), Documents([0, 9, 40, 64], within=Causal())])
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail()])
def test_all_that_came_is_one_tile(layout: Layout, mask: Mask) -> None:
    for plan in Case(layout, mask, 64, 64, 1, 4).plans(True):
        assert all(len(step.tiles) <= 1 for step in plan.forward)


@pytest.mark.parametrize("masking", [Masking.INTERVALS, Masking.INTERVALS_TOGETHER])
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail()])
def test_several_intervals_of_a_row_are_tiles_or_one_tile(layout: Layout, masking: Masking) -> None:
    """A window and some keys that all later rows see: three intervals; also in one batch row alone."""
    union = Causal() & (SlidingWindow(9, 0) | Keys(((0, 4), (20, 24))))
    for mask in (union, Batched([Causal(), union])):
        batch = 1 if mask is union else 2
        case = Case(layout, mask, 64, 64, batch, 2, masking)
        tiles = [tile for plan in case.plans(True) for step in plan.forward for tile in step.tiles]
        together = masking is Masking.INTERVALS_TOGETHER
        assert any(isinstance(tile.mask, IntervalMask) and len(tile.mask.sets) > 1 for tile in tiles) == together
        assert batch > 1 or sum(tile.mask.pairs for tile in tiles) == mask.pairs(64, 64)
        if together:
            assert len(tiles) == (4 if layout == HeadTail() else 3), "own and other keys of two ranks"
            assert all(tile.q == tile.mask.q for tile in tiles if isinstance(tile.mask, IntervalMask))


@pytest.mark.parametrize(("ranges", "tiles"), [(8, 1), (9, 9)])
def test_many_intervals_of_a_row_are_a_tile_each(ranges: int, tiles: int) -> None:
    mask = Keys(tuple((6 * index, 6 * index + 2) for index in range(ranges)))
    tiling = Case(Contiguous(), mask, 64, 64, 1, 1, Masking.INTERVALS_TOGETHER).tiling
    assert len(tiling.tiles_against(0, 0)) == tiles


def test_the_pairs_of_tiles_are_those_of_the_mask() -> None:
    mask = Documents([0, 9, 40, 64], within=Causal())
    case = Case(HeadTail(), mask, 64, 64, 1, 4)
    tiles = [tile for plan in case.plans(True) for step in plan.forward for tile in step.tiles]
    assert sum(tile.mask.pairs for tile in tiles) == mask.pairs(64, 64)
