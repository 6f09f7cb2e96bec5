"""Picture of the rank and the step that compute each (query, key) pair, by layout and KV transport.

python docs/scripts/schedules.py --output docs/images/schedules.png
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from assignments import NONE, assignment
from common import parser, save
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from cp_dtensor import Causal, Contiguous, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.tools.draw import RANK_COLOURS

TRANSPORTS = ("allgather", "alltoall")  # the plan of symm_mem is that of allgather
PANELS: tuple[tuple[str, Layout, int], ...] = (
    ("Contiguous()", Contiguous(), 0),
    ("HeadTail()", HeadTail(), 0),
    ("Striped(1)", Striped(1), 0),
    ("Striped(2)", Striped(2), 0),
    ("MirroredBatch(), first half", MirroredBatch(), 0),
    ("MirroredBatch(), second half", MirroredBatch(), 1),
)
"""Title, layout and batch row."""


def main() -> None:
    """Draws the picture."""
    command = parser(__doc__, picture="schedules.png")
    command.add_argument("--seq-len", type=int, default=16)
    command.add_argument("--ranks", type=int, default=4, choices=range(1, len(RANK_COLOURS) + 1))
    arguments = command.parse_args()
    figure, axes = plt.subplots(len(TRANSPORTS), len(PANELS), figsize=(4 * len(PANELS), 4.9 * len(TRANSPORTS)))
    for row, transport in zip(axes, TRANSPORTS, strict=True):
        for axis, (title, layout, batch_row) in zip(row, PANELS, strict=True):
            drawn = assignment(
                Causal(), layout, arguments.seq_len, arguments.ranks,
                batch_size=2, batch_row=batch_row, rotate_method=transport,
            )  # fmt: skip
            draw_pairs(axis, drawn.owner, drawn.step, 8)
            work = ", ".join(str(np.count_nonzero(drawn.owner == rank)) for rank in range(arguments.ranks))
            axis.set_title(f"{title}, {transport}\npairs by rank: {work}", fontsize=12)
    figure.legend(handles=legend(arguments.ranks), loc="lower center", ncol=arguments.ranks, fontsize=14, frameon=False)
    figure.suptitle(
        f"Causal attention of {arguments.seq_len} tokens on {arguments.ranks} ranks: the colour is the rank that "
        "computes a (query, key) pair, the number is the step in which it does",
        fontsize=16,
    )
    figure.tight_layout(rect=(0, 0.04, 1, 0.98))
    save(figure, arguments.output)


def legend(ranks: int) -> list[Patch]:
    """Returns a coloured patch for each rank."""
    return [Patch(color=RANK_COLOURS[rank], label=f"rank {rank}") for rank in range(ranks)]


def show_ranks(axis: Axes, ranks: np.ndarray) -> None:
    """Draws an array of ranks as coloured cells, pale grey where there is none."""
    axis.imshow(ranks, cmap=ListedColormap(("#f4f4f4", *RANK_COLOURS)), vmin=NONE, vmax=len(RANK_COLOURS) - 1)


def draw_pairs(axis: Axes, owner: np.ndarray, step: np.ndarray, font_size: float) -> None:
    """Draws the rank of each (query, key) pair as colour and its step as number."""
    show_ranks(axis, owner)
    for query, key in zip(*np.nonzero(owner >= 0), strict=True):
        axis.text(key, query, step[query, key], ha="center", va="center", fontsize=font_size)
    axis.set_xlabel("key")
    axis.set_ylabel("query")
    axis.set_xticks(range(0, len(owner), 4))
    axis.set_yticks(range(0, len(owner), 4))


if __name__ == "__main__":
    main()
