"""Exchange of sequence rows between ranks along a route, and its transpose for gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial, wraps
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor.api.extension import (
    RankFunction,
    SequenceRanks,
    Shared,
    capturing,
    differentiated_once,
    exchanged,
    no_autocast,
    refuse_batches,
    wide_dtype,
)
from cp_dtensor.layers.rows import Copy, Passed, RowMap, RowRoute, SequenceLayout, Whole, row_route
from cp_dtensor.spec.cache import LRUCache
from cp_dtensor.spec.layouts import Span

Tables = TypeVar("Tables", bound="tuple[Tensor, ...]")
Map = Callable[[Tensor], Tensor]
_ROWS = "an exchange of rows"


class _Linear(RankFunction):
    """A linear exchange. Its gradient is its transpose, and so on: differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.maps = back, there
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Linear.apply(grad, *ctx.maps), None, None


def backward_of_layer(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Wrap the backward of a layer with one output, `backward(ctx, saved, grad)`: it is differentiated once.

    Batches of gradients are refused. Autocast, inside of which a program may call backward, is off.
    """

    @differentiated_once
    @wraps(backward)
    def run(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batches(grad)
        with no_autocast(grad):
            return backward(ctx, saved, grad)

    return run


def rows_of(
    x: Tensor, dim: int, row_map: RowMap, sequence: SequenceLayout, ranks: SequenceRanks, *, transposed: bool = False
) -> Tensor:
    """Return the rows of this rank by a row map, in one collective; differentiable any number of times.

    Args:
        x: this rank's rows, of batch rows that are divided alike; its dim `dim` is the sequence.
        transposed: True for the transpose, which brings gradients of the result to the rows of x.
    """
    route = row_route(row_map, sequence, ranks.rank, ranks.sizes)
    there, back = (partial(_moved, route=route, dim=dim, ranks=ranks, back=each) for each in (False, True))
    result: Tensor = _Linear.apply(x, back, there) if transposed else _Linear.apply(x, there, back)
    return result


def whole_rows(
    x: Tensor, sequences: Sequence[tuple[Span, SequenceLayout]], ranks: SequenceRanks, *, transposed: bool = False
) -> Tensor:
    """Return the rows of all ranks, (B, S, ...) in the order of positions, of this rank's x (B, T, ...).

    `transposed` sums gradients (B, S, ...) over the ranks, in float32 or wider, to those of this rank's rows.
    """
    parts = [rows_of(x[slice(*span)], 1, Whole(), each, ranks, transposed=transposed) for span, each in sequences]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def swapped(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send each rank of a group its rows of x; return the rows that come from each. Differentiable any number of times.

    Args:
        x: (rows, ...), the rows for rank 0 first, then those for rank 1, and so on; the result is in the same order.
        sent, received: numbers of rows to each rank, and from each rank.
    """
    both = (sent, received), (received, sent)
    there, back = (partial(exchanged, group=group, what=_ROWS, sizes=sizes) for sizes in both)
    result: Tensor = _Linear.apply(x, there, back)
    return result


def gathered(x: Tensor, ranks: SequenceRanks) -> Tensor:
    """All-gather a tensor of every rank, (ranks, ...); the gradient is the sum over ranks of those of the results."""
    result: Tensor = _Linear.apply(x, ranks.gather, ranks.reduce_scatter)
    return result


def _moved(x: Tensor, route: RowRoute, dim: int, ranks: SequenceRanks, back: bool) -> Tensor:
    """Return rows of x along `dim`, each at its place by the route, from this and other ranks; zeros elsewhere.

    Gradients go `back` where rows came from. A row that was copied to several places gets the sum of theirs, in float32
    or wider, rounded once.
    """
    source, target, sent, received = _tables_of(route, x.device)
    rows, counts, passed, dtype, put = route.rows_out, route.rows_sent, route.passed, x.dtype, Tensor.index_copy_
    if back:
        source, target, sent, received = target, source, received, sent
        rows, counts, passed, put = route.rows_in, route.rows_received, route.passed_back, Tensor.index_add_
        dtype = wide_dtype(x) if route.has_several_copies else x.dtype
    out = x.new_zeros((*x.shape[:dim], rows, *x.shape[dim + 1 :]), dtype=dtype)
    put(out, dim, target, x.index_select(dim, source).to(dtype))
    if route.moves:
        put(out, dim, received, _exchanged(x, dim, sent, counts, passed, ranks).to(dtype))
    return out.to(x.dtype)


def _exchanged(
    x: Tensor, dim: int, rows: Tensor, counts: Sequence[int], passed: Sequence[Passed], ranks: SequenceRanks
) -> Tensor:
    """Send `rows` of x; return those that arrive, in the order of ranks.

    Args:
        counts: of rows to each rank.
        passed: rows that arrive over each axis (see `RowRoute`).
    """
    mine = x.index_select(dim, rows).movedim(dim, 0)
    # First to the right place of the inner axis, then along the outer ones.
    for group, come in zip(ranks.groups, passed, strict=True):
        places, beyond = len(come), len(come[0])  # rows are in the order of places beyond the axis, then along it
        to_places = [sum(counts[place::places]) for place in range(places)]
        mine = exchanged(_transposed(mine, counts, beyond), group, _ROWS, (to_places, list(map(sum, come))))
        mine = _transposed(mine, list(chain.from_iterable(come)), places)
        counts = [sum(column) for column in zip(*come, strict=True)]
    return mine.movedim(0, dim)


def _transposed(x: Tensor, counts: Sequence[int], outer: int) -> Tensor:
    """Return rows in `outer` times other parts, of `counts` rows, in the order of the other parts."""
    inner = len(counts) // outer
    if 1 in (outer, inner):
        return x
    parts = x.split(list(counts))
    return torch.cat([parts[o * inner + i] for i in range(inner) for o in range(outer)])


# Tables on devices

_tables: LRUCache[Shared[Any]] = LRUCache(128 << 20, pins=capturing)  # those that captured CUDA graphs read stay


def tables_on(device: torch.device, key: Hashable, make: Callable[[], Tables]) -> Tables:
    """Return tensors on a device from an LRU cache, at first `make()`, before launches on the current stream read them.

    `key` is of a class of its own for each use, or has the name of the use. Tensors on the CPU may be among them.
    """
    shared = _tables.get((key, device))
    if shared is None:
        shared = _tables.add((key, device), Shared(device, make, lambda made: [x for x in made if x.is_cuda]))
    tensors: Tables = shared.read()
    return tensors


class _RouteTables(NamedTuple):
    """Rows of a route."""

    own_source: Tensor
    own_target: Tensor
    sent: Tensor
    received: Tensor


def _tables_of(route: RowRoute, device: torch.device) -> _RouteTables:
    def rows(copies: Iterable[Copy], field: str) -> Tensor:
        spans = [(getattr(copy, field), copy.rows) for copy in copies]
        found = [row for first, count in spans for row in range(first, first + count)]
        return torch.tensor(found, dtype=torch.int64, device=device)

    def made() -> _RouteTables:
        sent, received = chain.from_iterable(route.sent), chain.from_iterable(route.received)
        return _RouteTables(
            rows(route.own, "source"), rows(route.own, "target"), rows(sent, "source"), rows(received, "target")
        )

    return tables_on(device, route, made)
