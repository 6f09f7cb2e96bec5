"""Recurrent layers of a sharded sequence by three methods: states travel, rows travel, or heads do.

scan: each rank computes how its runs map a state, ranks exchange these maps, and each rank computes its outputs from
the states that enter its runs. relayout: rows travel to a layout of one run a rank first, and outputs back. heads:
ranks exchange rows for heads, as Ulysses attention does, and each rank computes some heads of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor.api.extension import (
    CollectiveHeads,
    HeadRows,
    RankFunction,
    SequenceRanks,
    partition_heads,
    positions_of,
    rows_in_order,
)
from cp_dtensor.layers.call import rows_of
from cp_dtensor.layers.chunked import ChunkedRecurrence
from cp_dtensor.layers.fla import FlaRecurrence
from cp_dtensor.layers.rows import Relayout, SequenceLayout
from cp_dtensor.layers.scan import gathered, scan_plan, scanned
from cp_dtensor.spec.layouts import Contiguous


class Rows(NamedTuple):
    """Arguments of a recurrence over T tokens; H is a multiple of H'."""

    v: Tensor
    """(B, T, H, V)."""
    q: Tensor
    """(B, T, H', K)."""
    k: Tensor
    """(B, T, H', K)."""
    g: Tensor | None
    """(B, T, H) or (B, T, H, K)."""
    beta: Tensor | None
    """(B, T, H)."""


Prepare = Callable[[Rows, Sequence[int]], ChunkedRecurrence | FlaRecurrence]
"""The recurrence of some rows, given the lengths of their pieces."""
Result = tuple[Tensor, Tensor | None]
"""The output (B, T, H, V), and the states at the ends of documents (documents, B, H, K, V), if asked for."""


def by_scan(
    prepare: Prepare, rows: Rows, sequence: SequenceLayout, ranks: SequenceRanks, initial: Tensor | None, final: bool
) -> Result:
    """States travel: H K (K + V) numbers of each run.

    Args:
        rows: those of this rank.
        initial: (documents, B, H, K, V), equal on every rank, or None for zeros.
        final: True to return the states at the ends of documents.
    """
    plan = scan_plan(sequence, ranks.rank, final)
    recurrence = prepare(rows, [stop - start for start, stop in sequence.pieces(ranks.rank)])
    entering, ends = scanned(*recurrence.maps(plan.sent), plan, ranks, initial, _documents(sequence), final)
    return recurrence.outputs(entering)[0], ends


def by_relayout(
    prepare: Prepare, rows: Rows, sequence: SequenceLayout, ranks: SequenceRanks, initial: Tensor | None, final: bool
) -> Result:
    """Rows travel to adjacent chunks, whose states travel then. Arguments as `by_scan`."""
    there = replace(sequence, layout=Contiguous(), group=0)
    moved = Rows(*_moved(rows, Relayout(Contiguous()), sequence, ranks))
    out, ends = by_scan(prepare, moved, there, ranks, initial, final)
    (back,) = _moved([out], Relayout(sequence.layout, sequence.group), there, ranks)
    return back, ends


def _moved(
    rows: Sequence[Tensor | None], target: Relayout, sequence: SequenceLayout, ranks: SequenceRanks
) -> list[Any]:
    """Rows in another layout, in one exchange for each dtype."""
    moved: list[Any] = [*rows]
    for dtype in dict.fromkeys(x.dtype for x in rows if x is not None):
        some = {index: x for index, x in enumerate(rows) if x is not None and x.dtype == dtype}
        flat = [x.flatten(2) for x in some.values()]
        arrived = rows_of(torch.cat(flat, 2), 1, target, sequence, ranks).split([x.size(2) for x in flat], 2)
        for (index, x), mine in zip(some.items(), arrived, strict=True):
            moved[index] = mine.unflatten(2, x.shape[2:])
    return moved


