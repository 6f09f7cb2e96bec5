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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NONE = -1
"""Value of pairs that no rank computes."""
RANK_COLOURS = (
    "#7fb8da", "#f6b26b", "#93c98b", "#e58b8b", "#b39ddb", "#c8a27c", "#f1a7cf", "#a9b1b8",
    "#d3cf6d", "#6fcfc9", "#4f81bd", "#c8743c", "#4f9a5d", "#b0506a", "#7566a8", "#8d8d4e",
)  # fmt: skip
_MOST_TOKENS, _MOST_LABELLED = 2048, 256
_DESCRIPTION = """\
Draws the pairs of queries and keys that each rank computes, from the plans that calls execute. Without --output, prints
the mask as text and the imbalance of the layout.

    python -m cp_dtensor draw --mask window:15,0 --layout 'Striped(4)' --ranks 4 --output window.png
"""
_SHADES = "·░▒▓█"
_MOST_TEXT_CELLS = 40


@dataclass(frozen=True)
class Assignment:
    """The rank, step and tile of every (query, key) pair of one batch row; -1 where there is none."""

    owner: np.ndarray
    """(queries, keys): the rank that computes a pair."""
    step: np.ndarray
    """(queries, keys): the step of the rank's plan in which it computes the pair; 0 for its own keys."""
    tile: np.ndarray
    """(queries, keys): number of the tile, unique over all ranks."""
    times: np.ndarray
    """(queries, keys): how many tiles compute the pair; 1 if the mask allows the pair, else 0."""
    key_owner: np.ndarray
    """(keys,): the rank that owns a key."""
    buffer_row: np.ndarray
    """(ranks, keys): row of a key in the rank's gathered buffer; -1 if the rank does not receive the key."""


def assignment(
    mask: Mask,
    layout: Layout,
    seq_len: int,
    ranks: int,
    *,
    batch_size: int = 1,
    batch_row: int = 0,
    rotate_method: str = "alltoall",
) -> Assignment:
    """Table of who computes what of one batch row, from the plans of all ranks.

    Args:
        batch_size: rows of the batch; replaced by that of the mask if the mask has one.
        batch_row: the row to show.
        rotate_method: "alltoall" for a ring; "allgather" for the plan of all-gather and of symmetric memory.
    """
    batch_size = mask.batch_size or batch_size
    owner, step, tiles = (np.full((seq_len, seq_len), NONE) for _ in range(3))
    times = np.zeros((seq_len, seq_len), dtype=int)
    key_owner, buffer_row = np.full(seq_len, NONE), np.full((ranks, seq_len), NONE)
    partition = LayoutPartition(layout, seq_len, seq_len, batch_size, ranks)
    tiling = CallSpec(partition, mask, batch_size, 1, 1, 1, 1, "float32", masking_of(partition, mask)).tiling
    group = next(group for group in partition.groups() if group.batch[0] <= batch_row < group.batch[1])
    count = 0
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
                times[pairs] += seen
                for array, value in ((owner, rank), (step, number), (tiles, count)):
                    array[pairs] = np.where(seen, value, array[pairs])
                count += 1
        for source, parts in enumerate(plan.recv_parts):
            for part in parts:
                keys = _positions(group, source)[slice(*plan.rows.local_span(source, part))]
                buffer_row[rank, keys] = range(*plan.rows.span(source, part))
    return Assignment(owner, step, tiles, times, key_owner, buffer_row)


def _positions(group: GroupSegments, rank: int) -> list[int]:
    """The positions of a rank's queries, and of its keys, in local order."""
    return [position for segment in group.kv_by_rank[rank] for position in segment.positions()]


def key_positions(tile: Tile, plan: TilePlan, group: GroupSegments) -> np.ndarray:
    """The positions of the rows that `tile.kv` counts."""
    if tile.source is not None:
        return np.array(_positions(group, tile.source))
    positions = np.full(plan.rows.total, NONE)
    for source, part in plan.rows.places:
        rows = slice(*plan.rows.span(source, part))
        positions[rows] = _positions(group, source)[slice(*plan.rows.local_span(source, part))]
    return positions


