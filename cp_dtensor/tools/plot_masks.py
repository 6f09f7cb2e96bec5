"""Draws masks, who computes what of each and which keys travel for it, from the plans that the library executes.

python -m cp_dtensor.tools.plot_masks --output docs/images/masks.png
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cp_dtensor.comm.collective import AllGather
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiling import GroupSegments, Masking
from cp_dtensor.spec.balanced_layouts import Balanced
from cp_dtensor.spec.layouts import HeadTail, Layout
from cp_dtensor.spec.masks import Mask, interval_sets_of, is_plain
from cp_dtensor.tools.draw_mask import mask_of_text
from cp_dtensor.tools.plot_schedule import RANK_COLOURS, key_positions, seen_by

SEQ_LEN, RANKS = 16, 4
NOBODY = -1
PANELS = (
    "Full()",
    "Causal()",
    "SlidingWindow(4, 0)",
    "Documents([0, 3, 9, 16], within=Causal())",
    "PrefixLM(6)",
    "Documents([0, 6, 16]) & SlidingWindow(2, 2)",
    "(SlidingWindow(3, 0) | Documents([0, 16], [0, 2])) & Causal()",
    "Batched(Documents(edges, within=Causal()) for edges in ([0, 11, 16], [0, 12, 14, 16]))",
)
"""Masks of `SEQ_LEN` tokens, as one writes them."""
LAYER_COLOURS = ("#ffffff", "#4a5568", "#a0aec0")


@dataclass(frozen=True)
class Picture:
    """What happens to one batch row of a call: ranks, steps and rows as arrays, -1 where there is nothing."""

    owner: np.ndarray
    """(queries, keys): the rank that computes a pair."""
    step: np.ndarray
    """(queries, keys): the step of its plan in which it does."""
    times: np.ndarray
    """(queries, keys): how often it is computed."""
    key_owner: np.ndarray
    """(keys,): the rank that owns a key."""
    buffer_row: np.ndarray
    """(ranks, keys): the row of the rank's gathered buffer to which a key comes."""


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images/masks.png"))
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draw(PANELS).savefig(arguments.output, dpi=80)


def picture(mask: Mask, layout: Layout, seq_len: int, ranks: int, batch_row: int = 0) -> Picture:
    """What the plans of all ranks say, where all keys that a rank wants come together (`allgather`, `symm_mem`)."""
    batch_size = mask.batch_size or 1
    owner, step_of = (np.full((seq_len, seq_len), NOBODY) for _ in range(2))
    times = np.zeros((seq_len, seq_len), dtype=int)
    key_owner, buffer_row = np.full(seq_len, NOBODY), np.full((ranks, seq_len), NOBODY)
    partition = LayoutPartition(layout, seq_len, seq_len, batch_size, ranks)
    masking = Masking.BY_SHAPE if is_plain(mask, seq_len, seq_len) else Masking.INTERVALS
    shape = CallSpec(partition, mask, batch_size, 1, 1, 1, 1, "float32", masking)
    (group,) = partition.groups()
    for rank in range(ranks):
        plan = AllGather().plan(shape, rank)
        queries = np.array(_positions(group, rank))
        key_owner[_positions(group, rank)] = rank
        for number, step in enumerate(plan.forward):
            for tile in step.tiles:
                pairs = np.ix_(queries[slice(*tile.q)], key_positions(tile, group, plan.rows)[slice(*tile.kv)])
                seen = seen_by(tile, batch_row)
                times[pairs] += seen
                for array, value in ((owner, rank), (step_of, number)):
                    array[pairs] = np.where(seen, value, array[pairs])
        for source, parts in enumerate(plan.wanted):
            for part in parts:
                keys = _positions(group, source)[slice(*plan.rows.local_span(source, part))]
                buffer_row[rank, keys] = range(*plan.rows.span(source, part))
    return Picture(owner, step_of, times, key_owner, buffer_row)


def _positions(group: GroupSegments, rank: int) -> list[int]:
    """Of a rank's keys (and queries), in local order."""
    return [position for segment in group.kv_by_rank[rank] for position in segment.positions()]


