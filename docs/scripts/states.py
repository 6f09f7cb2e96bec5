"""Picture of the path of a recurrent layer's state through the runs of all ranks, by layout.

python docs/scripts/states.py --output docs/images/states.png
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from cp_dtensor import Contiguous, HeadTail, Layout
from cp_dtensor.layers.rows import SequenceLayout
from cp_dtensor.layers.scan import scan_plan
from cp_dtensor.tools.draw import RANK_COLOURS

SEQ_LEN, RANKS = 32, 4
PANELS: tuple[tuple[str, Layout, tuple[int, ...]], ...] = (
    ("Contiguous()", Contiguous(), ()),
    ("HeadTail()", HeadTail(), ()),
    ("HeadTail(), documents of 6, 19 and 7 tokens", HeadTail(), (0, 6, 25, 32)),
)
"""Title, layout and edges of documents."""
Run = tuple[int, tuple[int, int]]
"""A rank, and the positions of one of its runs."""


def ways(layout: Layout, edges: tuple[int, ...]) -> list[list[Run]]:
    """For each document that lies in several runs: the runs that its state passes through, in order."""
    sequence = SequenceLayout(layout, SEQ_LEN, RANKS, edges=edges)
    plan = scan_plan(sequence, 0, False)
    return [[(link.rank, sequence.pieces(link.rank)[link.piece]) for link in chain] for _, chain in plan.chains]


def draw(axis: Axes, layout: Layout, edges: tuple[int, ...]) -> None:
    """Draws runs as bars and the path of each state as arrows."""
    sequence = SequenceLayout(layout, SEQ_LEN, RANKS, edges=edges)
    for rank in range(RANKS):
        for start, stop in sequence.pieces(rank):
            axis.add_patch(
                Rectangle((start, rank - 0.3), stop - start, 0.6, facecolor=RANK_COLOURS[rank], edgecolor="white")
            )
    for way in ways(layout, edges):
        for (rank, (_, stop)), (next_rank, (start, _)) in pairwise(way):
            axis.add_patch(
                FancyArrowPatch(
                    (stop - 0.4, rank), (start + 0.4, next_rank), arrowstyle="-|>", mutation_scale=14, lw=1.5
                )
            )
    for edge in edges[1:-1]:
        axis.axvline(edge, color="black", linestyle=":")
    axis.set_xlim(0, SEQ_LEN)
    axis.set_ylim(RANKS - 0.5, -0.5)
    axis.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    axis.set_xlabel("position")


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images/states.png"))
    arguments = parser.parse_args()
    figure, axes = plt.subplots(1, len(PANELS), figsize=(6 * len(PANELS), 3.2))
    for axis, (title, layout, edges) in zip(axes, PANELS, strict=True):
        draw(axis, layout, edges)
        axis.set_title(title)
    figure.suptitle("Runs of each rank (bars), and the path of the state through them (arrows)")
    figure.tight_layout()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=80)


if __name__ == "__main__":
    main()
