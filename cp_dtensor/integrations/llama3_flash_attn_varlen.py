"""The llama3 variants of ring-flash-attn for packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from cp_dtensor import _torch
from cp_dtensor.api.varlen import heads_first_of_packed, varlen_attention
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.validation import Mesh, sequence_ranks
from cp_dtensor.integrations.flash_attn_arguments import (
    AttentionResult,
    FlashAttnOptions,
    check_longest,
    group_or_default,
    unpacked,
)
from cp_dtensor.spec.documents import ascending
from cp_dtensor.spec.layouts import Contiguous, Span
from cp_dtensor.spec.masks import is_integer


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


@_torch.never_compiled
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
        q, k, v, mesh=mesh, cu_seqlens=documents.cu_seqlens, is_causal=causal, window_size=window, method="ring",
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


_NOTE = "cp_dtensor_documents"  # attribute of tensors: what they were made from, and their version then


_FUNCTION = "llama3_flash_attn_varlen_func"


@dataclass(frozen=True)
class Prepared:
    """The documents of a whole packed sequence, and what one rank is told of them."""

    cu_seqlens: tuple[int, ...]
    """Of the whole, from 0 to its length."""
    causal: bool
    """Whether keys beyond the rank's part are left out."""
    rank: int
    world_size: int

    @cached_property
    def part(self) -> Span:
        """The positions of this rank."""
        (segment,) = Contiguous().segments(self.cu_seqlens[-1], self.rank, self.world_size)
        return segment.start, segment.start + segment.length

    @cached_property
    def pieces(self) -> tuple[tuple[Span, Span], ...]:
        """By document: this rank's queries, and the keys that they are told of."""
        start, stop = self.part
        return tuple(
            ((max(first, start), min(last, stop)), (first, min(last, stop) if self.causal else last))
            for first, last in pairwise(self.cu_seqlens)
            if first < stop and (last > start or first == start)
        )

    @property
    def q_edges(self) -> list[int]:
        """Where documents begin and end among this rank's queries."""
        return [0, *(queries[1] - self.part[0] for queries, _ in self.pieces)]

    @property
    def k_edges(self) -> list[int]:
        """Where documents begin and end among the keys that this rank is told of."""
        return [0, *(keys[1] - self.keys[0] for _, keys in self.pieces)]

    @cached_property
    def keys(self) -> Span:
        """The positions of those keys."""
        return (self.pieces[0][1][0], self.pieces[-1][1][1]) if self.pieces else (self.part[0],) * 2

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Most queries of this rank, and most keys that it is told of, in one document."""
        spans = zip(*self.pieces, strict=True) if self.pieces else ((), ())
        longest_q, longest_k = (max((last - first for first, last in each), default=0) for each in spans)
        return longest_q, longest_k

    @cached_property
    def documents_are_cut(self) -> bool:
        """Whether a document lies across several ranks."""
        cuts = {Prepared(self.cu_seqlens, True, rank, self.world_size).part[0] for rank in range(self.world_size)}
        return not cuts <= {*self.cu_seqlens}

    def check_use(self, causal: bool, max_seqlen_q: int, max_seqlen_k: int) -> None:
        """Refuses calls that these documents were not prepared for.

        Raises:
            TypeError, ValueError: a maximum that is too small; keys were left out that such a call has to see, which
                all ranks find alike.
        """
        if self.causal and not causal and self.documents_are_cut:
            raise ValueError(
                f"{_FUNCTION} got causal=False with documents that were prepared for causal=True, where ranks are not "
                "told of the keys behind their own; expected llama3_flash_attn_prepare_cu_seqlens(..., causal=False)"
            )
        check_longest(_FUNCTION, "max_seqlen_q", max_seqlen_q, self.longest[0])
        check_longest(_FUNCTION, "max_seqlen_k", max_seqlen_k, self.longest[1])


def remember(prepared: Prepared, *edges: object) -> None:
    """Lets tensors know from which documents they were made, until somebody writes to them."""
    for tensor in edges:
        if isinstance(tensor, torch.Tensor):
            setattr(tensor, _NOTE, (prepared, _torch.version_of(tensor)))


def documents_of(q: torch.Tensor, ranks: SequenceRanks, q_edges: Any, k_edges: Any, keys: slice) -> Prepared:
    """The documents of the whole sequence, remembered, or found by the ranks together.

    Raises:
        TypeError: edges or keys that are none.
        ValueError: those of another rank; on every rank alike, if they are found and belong to no whole.
    """
    if not isinstance(keys, slice) or not (is_integer(keys.start) and is_integer(keys.stop) and keys.step in (None, 1)):
        raise TypeError(f"{_FUNCTION} expects local_k_slice to be a slice of two integers, got {keys!r}")
    prepared = _remembered(q_edges, k_edges)
    if prepared is None:
        prepared = _found_together(q, ranks, q_edges, k_edges, keys)
        remember(prepared, q_edges, k_edges)
    for got, expected in (
        (f"rank {ranks.rank} of {ranks.size}", f"rank {prepared.rank} of {prepared.world_size}"),
        (f"local_k_slice from {keys.start} to {keys.stop}", "local_k_slice from {} to {}".format(*prepared.keys)),
        (f"{q.size(0)} tokens", f"{prepared.part[1] - prepared.part[0]} tokens"),
    ):
        if got != expected:
            raise ValueError(f"{_FUNCTION} got documents that were prepared for {expected}, and here is {got}")
    return prepared


def _remembered(q_edges: object, k_edges: object) -> Prepared | None:
    notes = [getattr(tensor, _NOTE, (None, None)) for tensor in (q_edges, k_edges)]
    versions = [_torch.version_of(each) for each in (q_edges, k_edges) if isinstance(each, torch.Tensor)]
    (prepared, _), (other, _) = notes
    same = prepared is other or prepared == other
    return prepared if same and [version for _, version in notes] == versions else None


def _found_together(q: torch.Tensor, ranks: SequenceRanks, q_edges: Any, k_edges: Any, keys: slice) -> Prepared:
    queries, keys_of = _integers("cu_seqlens_q", q_edges), _integers("cu_seqlens_k", k_edges)
    words = [q.size(0), keys.start, keys.stop, len(queries), *queries, *keys_of]
    most = max(ranks.gather_integers(len(words), q.device))
    return _whole_of(ranks.gather_integers(words + [-1] * (most - len(words)), q.device), ranks.rank)


def _whole_of(told: Sequence[list[int]], rank: int) -> Prepared:
    """The documents of which each rank has told its part."""
    total = sum(rows for rows, *_ in told)
    starts = {keys[0] for words in told for _, keys in _told_pieces(words, 0)}
    edges = (*(sorted(starts) or [0]), total)

    def told_as(causal: bool) -> bool:
        return all(_agrees(words, Prepared(edges, causal, other, len(told))) for other, words in enumerate(told))

    causal = next((causal for causal in (False, True) if told_as(causal)), None)
    if causal is None or edges[0]:
        raise ValueError(
            f"{_FUNCTION} got cu_seqlens_q, cu_seqlens_k and local_k_slice that are not those of one packed sequence; "
            f"expected what llama3_flash_attn_prepare_cu_seqlens gives, got by rank (tokens, slice, cu_seqlens): {told}"
        )
    return Prepared(edges, causal, rank, len(told))


def _agrees(words: list[int], prepared: Prepared) -> bool:
    start, stop = prepared.part
    wanted = [piece for piece in prepared.pieces if piece[0][0] < piece[0][1]]
    keys = (words[1], words[2])
    return words[0] == stop - start and keys == prepared.keys and _told_pieces(words, start) == wanted


def _told_pieces(words: list[int], start: int) -> list[tuple[Span, Span]]:
    """As `Prepared.pieces`, without those of no queries, from what a rank has told."""
    _, first_key, _, count, *edges = words
    queries = [start + edge for edge in edges[:count]]
    keys = [first_key + edge for edge in edges[count : 2 * count]]
    return [piece for piece in zip(pairwise(queries), pairwise(keys), strict=False) if piece[0][0] < piece[0][1]]


def _integers(name: str, values: Any) -> list[int]:
    numbers = values.tolist() if isinstance(values, torch.Tensor) else values
    if not isinstance(numbers, (list, tuple)) or not numbers or not all(map(is_integer, numbers)):
        raise TypeError(f"{_FUNCTION} expects {name} to be a tensor of integers of one dim, got {values!r}")
    return list(numbers)
