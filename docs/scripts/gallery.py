"""The pictures of docs/gallery.md, drawn from the plans that calls execute.

python docs/scripts/gallery.py                      all of them, into docs/images
python docs/scripts/gallery.py layouts methods      two of them
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from assignments import HEADS, METHODS, NONE, Assignment, assignment
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from cp_dtensor import (
    Balanced,
    Batched,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    MirroredBatch,
    PrefixLM,
    SlidingWindow,
    Striped,
)  # fmt: skip
from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.tools.draw import RANK_COLOURS

FOLDER = Path(__file__).resolve().parents[1] / "images"
SEQ_LEN, RANKS = 16, 4
LAYOUTS: tuple[tuple[str, Layout, int], ...] = (
    ("Contiguous()", Contiguous(), 0),
    ("HeadTail()", HeadTail(), 0),
    ("Striped(1)", Striped(1), 0),
    ("Striped(2)", Striped(2), 0),
    ("MirroredBatch(), first half", MirroredBatch(), 0),
    ("MirroredBatch(), second half", MirroredBatch(), 1),
)
"""Title, layout and batch row."""
TRANSPORTS = {"alltoall": AllToAll(), "allgather": AllGather()}
MASKS: dict[str, dict[str, Mask]] = {
    "masks_causal": {"Full()": Full(), "Causal()": Causal()},
    "masks_windows": {"SlidingWindow(4, 0)": SlidingWindow(4, 0), "PrefixLM(6)": PrefixLM(6)},
    "masks_documents": {
        "Documents([0, 3, 9, 16], within=Causal())": Documents([0, 3, 9, 16], within=Causal()),
        "Documents([0, 6, 16]) & SlidingWindow(2, 2)": Documents([0, 6, 16]) & SlidingWindow(2, 2),
        "(SlidingWindow(3, 0) | Documents([0, 16], [0, 2])) & Causal()": (
            (SlidingWindow(3, 0) | Documents([0, 16], [0, 2])) & Causal()
        ),
    },
    "masks_batched": {
        "Batched: documents of 11 and 5 tokens; of 12, 2 and 2": Batched(
            Documents(edges, within=Causal()) for edges in ([0, 11, 16], [0, 12, 14, 16])
        ),
    },
}
"""Masks of `SEQ_LEN` tokens by their expressions, of each picture."""


def save(figure: Figure, path: Path) -> None:
    """Write a picture of 64 colours, a third of the bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, dpi=100, facecolor="white")
    Image.open(buffer).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def new_figure(height: float, *lines: str, ranks: int = RANKS) -> Figure:
    """Return a figure 8 inches wide with a title and a legend of the ranks; pages show it at 400 pixels, too."""
    figure = Figure(figsize=(8, height), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=14)
    if ranks:
        handles = [Patch(facecolor=RANK_COLOURS[rank], label=f"rank {rank}") for rank in range(ranks)]
        figure.legend(handles=handles, loc="outside lower center", ncol=ranks, fontsize=13, frameon=False)
    return figure


def draw_ranks(axis: Axes, ranks: np.ndarray, texts: np.ndarray, title: str, x: str, y: str) -> None:
    """Draw an array of ranks as coloured cells with texts; white where there is no rank."""
    rows, columns = ranks.shape
    axis.imshow(ranks, cmap=ListedColormap(("#ffffff", *RANK_COLOURS)), vmin=NONE, vmax=len(RANK_COLOURS) - 1)
    for row, column in zip(*np.nonzero(ranks >= 0), strict=True):
        axis.text(column, row, texts[row, column], ha="center", va="center_baseline", fontsize=11)
    axis.set_title(title, fontsize=13)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_xticks(range(0, columns, 1 if columns <= 8 else 4))
    axis.set_yticks(range(0, rows, 1 if rows <= 8 else 4))


