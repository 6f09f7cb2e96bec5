"""Tiles of any mask: few unneeded keys, and few tiles (test_plan.py: every allowed pair once)."""

import pytest
from support.schedules import Call

from cp_dtensor.plan.plan import Stages, TilePlan, gathered_plan
from cp_dtensor.plan.tiles import UnionMask
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout
from cp_dtensor.spec.masks import Batched, Causal, Full, Mask, SlidingWindow
from cp_dtensor.spec.model_masks import Keys


def plans_of(
    layout: Layout, mask: Mask, ranks: int = 4, batch: int = 1, masking: Masking = Masking.INTERVALS
) -> list[TilePlan]:
    """Return the plans of all ranks for 64 tokens, which are gathered at once."""
    tiling = Call(layout, 64, 64, batch, ranks, mask, masking).tiling
    return [gathered_plan(tiling, rank, 1, Stages(1, 1), Stages(1, 1)) for rank in range(ranks)]


def received(plan: TilePlan) -> int:
    return sum(plan.rows.lengths[source][part] for source, parts in enumerate(plan.recv_parts) for part in parts)


def test_a_window_brings_a_window_of_keys() -> None:
    plans = plans_of(Contiguous(), SlidingWindow(4, 0))
    assert [received(plan) for plan in plans] == [plan.rows.total for plan in plans] == [0, 4, 4, 4]


def test_documents_bring_what_lies_before_in_the_same_document() -> None:
    plans = plans_of(Contiguous(), Documents([0, 20, 64], within=Causal()))  # shards of 16
    assert [received(plan) for plan in plans] == [0, 16, 12, 28]


@pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(20, 3), Documents([0, 9, 40, 64], within=Causal())])
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail()])
def test_all_that_came_is_one_tile(layout: Layout, mask: Mask) -> None:
    for plan in plans_of(layout, mask):
        assert all(len(step.tiles) <= 1 for step in plan.forward)


@pytest.mark.parametrize("masking", [Masking.INTERVALS, Masking.INTERVALS_TOGETHER])
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail()])
def test_several_intervals_of_a_row_are_tiles_or_one_tile(layout: Layout, masking: Masking) -> None:
    """A window and some keys that all later rows see: three intervals; also in one batch row alone."""
    union = Causal() & (SlidingWindow(9, 0) | Keys(((0, 4), (20, 24))))
    for mask in (union, Batched([Causal(), union])):
        batch = 1 if mask is union else 2
        tiles = [
            tile for plan in plans_of(layout, mask, 2, batch, masking) for step in plan.forward for tile in step.tiles
        ]
        together = masking is Masking.INTERVALS_TOGETHER
        assert any(isinstance(tile.mask, UnionMask) for tile in tiles) == together
        assert batch > 1 or sum(tile.mask.pairs for tile in tiles) == mask.pairs(64, 64)
        if together:
            assert len(tiles) == (4 if layout == HeadTail() else 3), "own and other keys of two ranks"
            assert all(tile.q == tile.mask.q == part.q for tile in tiles for part in tile.mask.parts)
            assert all(tile.mask.kv == part.kv for tile in tiles for part in tile.mask.parts)


@pytest.mark.parametrize(("ranges", "tiles"), [(8, 1), (9, 9)])
def test_many_intervals_of_a_row_are_a_tile_each(ranges: int, tiles: int) -> None:
    mask = Keys(tuple((6 * index, 6 * index + 2) for index in range(ranges)))
    tiling = Call(Contiguous(), 64, 64, 1, 1, mask, Masking.INTERVALS_TOGETHER).tiling
    assert len(tiling.tiles_against(0, 0)) == tiles


def test_the_pairs_of_tiles_are_those_of_the_mask() -> None:
    mask = Documents([0, 9, 40, 64], within=Causal())
    tiles = [tile for plan in plans_of(HeadTail(), mask) for step in plan.forward for tile in step.tiles]
    assert sum(tile.mask.pairs for tile in tiles) == mask.pairs(64, 64)
