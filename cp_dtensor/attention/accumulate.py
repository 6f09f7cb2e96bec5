"""Accumulating a result tile by tile: the output of a call, and each of its gradients.

One logic for both kinds. State is kept in the dtype of the result as long as nothing has been added to the first tile,
and in float32 (float64 for float64) after that, unless the addition is the last one: then everything is added at once
and rounded once, and there is no wide state at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from cp_dtensor._torch.tensors import cut
from cp_dtensor.attention.merge import add_parts, merge
from cp_dtensor.attention.triton import MAX_PARTS
from cp_dtensor.spec.layouts import Span

Tensors = tuple[torch.Tensor, ...]


class Part(NamedTuple):
    """What a tile, or other ranks, contribute to some rows of the heads that are added to."""

    batch: Span
    rows: Span
    tensors: Tensors
    """`(out, lse)` for merges; for sums `(gradient,)`, (B, H, rows, D), or `(stack,)`, (N, B, H, rows, D)."""

    @property
    def is_stack(self) -> bool:
        """Whether it is several tensors to add."""
        return self.tensors[0].dim() == 5


class Combination(ABC):
    """How parts combine: by LSE merge or by addition."""

    def __init__(self, state_dtype: torch.dtype) -> None:
        self.state_dtype = state_dtype

    @abstractmethod
    def empty(self, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> Tensors:
        """Uninitialised tensors for (B, H, S, D)."""

    @abstractmethod
    def reset(self, state: Tensors) -> None:
        """Makes the state that of nothing added."""

    @abstractmethod
    def combine(self, result: Tensors, base: Tensors, parts: Sequence[Part]) -> None:
        """`result` = base and up to MAX_PARTS parts of the same batch rows. May be in place."""


class LseMerge(Combination):
    """`(out, lse)` over more keys; `lse` in `state_dtype` throughout."""

    def empty(self, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> Tensors:
        return _empty(shape, like, dtype), like.new_empty(shape[:3], dtype=self.state_dtype)

    def reset(self, state: Tensors) -> None:
        state[0].zero_()
        state[1].fill_(float("-inf"))

    def combine(self, result: Tensors, base: Tensors, parts: Sequence[Part]) -> None:
        merge(result[0], result[1], base[0], base[1], [(part.rows, part.tensors[0], part.tensors[1]) for part in parts])


class Addition(Combination):
    """`(gradient,)`, summed in `state_dtype`."""

    def empty(self, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> Tensors:
        return (_empty(shape, like, dtype),)

    def reset(self, state: Tensors) -> None:
        state[0].zero_()

    def combine(self, result: Tensors, base: Tensors, parts: Sequence[Part]) -> None:
        stacks = [(part.rows, part.tensors[0] if part.is_stack else part.tensors[0].unsqueeze(0)) for part in parts]
        add_parts(result[0], base[0], stacks, self.state_dtype)


class Accumulator:
    """A result (B, H, S, D) to which parts are added, by groups of heads.

    A first part that covers all rows of its heads is taken over as it is, and with `may_overwrite` added to in place.
    (What a backend returns in forward may not be: selective checkpointing keeps it.) Later parts concern heads that
    came together at first.
    """

    def __init__(
        self,
        combination: Combination,
        shape: tuple[int, ...],
        like: torch.Tensor,
        may_overwrite: bool,
    ) -> None:
        self._combination = combination
        self._shape = shape
        self._like = like  # has the dtype, device and memory order of the result
        self._state_dtype = combination.state_dtype
        self._may_overwrite = may_overwrite
        self._pieces: list[_Piece] = []
        self._result: Tensors | None = None

    def add(self, heads: Span, parts: Sequence[Part], is_last: bool) -> None:
        """Adds parts to some heads. `is_last`: nothing will be added to these heads any more; said once of each."""
        piece = next((piece for piece in self._pieces if piece.has(heads)), None)
        if piece is None:
            piece, parts = self._begin(heads, parts)
            self._pieces.append(piece)
        by_batch: dict[Span, Sequence[Part]] = {}
        for part in parts:
            by_batch[part.batch] = [*by_batch.get(part.batch, ()), part]
        at_once = is_last and all(len(group) <= MAX_PARTS for group in by_batch.values())
        if parts and not at_once:
            self._make_wide(piece)
        if is_last:
            self._complete(piece, heads, by_batch)
        else:
            self._add_in_place(piece, heads, by_batch)

    def result(self) -> Tensors:
        """The result, after every head has had its last part."""
        if self._result is None:
            self._result = self._combination.empty(self._shape, self._like, self._like.dtype)
            self._combination.reset(self._result)
        return self._result

    def _begin(self, heads: Span, parts: Sequence[Part]) -> tuple[_Piece, Sequence[Part]]:
        """The first state of some heads, and the parts that it does not have yet."""
        covering, remaining = _covering(parts, self._shape[0], self._shape[2])
        if len(covering) > 1 and all(part.tensors[0].dtype == self._like.dtype for part in covering):
            shape = (self._shape[0], heads[1] - heads[0], *self._shape[2:])
            together = self._combination.empty(shape, self._like, self._like.dtype)
            for part in covering:
                for whole, piece in zip(together, part.tensors, strict=True):
                    cut(whole, None, None, part.rows).copy_(piece)
            return _Piece(heads, together, True), remaining
        batch, _, rows, width = self._shape
        if len(parts) == 1 and parts[0][:2] == ((0, batch), (0, rows)) and not parts[0].is_stack:
            # Backends may be wider than the result: math attention is. LSE is always as wide as the state.
            first, *others = parts[0].tensors
            dtype = first.dtype if first.dtype == self._like.dtype else self._state_dtype
            tensors = (first.to(dtype), *(other.to(self._state_dtype) for other in others))
            return _Piece(heads, tensors, self._may_overwrite), ()
        tensors = self._combination.empty((batch, heads[1] - heads[0], rows, width), self._like, self._state_dtype)
        self._combination.reset(tensors)
        return _Piece(heads, tensors, True), parts

    def _make_wide(self, piece: _Piece) -> None:
        piece.tensors = tuple(tensor.to(self._state_dtype, copy=not piece.is_ours) for tensor in piece.tensors)
        piece.is_ours = True

    def _add_in_place(self, piece: _Piece, heads: Span, by_batch: dict[Span, Sequence[Part]]) -> None:
        for batch, group in by_batch.items():
            for first in range(0, len(group), MAX_PARTS):
                parts = group[first : first + MAX_PARTS]
                # Only the rows between the first and the last part are read and written.
                start, stop = min(part.rows[0] for part in parts), max(part.rows[1] for part in parts)
                rows = _cut(piece.tensors, piece.relative(heads), batch, (start, stop))
                moved = [part._replace(rows=(part.rows[0] - start, part.rows[1] - start)) for part in parts]
                self._combination.combine(rows, rows, moved)

    def _complete(self, piece: _Piece, heads: Span, by_batch: dict[Span, Sequence[Part]]) -> None:
        """Adds the last parts to some heads, on the way to the result."""
        all_batch, all_heads, all_rows = (0, self._shape[0]), (0, self._shape[1]), (0, self._shape[2])
        # A state of all heads in the dtype of the result becomes the result, if it is ours or need not be written to.
        is_narrow = piece.tensors[0].dtype == self._like.dtype
        may_be_result = piece.is_ours or (heads == all_heads and not by_batch)
        has_no_other = self._result is None or self._result is piece.tensors
        if is_narrow and piece.heads == all_heads and may_be_result and has_no_other:
            self._add_in_place(piece, heads, by_batch)
            self._result = piece.tensors
            return
        # What cannot be combined at once, on the way from the state to the result, is added to the state before.
        parts = by_batch.get(all_batch, [])
        if len(parts) > MAX_PARTS or any(batch != all_batch for batch in by_batch):
            self._make_wide(piece)
            self._add_in_place(piece, heads, by_batch)
            parts = []
        if self._result is None:
            self._result = self._combination.empty(self._shape, self._like, self._like.dtype)
        result = _cut(self._result, heads, all_batch, all_rows)
        state = _cut(piece.tensors, piece.relative(heads), all_batch, all_rows)
        self._combination.combine(result, state, parts)
        piece.completed += heads[1] - heads[0]
        if piece.completed == piece.heads[1] - piece.heads[0]:
            self._pieces.remove(piece)  # its memory is needed


def output_accumulator(q: torch.Tensor, v_head_dim: int, state_dtype: torch.dtype) -> Accumulator:
    """Merges what tiles give of `(out, lse)` of queries q (B, H, S, D)."""
    return Accumulator(LseMerge(state_dtype), (*q.shape[:3], v_head_dim), q, may_overwrite=False)


def gradient_accumulator(of: torch.Tensor, state_dtype: torch.dtype) -> Accumulator:
    """Sums what tiles and ranks contribute to the gradient of a tensor."""
    return Accumulator(Addition(state_dtype), tuple(of.shape), of, may_overwrite=True)


@dataclass(eq=False)
class _Piece:
    """The state of some heads that came together."""

    heads: Span
    tensors: Tensors
    is_ours: bool
    """Whether the tensors may be written to."""
    completed: int = 0

    def has(self, heads: Span) -> bool:
        return self.heads[0] <= heads[0] and heads[1] <= self.heads[1]

    def relative(self, heads: Span) -> Span:
        return heads[0] - self.heads[0], heads[1] - self.heads[0]


def place_sums(out: torch.Tensor, parts: Sequence[Part], sum_dtype: torch.dtype) -> None:
    """Writes gradients to the rows of `out` (B, H, S, D) that they concern: summed where they meet, rounded once."""
    if _meet(parts):
        total = torch.zeros_like(out, dtype=sum_dtype)
        for part in parts:
            _rows(total, part).add_(part.tensors[0])
        out.copy_(total)
    else:
        for part in parts:
            _rows(out, part).copy_(part.tensors[0])


def _covering(parts: Sequence[Part], batch: int, rows: int) -> tuple[list[Part], list[Part]]:
    """Parts that together have every row once, if there are such, and the others."""
    covering: list[Part] = []
    others: list[Part] = []
    reached = 0
    for part in sorted(parts, key=lambda part: part.rows):
        if part.batch == (0, batch) and part.rows[0] == reached < part.rows[1] and not part.is_stack:
            covering.append(part)
            reached = part.rows[1]
        else:
            others.append(part)
    return (covering, others) if reached == rows else ([], list(parts))


def _meet(parts: Sequence[Part]) -> bool:
    ordered = sorted((part.batch, part.rows) for part in parts)
    return any(
        batch == next_batch and rows[1] > next_rows[0] for (batch, rows), (next_batch, next_rows) in pairwise(ordered)
    )


def _rows(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return tensor[part.batch[0] : part.batch[1], :, part.rows[0] : part.rows[1]]


def _cut(tensors: Tensors, heads: Span, batch: Span, rows: Span) -> Tensors:
    return tuple(cut(tensor, batch, heads, rows) for tensor in tensors)


def _empty(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the memory order of `like` where shapes agree: kernels want gradients and outputs in equal order."""
    return torch.empty_like(like, dtype=dtype) if like.shape == shape else like.new_empty(shape, dtype=dtype)