def draw_pairs(axis: Axes, drawn: Assignment, title: str, head: int = 0) -> None:
    """Draw the rank of each (query, key) pair of a head as colour, its step as number, and the rank beside its row."""
    step, inner = drawn.step[head], drawn.inner_step[head]
    texts = step.astype(object) if (inner == NONE).all() else np.vectorize("{}{}".format)(step, inner)
    draw_ranks(axis, drawn.owner[head], texts, title, "key", "query")
    for query, rank in enumerate(drawn.owner[head].max(1)):
        axis.text(drawn.owner.shape[2] - 0.2, query, str(rank), va="center_baseline", fontsize=11)


def draw_layouts() -> Figure:
    """Draw causal attention in a ring by layout."""
    figure = new_figure(
        13, "Causal attention of 16 tokens in a ring of 4. Colour, and number at the right:",
        "the rank that computes a (query, key) pair. Number inside: its step.",
    )  # fmt: skip
    for axis, (title, layout, row) in zip(np.ravel(figure.subplots(3, 2)), LAYOUTS, strict=True):
        drawn = assignment(Causal(), layout, SEQ_LEN, batch_size=2, batch_row=row)
        draw_pairs(axis, drawn, f"{title}\npairs by rank: {pairs_by_rank(drawn)}")
    return figure


def pairs_by_rank(drawn: Assignment) -> str:
    return ", ".join(str(np.count_nonzero(drawn.owner[0] == rank)) for rank in range(RANKS))


def draw_transports() -> Figure:
    """Draw the steps of two KV transports."""
    figure = new_figure(5.3, "Steps by rotate_method, HeadTail(). 0: a rank's own keys.")
    for axis, (name, transport) in zip(figure.subplots(1, 2), TRANSPORTS.items(), strict=True):
        draw_pairs(axis, assignment(Causal(), HeadTail(), SEQ_LEN, transport=transport), name)
    return figure


def draw_masks(masks: dict[str, Mask]) -> Figure:
    """Draw for each batch row of each mask, under two layouts, the pairs and the keys that ranks receive."""
    rows = [(text, mask, row) for text, mask in masks.items() for row in range(mask.batch_size or 1)]
    figure = new_figure(
        5.7 * len(rows) + 1.2, "Colour, and number at the right: the rank that computes a pair.",
        "Number inside: its step. Below: the keys at each rank, its own (•)",
        "and the rows of its buffer that it receives.",
    )  # fmt: skip
    parts: Any = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for part, (text, mask, row) in zip(parts, rows, strict=True):
        part.suptitle(text + f", row {row}" * bool(mask.batch_size), family="monospace", fontsize=12, fontweight="bold")
        axes = part.subplots(2, 2, height_ratios=[SEQ_LEN, RANKS])
        for (pairs, keys), layout in zip(axes.T, (HeadTail(), Balanced(mask, SEQ_LEN)), strict=True):
            drawn = assignment(mask, layout, SEQ_LEN, batch_row=row, transport=AllGather())
            draw_pairs(pairs, drawn, f"{type(layout).__name__}: {pairs_by_rank(drawn)} pairs")
            own = np.arange(RANKS)[:, None] == drawn.before[0]
            here = np.where(own | (drawn.buffer_row >= 0), drawn.before[0], NONE)
            draw_ranks(keys, here, np.where(own, "•", drawn.buffer_row.astype(str)), "", "key", "at rank")
    return figure


def draw_methods() -> Figure:
    """Draw the rows that ranks own, the rows that they hold in attention, and the pairs that they compute."""
    figure = new_figure(
        10.3, "Causal attention of 8 tokens and 4 heads on 4 ranks, HeadTail().",
        "Colour, and number at the right: the rank. Number of a pair: the step of",
        "the ring; 10 is step 0 of the inner ring in step 1 of the outer ring.",
    )  # fmt: skip
    ring, ulysses, hybrid, nested = (assignment(Causal(), HeadTail(), 8, method) for method in METHODS.values())
    axes: Any = figure.subplots(3, 3)
    draw_ranks(axes[0, 0], ring.before, ring.before, "ranks own", "token", "head")
    draw_pairs(axes[0, 1], ring, "ring, all heads")
    draw_pairs(axes[0, 2], nested, "nested ring, all heads")
    for row, name, drawn in zip(axes[1:], ("Ulysses", "hybrid"), (ulysses, hybrid), strict=True):
        draw_ranks(row[0], drawn.during, drawn.during, f"{name}: ranks hold", "token", "head")
        first, *_, last = heads_alike(drawn)
        for axis, heads in zip(row[1:], (first, last), strict=True):
            draw_pairs(axis, drawn, f"{name}, head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}", heads[0])
    return figure


