"""States that pass from run to run over all ranks: the order as integers, and composition of maps in one exchange."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dtensor.api.extension import SequenceRanks
from cp_dtensor.layers.exchange import gathered
from cp_dtensor.layers.rows import SequenceLayout
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
    """Return a rank's part of the exchange of maps.

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
    """Return the index in `cu_seqlens` of a position's document; 0 if there are no documents, None outside of them."""
    edges = sequence.edges
    if not edges:
        return 0
    inside = edges[0] <= position < edges[-1]
    return bisect_right(edges, position) - 1 if inside else None


# The exchange


def scanned(
    transition: Tensor, state: Tensor, plan: ScanPlan, ranks: SequenceRanks, initial: Tensor | None, documents: int,
    final: bool,
) -> tuple[list[Tensor | None], Tensor | None]:  # fmt: skip
    """Return the states that enter this rank's pieces, None for zeros, and those at the ends of documents if `final`.

    Args:
        transition: (sent pieces, ...): `plan.sent`, each a matrix (..., K, K), a diagonal (..., K) or a number (...).
        state: (sent pieces, ..., K, V).
        initial: (documents, ..., K, V), equal on every rank, or None for zeros.
    """
    entering: list[Tensor | None] = [
        None if initial is None or index is None else initial[index] for index in plan.documents
    ]
    finals: dict[int, Tensor] = {}
    by_rank = None
    if plan.chains:
        flat = transition.unsqueeze(-1).flatten(1)  # (sent pieces, 1) of numbers
        width = flat.size(1)
        sent = torch.cat([flat, state.flatten(1)], 1)
        sent = torch.nn.functional.pad(sent, (0, 0, 0, plan.slots - sent.size(0)))
        by_rank = gathered(sent, ranks)
        for document, chain in plan.chains:
            here = [place for place, link in enumerate(chain) if link.rank == plan.rank]
            current = None if initial is None or document is None else initial[document]
            for link in chain if final else chain[: max(here, default=-1) + 1]:
                if link.rank == plan.rank:
                    entering[link.piece] = current
                row = by_rank[link.rank, link.slot]
                added = row[width:].view(state.shape[1:])
                if current is not None:
                    added = added + _applied(row[:width].view(transition.shape[1:]), current)
                current = added
            if document is not None and current is not None:
                finals[document] = current
    # Backward of the exchange is a collective: each rank's results depend on it, with a gradient of zero at least.
    nothing = [x.flatten()[:0].sum() for x in (by_rank, initial) if x is not None]
    if nothing:
        first, zero = entering[0], torch.stack(nothing).sum()
        zero = zero * zero  # saves a tensor: a checkpoint recomputes up to here, past the exchange
        entering[0] = (state.new_zeros(state.shape[1:]) if first is None else first) + zero
    if not final:
        return entering, None
    ends = [finals.get(each, state.new_zeros(()) if initial is None else initial[each]) for each in range(documents)]
    return entering, torch.stack([end.expand(state.shape[1:]) for end in ends])


def _applied(transition: Tensor, state: Tensor) -> Tensor:
    """Return M S, where M is a matrix, a diagonal or a number."""
    if transition.dim() == state.dim():
        return transition @ state
    return transition[(..., *[None] * (state.dim() - transition.dim()))] * state
