"""Varlen functions of ring-flash-attention that divide every document over all ranks.

| kind | this rank's part of every document |
|---|---|
| `ring` | the rank-th of n equal chunks |
| `zigzag_ring` | chunks rank and 2n-1-rank of 2n equal chunks, the first before the second |

Tensors are (tokens, heads, head_dim), document after document. As in ring-flash-attention, `cu_seqlens` and
`max_seqlen` are those of one rank: those of the whole sequence, divided by the number of ranks. So the length of every
document is a multiple of n (2n for `zigzag_ring`), and all ranks have equally many tokens.

Documents of 4 and 8 tokens on 2 ranks: `cu_seqlens` is [0, 2, 6] on both. With `ring`, rank 0 has the positions 0 1 and
4 5 6 7, rank 1 has 2 3 and 8 9 10 11; with `zigzag_ring` they have 0 3 and 4 5 10 11, 1 2 and 6 7 8 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

from cp_dtensor import (
    Contiguous,
    Layout,
    PerDocument,
    context_parallel_shard,
    context_parallel_unshard,
    varlen_attention,
)
from cp_dtensor.api.extension import (
    CachedHash,
    Mesh,
    Segment,
    ascending,
    heads_first_of_packed,
    refuse_ids_and_lengths,
    sequence_ranks,
)
from cp_dtensor.integrations.flash_attn_arguments import (
    AttentionResult,
    PackedForms,
    check_longest,
    group_or_default,
    supported_window,
)


@dataclass(frozen=True)
class _Kind(PackedForms):
    """The functions of "ring" or "zigzag_ring"."""

    name: str
    chunks: int
    """Chunks of every document on each rank."""
    leading_dims = "tokens"

    def func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: Any,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Mesh | None = None,
        *,
        softcap: float = 0.0,
        debug: bool = False,
    ) -> AttentionResult:
        """This rank's rows of softmax(softmax_scale q k^T + mask) v within each document; differentiable.

        Args:
            q: (T, H, D), this rank's queries: its chunks of the first document, of the second, and so on.
            k: (T, Hkv, D), this rank's keys. H may be a multiple of Hkv (GQA, MQA).
            v: (T, Hkv, Dv), this rank's values.
            cu_seqlens: (documents + 1,), first and last position of documents on this rank, equal on every rank;
                integers or a tensor (reading one on a GPU waits for the GPU). Tokens after the last document are
                padding: their output and gradients are zero.
            max_seqlen: the length of the longest document on this rank, or more.
            causal: True if query i sees keys j <= i of its document, by their positions in the document.
            window_size: (left, right), numbers of keys to the left and right of its own position in the document that
                a query sees, -1 for no limit. With `causal`, right is 0.
            dropout_p, softmax_scale, alibi_slopes, deterministic, return_attn_probs, group, softcap: as for
                `ring_flash_attn_func`.
            debug: True to compare lengths, documents and all other arguments between ranks in every call. Otherwise
                they do so in the first call of each kind only.

        Returns:
            out: (T, H, Dv), contiguous. With `return_attn_probs`, (out, lse, None), where lse: (H, T) is the natural
            log of the softmax denominator in float32 (float64 for float64 inputs); not differentiable.

        Raises:
            TypeError, ValueError: arguments that do not fit, before any collective; with `debug`, lengths or documents
                that differ between ranks, on every rank alike.
            NotImplementedError: options refused above, before any collective.
        """
        heads_first_of_packed(q, k, v)
        window = supported_window(window_size, alibi_slopes)
        mesh = group_or_default(group)
        ranks = sequence_ranks(mesh).size
        edges = self._global_edges(q, k, cu_seqlens, max_seqlen, ranks)
        seq_len = ranks * q.size(0)
        result = varlen_attention(
            q, k, v, mesh=mesh, cu_seqlens=edges, is_causal=causal, window_size=window, method="ring",
            dropout_p=dropout_p, softcap=softcap, scale=softmax_scale, layout=self.layout(edges, seq_len),
            deterministic=deterministic, return_lse=return_attn_probs, seq_len=seq_len, debug=debug,
        )  # fmt: skip
        return (*result, None) if isinstance(result, tuple) else result

    def _global_edges(
        self, q: torch.Tensor, k: torch.Tensor, cu_seqlens: Any, max_seqlen: int, ranks: int
    ) -> tuple[int, ...]:
        """The cu_seqlens of the whole sequence from those of one rank."""
        function = f"{self.name}_flash_attn_varlen_func"
        edges = ascending(cu_seqlens, function, "cu_seqlens")
        if q.size(0) != k.size(0):
            raise ValueError(
                f"{function} has one cu_seqlens for queries and keys and expects as many of both, got {q.size(0)} "
                f"queries and {k.size(0)} keys"
            )
        if edges[-1] > q.size(0):
            raise ValueError(
                f"{function} expects the cu_seqlens of one rank, those of the whole divided by the {ranks} ranks; got "
                f"documents that end at {edges[-1]} for {q.size(0)} tokens of this rank"
            )
        refuse_ids_and_lengths(edges, q.size(0), function, "cu_seqlens")
        if any(edge % self.chunks for edge in edges):
            raise ValueError(
                f"{function} has {self.chunks} chunks of every document on each rank and expects cu_seqlens of one "
                f"rank to be multiples of {self.chunks}, got {list(edges)}"
            )
        longest = max([0, *[stop - start for start, stop in pairwise(edges)]])
        check_longest(function, "max_seqlen", max_seqlen, longest)
        return tuple(ranks * edge for edge in edges)

    def layout(self, cu_seqlens: tuple[int, ...], seq_len: int) -> Layout:
        """The layout for documents of the whole sequence."""
        if self.chunks == 1:
            return ContiguousPerDocument(cu_seqlens, seq_len)
        return PerDocument(cu_seqlens, seq_len=seq_len)


_KINDS = {"ring": _Kind("ring", 1), "zigzag_ring": _Kind("zigzag_ring", 2)}

ring_flash_attn_varlen_func = _KINDS["ring"].func
ring_flash_attn_varlen_kvpacked_func = _KINDS["ring"].kvpacked_func
ring_flash_attn_varlen_qkvpacked_func = _KINDS["ring"].qkvpacked_func
zigzag_ring_flash_attn_varlen_func = _KINDS["zigzag_ring"].func
zigzag_ring_flash_attn_varlen_kvpacked_func = _KINDS["zigzag_ring"].kvpacked_func
zigzag_ring_flash_attn_varlen_qkvpacked_func = _KINDS["zigzag_ring"].qkvpacked_func


@dataclass(frozen=True)
class ContiguousPerDocument(CachedHash, Layout):
    """Rank r owns the r-th of n adjacent chunks of every document; chunk lengths differ by at most one.

    Tokens before the first and after the last document are divided in the same way.

    Args:
        cu_seqlens: (documents + 1,), ascending positions where documents begin and end.
        seq_len: global number of tokens.

    >>> layout = ContiguousPerDocument((0, 2, 6), seq_len=6)
    >>> [[list(segment.positions()) for segment in layout.segments(6, rank, 2)] for rank in range(2)]
    [[[0], [2, 3]], [[1], [4, 5]]]
    """

    cu_seqlens: tuple[int, ...]
    seq_len: int

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        if seq_len != self.seq_len:
            raise ValueError(f"this layout divides sequences of {self.seq_len} tokens only, got {seq_len}")
        if world_size == 1:
            return (Segment.contiguous(0, seq_len),)
        parts = []
        for first, last in pairwise((0, *self.cu_seqlens, self.seq_len)):
            if first < last:
                (chunk,) = Contiguous().segments(last - first, rank, world_size)
                start = first + chunk.start
                parts.append(Segment.contiguous(start, start + chunk.length))
        return tuple(parts) or (Segment.contiguous(0, 0),)

    @property
    def only_length(self) -> int:
        return self.seq_len


def shard_varlen(
    tensor: torch.Tensor, kind: str, cu_seqlens: Any, group: Mesh | None = None, dim: int = 0
) -> torch.Tensor:
    """This rank's shard of a packed tensor that every rank has whole, for the varlen functions of `kind`.

    Args:
        tensor, group, dim, returns: as for `shard`.
        kind: "ring", "zigzag_ring" or "llama3".
        cu_seqlens: (documents + 1,), positions where documents begin and end in the whole sequence (the functions of
            "ring" and "zigzag_ring" take cu_seqlens // ranks). Tokens before the first and after the last document are
            divided like a document.

    Raises:
        TypeError, ValueError: arguments that do not fit; documents whose lengths are not multiples of the number of
            ranks (for "zigzag_ring", of twice this number).
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
    """The whole packed tensor on every rank from the ranks' shards: the inverse of `shard_varlen`.

    Args:
        tensor: this rank's shard. With "ring" and "zigzag_ring", all ranks have equally many tokens.
        kind, cu_seqlens, group, dim: as for `shard_varlen`.
        grad, returns, raises: as for `unshard`.
    """
    mesh = group_or_default(group)
    layout = _checked_layout(kind, cu_seqlens, tensor.size(dim) * sequence_ranks(mesh).size, mesh)
    return context_parallel_unshard(mesh, [tensor], [dim], layout, grad=grad)[0]


def _checked_layout(kind: str, cu_seqlens: Any, seq_len: int, mesh: Mesh) -> Layout:
    if kind == "llama3":
        return Contiguous()
    if kind not in _KINDS:
        raise ValueError(f"expected kind to be one of {', '.join(map(repr, _KINDS))}, 'llama3'; got {kind!r}")
    edges = ascending(cu_seqlens, "shard_varlen", "cu_seqlens")
    ranks = sequence_ranks(mesh).size
    multiple = _KINDS[kind].chunks * ranks
    if edges[-1] > seq_len or seq_len % ranks or any(edge % multiple for edge in edges):
        raise ValueError(
            f"{kind!r} expects cu_seqlens of the whole sequence, multiples of {multiple}, and a multiple of {ranks} "
            f"tokens; got {list(edges)} and {seq_len} tokens"
        )
    return _KINDS[kind].layout(edges, seq_len)
