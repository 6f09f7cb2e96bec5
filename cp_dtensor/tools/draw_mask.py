"""Draws a mask as text: queries downwards, keys to the right.

python -m cp_dtensor.tools.draw_mask "Documents([0, 5, 12], within=Causal()) & SlidingWindow(3, 0)" 12
"""

from __future__ import annotations

import argparse

from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.intervals import IntervalSets, count_pairs
from cp_dtensor.spec.masks import Batched, Causal, Full, Mask, PrefixLM, SlidingWindow, interval_sets_of

_SHADES = "·░▒▓█"
_MOST_CELLS = 40
_NAMES = {kind.__name__: kind for kind in (Full, Causal, SlidingWindow, PrefixLM, Documents, Batched)}


def main() -> None:
    """Draws the mask of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mask", help="a Python expression of cp_dtensor's masks")
    parser.add_argument("q_len", type=int, help="number of queries")
    parser.add_argument("kv_len", type=int, nargs="?", help="number of keys, that of queries if left out")
    arguments = parser.parse_args()
    draw(mask_of_text(arguments.mask), arguments.q_len, arguments.kv_len)


def draw(mask: Mask, q_len: int, kv_len: int | None = None) -> None:
    """Prints a mask: █ where a query sees a key, · where it does not.

    Of more than 40 tokens a cell is of several pairs, the darker the more of them are shown.

    >>> from cp_dtensor import Documents, PrefixLM
    >>> draw(Documents([0, 2, 5], within=PrefixLM(2)), 5)
    ████······
    ████······
    ····████··
    ····████··
    ····██████
    """
    print(drawn(mask, q_len, kv_len))


def drawn(mask: Mask, q_len: int, kv_len: int | None = None) -> str:
    """What `draw` prints."""
    kv_len = q_len if kv_len is None else kv_len
    cell = max(1, -(-max(q_len, kv_len) // _MOST_CELLS))
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
    shown, workload = count_pairs(sets, queries, keys), (queries[1] - queries[0]) * (keys[1] - keys[0])
    if shown in (0, workload):
        return _SHADES[-1 if shown else 0]
    return _SHADES[1 + 3 * shown // workload]


def mask_of_text(text: str) -> Mask:
    """The mask that an expression stands for.

    >>> mask_of_text("SlidingWindow(4, 0) & Causal()")
    Intersection(masks=(SlidingWindow(left=4, right=0, alignment='top_left'), Causal(alignment='top_left')))
    """
    mask = eval(text, dict(_NAMES))
    if not isinstance(mask, Mask):
        raise TypeError(f"expected an expression for a mask, got {text}")
    return mask


if __name__ == "__main__":
    main()
