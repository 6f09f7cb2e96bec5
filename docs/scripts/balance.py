"""Table of exact counts: the balance of layouts under masks, and the K/V rows that ranks receive.

python docs/scripts/balance.py --seq-len 65536 131072 --ranks 8
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from cp_dtensor import (
    Balanced,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    PerDocument,
    PrefixLM,
    SlidingWindow,
    Striped,
    imbalance,
)
from cp_dtensor.spec.intervals import clipped_bands
from cp_dtensor.spec.layouts import Span
from cp_dtensor.spec.masks import interval_sets_of
from cp_dtensor.tools.parsing import lognormal_documents
from cp_dtensor.tools.report import markdown_table

HEADER = ("mask", "layout", "imbalance", "blocks per rank", "shortest, longest shard", "K/V received: most, mean")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    text = report(arguments.seq_len, arguments.ranks)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n")


def report(seq_lens: Sequence[int], rank_counts: Sequence[int]) -> str:
    """Returns the tables and an explanation of their numbers."""
    numbers = [" ".join(map(str, values)) for values in (seq_lens, rank_counts)]
    parts = [
        "# Balance of layouts under masks",
        f"Exact counts, by `python docs/scripts/balance.py --seq-len {numbers[0]} --ranks {numbers[1]}` (no GPU).",
        "- **Imbalance**: (query, key) pairs of the busiest rank over the mean, minus 1: how much longer than need be "
        "attention takes.\n"
        "- **Blocks per rank**: unbroken ranges of positions that the rank with most of them owns.\n"
        "- **K/V received**: rows that a rank's queries see and others own, as a share of all rows that others own, "
        "which is what an all-gather brings; of the rank that needs most, and on average.\n"
        "- **Documents** have lognormal lengths: exp(N(log(median), sigma)), rounded down, at least 1; the last is cut "
        "off where the sequence ends. Python's `random.Random(0)`; the mask is causal within documents.\n"
        "- `Balanced` is made for the mask of its row, with the default tolerance of 1%.",
    ]
    for seq_len in seq_lens:
        for ranks in rank_counts:
            parts += [f"## {seq_len:,} tokens on {ranks} ranks", markdown_table(HEADER, list(_rows(seq_len, ranks)))]
    return "\n\n".join(parts)


def masks(seq_len: int) -> dict[str, Mask]:
    """Returns the masks of a table by name."""
    named: dict[str, Mask] = {
        "full": Full(),
        "causal": Causal(),
        "causal, window of 4,096": SlidingWindow(4095, 0),
        f"prefix of {seq_len // 8:,}": PrefixLM(seq_len // 8),
    }
    for median, sigma in ((128, 1.0), (1024, 1.0), (1024, 1.5), (8192, 1.0)):
        mask = lognormal_documents(seq_len, median, sigma)
        name = f"{len(mask.lengths):,} documents, median {median:,}, sigma {sigma}, longest {max(mask.lengths):,}"
        named[name] = mask
    return named


def received(layout: Layout, mask: Mask, seq_len: int, world_size: int) -> list[int]:
    """Returns for each rank the number of other ranks' keys that its queries see; the mask has no batch rows.

    >>> received(Contiguous(), Causal(), 4, 2)
    [0, 2]
    """
    (sets,) = interval_sets_of(mask, seq_len, seq_len, 1)
    counts = []
    for rank in range(world_size):
        owned = [span for segment in layout.segments(seq_len, rank, world_size) for span in segment.spans()]
        seen = [band.key_range for span in owned for bands in sets for band in clipped_bands(bands, span)]
        # Rows that are seen or owned, less those owned.
        counts.append(_length_of_union([*seen, *owned]) - sum(stop - start for start, stop in owned))
    return counts


def _rows(seq_len: int, ranks: int) -> Iterator[tuple[str, ...]]:
    for name, mask in masks(seq_len).items():
        layouts: list[Layout] = [Contiguous(), HeadTail(), Striped(64)]
        if isinstance(mask, Documents):
            layouts.append(PerDocument(mask.cu_seqlens))
        for layout in [*layouts, Balanced(mask, seq_len)]:
            lengths = [layout.local_length(seq_len, rank, ranks) for rank in range(ranks)]
            shares = [
                rows / max(seq_len - length, 1)
                for rows, length in zip(received(layout, mask, seq_len, ranks), lengths, strict=True)
            ]
            yield (
                name,
                type(layout).__name__ + (f"({layout.block})" if isinstance(layout, Striped) else ""),
                f"{imbalance(layout, mask, seq_len, ranks):.2%}",
                f"{max(_blocks(layout, seq_len, rank, ranks) for rank in range(ranks)):,}",
                f"{min(lengths):,}, {max(lengths):,}",
                f"{max(shares):.1%}, {sum(shares) / ranks:.1%}",
            )


def _blocks(layout: Layout, seq_len: int, rank: int, ranks: int) -> int:
    """Returns the number of unbroken ranges of positions that a rank owns."""
    spans = [span for segment in layout.segments(seq_len, rank, ranks) for span in segment.spans()]
    spans = sorted(span for span in spans if span[0] < span[1])
    return sum(1 for before, (start, _) in zip([(-1, -1), *spans], spans, strict=False) if before[1] != start)


def _length_of_union(spans: Sequence[Span]) -> int:
    spans = sorted(spans)
    reached = accumulate((stop for _, stop in spans), max, initial=0)
    return sum(max(stop - max(start, before), 0) for (start, stop), before in zip(spans, reached, strict=False))


if __name__ == "__main__":
    main()
