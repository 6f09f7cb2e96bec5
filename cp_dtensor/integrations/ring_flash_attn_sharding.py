"""Shards and layouts of the ring-flash-attn variants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import torch

from cp_dtensor.api.sharding import context_parallel_shard, context_parallel_unshard
from cp_dtensor.engine.validation import Mesh, sequence_ranks
from cp_dtensor.integrations.flash_attn_arguments import (
    group_or_default,
)
from cp_dtensor.spec.balanced_layouts import PerDocument
from cp_dtensor.spec.documents import ascending
from cp_dtensor.spec.layouts import (
    CachedHash,
    Contiguous,
    Layout,
    Segment,
    Span,
    chunk_length,
    chunk_start,
)

CHUNKS: Mapping[str, int] = MappingProxyType({"ring": 1, "zigzag_ring": 2})
"""By kind, how many chunks of every document a rank has."""


@dataclass(frozen=True)
class ContiguousPerDocument(CachedHash, Layout):
    """Of every document, rank r owns the r-th of n adjacent chunks, whose lengths differ by at most one.

    Tokens before the first and after the last document are divided in the same way.

    Args:
        cu_seqlens: ascending positions, one more than documents.
        seq_len: global number of tokens.

    >>> layout = ContiguousPerDocument((0, 2, 6), seq_len=6)
    >>> [[list(segment.positions()) for segment in layout.segments(6, rank, 2)] for rank in range(2)]
    [[[0], [2, 3]], [[1], [4, 5]]]
    """

    cu_seqlens: tuple[int, ...]
    seq_len: int
    __hash__ = CachedHash.__hash__

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        if seq_len != self.seq_len:
            raise ValueError(f"this layout divides sequences of {self.seq_len} tokens only, got {seq_len}")
        if world_size == 1:
            return (Segment.contiguous(0, seq_len),)
        parts = []
        for first, last in pairwise((0, *self.cu_seqlens, self.seq_len)):
            if first < last:
                start = first + chunk_start(last - first, world_size, rank)
                parts.append(Segment.contiguous(start, start + chunk_length(last - first, world_size, rank)))
        return tuple(parts) or (Segment.contiguous(0, 0),)

    def batch_groups(self, batch_size: int) -> tuple[Span, ...]:
        return ((0, batch_size),)

    def local_length(self, seq_len: int, rank: int, world_size: int) -> int:
        return sum(segment.length for segment in self.segments(seq_len, rank, world_size))

    @property
    def only_length(self) -> int:
        return self.seq_len

    @property
    def alignment(self) -> int:
        return 1


def layout_of_documents(kind: str, cu_seqlens: tuple[int, ...], seq_len: int) -> Layout:
    """Which tokens each rank has; the positions and the length are those of the whole sequence."""
    if kind == "ring":
        return ContiguousPerDocument(cu_seqlens, seq_len)
    return PerDocument(cu_seqlens, seq_len=seq_len)


def shard_varlen(
    tensor: torch.Tensor, kind: str, cu_seqlens: Any, group: Mesh | None = None, dim: int = 0
) -> torch.Tensor:
    """This rank's shard, as varlen functions of `kind` expect it, of a packed tensor that every rank has whole.

    Args:
        tensor: of any dtype and shape: q, k, v, packed ones, token ids.
        kind: "ring", "zigzag_ring" or "llama3".
        cu_seqlens: where documents begin and end in the whole sequence (the functions of "ring" and "zigzag_ring" take
            cu_seqlens // ranks). What is before the first and behind the last document is divided as a document is.
        group: as for the functions.
        dim: the sequence dim, negative counts from the end.

    Returns:
        a new tensor. Differentiable: gradients of other ranks' tokens are zero here, so that the sum over ranks is the
        gradient of the whole tensor.

    Raises:
        TypeError, ValueError: arguments that do not fit; documents whose lengths the ranks (for "zigzag_ring", twice as
            many) do not divide.
    """
    mesh = group_or_default(group)
    layout = _checked_layout(kind, cu_seqlens, tensor.size(dim), mesh)
    return context_parallel_shard(mesh, [tensor], [dim], layout)[0]


def unshard_varlen(
    tensor: torch.Tensor,
    kind: str,
    cu_seqlens: Any,
    group: Mesh | None = None,
    dim: int = 0,
    *,
    grad: Literal["replicated", "partial"] = "replicated",
) -> torch.Tensor:
    """The whole packed tensor, on every rank, from the ranks' shards: the inverse of `shard_varlen`.

    Args:
        tensor: this rank's shard.
        kind, cu_seqlens, group, dim: as for `shard_varlen`. Of "ring" and "zigzag_ring", all ranks have equally many
            tokens.
        grad: as for `unshard`.

    Returns:
        a new tensor, differentiable.

    Raises:
        TypeError, ValueError: arguments that do not fit; shards whose lengths are not the layout's, on all ranks alike.
    """
    mesh = group_or_default(group)
    layout = _checked_layout(kind, cu_seqlens, tensor.size(dim) * sequence_ranks(mesh).size, mesh)
    return context_parallel_unshard(mesh, [tensor], [dim], layout, grad=grad)[0]


def _checked_layout(kind: str, cu_seqlens: Any, seq_len: int, mesh: Mesh) -> Layout:
    if kind == "llama3":
        return Contiguous()
    if kind not in CHUNKS:
        raise ValueError(f"expected kind to be one of {', '.join(map(repr, CHUNKS))}, 'llama3'; got {kind!r}")
    edges = ascending(cu_seqlens, "shard_varlen", "cu_seqlens")
    ranks = sequence_ranks(mesh).size
    multiple = CHUNKS[kind] * ranks
    if edges[-1] > seq_len or seq_len % ranks or any(edge % multiple for edge in edges):
        raise ValueError(
            f"{kind!r} expects cu_seqlens of the whole sequence, multiples of {multiple}, and a multiple of {ranks} "
            f"tokens; got {list(edges)} and {seq_len} tokens"
        )
    return layout_of_documents(kind, edges, seq_len)
