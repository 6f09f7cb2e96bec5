"""Picture of the rows that ranks hold and the pairs that they compute by each method, from execution plans.

python docs/scripts/methods.py --output docs/images/methods.png
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch.distributed as dist
from assignments import NONE, key_positions, seen_by
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from schedules import legend, show_ranks

from cp_dtensor.attention.backends.aten import MathAttention
from cp_dtensor.comm.collective import AllToAll
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.transport import TransportMethod
from cp_dtensor.engine.base import Plan
from cp_dtensor.engine.planner import plan_call
from cp_dtensor.engine.ring import NestedRingPlan, Ring, RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.plan.partition import CallSpec, LayoutPartition, MergedPartition, masking_of
from cp_dtensor.spec.layouts import HeadTail, Layout, Span
from cp_dtensor.spec.masks import Causal

HEADS = 4


@dataclass(frozen=True)
class Panel:
    """One row of the picture."""

    title: str
    method: str
    shape: tuple[int, ...]
    """Shape of the mesh, the outer axis first."""


PANELS = (
    Panel('Ring of 4, method="ring": every rank keeps its queries, keys and values travel', "ring", (4,)),
    Panel('Ulysses over 4, method="ulysses": rows are exchanged for heads, and back', "ulysses", (4,)),
    Panel(
        'Ulysses over 2 inside of a ring of 2, method="hybrid": K/V travel between 0 and 2, 1 and 3', "hybrid", (2, 2)
    ),
    Panel('Nested ring of 2 x 2, method="ring" over two axes: 0 and 1 are a node, 2 and 3 another', "ring", (2, 2)),
)


@dataclass(frozen=True)
class Picture:
    """Ranks and steps of a call of `HEADS` heads as arrays; -1 where there is none."""

    before: np.ndarray
    """(heads, tokens): the rank that owns the rows of a head."""
    during: np.ndarray
    """(heads, tokens): the rank that holds these queries, keys and values during attention."""
    owner: np.ndarray
    """(heads, queries, keys): the rank that computes a pair."""
    step: np.ndarray
    """(heads, queries, keys): step of the ring that computes the pair."""
    inner_step: np.ndarray
    """(heads, queries, keys): step of the inner ring, if there is one."""
    times: np.ndarray
    """(heads, queries, keys): number of tiles that compute the pair."""


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images/methods.png"))
    arguments = parser.parse_args()
    figure = draw(PANELS, HeadTail(), seq_len=8)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=80)


def picture(panel: Panel, layout: Layout, seq_len: int) -> Picture:
    """Returns the picture of one causal call with a batch of one, from the plans of all ranks."""
    by_pair = (HEADS, seq_len, seq_len)
    before, during = (np.full((HEADS, seq_len), NONE) for _ in range(2))
    owner, step, inner_step = (np.full(by_pair, NONE) for _ in range(3))
    times = np.zeros(by_pair, dtype=int)
    partition = LayoutPartition(layout, seq_len, seq_len, 1, int(np.prod(panel.shape)))
    for ranks, plan in plans(panel, partition, AllToAll()):
        rank = ranks.rank
        before[:, _rows(partition, rank)] = rank
        heads, rows = _held(plan, partition, ranks)
        during[slice(*heads), rows] = rank
        for tile in _tiles(plan, ranks):
            for head in range(*tile.heads):
                place: Any = (head, *np.ix_(tile.queries, tile.keys))
                times[place] += tile.seen
                for array, value in ((owner, rank), (step, tile.step), (inner_step, tile.inner_step)):
                    array[place] = np.where(tile.seen, value, array[place])
    return Picture(before, during, owner, step, inner_step, times)


def plans(panel: Panel, partition: LayoutPartition, transport: TransportMethod) -> Iterator[tuple[SequenceRanks, Plan]]:
    """Yields every rank and its plan of a causal call of `HEADS` heads."""
    masking = masking_of(partition, Causal())
    spec = CallSpec(partition, Causal(), partition.batch_size, HEADS, HEADS, 1, 1, "float32", masking)
    for ranks in _every_rank(panel.shape):
        yield ranks, plan_call(spec, panel.method, transport, MathAttention(), ranks)


def _every_rank(shape: tuple[int, ...]) -> Iterator[SequenceRanks]:
    """Yields the ranks, with process groups that have a rank and a size only: planning needs no more."""
    if len(shape) == 1:
        yield from (SequenceRanks(_group(rank, shape[0])) for rank in range(shape[0]))
        return
    for outer in range(shape[0]):
        for inner in range(shape[1]):
            yield SequenceRanks(_group(outer, shape[0]), _group(inner, shape[1]))


def _group(rank: int, size: int) -> dist.ProcessGroup:
    make: Any = dist.ProcessGroup  # torch's annotations do not know this constructor
    return make(rank, size)


def _rows(partition: LayoutPartition | MergedPartition, rank: int) -> list[int]:
    """Returns the positions of a rank's queries."""
    return [p for segment in partition.groups()[0].q_by_rank[rank] for p in segment.positions()]


