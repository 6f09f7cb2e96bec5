"""Pictures of masks, and of the pairs that each rank computes; `python -m cp_dtensor draw`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cp_dtensor import Layout, Mask, imbalance
from cp_dtensor.spec.intervals import IntervalSets, count_pairs
from cp_dtensor.spec.masks import clipped_interval_sets, interval_sets_of
from cp_dtensor.tools.parsing import (
    LAYOUTS,
    MASK_HELP,
    command_parser,
    layout_by_name,
    mask_by_name,
    positive,
    save_picture,
)

with suppress(ImportError):  # the text needs no numpy
    import numpy as np
if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANK_COLOURS = (  # the first four differ in grey, too
    "#4f8fcd", "#ffdf9a", "#a5d593", "#e8837a", "#b39ddb", "#c8a27c", "#f1a7cf", "#a9b1b8",
    "#d3cf6d", "#6fcfc9", "#31659c", "#c8743c", "#4f9a5d", "#b0506a", "#7566a8", "#8d8d4e",
)  # fmt: skip
_MOST_TOKENS = 2048
_DESCRIPTION = """\
Draws the pairs of queries and keys that each rank computes: those of its queries. Without --output, prints the mask as
text and the imbalance of the layout.

    python -m cp_dtensor draw --mask window:15,0 --layout 'Striped(4)' --ranks 4 --output window.png
"""
_SHADES = "·░▒▓█"
_MOST_TEXT_CELLS = 40


# Picture


def owners(mask: Mask, layout: Layout, seq_len: int, ranks: int, group: int) -> np.ndarray:
    """Return the rank that computes each pair, that of the query, in a group of batch rows; -1 for none."""
    owner = np.full((seq_len, seq_len), -1)
    bands = [band for bands in clipped_interval_sets(mask, seq_len, seq_len) for band in bands]
    for rank in range(ranks):
        for query in (each for segment in layout.segments(seq_len, rank, ranks, group) for each in segment.positions()):
            for band in (band for band in bands if band.first <= query < band.last):
                owner[query, slice(*band.keys(query))] = rank
    return owner


def draw_owners(mask: Mask, layout: Layout, seq_len: int, ranks: int, title: str) -> Figure:
    """Draw the mask coloured by the rank that computes a pair, with the number of pairs of each rank."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = [owners(mask, layout, seq_len, ranks, group) for group in range(len(layout.batch_groups(2)))]
    figure = Figure(figsize=(5 * len(drawn) + 2, 5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes: Any = figure.subplots(1, len(drawn), squeeze=False)[0]
    for half, axis, owner in zip(("first", "second"), axes, drawn, strict=False):
        colours = ListedColormap(RANK_COLOURS[:ranks])
        axis.imshow(np.ma.masked_less(owner, 0), cmap=colours, vmin=0, vmax=ranks - 1, interpolation="none")
        axis.set(xlabel="key", ylabel="query", title=f"{half} half of the batch" if len(drawn) > 1 else "")
    pairs = [sum(int(np.count_nonzero(owner == rank)) for owner in drawn) for rank in range(ranks)]
    labels = (f"rank {rank}: {count:,} pairs" for rank, count in enumerate(pairs))
    patches = [Patch(color=colour, label=label) for colour, label in zip(RANK_COLOURS, labels, strict=False)]
    figure.legend(handles=patches, loc="outside right center", frameon=False)
    return figure


# Text


def print_mask(mask: Mask, q_len: int, kv_len: int | None = None) -> None:
    """Print a mask: █ where a query sees a key, · where it does not.

    With more than 40 tokens, each cell is several pairs; darker cells have more allowed pairs.

    >>> from cp_dtensor import Documents, PrefixLM
    >>> print_mask(Documents([0, 2, 5], within=PrefixLM(2)), 5)
    ████······
    ████······
    ····████··
    ····████··
    ····██████
    """
    print(mask_as_text(mask, q_len, kv_len))


def mask_as_text(mask: Mask, q_len: int, kv_len: int | None = None) -> str:
    """Return the text that `print_mask` prints."""
    kv_len = q_len if kv_len is None else kv_len
    cell = max(1, -(-max(q_len, kv_len) // _MOST_TEXT_CELLS))
    by_row = interval_sets_of(mask, q_len, kv_len, mask.batch_size or 1)
    parts = [f"a cell: {cell} x {cell} pairs"] if cell > 1 else []
    for number, sets in enumerate(by_row):
        parts += [f"batch row {number}:"] if len(by_row) > 1 else []
        for first in range(0, q_len, cell):
            queries = (first, min(first + cell, q_len))
            parts.append(
                "".join(2 * _shade(sets, queries, (lo, min(lo + cell, kv_len))) for lo in range(0, kv_len, cell))
            )
    return "\n".join(parts)


def _shade(sets: IntervalSets, queries: tuple[int, int], keys: tuple[int, int]) -> str:
    seen, pairs = count_pairs(sets, queries, keys), (queries[1] - queries[0]) * (keys[1] - keys[0])
    return _SHADES[-1 if seen else 0] if seen in (0, pairs) else _SHADES[1 + 3 * seen // pairs]


# Command


def main(arguments: Sequence[str]) -> None:
    """Draw the picture of the command line; print the mask and the imbalance if no file is named."""
    parser = command_parser("draw", _DESCRIPTION)
    parser.add_argument("--mask", default="causal", metavar="MASK", help=f"{MASK_HELP}; default: causal")
    parser.add_argument("--layout", default="HeadTail", help=f"{', '.join(LAYOUTS)} or Striped(N); default: HeadTail")
    parser.add_argument("--ranks", type=positive, default=4, help=f"1 to {len(RANK_COLOURS)}; default: 4")
    parser.add_argument("--seq-len", type=positive, default=64, help="global number of tokens; default: 64")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="picture to write, such as plan.png")
    options = parser.parse_args(arguments)
    ranks, seq_len = options.ranks, options.seq_len
    if ranks > len(RANK_COLOURS):
        parser.error(f"--ranks: expected at most {len(RANK_COLOURS)}, one colour each, got {ranks}")
    if seq_len > _MOST_TOKENS:
        parser.error(f"--seq-len: expected at most {_MOST_TOKENS}, since every pair is a cell, got {seq_len}")
    try:
        mask = mask_by_name(options.mask, seq_len)
        layout = layout_by_name(options.layout, mask, seq_len)
        mask.pairs(seq_len, seq_len)  # refuses masks that do not fit the length
    except ValueError as error:
        parser.error(str(error))
    title = f"{options.mask} · {options.layout} · {seq_len} tokens on {ranks} rank{'s' if ranks > 1 else ''}"
    title += f": imbalance {imbalance(layout, mask, seq_len, ranks):.1%}"
    if options.output is None:
        print(f"{mask_as_text(mask, seq_len)}\n{title}")
        return
    save_picture(parser, options.output, lambda: draw_owners(mask, layout, seq_len, ranks, title))
