"""Masks as text, with the rank that computes each query; `python -m cp_dtensor draw`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cp_dtensor import Layout, Mask, imbalance
from cp_dtensor.spec.intervals import IntervalSets, count_pairs
from cp_dtensor.spec.layouts import Span
from cp_dtensor.spec.masks import interval_sets_of
from cp_dtensor.tools.parsing import LAYOUTS, MASK_HELP, command_parser, layout_by_name, mask_by_name, positive

_MOST_TOKENS = 2048
_DESCRIPTION = """\
Draws the pairs of queries (lines) and keys (columns) that a mask allows, and behind each line the rank that computes
it: that of the query. A layout with other ranks in the second half of the batch has both, as in 0|3.

    python -m cp_dtensor draw --mask window:15,0 --layout 'Striped(4)' --ranks 4
"""
_SHADES = "·░▒▓█"
_MOST_TEXT_CELLS = 40


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


def mask_as_text(
    mask: Mask, q_len: int, kv_len: int | None = None, label: Callable[[Span], str] = lambda queries: ""
) -> str:
    """Return the text that `print_mask` prints, with a label of the queries of each line behind it."""
    kv_len = q_len if kv_len is None else kv_len
    cell = max(1, -(-max(q_len, kv_len) // _MOST_TEXT_CELLS))
    by_row = interval_sets_of(mask, q_len, kv_len, mask.batch_size or 1)
    parts = [f"a cell: {cell} x {cell} pairs"] if cell > 1 else []
    for number, sets in enumerate(by_row):
        parts += [f"batch row {number}:"] if len(by_row) > 1 else []
        for first in range(0, q_len, cell):
            queries = (first, min(first + cell, q_len))
            line = "".join(2 * _shade(sets, queries, (lo, min(lo + cell, kv_len))) for lo in range(0, kv_len, cell))
            parts.append(line + label(queries))
    return "\n".join(parts)


def _shade(sets: IntervalSets, queries: Span, keys: Span) -> str:
    seen, pairs = count_pairs(sets, queries, keys), (queries[1] - queries[0]) * (keys[1] - keys[0])
    return _SHADES[-1 if seen else 0] if seen in (0, pairs) else _SHADES[1 + 3 * seen // pairs]


def ranks_of_queries(layout: Layout, seq_len: int, ranks: int) -> Callable[[Span], str]:
    """Return a function that gives the ranks of some queries as text, in both halves of a batch if they differ."""
    groups = range(len(layout.batch_groups(2)))
    owners = [
        {position: rank for rank in range(ranks) for segment in layout.segments(seq_len, rank, ranks, group)
         for position in segment.positions()} for group in groups
    ]  # fmt: skip

    def label(queries: Span) -> str:
        by_group = [sorted({owner[query] for query in range(*queries)}) for owner in owners]
        return "  " + "|".join(",".join(map(str, each)) for each in by_group)

    return label


def main(arguments: Sequence[str]) -> None:
    """Print the mask of the command line, the ranks of its queries and the imbalance."""
    parser = command_parser("draw", _DESCRIPTION)
    parser.add_argument("--mask", default="causal", metavar="MASK", help=f"{MASK_HELP}; default: causal")
    parser.add_argument("--layout", default="HeadTail", help=f"{', '.join(LAYOUTS)} or Striped(N); default: HeadTail")
    parser.add_argument("--ranks", type=positive, default=4, help="default: 4")
    parser.add_argument("--seq-len", type=positive, default=64, help="global number of tokens; default: 64")
    options = parser.parse_args(arguments)
    ranks, seq_len = options.ranks, options.seq_len
    if seq_len > _MOST_TOKENS:
        parser.error(f"--seq-len: expected at most {_MOST_TOKENS}, got {seq_len}")
    try:
        mask = mask_by_name(options.mask, seq_len)
        layout = layout_by_name(options.layout, mask, seq_len)
        text = mask_as_text(mask, seq_len, label=ranks_of_queries(layout, seq_len, ranks))
    except ValueError as error:
        parser.error(str(error))
    title = f"{options.mask} · {options.layout} · {seq_len} tokens on {ranks} rank{'s' if ranks > 1 else ''}"
    print(f"{text}\n{title}: imbalance {imbalance(layout, mask, seq_len, ranks):.1%}")
