"""Calls of sequence operations: lengths, documents, and functions and operators that move rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cp_dtensor.api.extension import (
    LENGTH,
    Facts,
    Keys,
    RankFunction,
    SequenceRanks,
    Sharding,
    Signature,
    begin_pass,
    below_autograd,
    compare,
    current_backward,
    define_operator,
    length_of,
    refuse_other_lengths,
)
from cp_dtensor.layers.exchange import moved_rows, rows_moved_back
from cp_dtensor.layers.rows import Edges, Relayout, RowMap, RowRoute, SequenceLayout, row_route
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.documents import ascending, edges_of_documents, refuse_ids_and_lengths
from cp_dtensor.spec.layouts import Layout, Span
from cp_dtensor.spec.masks import Mask


@dataclass(frozen=True)
class SequenceCall(Sharding):
    """A sequence operation without tensors, length and documents."""

    owner: str = ""
    """The public function, for messages."""
    operation: Any = None
    """A `RowMap`, or a layer (`layers.layer`)."""
    mask: Mask | None = None
    """The mask of the context whose documents the call takes over."""

    @property
    def key(self) -> str:
        """Text of the call in compiled code, equal in every process, by which `sequence_call_of` finds it."""
        no_ranks: Any = None  # process groups end before compiled code does
        return _keys.key_of((self.ranks.names, replace(self, ranks=no_ranks)))

    def length(self, x: Tensor, dim: int, seq_len: int | None, edges: Edges, others: Hashable = ()) -> int:
        """The global length. The ranks compare the first call of each signature.

        `others` describes other tensors, whose dtypes and dims the code determines.

        Raises:
            ValueError: local lengths that do not fit; calls that differ between ranks, on every rank alike.
        """
        known = refusal = None
        try:
            known = self._known_length(x, dim, seq_len)
            self.check_edges(edges, known)
        except ValueError as error:  # the others may be about to compare
            refusal = error
        is_declared = seq_len is not None or self.layout.only_length is not None or known in self.lengths
        shape = [size for each, size in enumerate(x.shape) if each != dim]
        signature = self.owner, type(self.layout), x.dtype, *shape[1:], others, is_declared or x.size(dim)

        def facts() -> Facts:
            return {
                "function": self.owner, "operation": repr(self.operation), "layout": repr(self.layout),
                "dtype": str(x.dtype), "shape": shape, "other tensors": others,
                LENGTH: known if refusal is None else f"refused: {x.size(dim)} local tokens", "documents": edges,
            }  # fmt: skip

        compare(self, signature, x, facts, refusal=refusal)
        assert known is not None  # or there was a refusal
        # Compiled code and checkpoints compute layers again in backward, which not every rank need do.
        if current_backward() is None:
            begin_pass(self.ranks, _signature(self.owner, x.dtype, self.layout), x)
        return known

    def _known_length(self, x: Tensor, dim: int, seq_len: int | None) -> int:
        """The length that the caller passed or declared, or ranks x local tokens; refuses other shards."""
        ranks, local = self.ranks, x.size(dim)
        if seq_len is None:
            return length_of(self, local)
        refuse_other_lengths(self.layout, seq_len, self.owner)
        expected = self.layout.local_length(seq_len, ranks.rank, ranks.size)
        if local != expected:
            raise ValueError(
                f"{self.owner}: got {local} local tokens (dim {dim} of {tuple(x.shape)}) on rank {ranks.rank} of "
                f"{ranks.size}, expected {expected} of {seq_len} tokens in {self.layout}"
            )
        return seq_len

    def check_edges(self, edges: Edges, seq_len: int) -> None:
        """Refuses documents beyond the sequence, and what looks like their ids or lengths."""
        if self.mask is not None:  # refuses what attention refuses: positions may look like lengths, and be none
            edges_of_documents(self.mask, seq_len)
            return
        if edges and edges[-1] > seq_len:
            raise ValueError(
                f"{self.owner}: got cu_seqlens up to {edges[-1]}, expected at most the length of the sequence, "
                f"{seq_len}"
            )
        if edges:
            refuse_ids_and_lengths(edges, seq_len, self.owner, "cu_seqlens")

    def sequences(self, seq_len: int, batch_size: int, edges: Edges) -> list[tuple[Span, SequenceLayout]]:
        """The sequence for each group of batch rows that are divided alike."""
        size = self.ranks.size
        return [
            (rows, SequenceLayout(self.layout, seq_len, size, group, edges))
            for group, rows in enumerate(self.layout.batch_groups(batch_size))
        ]


@lru_cached
def _signature(owner: str, dtype: torch.dtype, layout: Layout) -> Signature:
    """The signature of a sequence operation: a part of what is equal on all ranks."""
    return Signature(f"{owner}, {dtype}, {layout}")


def document_edges(owner: str, cu_seqlens: Any) -> Edges:
    """The positions of `cu_seqlens`, integers or a tensor, which is waited for on a GPU; () for None and [0].

    Raises:
        ValueError: anything else than ascending integers >= 0.
    """
    edges = () if cu_seqlens is None else ascending(cu_seqlens, owner, "cu_seqlens")
    return () if edges == (0,) else edges


_keys = Keys[tuple[tuple[str, ...], SequenceCall]]("a sequence operation,")


def sequence_call_of(key: str) -> SequenceCall:
    """The call of a key, on this process's groups."""
    names, call = _keys.value_of(key)
    return replace(call, ranks=SequenceRanks.of_names(names))