def by_heads(
    prepare: Prepare, rows: Rows, sequence: SequenceLayout, ranks: SequenceRanks, initial: Tensor | None, final: bool
) -> Result:
    """Heads travel: H is a multiple of the ranks, which are along one axis. Arguments as `by_scan`.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509), for attention; Megatron-LM for Mamba and gated delta nets.
    """
    v, q, k, g, beta = rows
    group, size, layout = axis_of_heads(ranks), ranks.size, sequence.layout
    assert group is not None
    heads = partition_heads(v.size(2), q.size(2), size)
    segments = [layout.segments(sequence.seq_len, rank, size, sequence.group) for rank in range(size)]
    in_order = rows_in_order(segments)
    groups = [heads.kv_groups(rank) for rank in range(size)]
    of_values = HeadRows(in_order, tuple(map(heads.query_heads, groups)))
    of_keys = HeadRows(in_order, tuple(groups))
    q, k = (x if heads.replication == 1 else x.repeat_interleave(heads.replication, 2) for x in (q, k))
    some = {index: x for index, x in enumerate((v, q, k, g, beta)) if x is not None}
    kinds = tuple(of_keys if index in (1, 2) else of_values for index in some)
    by_head = [(x if x.dim() == 4 else x.unsqueeze(-1)).transpose(1, 2) for x in some.values()]
    arrived = [x.transpose(1, 2) for x in _Exchanged.apply(True, kinds, group, *by_head)]
    # Blocks of stripes arrive segment by segment.
    positions = None
    if not all(each.is_contiguous for of_rank in segments for each in of_rank):
        positions = positions_of([segments[rank][part] for rank, part in in_order.places], v.device)
        arrived = [x.index_select(1, positions.argsort()) for x in arrived]
    mine: list[Any] = [None] * len(rows)
    for (index, x), of_heads in zip(some.items(), arrived, strict=True):
        mine[index] = of_heads if x.dim() == 4 else of_heads.squeeze(-1)

    whole = SequenceLayout(Contiguous(), sequence.seq_len, 1, 0, sequence.edges)
    documents = scan_plan(whole, 0, False).documents
    start, stop = of_values.heads[ranks.rank]
    states = None if initial is None else initial[:, :, start:stop]
    entering = [None if states is None or index is None else states[index] for index in documents]
    if states is not None and all(each is None for each in entering):  # zeros, with a gradient of zero
        entering[0] = states[:0].sum(0)
    recurrence = prepare(Rows(*mine), [last - first for first, last in whole.pieces(0)])
    out, ends = recurrence.outputs(entering, final)
    if positions is not None:
        out = out.index_select(1, positions)
    (back,) = _Exchanged.apply(False, (of_values,), group, out.transpose(1, 2))
    if not final:
        return back.transpose(1, 2), None
    at_ends = dict(zip(documents, ends, strict=True))
    nothing = ends[0].new_zeros(ends[0].shape)
    last = [
        at_ends[each] if each in at_ends else nothing if states is None else states[each]
        for each in range(_documents(sequence))
    ]
    return back.transpose(1, 2), gathered(torch.stack(last), ranks).movedim(0, 2).flatten(2, 3)


def axis_of_heads(ranks: SequenceRanks) -> dist.ProcessGroup | None:
    """The only axis with more than one rank, None if there are two."""
    if ranks.inner is None or ranks.inner.size() == 1:
        return ranks.outer
    return ranks.inner if ranks.outer.size() == 1 else None


class _Exchanged(RankFunction):
    """Exchanges rows for heads, or heads for rows, which is the transpose.

    Tensors are (B, all heads, this rank's rows, D), or (B, this rank's heads, all rows, D). `kinds` has those of each.
    """

    @staticmethod
    def forward(
        ctx: Any, towards_heads: bool, kinds: tuple[HeadRows, ...], group: dist.ProcessGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = not towards_heads, kinds, group
        bundles = [[x] for x in tensors]
        if towards_heads:
            return tuple(x for (x,) in CollectiveHeads().to_heads(bundles, [kinds], group).receive())
        targets = []
        for x, kind in zip(tensors, kinds, strict=True):
            rows = sum(kind.rows.lengths[group.rank()])
            targets.append([x.new_empty(x.size(0), rows, sum(kind.head_counts), x.size(3)).transpose(1, 2)])
        CollectiveHeads().to_rows(bundles, targets, kinds, group, is_last=True).wait()
        return tuple(x for (x,) in targets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_Exchanged.apply(*ctx.arguments, *grads)


def _documents(sequence: SequenceLayout) -> int:
    return max(len(sequence.edges) - 1, 1)


METHODS = {"scan": by_scan, "relayout": by_relayout, "heads": by_heads}
"""By the value of `method=`."""
