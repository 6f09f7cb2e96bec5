"""Pictures of masks: the rank that computes each (query, key) pair, and the keys that each rank receives.

python docs/scripts/masks.py --folder docs/images
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from assignments import NONE, Assignment, assignment
from common import parser, save
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from schedules import draw_pairs, legend, show_ranks

from cp_dtensor import Balanced, Batched, Causal, Documents, Full, HeadTail, Mask, PrefixLM, SlidingWindow
from cp_dtensor.spec.masks import interval_sets_of

SEQ_LEN, RANKS = 16, 4
FAMILIES: dict[str, dict[str, Mask]] = {
    "causal": {"Full()": Full(), "Causal()": Causal()},
    "windows": {"SlidingWindow(4, 0)": SlidingWindow(4, 0), "PrefixLM(6)": PrefixLM(6)},
    "documents": {
        "Documents([0, 3, 9, 16], within=Causal())": Documents([0, 3, 9, 16], within=Causal()),
        "Documents([0, 6, 16]) & SlidingWindow(2, 2)": Documents([0, 6, 16]) & SlidingWindow(2, 2),
        "(SlidingWindow(3, 0) | Documents([0, 16], [0, 2])) & Causal()": (
            (SlidingWindow(3, 0) | Documents([0, 16], [0, 2])) & Causal()
        ),
    },
    "batched": {
        "Batched(Documents(edges, within=Causal()) for edges in ([0, 11, 16], [0, 12, 14, 16]))": Batched(
            Documents(edges, within=Causal()) for edges in ([0, 11, 16], [0, 12, 14, 16])
        ),
    },
}
"""Masks of `SEQ_LEN` tokens, by the name of a picture and by their expressions."""
SHADES = ("#ffffff", "#4a5568", "#a0aec0")
"""Colors of hidden pairs, and of the mask's interval sets."""


def main() -> None:
    """Draws a picture of each family."""
    command = parser(__doc__)
    command.add_argument("--folder", type=Path, default=Path("docs/images"))
    arguments = command.parse_args()
    for name, panels in FAMILIES.items():
        save(draw(panels), arguments.folder / f"masks_{name}.png")


def draw(panels: dict[str, Mask]) -> Figure:
    """Draws a line for each batch row of each mask: the mask, then pairs and received keys under two layouts."""
    lines = [(text, mask, row) for text, mask in panels.items() for row in range(mask.batch_size or 1)]
    figure = plt.figure(figsize=(14, 5.8 * len(lines) + 1.5))
    parts: Any = figure.subfigures(len(lines) + 1, 1, height_ratios=[1.5, *[5.8] * len(lines)])
    for part, (text, mask, row) in zip(parts[1:], lines, strict=True):
        title = text if mask.batch_size is None else f"{text}, row {row}"
        part.suptitle(title, x=0.04, y=0.985, ha="left", fontsize=15, family="monospace", fontweight="bold")
        axes = part.subplots(2, 3, height_ratios=[SEQ_LEN, RANKS], sharex=True)
        part.subplots_adjust(left=0.045, right=0.99, top=0.87, bottom=0.09, hspace=0.08, wspace=0.13)
        _draw_mask(axes[0, 0], mask, row)
        axes[1, 0].axis("off")
        for column, layout in zip(axes.T[1:], (HeadTail(), Balanced(mask, SEQ_LEN)), strict=True):
            drawn = assignment(mask, layout, SEQ_LEN, RANKS, batch_row=row, rotate_method="allgather")
            draw_pairs(column[0], drawn.owner, drawn.step, 9)
            work = ", ".join(str(np.count_nonzero(drawn.owner == rank)) for rank in range(RANKS))
            column[0].set_title(f"{type(layout).__name__}: pairs by rank {work}", fontsize=12)
            column[0].set_xlabel("")
            _draw_received(column[1], drawn)
    parts[0].legend(handles=legend(RANKS), loc="lower center", ncol=RANKS, fontsize=14, frameon=False)
    parts[0].suptitle(
        f"Masks of {SEQ_LEN} tokens on {RANKS} ranks. Left: the pairs that a mask allows; shades are interval sets.\n"
        "Squares: the colour is the rank that computes a (query, key) pair, the number the step in which it does "
        "(0: with its own keys).\n"
        "Below them, for each rank: the keys that it owns and the keys that it receives, with their buffer rows.",
        x=0.04,
        y=0.92,
        ha="left",
        fontsize=14,
    )
    return figure


def _draw_mask(axis: Axes, mask: Mask, batch_row: int) -> None:
    seen = np.zeros((SEQ_LEN, SEQ_LEN), dtype=int)
    of_row = interval_sets_of(mask, SEQ_LEN, SEQ_LEN, mask.batch_size or 1)[batch_row if mask.batch_size else 0]
    for number, interval_set in enumerate(of_row, start=1):
        for band in interval_set:
            for query in range(band.first, band.last):
                seen[query, slice(*band.keys(query))] = number
    axis.imshow(seen, cmap=ListedColormap(SHADES), vmin=0, vmax=len(SHADES) - 1)
    axis.set_title(f"{np.count_nonzero(seen)} pairs", fontsize=12)
    axis.tick_params(labelbottom=True)
    axis.set_ylabel("query")
    axis.set_xticks(range(0, SEQ_LEN, 4))
    axis.set_yticks(range(0, SEQ_LEN, 4))


def _draw_received(axis: Axes, drawn: Assignment) -> None:
    own = np.arange(RANKS)[:, None] == drawn.key_owner
    here = own | (drawn.buffer_row >= 0)
    show_ranks(axis, np.where(here, drawn.key_owner, NONE))
    for rank, key in zip(*np.nonzero(here), strict=True):
        text = "own" if own[rank, key] else str(drawn.buffer_row[rank, key])
        axis.text(key, rank, text, ha="center", va="center", fontsize=6.5 if own[rank, key] else 9)
    axis.set_xlabel("key")
    axis.set_ylabel("at rank")
    axis.set_xticks(range(0, SEQ_LEN, 4))
    axis.set_yticks(range(RANKS))


if __name__ == "__main__":
    main()
