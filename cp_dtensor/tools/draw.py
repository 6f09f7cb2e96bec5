"""Pictures of the pairs that each rank computes, drawn from execution plans; `python -m cp_dtensor draw`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cp_dtensor import Layout, Mask, imbalance
from cp_dtensor.plan.partition import CallSpec, LayoutPartition, masking_of
from cp_dtensor.plan.plan import Stages, TilePlan, gathered_plan, ring_plan
from cp_dtensor.plan.tiles import Tile
from cp_dtensor.plan.tiling import GroupSegments
from cp_dtensor.spec.intervals import IntervalSets, count_pairs
from cp_dtensor.spec.masks import interval_sets_of
from cp_dtensor.tools.parsing import LAYOUTS, MASK_HELP, command_parser, layout_by_name, mask_by_name, positive

with suppress(ImportError):  # the text needs no numpy
    import numpy as np
if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE = -1
"""Value of pairs that no rank computes."""
RANK_COLOURS = (
    "#7fb8da", "#f6b26b", "#93c98b", "#e58b8b", "#b39ddb", "#c8a27c", "#f1a7cf", "#a9b1b8",
    "#d3cf6d", "#6fcfc9", "#4f81bd", "#c8743c", "#4f9a5d", "#b0506a", "#7566a8", "#8d8d4e",
)  # fmt: skip
_MOST_TOKENS = 2048
_DESCRIPTION = """\
Draws the pairs of queries and keys that each rank computes, from the plans that calls execute. Without --output, prints
the mask as text and the imbalance of the layout.

    python -m cp_dtensor draw --mask window:15,0 --layout 'Striped(4)' --ranks 4 --output window.png
"""
_SHADES = "·░▒▓█"
_MOST_TEXT_CELLS = 40


@dataclass(frozen=True)
class Assignment:
    """The rank and step of every (query, key) pair of one batch row; -1 where there is none."""

    owner: np.ndarray
    """(queries, keys): the rank that computes a pair."""
    step: np.ndarray
    """(queries, keys): the step of the rank's plan in which it computes the pair; 0 for its own keys."""
    key_owner: np.ndarray
    """(keys,): the rank that owns a key."""
    buffer_row: np.ndarray
    """(ranks, keys): row of a key in the rank's gathered buffer; -1 if the rank does not receive the key."""


def assignment(
    mask: Mask, layout: Layout, seq_len: int, ranks: int, *, batch_size: int = 1, batch_row: int = 0,
    rotate_method: str = "alltoall",
) -> Assignment:  # fmt: skip
    """Tabulate who computes what of one batch row, from the plans of all ranks.

    Args:
        batch_size: rows of the batch; replaced by that of the mask if the mask has one.
        batch_row: the row to show.
        rotate_method: "alltoall" for a ring; "allgather" for the plan of all-gather and of symmetric memory.
    """
    batch_size = mask.batch_size or batch_size
    owner, step = (np.full((seq_len, seq_len), NONE) for _ in range(2))
    key_owner, buffer_row = np.full(seq_len, NONE), np.full((ranks, seq_len), NONE)
    partition = LayoutPartition(layout, seq_len, seq_len, batch_size, ranks)
    tiling = CallSpec(partition, mask, batch_size, 1, 1, 1, 1, "float32", masking_of(partition, mask)).tiling
    group = next(group for group in partition.groups() if group.batch[0] <= batch_row < group.batch[1])
    for rank in range(ranks):
        one = Stages(1, 1)
        plan = ring_plan(tiling, rank, 1) if rotate_method == "alltoall" else gathered_plan(tiling, rank, 1, one, one)
        queries = np.array(_positions(group, rank))
        key_owner[_positions(group, rank)] = rank
        for number, each in enumerate(plan.forward):
            for tile in each.tiles:
                if tile.batch != group.batch:
                    continue
                pairs = np.ix_(queries[slice(*tile.q)], key_positions(tile, plan, group)[slice(*tile.kv)])
                seen = seen_by(tile, batch_row if mask.batch_size else 0)
                for array, value in ((owner, rank), (step, number)):
                    array[pairs] = np.where(seen, value, array[pairs])
        for source, parts in enumerate(plan.recv_parts):
            for part in parts:
                keys = _positions(group, source)[slice(*plan.rows.local_span(source, part))]
                buffer_row[rank, keys] = range(*plan.rows.span(source, part))
    return Assignment(owner, step, key_owner, buffer_row)


def _positions(group: GroupSegments, rank: int) -> list[int]:
    """Return the positions of a rank's queries, and of its keys, in local order."""
    return [position for segment in group.kv_by_rank[rank] for position in segment.positions()]


def key_positions(tile: Tile, plan: TilePlan, group: GroupSegments) -> np.ndarray:
    """Return the positions of the rows that `tile.kv` counts."""
    if tile.source is not None:
        return np.array(_positions(group, tile.source))
    positions = np.full(plan.rows.total, NONE)
    for source, part in plan.rows.places:
        rows = slice(*plan.rows.span(source, part))
        positions[rows] = _positions(group, source)[slice(*plan.rows.local_span(source, part))]
    return positions


def seen_by(tile: Tile, batch_row: int = 0) -> np.ndarray:
    """Return the (query, key) pairs of a tile that its mask allows in one of its batch rows: (rows, columns)."""
    rows, columns = tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0]
    seen = np.zeros((rows, columns), dtype=bool)
    for part in tile.mask.parts:
        for row, (first, last) in enumerate(part.intervals(rows, columns, batch_row)):
            seen[row, first : max(first, last)] = True
    return seen


# Picture


def draw_assignment(mask: Mask, layout: Layout, seq_len: int, ranks: int, title: str) -> Figure:
    """Draw the mask coloured by the rank that computes a pair, with the number of pairs of each rank."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = layout.batch_groups(2)
    drawn = [
        assignment(mask, layout, seq_len, ranks, batch_size=len(groups), batch_row=row).owner
        for row in range(len(groups))
    ]
    figure = Figure(figsize=(7 * len(drawn) + 2.5, 7.5), layout="constrained")
    figure.suptitle(title)
    axes: Any = figure.subplots(1, len(drawn), squeeze=False)[0]
    for half, axis, owner in zip(("first", "second"), axes, drawn, strict=False):
        colours = ListedColormap(RANK_COLOURS[:ranks])
        axis.imshow(np.ma.masked_less(owner, 0), cmap=colours, vmin=0, vmax=ranks - 1, interpolation="none")
        axis.set(xlabel="key", ylabel="query", title=f"{half} half of the batch" if len(drawn) > 1 else "")
    pairs = [sum(int(np.count_nonzero(owner == rank)) for owner in drawn) for rank in range(ranks)]
    labels = (f"rank {rank}: {count:,} pairs" for rank, count in enumerate(pairs))
    patches = [Patch(color=colour, label=label) for colour, label in zip(RANK_COLOURS, labels, strict=False)]
    figure.legend(handles=patches, loc="outside right upper", frameon=False)
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
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("a picture needs matplotlib: pip install matplotlib")
    figure = draw_assignment(mask, layout, seq_len, ranks, title)
    try:
        figure.savefig(options.output, dpi=110, facecolor="white")
    except (OSError, ValueError) as error:
        parser.error(f"--output {options.output}: {error}")
    print(f"wrote {options.output}")