def seen_by(tile: Tile, batch_row: int = 0) -> np.ndarray:
    """The (query, key) pairs of a tile that its mask allows in one of its batch rows: (rows, columns)."""
    rows, columns = tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0]
    seen = np.zeros((rows, columns), dtype=bool)
    for part in tile.mask.parts:
        for row, (first, last) in enumerate(part.intervals(rows, columns, batch_row)):
            seen[row, first : max(first, last)] = True
    return seen


# Picture


def draw_assignment(mask: Mask, layout: Layout, seq_len: int, ranks: int, title: str, rotate_method: str) -> Figure:
    """Draws the mask coloured by rank with the tiles outlined, and the work of each rank beside it."""
    from matplotlib.figure import Figure

    groups = layout.batch_groups(2)
    drawn = [
        assignment(
            mask, layout, seq_len, ranks, batch_size=len(groups), batch_row=row, rotate_method=rotate_method
        )
        for row in range(len(groups))
    ]  # fmt: skip
    width, side = 7.2 * len(drawn) + 4.6, 7.2
    figure = Figure(figsize=(width, side + 1.3))
    axes: Any = figure.subplots(1, len(drawn) + 1, width_ratios=[7.2] * len(drawn) + [2.9])
    figure.subplots_adjust(left=0.85 / width, right=1 - 0.5 / width, bottom=0.085, top=0.85, wspace=0.2)
    for half, axis, each in zip(("first", "second"), axes, drawn, strict=False):
        _draw_pairs(axis, each, ranks)
        if len(drawn) > 1:
            axis.set_title(f"{half} half of the batch", fontsize=11, pad=16)
    work = [sum(int(np.count_nonzero(each.owner == rank)) for each in drawn) for rank in range(ranks)]
    _draw_work(axes[-1], work, imbalance(layout, mask, seq_len, ranks))
    figure.suptitle(title, x=0.85 / width, y=0.97, ha="left", fontsize=15, fontweight="bold")
    tiles = sum(len(np.unique(each.tile[each.tile >= 0])) for each in drawn)
    about = f"colour: rank that computes a (query, key) pair · outlines: tiles ({tiles})"
    about += " · numbers: step in which the rank computes the tile · strips: owner of a token"
    figure.text(0.85 / width, 0.918, about, fontsize=9.5, color="#555555")
    return figure


def _draw_pairs(axis: Axes, drawn: Assignment, ranks: int) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(RANK_COLOURS[:ranks])
    seq_len = len(drawn.key_owner)
    axis.imshow(np.ma.masked_less(drawn.owner, 0), cmap=colours, vmin=0, vmax=ranks - 1, interpolation="none")
    cell = 7.2 * 72 / seq_len  # points
    framed = np.pad(drawn.tile, 1, constant_values=NONE)
    below = np.argwhere(framed[:-1, 1:-1] != framed[1:, 1:-1])
    right = np.argwhere(framed[1:-1, :-1] != framed[1:-1, 1:])
    lines = [((x - 0.5, y - 0.5), (x + 0.5, y - 0.5)) for y, x in below]
    lines += [((x - 0.5, y - 0.5), (x - 0.5, y + 0.5)) for y, x in right]
    axis.add_collection(
        LineCollection(lines, colors="#2b2b2b", linewidths=min(0.9, max(0.4, 0.12 * cell)), capstyle="round")
    )
    if seq_len <= _MOST_LABELLED:
        for block in _blocks(drawn.tile):
            y, x = block[np.argmin(((block - block.mean(0)) ** 2).sum(1))]
            mean = block.mean(0)
            centre = mean if drawn.tile[tuple(mean.round().astype(int))] == drawn.tile[y, x] else (y, x)
            size = min(12.0, 0.6 * cell * (np.ptp(block, axis=0).min() + 1))
            if size >= 5:
                text = str(drawn.step[y, x])
                axis.text(centre[1], centre[0], text, ha="center", va="center", fontsize=size, color="#222222")
    above, beside = (0, 1.008, 1, 0.018), (-0.026, 0, 0.018, 1)
    for place, owners in ((above, drawn.key_owner[None]), (beside, drawn.key_owner[:, None])):
        strip = axis.inset_axes(place)
        strip.imshow(owners, cmap=colours, vmin=0, vmax=ranks - 1, aspect="auto", interpolation="none")
        strip.axis("off")
    axis.set_xlabel("key", fontsize=11)
    axis.set_ylabel("query", fontsize=11, labelpad=12)
    axis.tick_params(labelsize=9, length=0, pad=3)
    axis.tick_params(axis="y", pad=14)
    axis.spines[:].set_color("#bbbbbb")


