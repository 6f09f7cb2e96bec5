"""Exchange of sequence rows between ranks along a route, and its transpose for gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor.api.extension import SequenceRanks, Shared, all_to_all_single, capturing, wide_dtype
from cp_dtensor.layers.rows import Copy, RowRoute
from cp_dtensor.spec.cache import LRUCache

Sizes = tuple[Sequence[int], Sequence[int], Sequence[Sequence[int]]]
"""Rows to each rank, from each rank, and passed on (see `RowRoute`)."""


def moved_rows(x: Tensor, route: RowRoute, dim: int, ranks: SequenceRanks) -> Tensor:
    """The result of a route, in one collective of all ranks.

    Args:
        x: this rank's rows, whose dim `dim` is the sequence.
    """
    out, table = _zeros(x, dim, route.rows_out), _tables(route, x.device)
    out.index_copy_(dim, table.own_target, x.index_select(dim, table.own_source))
    sizes = route.rows_sent, route.rows_received, route.passed
    arrived = _exchanged(x, dim, table.sent, sizes, ranks) if route.moves else None
    return out if arrived is None else out.index_copy_(dim, table.received, arrived)


def rows_moved_back(grad: Tensor, route: RowRoute, dim: int, ranks: SequenceRanks) -> Tensor:
    """The transpose of `moved_rows`: a row's gradient is the sum of those of its copies on all ranks, rounded once."""
    table = _tables(route, grad.device)
    dtype = wide_dtype(grad) if table.has_several_copies else grad.dtype
    total = _zeros(grad, dim, route.rows_in, dtype)
    total.index_add_(dim, table.own_source, grad.index_select(dim, table.own_target).to(dtype))
    sizes = route.rows_received, route.rows_sent, route.passed_back
    arrived = _exchanged(grad, dim, table.received, sizes, ranks) if route.moves else None
    if arrived is not None:
        total.index_add_(dim, table.sent, arrived.to(dtype))
    return total.to(grad.dtype)


def _exchanged(x: Tensor, dim: int, rows: Tensor, sizes: Sizes, ranks: SequenceRanks) -> Tensor | None:
    """The rows that arrive in the order of ranks, None if they have no elements; `rows` are those to send."""
    sent = x.index_select(dim, rows).movedim(dim, 0).contiguous()
    line = torch.Size(sent.shape[1:]).numel()
    to, come, passed = sizes
    in_elements = [line * count for count in to], [line * count for count in come]
    arrived = all_to_all(sent.view(-1), *in_elements, [[line * count for count in each] for each in passed], ranks)
    return arrived.view(-1, *sent.shape[1:]).movedim(0, dim) if line else None


def all_to_all(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], passed: Sequence[Sequence[int]], ranks: SequenceRanks
) -> Tensor:
    """Sends a flat tensor's parts to the ranks, and returns what comes from them, both in the order of ranks.

    Args:
        rows: (elements,), contiguous.
        sent, received: elements to each rank and from each rank.
        passed: see `RowRoute`, in elements; not read if the ranks are along one axis.
    """
    if ranks.inner is None:
        return _all_to_all(rows, sent, received, ranks.outer)
    # First to the right place of the inner axis, then along the outer one.
    inner, outer = range(ranks.inner_size), range(ranks.outer.size())
    parts = rows.split(list(sent))
    by_place = torch.cat([parts[o * len(inner) + i] for i in inner for o in outer])
    to_places = [sum(sent[o * len(inner) + i] for o in outer) for i in inner]
    rows = _all_to_all(by_place, to_places, list(map(sum, passed)), ranks.inner)
    parts = rows.split([size for of_place in passed for size in of_place])
    by_node = torch.cat([parts[i * len(outer) + o] for o in outer for i in inner])
    from_nodes = [sum(received[o * len(inner) + i] for i in inner) for o in outer]
    return _all_to_all(by_node, [sum(of_place[o] for of_place in passed) for o in outer], from_nodes, ranks.outer)


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
