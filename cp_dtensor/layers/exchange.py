"""Exchange of sequence rows between ranks along a route, and its transpose for gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor.api.extension import RankFunction, SequenceRanks, Shared, all_to_all_single, capturing, wide_dtype
from cp_dtensor.layers.rows import Copy, RowMap, RowRoute, SequenceLayout, row_route
from cp_dtensor.spec.cache import LRUCache

V = TypeVar("V")

Sizes = tuple[Sequence[int], Sequence[int], Sequence[Sequence[int]]]
"""Rows to each rank, from each rank, and passed on (see `RowRoute`)."""


def rows_of(
    x: Tensor, dim: int, row_map: RowMap, sequence: SequenceLayout, ranks: SequenceRanks, *, transposed: bool = False
) -> Tensor:
    """Return the rows of this rank by a row map, in one collective; differentiable any number of times.

    Args:
        x: this rank's rows, of batch rows that are divided alike; its dim `dim` is the sequence.
        transposed: True for the transpose, which brings gradients of the result to the rows of x.
    """
    route = row_route(row_map, sequence, ranks.rank, ranks.inner_size)
    result: Tensor = _MovedRows.apply(x, route, dim, ranks, transposed)
    return result


class _MovedRows(RankFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: RowRoute, dim: int, ranks: SequenceRanks, transposed: bool) -> Tensor:
        ctx.arguments = route, dim, ranks, not transposed
        return (_moved_back if transposed else _moved)(x, route, dim, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _MovedRows.apply(grad, *ctx.arguments), None, None, None, None


def _moved(x: Tensor, route: RowRoute, dim: int, ranks: SequenceRanks) -> Tensor:
    """Return rows of x along `dim`, each at its place by the route, from this and other ranks; zeros elsewhere."""
    out, table = _zeros(x, dim, route.rows_out), _tables(route, x.device)
    out.index_copy_(dim, table.own_target, x.index_select(dim, table.own_source))
    sizes = route.rows_sent, route.rows_received, route.passed
    arrived = _exchanged(x, dim, table.sent, sizes, ranks) if route.moves else None
    return out if arrived is None else out.index_copy_(dim, table.received, arrived)


def _moved_back(grad: Tensor, route: RowRoute, dim: int, ranks: SequenceRanks) -> Tensor:
    """Return the gradient of x in `_moved`, whose result has the gradient `grad`: rows go back where they came from.

    A row that was copied to several places gets the sum of their gradients, in float32 or wider, rounded once.
    """
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
    """Send `rows` of x; return those that arrive in the order of ranks, None if they have no elements."""
    sent = x.index_select(dim, rows).movedim(dim, 0).contiguous()
    line = torch.Size(sent.shape[1:]).numel()
    to, come, passed = sizes
    in_elements = [line * count for count in to], [line * count for count in come]
    arrived = _all_to_all(sent.view(-1), *in_elements, [[line * count for count in each] for each in passed], ranks)
    return arrived.view(-1, *sent.shape[1:]).movedim(0, dim) if line else None


def _all_to_all(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], passed: Sequence[Sequence[int]], ranks: SequenceRanks
) -> Tensor:
    """Send a flat tensor's parts to the ranks, and return what comes from them, both in the order of ranks.

    Args:
        rows: (elements,), contiguous.
        sent, received: elements to each rank and from each rank.
        passed: see `RowRoute`, in elements; not read if the ranks are along one axis.
    """
    if ranks.inner is None:
        return _over_axis(rows, sent, received, ranks.outer)
    # First to the right place of the inner axis, then along the outer one.
    inner, outer = range(ranks.inner_size), range(ranks.outer.size())
    parts = rows.split(list(sent))
    by_place = torch.cat([parts[o * len(inner) + i] for i in inner for o in outer])
    to_places = [sum(sent[o * len(inner) + i] for o in outer) for i in inner]
    rows = _over_axis(by_place, to_places, list(map(sum, passed)), ranks.inner)
    parts = rows.split([size for of_place in passed for size in of_place])
    by_node = torch.cat([parts[i * len(outer) + o] for o in outer for i in inner])
    from_nodes = [sum(received[o * len(inner) + i] for i in inner) for o in outer]
    return _over_axis(by_node, [sum(of_place[o] for of_place in passed) for o in outer], from_nodes, ranks.outer)


def _over_axis(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received))
    size = rows.element_size()  # as bytes: process groups do not support every dtype
    into, out_of = ([size * each for each in sizes] for sizes in (received, sent))
    all_to_all_single(arrived.view(torch.uint8), rows.view(torch.uint8), group, "an exchange of rows", (into, out_of))
    return arrived


def swapped(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send each rank of a group its rows of x; return the rows that come from each. Differentiable any number of times.

    Args:
        x: (rows, ...), the rows for rank 0 first, then those for rank 1, and so on; the result is in the same order.
        sent, received: numbers of rows to each rank, and from each rank.
    """
    result: Tensor = _Swapped.apply(x, sent, received, group)
    return result


class _Swapped(RankFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = received, sent, group
        line = torch.Size(x.shape[1:]).numel()
        sizes = [line * count for count in sent], [line * count for count in received]
        return _over_axis(x.contiguous().view(-1), *sizes, group).view(sum(received), *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Swapped.apply(grad, *ctx.arguments), None, None, None


def _zeros(like: Tensor, dim: int, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_zeros((*like.shape[:dim], rows, *like.shape[dim + 1 :]), dtype=dtype)


# Tables on devices


class TableCache(Generic[V]):
    """LRU cache of values with tensors on devices, at most 64 MiB; those that captured CUDA graphs read stay."""

    def __init__(self, tensors: Callable[[V], Iterable[Tensor]]) -> None:
        self._tensors, self._cache = tensors, LRUCache[Shared[V]](64 << 20, pins=capturing)

    def read(self, key: Hashable, device: torch.device, make: Callable[[], V]) -> V:
        """Return the value of a key on a device, at first `make()`, before launches on the current stream read it."""
        shared = self._cache.get((key, device))
        if shared is None:
            shared = self._cache.add((key, device), Shared(device, make, self._tensors))
        return shared.read()


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


_cached_tables = TableCache(_Tables.tensors)


def _tables(route: RowRoute, device: torch.device) -> _Tables:
    return _cached_tables.read(route, device, lambda: _Tables(route, device))
