"""The llama3 functions of ring-flash-attention for packed documents.

The packed sequence is cut into adjacent parts, one for each rank, regardless of where documents begin and end; K/V are
all-gathered. The tensors that `llama3_flash_attn_prepare_cu_seqlens` returns describe one rank's own documents only, as
in ring-flash-attention, but an execution plan depends on the documents of all ranks. So these tensors carry the whole
`cu_seqlens` as an attribute: pass them on unchanged. Copies, and tensors written to since, are refused.

In compiled programs these functions run uncompiled, between graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from cp_dtensor import Contiguous, varlen_attention
from cp_dtensor.api.extension import (
    Mesh,
    ascending,
    heads_first_of_packed,
    is_integer,
    never_compiled,
    sequence_ranks,
    version_of,
)
from cp_dtensor.integrations.flash_attn_arguments import (
    AttentionResult,
    PackedForms,
    check_longest,
    group_or_default,
    supported_window,
)

_PREPARE = "llama3_flash_attn_prepare_cu_seqlens"
_FUNCTION = "llama3_flash_attn_varlen_func"
_NOTE = "cp_dtensor_documents"
"""Attribute of prepared tensors: their `_Documents` and their version when prepared."""


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """The document arguments of `llama3_flash_attn_varlen_func` for one rank.

    Args:
        cu_seqlens: (documents + 1,), positions where documents begin and end in the whole packed sequence, from 0 to
            its length. (ring-flash-attention requires a multiple of `world_size`; here parts may differ by one token.)
        causal: True if attention will be causal: keys after this rank's part are left out then.
        rank, world_size: this rank, and the number of ranks that share the sequence.

    Returns:
        cu_seqlens_q: edges of documents in this rank's part, in the dtype and on the device of `cu_seqlens`.
        cu_seqlens_k: edges of documents in the keys that this rank's queries see, which begin with its first document.
        max_seqlen_q, max_seqlen_k: the longest document in each.
        local_k_slice: the positions of these keys in the whole sequence.

    Raises:
        TypeError, ValueError: positions that do not ascend from 0; a rank outside of `world_size`.

    >>> cu_seqlens_q, cu_seqlens_k, *rest = llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 3, 8]), True, 1, 2)
    >>> cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), rest
    ([0, 4], [0, 5], [4, 5, slice(3, 8, None)])
    """
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"expected cu_seqlens to be a tensor, got {type(cu_seqlens).__name__}")
    edges = ascending(cu_seqlens, _PREPARE, "cu_seqlens")
    if edges[0]:
        raise ValueError(f"expected cu_seqlens to begin with 0, got {list(edges)}")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected a rank of world_size={world_size}, got rank={rank}")
    parts = [Contiguous().segments(edges[-1], each, world_size)[0] for each in range(world_size)]
    start, stop = parts[rank].start, parts[rank].start + parts[rank].length
    queries, keys = [], []  # spans of positions, by document of this rank
    for first, last in pairwise(edges):
        if first < stop and (last > start or first == start):
            queries.append((max(first, start), min(last, stop)))
            keys.append((first, min(last, stop) if causal else last))
    keys_of_rank = (keys[0][0], keys[-1][1]) if keys else (start, start)
    max_seqlen_q, max_seqlen_k = (max((last - first for first, last in each), default=0) for each in (queries, keys))
    documents = _Documents(
        edges, rank, world_size, stop - start, keys_of_rank, (max_seqlen_q, max_seqlen_k),
        leaves_out_keys=bool(causal) and not {part.start for part in parts} <= {*edges},
    )  # fmt: skip
    cu_seqlens_q = cu_seqlens.new_tensor([0, *(last - start for _, last in queries)])
    cu_seqlens_k = cu_seqlens.new_tensor([0, *(last - keys_of_rank[0] for _, last in keys)])
    for tensor in (cu_seqlens_q, cu_seqlens_k):
        setattr(tensor, _NOTE, (documents, version_of(tensor)))
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, slice(*keys_of_rank)


@dataclass(frozen=True)
class _Documents:
    """The documents that one rank's tensors were prepared from."""

    cu_seqlens: tuple[int, ...]
    """Of the whole sequence, from 0 to its length."""
    rank: int
    world_size: int
    tokens: int
    """The number of this rank's tokens."""
    keys: tuple[int, int]
    """The positions of the keys that its queries see."""
    longest: tuple[int, int]
    """Most queries and most keys of one document."""
    leaves_out_keys: bool
    """True if prepared for causal attention, with a document on several ranks."""