def heads_alike(drawn: Assignment) -> list[list[int]]:
    """Return heads that the same ranks compute, in order."""
    alike: dict[bytes, list[int]] = {}
    for head in range(HEADS):
        alike.setdefault(drawn.owner[head].tobytes(), []).append(head)
    return list(alike.values())


def draw_buffers() -> Figure:
    """Draw a buffer of `SEQ_LEN` tokens before, in and after a context."""
    figure = new_figure(5.2, "A buffer of 16 tokens: the number is the token, the colour its owner.")
    before, inside, after = figure.subplots(3, 1)
    owner = assignment(Full(), HeadTail(), SEQ_LEN).before[0]
    whole = np.tile(np.arange(SEQ_LEN), (RANKS, 1))
    shards = np.array([np.flatnonzero(owner == rank) for rank in range(RANKS)])
    draw_ranks(before, owner[whole], whole, "before: each rank has all tokens", "", "at rank")
    draw_ranks(inside, owner[shards], shards, "in the context: a shard in the same variable", "", "at rank")
    draw_ranks(after, owner[whole], whole, "after: all tokens again", "place in the buffer", "at rank")
    for axis in (before, inside, after):
        axis.set(xlim=before.get_xlim(), aspect="auto")
    return figure


def draw_states() -> Figure:
    """Draw the unbroken runs of each rank, and the path of a recurrent layer's state through them."""
    figure = new_figure(5.6, "Runs of each rank (bars); arrows: the state of a recurrent layer.", ranks=0)
    panels: Sequence[tuple[str, Layout, tuple[int, ...]]] = (
        ("Contiguous()", Contiguous(), ()), ("HeadTail()", HeadTail(), ()),
        ("HeadTail(), documents of 6, 19 and 7 tokens (dotted)", HeadTail(), (6, 25)),
    )  # fmt: skip
    for axis, (title, layout, edges) in zip(figure.subplots(3, 1, sharex=True), panels, strict=True):
        places = [(each.positions(), rank) for rank in range(RANKS) for each in layout.segments(32, rank, RANKS)]
        runs = sorted((min(each), max(each) + 1, rank) for each, rank in places)
        for (start, stop, rank), after in zip(runs, [*runs[1:], None], strict=True):
            axis.barh(rank, stop - start, left=start, height=0.7, color=RANK_COLOURS[rank])
            if after and after[2] != rank:
                arrow = {"arrowstyle": "->", "linewidth": 1.8}
                axis.annotate("", (after[0] + 0.3, after[2]), (stop - 0.3, rank), arrowprops=arrow)
        for edge in edges:
            axis.axvline(edge, color="black", linestyle=":", linewidth=2)
        axis.set_title(title, fontsize=13)
        axis.set(xlim=(0, 32), ylim=(RANKS - 0.5, -0.5), yticks=range(RANKS), ylabel="rank")
    axis.set_xlabel("position")
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "layouts": draw_layouts, "transports": draw_transports, "methods": draw_methods, "buffers": draw_buffers,
    "states": draw_states, **{name: partial(draw_masks, masks) for name, masks in MASKS.items()},
}  # fmt: skip


def main() -> None:
    """Draw the named pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}; default: all")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*PICTURES}:
        parser.error(f"expected names of {', '.join(PICTURES)}, got {', '.join(sorted(unknown))}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with rc_context({"font.size": 12}):
        for name in arguments.names or PICTURES:
            save(PICTURES[name](), arguments.folder / f"{name}.png")


if __name__ == "__main__":
    main()
