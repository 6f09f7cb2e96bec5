"""Recurrent layers of a sharded sequence by three methods: states travel, rows travel, or heads do.

scan: each rank computes how its runs map a state, ranks exchange these maps, and each rank computes its outputs from
the states that enter its runs. relayout: rows travel to a layout of one run a rank first, and outputs back. heads:
ranks exchange rows for heads, as Ulysses attention does, and each rank computes some heads of the whole sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor.api.extension import SequenceRanks, positions_of
from cp_dtensor.layers.chunked import ChunkedRecurrence, Rows
from cp_dtensor.layers.exchange import gathered, rows_of, swapped, tables_on
from cp_dtensor.layers.fla import FlaRecurrence
from cp_dtensor.layers.rows import Relayout, SequenceLayout
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.layouts import CachedHash, Contiguous, shard_lengths

# The order of states, as integers


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


# The methods

Prepare = Callable[[Rows, Sequence[int]], ChunkedRecurrence | FlaRecurrence]
"""The recurrence of some rows, given the lengths of their pieces."""
Result = tuple[Tensor, Tensor | None]
"""The output (B, T, H, V), and the states at the ends of documents (documents, B, H, K, V), if asked for."""


def by_scan(
    prepare: Prepare, rows: Rows, sequence: SequenceLayout, ranks: SequenceRanks, initial: Tensor | None, final: bool
) -> Result:
    """Compute a recurrence whose states travel: H K (K + V) numbers of each run.

    Args:
        rows: those of this rank.
        initial: (documents, B, H, K, V), equal on every rank, or None for zeros.
        final: True to return the states at the ends of documents.
    """
    plan = scan_plan(sequence, ranks.rank, final)
    recurrence = prepare(rows, [stop - start for start, stop in sequence.pieces(ranks.rank)])
    entering, ends = scanned(*recurrence.maps(plan.sent), plan, ranks, initial, sequence.documents, final)
    return recurrence.outputs(entering)[0], ends


def by_relayout(
    prepare: Prepare, rows: Rows, sequence: SequenceLayout, ranks: SequenceRanks, initial: Tensor | None, final: bool
) -> Result:
    """Compute a recurrence whose rows travel to adjacent chunks, whose states travel then. Arguments as `by_scan`."""
    there = replace(sequence, layout=Contiguous(), group=0)
    target, back = Relayout(Contiguous()), Relayout(sequence.layout, sequence.group)
    moved = Rows(*_together(rows, 1, lambda x: rows_of(x.flatten(2), 1, target, sequence, ranks)))
    out, ends = by_scan(prepare, moved, there, ranks, initial, final)
    return rows_of(out, 1, back, there, ranks), ends


def by_heads(
    prepare: Prepare, rows: Rows, sequence: SequenceLayout, ranks: SequenceRanks, initial: Tensor | None, final: bool
) -> Result:
    """Compute a recurrence whose heads travel: H is a multiple of the ranks, along one axis. Arguments as `by_scan`.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509), for attention; Megatron-LM for Mamba and gated delta nets.
    """
    group, size = axis_of_heads(ranks), ranks.size
    assert group is not None
    of_layout = replace(sequence, edges=())  # documents do not matter, and may be new in each step
    positions, by_position = tables_on(rows.v.device, of_layout, lambda: _places(of_layout, rows.v.device))
    lengths = list(shard_lengths(sequence.layout, sequence.seq_len, size))
    of_every_rank = [lengths[ranks.rank]] * size
    times = rows.copies_of_keys(size)
    if times > 1:
        rows = rows._replace(q=rows.q.repeat_interleave(times, 2), k=rows.k.repeat_interleave(times, 2))

    def to_heads(x: Tensor) -> Tensor:
        by_rank = x.permute(2, 1, 0, 3).flatten(0, 1)  # (B, T, ranks, D): the rows for each rank, one after the other
        arrived = swapped(by_rank, of_every_rank, lengths, group)
        return arrived.index_select(0, by_position).transpose(0, 1)

    mine = Rows(*_together(rows, size, to_heads))
    whole = SequenceLayout(Contiguous(), sequence.seq_len, 1, 0, sequence.edges)
    documents = scan_plan(whole, 0, False).documents
    count = rows.v.size(2) // size
    states = None if initial is None else initial[:, :, ranks.rank * count : (ranks.rank + 1) * count]
    entering = [None if states is None or index is None else states[index] for index in documents]
    if states is not None and all(each is None for each in entering):  # zeros, with a gradient of zero
        entering[0] = states[:0].sum(0)
    out, ends = prepare(mine, [stop - start for start, stop in whole.pieces(0)]).outputs(entering, final)
    by_rank = out.transpose(0, 1).index_select(0, positions)
    back = swapped(by_rank, lengths, of_every_rank, group)
    back = back.unflatten(0, (size, lengths[ranks.rank])).permute(2, 1, 0, 3, 4).flatten(2, 3)
    if not final:
        return back, None
    at_ends = dict(zip(documents, ends, strict=True))
    nothing = torch.zeros_like(ends[0])
    last = [at_ends.get(each, nothing if states is None else states[each]) for each in range(sequence.documents)]
    return back, gathered(torch.stack(last), ranks).movedim(0, 2).flatten(2, 3)


def axis_of_heads(ranks: SequenceRanks) -> dist.ProcessGroup | None:
    """Return the only axis with more than one rank, None if there are several."""
    wide = [group for group in ranks.axes if group.size() > 1] or [ranks.outer]
    return wide[0] if len(wide) == 1 else None


def _together(rows: Rows, parts: int, move: Callable[[Tensor], Tensor]) -> list[Any]:
    """Move tensors (B, T, heads, ...) in one exchange for each dtype.

    `move` gets (B, T, parts, D), each part with an equal share of all heads, and returns (B, other rows, D).
    """
    moved: list[Any] = [*rows]
    for dtype in dict.fromkeys(x.dtype for x in rows if x is not None):
        some = {index: x for index, x in enumerate(rows) if x is not None and x.dtype == dtype}
        flat = [x.unflatten(2, (parts, x.size(2) // parts)).flatten(3) for x in some.values()]
        arrived = move(torch.cat(flat, 3)).split([x.size(3) for x in flat], 2)
        for (index, x), mine in zip(some.items(), arrived, strict=True):
            moved[index] = mine.unflatten(2, (x.size(2) // parts, *x.shape[3:]))
    return moved


def _places(sequence: SequenceLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of the rows of all ranks, one rank after the other, and the row of each position."""
    positions = torch.cat([positions_of(sequence.segments(rank), device) for rank in range(sequence.world_size)])
    return positions, positions.argsort()


METHODS = {"scan": by_scan, "relayout": by_relayout, "heads": by_heads}
"""By the value of `method=`."""