def _held(plan: Plan, partition: LayoutPartition, ranks: SequenceRanks) -> tuple[Span, list[int]]:
    """Returns the query heads and the rows that a rank holds during attention."""
    if not isinstance(plan, UlyssesPlan):
        return (0, HEADS), _rows(partition, ranks.rank)
    size = plan.heads.world_size
    kv_groups = plan.heads.kv_groups(ranks.rank % size)
    return plan.heads.query_heads(kv_groups), _rows(MergedPartition(partition, size), ranks.rank // size)


@dataclass(frozen=True)
class _Drawn:
    """A tile, as positions of its queries and keys."""

    heads: Span
    step: int
    inner_step: int
    queries: np.ndarray
    keys: np.ndarray
    seen: np.ndarray
    """(queries, keys): pairs that the mask allows."""


def _tiles(plan: Plan, ranks: SequenceRanks) -> Iterator[_Drawn]:
    """Yields the tiles of one rank."""
    if isinstance(plan, RingPlan):
        yield from _tiles_of_ring(plan, (0, HEADS))
    elif isinstance(plan, UlyssesPlan):
        for stage, inner in enumerate(plan.inner):
            assert isinstance(inner, RingPlan)
            kv_groups = plan.heads.kv_groups(ranks.rank % plan.heads.world_size, stage)
            yield from _tiles_of_ring(inner, plan.heads.query_heads(kv_groups))
    elif isinstance(plan, NestedRingPlan):
        for number, of_step in enumerate(plan.inner.values()):  # one group of heads
            for tile in () if of_step is None else _tiles_of_ring(of_step, (0, HEADS)):
                yield replace(tile, step=number, inner_step=tile.step)


def _tiles_of_ring(plan: Ring, heads: Span) -> Iterator[_Drawn]:
    (group,) = plan.spec.partition.groups()
    queries = np.array([p for segment in group.q_by_rank[plan.tile_plan.rank] for p in segment.positions()])
    for number, step in enumerate(plan.tile_plan.forward):
        for tile in step.tiles:
            keys = key_positions(tile, plan.tile_plan, group)
            yield _Drawn(heads, number, NONE, queries[slice(*tile.q)], keys[slice(*tile.kv)], seen_by(tile))


def draw(panels: tuple[Panel, ...], layout: Layout, seq_len: int) -> Figure:
    """Draws a row for each panel: rows that ranks own, rows that they hold in attention, pairs that they compute."""
    figure = plt.figure(figsize=(4 * (2 + HEADS), 4.7 * len(panels) + 2))
    heights = [1.6, *[5] * len(panels), 0.6]
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    for part, panel in zip(parts[1:-1], panels, strict=True):
        part.suptitle(panel.title, x=0.02, y=0.99, ha="left", fontsize=20, fontweight="bold")
        row = part.subplots(1, 2 + HEADS)
        part.subplots_adjust(left=0.035, right=0.99, top=0.83, bottom=0.12, wspace=0.22)
        drawn = picture(panel, layout, seq_len)
        _draw_held(row[0], drawn.before, "owns Q, K and V")
        if np.array_equal(drawn.before, drawn.during):
            row[1].axis("off")
        else:
            _draw_held(row[1], drawn.during, "has after the exchange")
        alike = _alike(drawn)
        for axis, heads in zip(row[2:], alike, strict=False):
            _draw_pairs(axis, drawn, heads)
        for axis in row[2 + len(alike) :]:
            axis.axis("off")
    ranks = max(int(np.prod(panel.shape)) for panel in panels)
    figure.legend(handles=legend(ranks), loc="lower center", ncol=ranks, fontsize=19, frameon=False)
    figure.suptitle(
        f"Causal attention of {seq_len} tokens and {HEADS} heads on {ranks} ranks, {layout}. The colour is the rank.\n"
        "Right: the number is the step of the ring that computes a (query, key) pair; "
        "1.0 is step 0 of the inner ring in step 1 of the outer ring.",
        fontsize=20,
        y=0.985,
    )
    return figure


def _alike(drawn: Picture) -> list[Span]:
    """Returns ranges of neighbouring heads with the same picture."""
    spans: list[Span] = []
    for head in range(HEADS):
        if spans and np.array_equal(drawn.owner[head], drawn.owner[head - 1]):
            spans[-1] = (spans[-1][0], head + 1)
        else:
            spans.append((head, head + 1))
    return spans


def _draw_held(axis: Axes, held: np.ndarray, title: str) -> None:
    show_ranks(axis, held)
    for head, token in zip(*np.nonzero(held >= 0), strict=True):
        axis.text(token, head, str(held[head, token]), ha="center", va="center", fontsize=15)
    axis.set_title(title, fontsize=17)
    axis.set_xlabel("token", fontsize=15)
    axis.set_ylabel("head", fontsize=15, labelpad=9)
    axis.set_yticks(range(len(held)))
    axis.set_xticks(range(held.shape[1]))
    axis.tick_params(labelsize=13)


def _draw_pairs(axis: Axes, drawn: Picture, heads: Span) -> None:
    owner = drawn.owner[heads[0]]
    show_ranks(axis, owner)
    for query, key in zip(*np.nonzero(owner >= 0), strict=True):
        step, inner = drawn.step[heads[0], query, key], drawn.inner_step[heads[0], query, key]
        text = str(step) if inner == NONE else f"{step}.{inner}"
        axis.text(key, query, text, ha="center", va="center", fontsize=15)
    names = ", ".join(map(str, range(*heads)))
    axis.set_title(f"computes of head{'s' if heads[1] - heads[0] > 1 else ''} {names}", fontsize=17)
    axis.set_xlabel("key", fontsize=15)
    axis.set_ylabel("query", fontsize=15, labelpad=9)
    axis.set_xticks(range(len(owner)))
    axis.set_yticks(range(len(owner)))
    axis.tick_params(labelsize=13)


if __name__ == "__main__":
    main()
