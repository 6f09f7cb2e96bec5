"""Order in which states pass through the pieces of documents, over all ranks, as integers."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from cp_dtensor.plan.rows import SequenceLayout
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.layouts import CachedHash


class PieceLink(NamedTuple):
    """A piece of a document whose map of states all ranks know."""

    rank: int
    slot: int
    """Index among the maps that the rank sends."""
    piece: int
    """Index among the pieces of the rank."""


@dataclass(frozen=True)
class ScanPlan(CachedHash):
    """Maps of states that ranks exchange, and the order in which each document passes through them."""

    rank: int
    sent: tuple[int, ...]
    """Pieces of this rank whose maps it sends."""
    slots: int
    """The largest number of maps that a rank sends."""
    chains: tuple[tuple[int | None, tuple[PieceLink, ...]], ...]
    """For each document with links, by position: its index in `cu_seqlens`, None for tokens outside, and its links."""
    documents: tuple[int | None, ...]
    """For each piece of this rank, also an empty one: the index of its document."""


@lru_cached
def scan_plan(sequence: SequenceLayout, rank: int, all_documents: bool) -> ScanPlan:
    """A rank's part of the exchange of maps.

    Args:
        all_documents: True if the state at the end of each document is asked for; else documents that are one piece of
            one rank need no exchange.

    >>> from cp_dtensor.spec.layouts import Contiguous
    >>> plan = scan_plan(SequenceLayout(Contiguous(), 8, 2, edges=(0, 2, 6, 8)), 0, False)
    >>> plan.sent, plan.chains
    ((1,), ((1, (PieceLink(rank=0, slot=0, piece=1), PieceLink(rank=1, slot=0, piece=0))),))
    """
    pieces = [sequence.pieces(each) for each in range(sequence.world_size)]
    by_document: dict[int, list[tuple[int, int, int]]] = {}
    for each, of_rank in enumerate(pieces):
        for index, (start, stop) in enumerate(of_rank):
            if start < stop:
                by_document.setdefault(sequence.document(start)[0], []).append((start, each, index))
    sent: list[list[int]] = [[] for _ in pieces]
    linked = {begin: sorted(found) for begin, found in by_document.items() if all_documents or len(found) > 1}
    for found in linked.values():
        for _, each, index in found:
            sent[each].append(index)
    slots = [{index: slot for slot, index in enumerate(sorted(of_rank))} for of_rank in sent]
    chains = [
        (_index(sequence, begin), tuple(PieceLink(each, slots[each][index], index) for _, each, index in found))
        for begin, found in sorted(linked.items())
    ]
    return ScanPlan(
        rank,
        tuple(sorted(sent[rank])),
        max(map(len, sent)),
        tuple(chains),
        tuple(_index(sequence, start) if start < stop else None for start, stop in pieces[rank]),
    )


def _index(sequence: SequenceLayout, position: int) -> int | None:
    """The index in `cu_seqlens` of the document of a position; 0 if there are no documents, None outside of them."""
    edges = sequence.edges
    if not edges:
        return 0
    inside = edges[0] <= position < edges[-1]
    return bisect_right(edges, position) - 1 if inside else None
