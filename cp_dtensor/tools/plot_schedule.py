"""Draws who computes what at which step, from the schedules themselves.

python -m cp_dtensor.tools.plot_schedule --output docs/images/schedules.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.comm.transport import KVTransport
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiles import Tile
from cp_dtensor.plan.tiling import GatheredRows, GroupSegments, Masking, group_segments
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.spec.masks import Causal

DRAWN: tuple[KVTransport, ...] = (AllGather(), AllToAll())  # symm_mem has the schedule of all-gather
RANK_COLOURS = ("#f4f4f4", "#8ecae6", "#ffb703", "#95d5b2", "#e5989b")
PANELS: tuple[tuple[str, Layout, int], ...] = (
    ("Contiguous()", Contiguous(), 0),
    ("HeadTail()", HeadTail(), 0),
    ("Striped(1)", Striped(1), 0),
    ("Striped(2)", Striped(2), 0),
    ("MirroredBatch(), first half", MirroredBatch(), 0),
    ("MirroredBatch(), second half", MirroredBatch(), 1),
)


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images/schedules.png"))
    parser.add_argument("--seq-len", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=4, choices=range(1, len(RANK_COLOURS)))
    arguments = parser.parse_args()
    figure, axes = plt.subplots(len(DRAWN), len(PANELS), figsize=(4 * len(PANELS), 4.9 * len(DRAWN)))
    for row, transport in zip(axes, DRAWN, strict=True):
        for axis, (title, layout, group) in zip(row, PANELS, strict=True):
            owner, step = computed_by(layout, group, transport, arguments.seq_len, arguments.ranks)
            _draw(axis, owner, step, f"{title}, {transport.name}")
    handles = [Patch(color=RANK_COLOURS[rank + 1], label=f"rank {rank}") for rank in range(arguments.ranks)]
    figure.legend(handles=handles, loc="lower center", ncol=arguments.ranks, fontsize=14, frameon=False)
    figure.suptitle(
        f"Causal attention of {arguments.seq_len} tokens on {arguments.ranks} ranks: the colour is the rank that "
        "computes a (query, key) pair, the number is the step in which it does",
        fontsize=16,
    )
    figure.tight_layout(rect=(0, 0.04, 1, 0.98))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=80)


def computed_by(
    layout: Layout, group: int, transport: KVTransport, seq_len: int, ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each (query, key) pair of global positions, the rank that computes it and the step; -1 where masked."""
    owner = np.full((seq_len, seq_len), -1)
    step_of = np.full((seq_len, seq_len), -1)
    for rank in range(ranks):
        groups = group_segments(layout, seq_len, seq_len, 2, ranks)
        here = groups[group]
        queries = np.array([position for segment in here.q_by_rank[rank] for position in segment.positions()])
        partition = LayoutPartition(layout, seq_len, seq_len, 2, ranks)
        plan = transport.plan(CallSpec(partition, Causal(), 2, 1, 1, 1, 1, "float32", causal_masking(layout)), rank)
        for number, step in enumerate(plan.forward):
            for tile in step.tiles:
                if tile.batch != here.batch:
                    continue
                keys = key_positions(tile, here, plan.rows)
                pairs = np.ix_(queries[slice(*tile.q)], keys[slice(*tile.kv)])
                seen = seen_by(tile)
                owner[pairs] = np.where(seen, rank, owner[pairs])
                step_of[pairs] = np.where(seen, number, step_of[pairs])
    return owner, step_of


def key_positions(tile: Tile, group: GroupSegments, rows: GatheredRows) -> np.ndarray:
    """Global positions of the rows that `tile.kv` counts in."""
    if tile.source is not None:
        return np.array([p for segment in group.kv_by_rank[tile.source] for p in segment.positions()])
    positions = np.full(rows.total, -1)
    for source, part in rows.places:
        shard = [position for segment in group.kv_by_rank[source] for position in segment.positions()]
        positions[slice(*rows.span(source, part))] = shard[slice(*rows.local_span(source, part))]
    return positions


def causal_masking(layout: Layout) -> Masking:
    """How causal tiles of a layout are masked."""
    stripes_of_blocks = isinstance(layout, Striped) and layout.block > 1
    return Masking.INTERVALS if stripes_of_blocks else Masking.BY_SHAPE


def seen_by(tile: Tile, batch_row: int = 0) -> np.ndarray:
    """Which of the (query, key) pairs of a tile its mask lets through, in one of its batch rows."""
    rows, columns = tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0]
    seen = np.zeros((rows, columns), dtype=bool)
    for row, (first, last) in enumerate(tile.mask.intervals(rows, columns, batch_row)):
        seen[row, first : max(first, last)] = True
    return seen


def _draw(axis: Axes, owner: np.ndarray, step: np.ndarray, title: str) -> None:
    axis.imshow(owner, cmap=ListedColormap(RANK_COLOURS), vmin=-1, vmax=len(RANK_COLOURS) - 2)
    for query, key in zip(*np.nonzero(owner >= 0), strict=True):
        axis.text(key, query, step[query, key], ha="center", va="center", fontsize=8)
    work = ", ".join(str(np.count_nonzero(owner == rank)) for rank in range(owner.max() + 1))
    axis.set_title(f"{title}\npairs by rank: {work}", fontsize=12)
    axis.set_xlabel("key")
    axis.set_ylabel("query")
    axis.set_xticks(range(0, len(owner), 4))
    axis.set_yticks(range(0, len(owner), 4))


if __name__ == "__main__":
    main()
