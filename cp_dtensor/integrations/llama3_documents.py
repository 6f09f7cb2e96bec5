"""Packed documents that are cut into adjacent parts, as each rank is told of its own: made, remembered, found again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from cp_dtensor import _torch_private
from cp_dtensor.integrations.flash_attn_arguments import check_longest
from cp_dtensor.layouts import Contiguous, Span
from cp_dtensor.masks import is_integer
from cp_dtensor.rotation.ranks import SequenceRanks

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
            setattr(tensor, _NOTE, (prepared, _torch_private.version_of(tensor)))


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
    versions = [_torch_private.version_of(each) for each in (q_edges, k_edges) if isinstance(each, torch.Tensor)]
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