def _blocks(tiles: np.ndarray) -> list[np.ndarray]:
    """The connected areas of equal tile numbers: (pairs, 2) each, query and key."""
    left = {(int(y), int(x)) for y, x in np.argwhere(tiles >= 0)}
    blocks = []
    while left:
        block = [left.pop()]
        for y, x in block:  # which grows meanwhile
            near = {(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)} & left
            block += (same := [each for each in near if tiles[each] == tiles[y, x]])
            left -= {*same}
        blocks.append(np.array(block))
    return blocks


def _draw_work(axis: Axes, work: Sequence[int], excess: float) -> None:
    axis.barh(range(len(work)), work, color=RANK_COLOURS[: len(work)], height=0.76)
    for rank, pairs in enumerate(work):
        axis.text(1.36 * max(*work, 1), rank, f"{pairs:,}", va="center", ha="right", fontsize=9.5, color="#333333")
    axis.axvline(sum(work) / len(work), color="#2b2b2b", linestyle=(0, (4, 3)), linewidth=1)
    axis.set_yticks(range(len(work)), [f"rank {rank}" for rank in range(len(work))], fontsize=9.5)
    axis.set_ylim(max(len(work), 4) - 0.4, -0.6)
    axis.set_xlim(0, 1.38 * max(*work, 1))
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.set_title(f"pairs per rank (dashed: mean)\nimbalance {excess:.1%}", fontsize=11, loc="left")
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.spines["left"].set_color("#bbbbbb")


# Text


def print_mask(mask: Mask, q_len: int, kv_len: int | None = None) -> None:
    """Prints a mask: █ where a query sees a key, · where it does not.

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
    """The text that `print_mask` prints."""
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
    """Draws the picture of the command line; prints the mask and the work per rank if no file is named."""
    parser = command_parser("draw", _DESCRIPTION)
    parser.add_argument("--mask", default="causal", metavar="MASK", help=f"{MASK_HELP}; default: causal")
    parser.add_argument("--layout", default="HeadTail", help=f"{', '.join(LAYOUTS)} or Striped(N); default: HeadTail")
    parser.add_argument("--ranks", type=positive, default=4, help=f"1 to {len(RANK_COLOURS)}; default: 4")
    parser.add_argument("--seq-len", type=positive, default=64, help="global number of tokens; default: 64")
    methods = "alltoall: a ring (default); allgather: all other ranks' keys at once, as symm_mem"
    parser.add_argument("--rotate-method", choices=("alltoall", "allgather"), help=methods)
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
    if options.output is None:
        if options.rotate_method is not None:
            parser.error("--rotate-method is of pictures: it needs --output")
        print(f"{mask_as_text(mask, seq_len)}\n{title}: imbalance {imbalance(layout, mask, seq_len, ranks):.1%}")
        return
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("a picture needs matplotlib: pip install matplotlib")
    figure = draw_assignment(mask, layout, seq_len, ranks, title, options.rotate_method or "alltoall")
    try:
        figure.savefig(options.output, dpi=110, facecolor="white")
    except (OSError, ValueError) as error:
        parser.error(f"--output {options.output}: {error}")
    print(f"wrote {options.output}")