# Moving rows


def moved(call: SequenceCall, x: Tensor, dim: int, seq_len: int, edges: Edges) -> Tensor:
    """The rows of this rank by the row map of a call; differentiable any number of times."""
    parts = [
        rows_of(x[start:stop], dim, row_map, sequence, call.ranks)
        for (start, stop), sequence, row_map in _groups(call, x.size(0), seq_len, edges)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rows_of(x: Tensor, dim: int, row_map: RowMap, sequence: SequenceLayout, ranks: SequenceRanks) -> Tensor:
    """The rows of this rank by a row map, for batch rows that are divided alike; differentiable."""
    result: Tensor = _MovedRows.apply(x, row_route(row_map, sequence, ranks.rank, ranks.inner_size), dim, ranks, False)
    return result


class _MovedRows(RankFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: RowRoute, dim: int, ranks: SequenceRanks, transposed: bool) -> Tensor:
        ctx.arguments = route, dim, ranks, not transposed
        return (rows_moved_back if transposed else moved_rows)(x, route, dim, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _MovedRows.apply(grad, *ctx.arguments), None, None, None, None


def _groups(
    call: SequenceCall, batch_size: int, seq_len: int, edges: Edges
) -> Iterator[tuple[Span, SequenceLayout, RowMap]]:
    """Batch rows that are divided alike, in both layouts if there are two, with their sequence and row map."""
    row_map = call.operation
    for (start, stop), sequence in call.sequences(seq_len, batch_size, edges):
        if not isinstance(row_map, Relayout):
            yield (start, stop), sequence, row_map
            continue
        for group, (first, last) in enumerate(row_map.target.batch_groups(batch_size)):
            rows = max(start, first), min(stop, last)
            if rows[0] < rows[1] or batch_size == 0:
                yield rows, sequence, replace(row_map, group=group)


# Operators in compiled code


def traced_moved(key: str, x: Tensor, cu_seqlens: Tensor | None, dim: int, seq_len: int, rows: int) -> Tensor:
    """`moved` in a program that is being captured.

    Args:
        key: of the call.
        seq_len: -1 if it is known only when the code runs.
        rows: of the result; -1 for those of x.
    """
    result: Tensor = torch.ops.cp_dtensor.rows(x, cu_seqlens, key, dim, seq_len, rows)
    return result


def _rows(x: Tensor, cu_seqlens: Tensor | None, key: str, dim: int, seq_len: int, _rows_out: int) -> Tensor:
    call = sequence_call_of(key)
    edges = document_edges(call.owner, cu_seqlens)
    length = call.length(x, dim, None if seq_len < 0 else seq_len, edges)
    with below_autograd():
        return moved(call, x, dim, length, edges)


def _rows_back(grad: Tensor, cu_seqlens: Tensor | None, key: str, dim: int, seq_len: int, _rows_in: int) -> Tensor:
    call = sequence_call_of(key)
    edges = document_edges(call.owner, cu_seqlens)
    # If the length is unknown, the result of the forward has as many rows as its argument.
    length = call.length(grad, dim, None, edges) if seq_len < 0 else seq_len
    ranks = call.ranks
    with below_autograd():
        parts = [
            rows_moved_back(grad[start:stop], row_route(row_map, sequence, ranks.rank, ranks.inner_size), dim, ranks)
            for (start, stop), sequence, row_map in _groups(call, grad.size(0), length, edges)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fake_rows(x: Tensor, cu_seqlens: Tensor | None, key: str, dim: int, seq_len: int, rows: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], x.size(dim) if rows < 0 else rows, *x.shape[dim + 1 :]))


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cu_seqlens, ctx.key, ctx.dim, ctx.seq_len, _ = inputs
    ctx.rows = x.size(ctx.dim)
    ctx.save_for_backward(cu_seqlens)


def _gradient_by(name: str) -> Callable[..., tuple[Tensor | None, ...]]:
    def gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (cu_seqlens,) = ctx.saved_tensors
        operator = getattr(torch.ops.cp_dtensor, name)
        return operator(grad, cu_seqlens, ctx.key, ctx.dim, ctx.seq_len, ctx.rows), None, None, None, None, None

    return gradient


def _define() -> None:
    arguments = "Tensor? cu_seqlens, str call, int dim, SymInt seq_len, SymInt rows) -> Tensor"
    for name, implementation, transposed in (("rows", _rows, "rows_back"), ("rows_back", _rows_back, "rows")):
        define_operator(
            f"{name}(Tensor x, {arguments}", implementation, _fake_rows, gradients=_gradient_by(transposed),
            save=_keep_arguments,
        )  # fmt: skip


_define()