def draw(panels: tuple[str, ...]) -> Figure:
    """One line for each mask (for each of its batch rows): the mask, and what happens under two layouts."""
    lines = [(text, row) for text in panels for row in range(mask_of_text(text).batch_size or 1)]
    figure = plt.figure(figsize=(14, 5.8 * len(lines) + 1.5))
    parts: Any = figure.subfigures(len(lines) + 1, 1, height_ratios=[1.5, *[5.8] * len(lines)])
    for part, (text, row) in zip(parts[1:], lines, strict=True):
        mask = mask_of_text(text)
        title = text if mask.batch_size is None else f"{text}, row {row}"
        part.suptitle(title, x=0.04, y=0.985, ha="left", fontsize=15, family="monospace", fontweight="bold")
        axes = part.subplots(2, 3, height_ratios=[SEQ_LEN, RANKS], sharex=True)
        part.subplots_adjust(left=0.045, right=0.99, top=0.87, bottom=0.09, hspace=0.08, wspace=0.13)
        _draw_mask(axes[0, 0], mask, row)
        axes[1, 0].axis("off")
        for column, layout in zip(axes.T[1:], (HeadTail(), Balanced(mask, SEQ_LEN)), strict=True):
            drawn = picture(mask, layout, SEQ_LEN, RANKS, row)
            _draw_pairs(column[0], drawn, type(layout).__name__)
            _draw_travel(column[1], drawn)
    handles = [Patch(color=RANK_COLOURS[rank + 1], label=f"rank {rank}") for rank in range(RANKS)]
    parts[0].legend(handles=handles, loc="lower center", ncol=RANKS, fontsize=14, frameon=False)
    parts[0].suptitle(
        f"Masks of {SEQ_LEN} tokens on {RANKS} ranks. Left: who sees whom; shades are layers of intervals.\n"
        "Squares: the colour is the rank that computes a (query, key) pair, the number the step in which it does "
        "(0: with its own keys).\n"
        "Below them, for each rank: the keys that it owns, and those that come to it, with their rows in its buffer.",
        x=0.04,
        y=0.92,
        ha="left",
        fontsize=14,
    )
    return figure


def _draw_mask(axis: Axes, mask: Mask, batch_row: int) -> None:
    seen = np.zeros((SEQ_LEN, SEQ_LEN), dtype=int)
    of_row = interval_sets_of(mask, SEQ_LEN, SEQ_LEN, mask.batch_size or 1)[batch_row if mask.batch_size else 0]
    for number, layer in enumerate(of_row, start=1):
        for band in layer:
            for query in range(band.first, band.last):
                seen[query, slice(*band.keys(query))] = number
    axis.imshow(seen, cmap=ListedColormap(LAYER_COLOURS), vmin=0, vmax=len(LAYER_COLOURS) - 1)
    axis.set_title(f"{np.count_nonzero(seen)} pairs", fontsize=12)
    axis.set_xticks(range(0, SEQ_LEN, 4))
    axis.tick_params(labelbottom=True)
    _label(axis)


def _draw_pairs(axis: Axes, drawn: Picture, layout: str) -> None:
    axis.imshow(drawn.owner, cmap=ListedColormap(RANK_COLOURS), vmin=NOBODY, vmax=len(RANK_COLOURS) - 2)
    for query, key in zip(*np.nonzero(drawn.owner >= 0), strict=True):
        axis.text(key, query, drawn.step[query, key], ha="center", va="center", fontsize=9)
    work = ", ".join(str(np.count_nonzero(drawn.owner == rank)) for rank in range(RANKS))
    axis.set_title(f"{layout}: pairs by rank {work}", fontsize=12)
    _label(axis)


def _draw_travel(axis: Axes, drawn: Picture) -> None:
    own = np.arange(RANKS)[:, None] == drawn.key_owner
    shown = np.where(own | (drawn.buffer_row >= 0), drawn.key_owner, NOBODY)
    axis.imshow(shown, cmap=ListedColormap(RANK_COLOURS), vmin=NOBODY, vmax=len(RANK_COLOURS) - 2)
    for rank, key in zip(*np.nonzero(own | (drawn.buffer_row >= 0)), strict=True):
        text = "own" if own[rank, key] else str(drawn.buffer_row[rank, key])
        axis.text(key, rank, text, ha="center", va="center", fontsize=6.5 if own[rank, key] else 9)
    axis.set_xlabel("key", fontsize=12)
    axis.set_ylabel("to rank", fontsize=12)
    axis.set_xticks(range(0, SEQ_LEN, 4))
    axis.set_yticks(range(RANKS))


def _label(axis: Axes) -> None:
    axis.set_ylabel("query", fontsize=12)
    axis.set_yticks(range(0, SEQ_LEN, 4))


if __name__ == "__main__":
    main()
