"""What the pictures of the documents show is what schedules and decisions say."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from cp_dtensor import Contiguous, HeadTail, Layout, Striped
from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.plan.head_partition import HeadPartition
from cp_dtensor.plan.partition import LayoutPartition
from cp_dtensor.plan.tiles import Tile
from cp_dtensor.plan.tiling import gathered_rows, group_segments, tiles_against
from cp_dtensor.spec.layouts import MirroredBatch
from cp_dtensor.spec.masks import Full

plot_schedule = pytest.importorskip("cp_dtensor.tools.plot_schedule", reason="needs the extra [tools]")
plot_methods = pytest.importorskip("cp_dtensor.tools.plot_methods", reason="needs the extra [tools]")

RANKS, SEQ_LEN = 4, 16
CAUSAL = np.tri(SEQ_LEN, dtype=bool)
LAYOUTS: list[Layout] = [Contiguous(), HeadTail(), Striped(1), Striped(2)]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=repr)


def owners(layout: Layout, group: int = 0) -> np.ndarray:
    """The rank of each position."""
    rank_of = np.full(SEQ_LEN, -1)
    for rank in range(RANKS):
        for segment in layout.segments(SEQ_LEN, rank, RANKS, group):
            rank_of[list(segment.positions())] = rank
    return rank_of


@pytest.mark.parametrize(("_title", "layout", "group"), plot_schedule.PANELS, ids=lambda value: repr(value))
@pytest.mark.parametrize("transport", plot_schedule.DRAWN, ids=lambda transport: transport.name)
def test_schedules_by_rank_and_step(transport: object, _title: str, layout: Layout, group: int) -> None:
    """Every allowed pair, by the rank that owns the query; in step 0 exactly if it owns the key too."""
    owner, step = plot_schedule.computed_by(layout, group, transport, SEQ_LEN, RANKS)
    rank_of = owners(layout, group)
    np.testing.assert_array_equal(owner, np.where(CAUSAL, rank_of[:, None], -1))
    np.testing.assert_array_equal(step >= 0, CAUSAL)
    np.testing.assert_array_equal((step == 0)[CAUSAL], (rank_of[:, None] == rank_of)[CAUSAL])


def test_positions_of_keys_in_a_gathered_buffer() -> None:
    """Shards 0 1 14 15, 2 3 12 13, 4 5 10 11 and 6 7 8 9 stand in the order of positions."""
    groups = group_segments(HeadTail(), SEQ_LEN, SEQ_LEN, 1, RANKS)
    rows = gathered_rows(groups)
    tile = Tile(None, (0, 1), (0, 4), (0, 4), tiles_against(groups, 0, 0, Full())[0].mask)
    assert plot_schedule.key_positions(tile, groups[0], rows).tolist() == list(range(SEQ_LEN))


@pytest.mark.parametrize("panel", plot_methods.PANELS, ids=lambda panel: panel.title.split(",")[0])
@each_layout
def test_methods_by_rank_and_head(layout: Layout, panel: plot_methods.Panel) -> None:
    """Every allowed pair of every head is computed once, by a rank that has its head and its query."""
    drawn = plot_methods.picture(panel, layout, SEQ_LEN)
    np.testing.assert_array_equal(drawn.times, np.broadcast_to(CAUSAL, drawn.times.shape))
    np.testing.assert_array_equal(drawn.before, np.broadcast_to(owners(layout), drawn.before.shape))
    np.testing.assert_array_equal(drawn.owner, np.where(CAUSAL, drawn.during[:, :, None], -1))


@each_layout
def test_methods_by_hand(layout: Layout) -> None:
    """Who has what meanwhile, and in which step: rank - hop, over one axis or two."""
    ring, ulysses, hybrid, rings = (plot_methods.picture(panel, layout, SEQ_LEN) for panel in plot_methods.PANELS)
    rank_of = owners(layout)
    for head, token in product(range(4), range(SEQ_LEN)):
        rank = rank_of[token]
        assert ring.during[head, token] == rings.during[head, token] == rank
        assert ulysses.during[head, token] == head
        assert hybrid.during[head, token] == rank // 2 * 2 + head // 2
    for head, (query, key) in product(range(4), np.argwhere(CAUSAL)):
        reader, source = rank_of[query], rank_of[key]
        place = (head, query, key)
        assert ring.step[place] == (reader - source) % 4
        assert ulysses.step[place] == 0
        assert hybrid.step[place] == rings.step[place] == (reader // 2 - source // 2) % 2
        assert rings.inner_step[place] == (reader - source) % 2


TILES = {  # docs/choosing.md: of ring, Ulysses, hybrid and ring of rings; by alltoall, then by allgather
    Contiguous(): ([(1, 4), (1, 1), (1, 2), (1, 4)], [(1, 2), (1, 1), (1, 2), (1, 4)]),
    HeadTail(): ([(4, 4), (1, 1), (2, 2), (4, 4)], [(2, 3), (1, 1), (2, 2), (4, 5)]),
    Striped(1): ([(4, 4), (16, 16), (8, 8), (4, 4)], [(4, 4), (16, 16), (8, 8), (4, 4)]),
    Striped(2): ([(4, 4), (4, 4), (4, 4), (4, 4)], [(4, 4), (4, 4), (4, 4), (4, 4)]),
    MirroredBatch(): ([(5, 5), (8, 8), (5, 5), (5, 5)], [(3, 4), (8, 8), (5, 5), (5, 5)]),
}


@pytest.mark.parametrize("layout", TILES, ids=repr)
def test_tiles_that_the_documents_tell_of(layout: Layout) -> None:
    """The least and the most of a forward on any rank."""
    partition = LayoutPartition(layout, 64, 64, 2, RANKS)
    for transport, expected in zip((AllToAll(), AllGather()), TILES[layout], strict=True):
        found = []
        for panel in plot_methods.PANELS:
            counts = []
            for _, plan in plot_methods.plans(panel, partition, transport):
                rings = [plan] if isinstance(plan, RingPlan) else [ring for ring in plan.inner if ring]
                counts.append(sum(len(step.tiles) for ring in rings for step in ring.plan.forward))
            found.append((min(counts), max(counts)))
        assert found == expected


def test_pictures_follow_the_division_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn from what is decided: other units, another picture."""
    panel = plot_methods.PANELS[1]
    reversed_units = lambda self, rank, stage=None: (3 - rank, 4 - rank)  # noqa: E731
    monkeypatch.setattr(HeadPartition, "units", reversed_units)
    drawn = plot_methods.picture(panel, HeadTail(), SEQ_LEN)
    assert drawn.during[:, 0].tolist() == [3, 2, 1, 0]
    assert drawn.owner[:, 0, 0].tolist() == [3, 2, 1, 0]


def test_halves_of_a_mirrored_batch_differ() -> None:
    first, second = (owners(MirroredBatch(), group) for group in (0, 1))
    np.testing.assert_array_equal(first, second[::-1])


def test_the_picture_has_a_panel_for_each_group_of_heads() -> None:
    figure = plot_methods.draw(plot_methods.PANELS, HeadTail(), 8)
    titles = [axis.get_title() for axis in figure.get_axes() if axis.axison]
    assert [title for title in titles if title.startswith("computes")] == [
        "computes of heads 0, 1, 2, 3",
        *(f"computes of head {head}" for head in range(4)),
        "computes of heads 0, 1",
        "computes of heads 2, 3",
        "computes of heads 0, 1, 2, 3",
    ]
    plot_methods.plt.close(figure)