def _documents_of(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> _Documents:
    """The documents that two tensors were prepared from; refuses copies, and tensors written to since."""
    found: list[_Documents] = []
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        documents, version = getattr(tensor, _NOTE, (None, None))
        if documents is None or version != version_of(tensor) or documents not in (found or [documents]):
            raise ValueError(
                f"{_FUNCTION} expects {name} to be the tensor that {_PREPARE} returned, not a copy and not written to "
                f"since (call {_PREPARE} for each new cu_seqlens); got {tensor!r}"
            )
        found.append(documents)
    return found[0]


@dataclass(frozen=True)
class _Llama3(PackedForms):
    """The llama3 functions of packed documents."""

    leading_dims = "tokens"

    @never_compiled
    def func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        heads_k_stride: int,
        local_k_slice: slice,
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
            q: (T, H, D), this rank's adjacent part of the packed sequence.
            k: (T, Hkv, D), this rank's keys. H may be a multiple of Hkv (GQA, MQA).
            v: (T, Hkv, Dv), this rank's values.
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice: the results of
                `llama3_flash_attn_prepare_cu_seqlens`, the very tensors. The maxima may be larger.
            heads_k_stride: a divisor of Hkv, in ring-flash-attention the key heads to gather at a time. Not used here,
                since the planner chooses the stages.
            causal: True if query i sees keys j <= i of its document.
            window_size: (left, right), numbers of keys to the left and right of its own position in the document that
                a query sees, -1 for no limit. With `causal`, right is 0.
            dropout_p, softmax_scale, alibi_slopes, deterministic, return_attn_probs, group, softcap: as for
                `ring_flash_attn_func`.
            debug: True to compare between ranks all arguments that must agree.

        Returns:
            out: (T, H, Dv), contiguous. With `return_attn_probs`, (out, lse, None), where lse: (H, T) is the natural
            log of the softmax denominator in float32 (float64 for float64 inputs); not differentiable.

        Raises:
            TypeError, ValueError: arguments that do not fit, before K/V travel; cu_seqlens that are not the prepared
                tensors; documents prepared for causal attention in a call that is not, on every rank alike.
            NotImplementedError: options refused above, before any collective.
        """
        heads_first_of_packed(q, k, v)
        window = supported_window(window_size, alibi_slopes)
        if heads_k_stride < 1 or k.size(1) % heads_k_stride:
            raise ValueError(f"expected heads_k_stride to divide the {k.size(1)} key heads, got {heads_k_stride}")
        mesh = group_or_default(group)
        ranks = sequence_ranks(mesh)
        documents = _documents_of(cu_seqlens_q, cu_seqlens_k)
        keys = local_k_slice
        if not (
            isinstance(keys, slice) and is_integer(keys.start) and is_integer(keys.stop) and keys.step in (None, 1)
        ):
            raise TypeError(f"{_FUNCTION} expects local_k_slice to be a slice of two integers, got {keys!r}")
        for got, expected in (
            (f"rank {ranks.rank} of {ranks.size}", f"rank {documents.rank} of {documents.world_size}"),
            (f"local_k_slice from {keys.start} to {keys.stop}", "local_k_slice from {} to {}".format(*documents.keys)),
            (f"{q.size(0)} tokens", f"{documents.tokens} tokens"),
        ):
            if got != expected:
                raise ValueError(f"{_FUNCTION} got documents that were prepared for {expected}, and here is {got}")
        if documents.leaves_out_keys and not causal:
            raise ValueError(
                f"{_FUNCTION} got causal=False with documents that were prepared for causal=True, which leaves out "
                f"keys; expected {_PREPARE}(..., causal=False)"
            )
        check_longest(_FUNCTION, "max_seqlen_q", max_seqlen_q, documents.longest[0])
        check_longest(_FUNCTION, "max_seqlen_k", max_seqlen_k, documents.longest[1])
        result = varlen_attention(
            q, k, v, mesh=mesh, cu_seqlens=documents.cu_seqlens, is_causal=causal, window_size=window, method="ring",
            dropout_p=dropout_p, softcap=softcap, scale=softmax_scale, layout=Contiguous(), rotate_method="allgather",
            deterministic=deterministic, return_lse=return_attn_probs, seq_len=documents.cu_seqlens[-1], debug=debug,
        )  # fmt: skip
        return (*result, None) if isinstance(result, tuple) else result


_LLAMA3 = _Llama3()

llama3_flash_attn_varlen_func = _LLAMA3.func
llama3_flash_attn_varlen_kvpacked_func = _LLAMA3.kvpacked_func
llama3_flash_attn_varlen_qkvpacked_func = _LLAMA3.qkvpacked_func
