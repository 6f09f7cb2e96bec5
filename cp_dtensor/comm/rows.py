"""Exchange of sequence rows between ranks along a route, and its transpose for gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor._torch.cache import capturing
from cp_dtensor._torch.streams import Shared
from cp_dtensor._torch.tensors import wide_dtype
from cp_dtensor.comm.faults import all_to_all_single
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.plan.rows import Copy, RowRoute
from cp_dtensor.spec.cache import LRUCache

Matrix = Sequence[Sequence[int]]
"""Numbers by sending and receiving rank."""


def moved_rows(x: Tensor, route: RowRoute, dim: int, ranks: SequenceRanks) -> Tensor:
    """The result of a route, in one collective of all ranks.

    Args:
        x: this rank's rows, whose dim `dim` is the sequence.
    """
    out, table = _zeros(x, dim, route.rows_out), _tables(route, x.device)
    out.index_copy_(dim, table.own_target, x.index_select(dim, table.own_source))
    arrived = _exchanged(x, dim, table.sent, route.counts, ranks)
    return out if arrived is None else out.index_copy_(dim, table.received, arrived)


def rows_moved_back(grad: Tensor, route: RowRoute, dim: int, ranks: SequenceRanks) -> Tensor:
    """The transpose of `moved_rows`: a row's gradient is the sum of those of its copies on all ranks, rounded once."""
    table = _tables(route, grad.device)
    dtype = wide_dtype(grad) if table.has_several_copies else grad.dtype
    total = _zeros(grad, dim, route.rows_in, dtype)
    total.index_add_(dim, table.own_source, grad.index_select(dim, table.own_target).to(dtype))
    arrived = _exchanged(grad, dim, table.received, tuple(zip(*route.counts, strict=True)), ranks)
    if arrived is not None:
        total.index_add_(dim, table.sent, arrived.to(dtype))
    return total.to(grad.dtype)


def _exchanged(x: Tensor, dim: int, rows: Tensor, counts: Matrix, ranks: SequenceRanks) -> Tensor | None:
    """The rows that arrive in the order of ranks, None if no rank sends any; `rows` are those to send."""
    if not any(map(any, counts)):  # alike on every rank
        return None
    sent = x.index_select(dim, rows).movedim(dim, 0).contiguous()
    line = torch.Size(sent.shape[1:]).numel()
    arrived = all_to_all(sent.view(-1), [[line * count for count in of_rank] for of_rank in counts], ranks)
    return arrived.view(-1, *sent.shape[1:]).movedim(0, dim) if line else None


def all_to_all(rows: Tensor, sizes: Matrix, ranks: SequenceRanks) -> Tensor:
    """Sends a flat tensor's parts to the ranks, and returns what comes from them, both in the order of ranks.

    Args:
        rows: (elements,), contiguous.
        sizes: elements from each rank to each, equal on every rank.
    """
    if ranks.inner is None:
        return _all_to_all(rows, sizes[ranks.rank], [of_rank[ranks.rank] for of_rank in sizes], ranks.outer)
    # First to the right place of the inner axis, then along the outer one.
    inner, outer = range(ranks.inner_size), range(ranks.outer.size())
    here, place = divmod(ranks.rank, ranks.inner_size)
    parts = rows.split(list(sizes[ranks.rank]))
    by_place = torch.cat([parts[o * len(inner) + i] for i in inner for o in outer])
    between = [[sizes[here * len(inner) + i][o * len(inner) + place] for o in outer] for i in inner]
    sent = [sum(sizes[ranks.rank][o * len(inner) + i] for o in outer) for i in inner]
    rows = _all_to_all(by_place, sent, list(map(sum, between)), ranks.inner)
    parts = rows.split([size for of_place in between for size in of_place])
    by_node = torch.cat([parts[i * len(outer) + o] for o in outer for i in inner])
    received = [sum(sizes[o * len(inner) + i][ranks.rank] for i in inner) for o in outer]
    return _all_to_all(by_node, [sum(of_place[o] for of_place in between) for o in outer], received, ranks.outer)


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received))
    size = rows.element_size()  # as bytes: process groups do not support every dtype
    into, out_of = ([size * each for each in sizes] for sizes in (received, sent))
    all_to_all_single(arrived.view(torch.uint8), rows.view(torch.uint8), group, "an exchange of rows", (into, out_of))
    return arrived


def _zeros(like: Tensor, dim: int, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_zeros((*like.shape[:dim], rows, *like.shape[dim + 1 :]), dtype=dtype)


class _Tables:
    """Rows of a route as tensors on a device."""

    def __init__(self, route: RowRoute, device: torch.device) -> None:
        def of(copies: Iterable[Copy], field: str) -> Tensor:
            spans = [(getattr(copy, field), copy.rows) for copy in copies]
            return torch.tensor(
                [row for first, count in spans for row in range(first, first + count)], dtype=torch.int64, device=device
            )

        sent = [copy for copies in route.sent for copy in copies]
        self.own_source, self.own_target = of(route.own, "source"), of(route.own, "target")
        self.sent = of(sent, "source")
        self.received = of((copy for copies in route.received for copy in copies), "target")
        spans = sorted((copy.source, copy.source + copy.rows) for copy in (*route.own, *sent))
        self.has_several_copies = any(stop > start for (_, stop), (start, _) in pairwise(spans))
        """True if some row of this rank has copies in two places."""

    def tensors(self) -> tuple[Tensor, ...]:
        return self.own_source, self.own_target, self.sent, self.received


_cached_tables = LRUCache[Shared[_Tables]](64 << 20, pins=capturing)


def _tables(route: RowRoute, device: torch.device) -> _Tables:
    key = route, device
    tables = _cached_tables.get(key)
    if tables is None:
        tables = _cached_tables.add(key, Shared(device, lambda: _Tables(route, device), _Tables.tensors))
    return tables.read()
