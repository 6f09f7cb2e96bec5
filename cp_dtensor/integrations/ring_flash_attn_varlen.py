"""Packed documents that are cut into adjacent parts, as each rank is told of its own: made, remembered, found again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from cp_dtensor.api.varlen import heads_first_of_packed, varlen_attention
from cp_dtensor.engine.validation import Mesh, sequence_ranks
from cp_dtensor.integrations.flash_attn_arguments import (
    AttentionResult,
    FlashAttnOptions,
    check_longest,
    group_or_default,
    unpacked,
)
from cp_dtensor.integrations.ring_flash_attn_sharding import CHUNKS, layout_of_documents
from cp_dtensor.spec.documents import ascending, refuse_ids_and_lengths

# The varlen functions of ring-flash-attention that cut each document over all ranks, by `varlen_attention`. | kind
# | what each rank has of every document | |---|---| | `ring` | the rank-th of n equal chunks | | `zigzag_ring` |
# chunks rank and 2n-1-rank of 2n equal ones, the first before the second | Tensors are (tokens, heads, head dim),
# document after document. As there, `cu_seqlens` and `max_seqlen` are those of one rank: those of the whole,
# divided by the number of ranks. So the length of every document is a multiple of the ranks (of twice as many for
# `zigzag_ring`), and all ranks have equally many tokens. Documents of 4 and 8 tokens on 2 ranks: `cu_seqlens` is
# [0, 2, 6] on both. In `ring`, rank 0 has the positions 0 1 and 4 5 6 7, rank 1 has 2 3 and 8 9 10 11; in
# `zigzag_ring` they have 0 3 and 4 5 10 11, 1 2 and 6 7 8 9.


@dataclass(frozen=True)
class VarlenKind:
    """Functions that differ in nothing but how each document is divided."""

    name: str

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
        """This rank's rows of softmax(softmax_scale q k^T + mask) v, each over its document; differentiable.

        Args:
            q: (T, H, D), this rank's queries: its chunks of the first document, those of the second, and so on.
            k: (T, Hkv, D), this rank's keys. H may be a multiple of Hkv (GQA, MQA).
            v: (T, Hkv, Dv), this rank's values.
            cu_seqlens: where documents begin and end on this rank, the same on every rank; integers or a tensor (of one
                on a GPU the numbers are read, which waits for the GPU). Tokens behind the last document are padding:
                their output and gradients are zero.
            max_seqlen: of the longest document on this rank, or more.
            dropout_p: probability that a weight of the softmax is dropped, as for `context_parallel_attention`.
            softmax_scale: factor of the logits, 1 / sqrt(D) if None.
            causal: query i sees keys j <= i of its document, by their positions there.
            window_size: (left, right), how many keys to the left and to the right of it a query sees in its document,
                on whichever rank they are; -1 for all. With `causal`, right is 0.
            alibi_slopes: None; others are refused.
            deterministic: equal inputs give equal bits on GPUs too, as for `context_parallel_attention`.
            return_attn_probs: also return the log-sum-exp.
            group: the ranks that share the sequence, as for the functions without documents.
            softcap: 0.0; other values are refused.
            debug: let the ranks exchange and compare lengths, documents and all else that must agree. Otherwise ranks
                tell each other nothing, as in that package.

        Returns:
            out: (T, H, Dv), contiguous. With `return_attn_probs`, (out, lse, None), where lse: (H, T) is the natural
            log of the softmax denominator in float32 (float64 for float64 inputs); not differentiable.

        Raises:
            TypeError, ValueError: arguments that do not fit, before any collective; with `debug`, ranks whose lengths
                or documents differ, on every rank alike.
            NotImplementedError: what is refused above, before any collective.
        """
        options = FlashAttnOptions(window_size, softcap, alibi_slopes)
        heads_first_of_packed(q, k, v)
        options.check()
        mesh = group_or_default(group)
        ranks = sequence_ranks(mesh).size
        edges = self._edges(q, k, cu_seqlens, max_seqlen, ranks)
        seq_len = ranks * q.size(0)
        result = varlen_attention(
            q, k, v, mesh=mesh, cu_seqlens=edges, is_causal=causal, window=options.window, method="ring",
            dropout_p=dropout_p, scale=softmax_scale, layout=layout_of_documents(self.name, edges, seq_len),
            deterministic=deterministic, return_lse=return_attn_probs, seq_len=seq_len, debug=debug,
        )  # fmt: skip
        return (*result, None) if isinstance(result, tuple) else result

    def _edges(self, q: torch.Tensor, k: torch.Tensor, cu_seqlens: Any, max_seqlen: int, ranks: int) -> tuple[int, ...]:
        """Where documents begin and end in the whole sequence."""
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
        chunks = CHUNKS[self.name]
        if any(edge % chunks for edge in edges):
            raise ValueError(
                f"{function} has {chunks} chunks of every document on each rank and expects cu_seqlens of one rank to "
                f"be multiples of {chunks}, got {list(edges)}"
            )
        longest = max([0, *[stop - start for start, stop in pairwise(edges)]])
        check_longest(function, "max_seqlen", max_seqlen, longest)
        return tuple(ranks * edge for edge in edges)

    def kvpacked_func(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
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
        """`func` of q: (T, H, D) and kv: (T, 2, Hkv, D), this rank's keys and values; see there."""
        k, v = unpacked("kv", kv, 2, "tokens")
        return self.func(
            q, k, v, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs, group, softcap=softcap, debug=debug,
        )  # fmt: skip

    def qkvpacked_func(
        self,
        qkv: torch.Tensor,
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
        """`func` of qkv: (T, 3, H, D), this rank's queries, keys and values; see there."""
        q, k, v = unpacked("qkv", qkv, 3, "tokens")
        return self.func(
            q, k, v, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs, group, softcap=softcap, debug=debug,
        )  # fmt: skip


_RING = VarlenKind("ring")
_ZIGZAG_RING = VarlenKind("zigzag_ring")

ring_flash_attn_varlen_func = _RING.func
ring_flash_attn_varlen_kvpacked_func = _RING.kvpacked_func
ring_flash_attn_varlen_qkvpacked_func = _RING.qkvpacked_func
zigzag_ring_flash_attn_varlen_func = _ZIGZAG_RING.func
zigzag_ring_flash_attn_varlen_kvpacked_func = _ZIGZAG_RING.kvpacked_func
zigzag_ring_flash_attn_varlen_qkvpacked_func = _ZIGZAG_RING.qkvpacked_func


# The llama3 functions of ring-flash-attention for packed documents, by `varlen_attention`. The packed sequence is
# cut into adjacent parts, one for each rank, wherever documents begin and end; keys and values are gathered. What a
# rank passes, as `llama3_flash_attn_prepare_cu_seqlens` gives it, says of its own queries which keys they see. Who
# sees this rank's keys is as much a part of a plan, so the whole picture is needed: the tensors remember from which
# documents they were made. Of tensors that do not (copies, or such as somebody else made), the ranks find the
# documents together, in two small collectives, and the tensors remember them from then on. So either all ranks pass
# tensors that remember, or none does. In compiled programs these functions run uncompiled, between graphs.
