"""The llama3 functions of ring-flash-attention for packed documents, by `varlen_attention`.

The packed sequence is cut into adjacent parts, one for each rank, wherever documents begin and end; keys and values are
gathered. What a rank passes, as `llama3_flash_attn_prepare_cu_seqlens` gives it, says of its own queries which keys
they see. Who sees this rank's keys is as much a part of a plan, so the whole picture is needed: the tensors remember
from which documents they were made. Of tensors that do not (copies, or such as somebody else made), the ranks find the
documents together, in two small collectives, and the tensors remember them from then on. So either all ranks pass
tensors that remember, or none does. In compiled programs these functions run uncompiled, between graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_dtensor import _torch_private
from cp_dtensor.arguments import Mesh, sequence_ranks
from cp_dtensor.documents import ascending
from cp_dtensor.integrations.flash_attn_arguments import (
    AttentionResult,
    FlashAttnOptions,
    group_or_default,
    unpacked,
)
from cp_dtensor.integrations.llama3_documents import Prepared, documents_of, remember
from cp_dtensor.layouts import Contiguous
from cp_dtensor.varlen import heads_first_of_packed, varlen_attention


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """What `llama3_flash_attn_varlen_func` is told of the documents, on one rank.

    Args:
        cu_seqlens: (documents + 1,), where documents begin and end in the whole packed sequence, from 0 to its length.
            (That package's wants a length that the ranks divide; here parts may differ by one token.)
        causal: whether attention will be causal: then keys beyond this rank's part are left out.
        rank, world_size: this rank, and how many share the sequence.

    Returns:
        cu_seqlens_q: where documents begin and end in this rank's part, like `cu_seqlens` in dtype and device.
        cu_seqlens_k: the same in the keys that this rank's queries see: from the start of its first document on.
        max_seqlen_q, max_seqlen_k: the longest of each.
        local_k_slice: which keys of the whole sequence those are.

    Raises:
        TypeError, ValueError: positions that do not ascend from 0; a rank that is not one of `world_size`.

    >>> cu_seqlens_q, cu_seqlens_k, *rest = llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 3, 8]), True, 1, 2)
    >>> cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), rest
    ([0, 4], [0, 5], [4, 5, slice(3, 8, None)])
    """
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"expected cu_seqlens to be a tensor, got {type(cu_seqlens).__name__}")
    edges = ascending(cu_seqlens, "llama3_flash_attn_prepare_cu_seqlens", "cu_seqlens")
    if edges[0]:
        raise ValueError(f"expected cu_seqlens to begin with 0, got {list(edges)}")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected a rank of world_size={world_size}, got rank={rank}")
    prepared = Prepared(edges, bool(causal), rank, world_size)
    q_edges, k_edges = (cu_seqlens.new_tensor(own) for own in (prepared.q_edges, prepared.k_edges))
    remember(prepared, q_edges, k_edges)
    return q_edges, k_edges, *prepared.longest, slice(*prepared.keys)


@_torch_private.never_compiled
def llama3_flash_attn_varlen_func(
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
    """This rank's rows of softmax(softmax_scale q k^T + mask) v, each over its whole document; differentiable.

    Args:
        q: (T, H, D), this rank's adjacent part of the packed sequence.
        k: (T, Hkv, D), this rank's keys. H may be a multiple of Hkv (GQA, MQA).
        v: (T, Hkv, Dv), this rank's values.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice: as
            `llama3_flash_attn_prepare_cu_seqlens` gives them. Other maxima may be larger.
        heads_k_stride: a divisor of Hkv, how many key heads to gather at a time there; here `Staging` decides.
        dropout_p: probability that a weight of the softmax is dropped, as for `context_parallel_attention`.
        softmax_scale: factor of the logits, 1 / sqrt(D) if None.
        causal: query i sees keys j <= i of its document.
        window_size: (left, right), how many keys to the left and to the right of it a query sees in its document, -1
            for all. With `causal`, right is 0.
        alibi_slopes: None; others are refused.
        deterministic: equal inputs give equal bits on GPUs too, as for `context_parallel_attention`.
        return_attn_probs: also return the log-sum-exp.
        group: the ranks that share the sequence, as for the functions without documents.
        softcap: 0.0; other values are refused.
        debug: let the ranks exchange and compare all that must agree.

    Returns:
        out: (T, H, Dv), contiguous. With `return_attn_probs`, (out, lse, None), where lse: (H, T) is the natural log of
        the softmax denominator in float32 (float64 for float64 inputs); not differentiable.

    Raises:
        TypeError, ValueError: arguments that do not fit, before keys and values travel. Cuts of documents that belong
            to no whole, or that were prepared for causal attention where this is not, on every rank alike.
        NotImplementedError: what is refused above, before any collective.
    """
    options = FlashAttnOptions(window_size, softcap, alibi_slopes)
    heads_first_of_packed(q, k, v)
    options.check()
    window = options.window
    if heads_k_stride < 1 or k.size(1) % heads_k_stride:
        raise ValueError(f"expected heads_k_stride to divide the {k.size(1)} key heads, got {heads_k_stride}")
    mesh = group_or_default(group)
    ranks = sequence_ranks(mesh)
    documents = documents_of(q, ranks, cu_seqlens_q, cu_seqlens_k, local_k_slice)
    documents.check_use(causal, max_seqlen_q, max_seqlen_k)
    result = varlen_attention(
        q, k, v, mesh=mesh, cu_seqlens=documents.cu_seqlens, is_causal=causal, window=window, method="ring",
        dropout_p=dropout_p, scale=softmax_scale, layout=Contiguous(), rotate_method="allgather",
        deterministic=deterministic, return_lse=return_attn_probs, seq_len=documents.cu_seqlens[-1], debug=debug,
    )  # fmt: skip
    return (*result, None) if isinstance(result, tuple) else result


def llama3_flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
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
    """`llama3_flash_attn_varlen_func` of q: (T, H, D) and kv: (T, 2, Hkv, D), this rank's; see there."""
    k, v = unpacked("kv", kv, 2, "tokens")
    return llama3_flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice, dropout_p,
        softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group, softcap=softcap,
        debug=debug,
    )  # fmt: skip


def llama3_flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
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
    """`llama3_flash_attn_varlen_func` of qkv: (T, 3, H, D), this rank's queries, keys and values; see there."""
    q, k, v = unpacked("qkv", qkv, 3, "tokens")
    return llama3_flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice, dropout_p,
        softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group, softcap=softcap,
        debug=debug,
    )  # fmt: skip
