"""Calls of sequence operations: what they share with attention, lengths and documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cp_dtensor.api.extension import (
    LENGTH,
    Facts,
    Keys,
    SequenceRanks,
    Sharding,
    Signature,
    begin_pass,
    compare,
    current_backward,
    length_of,
)
from cp_dtensor.layers.rows import Edges, SequenceLayout
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.documents import ascending, edges_of_documents, refuse_ids_and_lengths
from cp_dtensor.spec.layouts import Layout, Span
from cp_dtensor.spec.masks import Mask


@dataclass(frozen=True)
class SequenceCall(Sharding):
    """A sequence operation without tensors."""

    owner: str = ""
    """The public function, for messages."""
    operation: Any = None
    """A `SequenceLayer`."""
    mask: Mask | None = None
    """The mask of the context whose documents the call takes over."""
    seq_len: int | None = None
    """The global length; None until it is found."""
    edges: Edges = ()
    """The documents."""

    @property
    def length(self) -> int:
        """The global length, once it is found."""
        assert self.seq_len is not None
        return self.seq_len

    @property
    def key(self) -> str:
        """Text of the call in compiled code, equal in every process, by which `sequence_call_of` finds it."""
        no_ranks: Any = None  # process groups end before compiled code does
        return _keys.key_of((self.ranks.names, replace(self, ranks=no_ranks, seq_len=None, edges=())))

    def agreed(self, tensors: Sequence[Any]) -> SequenceCall:
        """Return the call with its global length. The ranks compare the first call of each signature.

        Raises:
            ValueError: local lengths that do not fit; calls that differ between ranks, on every rank alike.
        """
        x, dim, dims = tensors[0], self.operation.dim, self.operation.dims
        others = []
        for index, each in enumerate(tensors):
            if index and each is not None:
                sizes = [size for size, letter in zip(each.shape, dims[index], strict=False) if letter not in "BTN"]
                others.append((index, str(each.dtype), *sizes))
        known = refusal = None
        try:
            known = length_of(self, x.size(dim), f"{self.owner}: sequence", self.seq_len)
            self.check_edges(known)
            self.operation.check(replace(self, seq_len=known), tensors)
        except (ValueError, NotImplementedError) as error:  # the others may be about to compare
            refusal = error
        is_declared = self.seq_len is not None or self.layout.only_length is not None or known in self.lengths
        shape = [size for each, size in enumerate(x.shape) if each != dim]
        signature = self.owner, type(self.layout), x.dtype, *shape[1:], tuple(others), is_declared or x.size(dim)

        def facts() -> Facts:
            return {
                "function": self.owner, "operation": repr(self.operation), "layout": repr(self.layout),
                "dtype": str(x.dtype), "shape": shape, "other tensors": others,
                LENGTH: f"refused: {x.size(dim)} local tokens" if known is None else known, "documents": self.edges,
                "arguments": "accepted" if refusal is None or known is None else f"refused: {refusal}",
            }  # fmt: skip

        compare(self, signature, x, facts, refusal=refusal)
        assert known is not None  # or there was a refusal
        # Compiled code and checkpoints compute layers again in backward, which not every rank need do.
        if current_backward() is None:
            begin_pass(self.ranks, _signature(self.owner, x.dtype, self.layout), x)
        return replace(self, seq_len=known)

    def check_edges(self, seq_len: int) -> None:
        """Refuse documents beyond the sequence, and what looks like their ids or lengths."""
        if self.mask is not None:  # refuses what attention refuses: positions may look like lengths, and be none
            edges_of_documents(self.mask, seq_len)
            return
        if self.edges and self.edges[-1] > seq_len:
            raise ValueError(
                f"{self.owner}: got cu_seqlens up to {self.edges[-1]}, expected at most the length of the sequence, "
                f"{seq_len}"
            )
        if self.edges:
            refuse_ids_and_lengths(self.edges, seq_len, self.owner, "cu_seqlens")

    def sequence(self, batch_size: int = 2) -> SequenceLayout:
        """Return the sequence of all batch rows; refuse layouts that divide them differently."""
        if len(self.layout.batch_groups(batch_size)) > 1:
            raise NotImplementedError(
                f"{self.owner} expects a layout that divides all batch rows alike, got {self.layout}"
            )
        ((_, sequence),) = self.sequences(batch_size)
        return sequence

    def sequences(self, batch_size: int = 1) -> list[tuple[Span, SequenceLayout]]:
        """Return the sequence for each group of batch rows that are divided alike."""
        return [
            (rows, SequenceLayout(self.layout, self.length, self.ranks.size, group, self.edges))
            for group, rows in enumerate(self.layout.batch_groups(batch_size))
        ]


@lru_cached
def _signature(owner: str, dtype: torch.dtype, layout: Layout) -> Signature:
    """Return the signature of a sequence operation: a part of what is equal on all ranks."""
    return Signature(f"{owner}, {dtype}, {layout}")


def document_edges(owner: str, cu_seqlens: Any) -> Edges:
    """Return the positions of `cu_seqlens`, integers or a tensor, which is waited for on a GPU; () for None and [0].

    Raises:
        ValueError: anything else than ascending integers >= 0.
    """
    edges = () if cu_seqlens is None else ascending(cu_seqlens, owner, "cu_seqlens")
    return () if edges == (0,) else edges


_keys = Keys[tuple[tuple[str, ...], SequenceCall]]("a sequence operation,")


def operation_of(key: str) -> Any:
    """Return the operation of the call of a key."""
    return _keys.value_of(key)[1].operation


def sequence_call_of(key: str, seq_len: int, cu_seqlens: Tensor | None) -> SequenceCall:
    """Return the call of a key, on this process's groups; -1 for a length that is not known."""
    names, call = _keys.value_of(key)
    edges, known = document_edges(call.owner, cu_seqlens), None if seq_len < 0 else seq_len
    return replace(call, ranks=SequenceRanks.of_names(names), seq_len=known, edges=edges)
