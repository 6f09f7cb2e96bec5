"""Accumulation of the output of a call, and of each of its gradients, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.tensors import cut, cut_all, empty_in_order_of
from cp_dtensor.attention.lse import empty_lse, rounded_lse
from cp_dtensor.attention.merge import add_parts, merge
from cp_dtensor.attention.triton import MAX_PARTS
from cp_dtensor.spec.layouts import Span


class Part(NamedTuple):
    """The contribution of a tile, or of other ranks, to some batch rows and rows of the heads that it is added to."""

    batch: Span
    rows: Span
    tensors: Tensors
    """`(out, lse)` for merges; for sums `(gradient,)`, (B, H, rows, D), or `(stack,)`, (N, B, H, rows, D)."""


class Accumulator:
    """A result (B, H, S, D) to which parts are added, by groups of heads: `(gradient,)`, or the LSE merge `(out, lse)`.

    The state has the dtype of the result until something is added to the first part, and is float32 (float64 for
    float64) after that. If the first addition is also the last one, everything is added at once and rounded once,
    without a float32 state.

    A first part that covers all rows of its heads becomes the state without a copy. Later gradients are added to it in
    place; outputs of a forward kernel are not overwritten, since selective checkpointing saves them. Heads of a later
    part are among heads that were added together at first.
    """

    def __init__(
        self, like: Tensor, state_dtype: torch.dtype, dim: int | None = None, *, floats_of_lse: int = 0
    ) -> None:
        """Begin without parts.

        Args:
            like: (B, H, S, any), has the dtype, device and memory order of the result.
            state_dtype: dtype of sums, and of an lse throughout.
            dim: D of the result; None for that of `like`.
            floats_of_lse: 0 for gradients; 1 or 2 for `(out, lse)`.
        """
        batch, heads, rows, width = like.shape
        self._shape = (batch, heads, rows, width if dim is None else dim)
        self._batch, self._heads, self._rows = (0, batch), (0, heads), (0, rows)
        self._like, self._dtype, self._state_dtype = like, like.dtype, state_dtype
        self._floats_of_lse = floats_of_lse
        self._states: list[_State] = []
        self._result: Tensors | None = None

    def add(self, heads: Span, parts: Sequence[Part], is_last: bool) -> None:
        """Add parts to some heads. `is_last`: True in the last call for these heads, once for each head."""
        for state in self._states:
            if state.heads[0] <= heads[0] and heads[1] <= state.heads[1]:
                break
        else:
            state, parts = self._begin(heads, parts)
            self._states.append(state)
            if not parts and not is_last:
                return
        by_batch: dict[Span, list[Part]] = {}
        for part in parts:
            by_batch.setdefault(part.batch, []).append(part)
        if parts and not (is_last and max(map(len, by_batch.values())) <= MAX_PARTS):
            self._widen(state)
        if is_last:
            self._complete(state, heads, by_batch)
        else:
            self._add_to_state(state, heads, by_batch)

    def result(self) -> Tensors:
        """Return the result, after the last part of every head."""
        if self._result is None:
            self._result = self._empty(self._shape[1], self._dtype)
            self._clear(self._result)
        return self._result

    def _clear(self, tensors: Tensors) -> None:
        """Set tensors to the result of no parts."""
        tensors[0].zero_()
        for lse in tensors[1:]:
            lse.zero_()
            rounded_lse(lse).fill_(float("-inf"))

    def _begin(self, heads: Span, parts: Sequence[Part]) -> tuple[_State, Sequence[Part]]:
        """Return the first state of some heads, and the parts that it does not contain yet."""
        if len(parts) == 1:
            batch, rows, tensors = parts[0]
            if (batch, rows) == (self._batch, self._rows) and tensors[0].dim() == 4:
                if tensors[0].dtype != self._dtype:  # a backend may return a wider dtype than the result has
                    tensors = (tensors[0].to(self._state_dtype), *tensors[1:])
                return _State(heads, tensors, is_owned=not self._floats_of_lse), ()
        covering, others = self._covering(parts)
        tensors = self._empty(heads[1] - heads[0], self._dtype if covering else self._state_dtype)
        if covering:
            for part in covering:
                for whole, rows_of_whole in zip(tensors, part.tensors, strict=True):
                    whole[:, :, part.rows[0] : part.rows[1]].copy_(rows_of_whole)
        else:
            self._clear(tensors)
        return _State(heads, tensors, True), others

    def _covering(self, parts: Sequence[Part]) -> tuple[list[Part], Sequence[Part]]:
        """Return two or more parts in the result's dtype that have every row once together, if any, and the others."""
        covering: list[Part] = []
        others: list[Part] = []
        reached = 0
        for part in sorted(parts, key=itemgetter(1)):  # by rows
            (batch, (start, stop), (first, *_)) = part
            if batch == self._batch and start == reached < stop and first.dim() == 4 and first.dtype == self._dtype:
                covering.append(part)
                reached = stop
            else:
                others.append(part)
        return (covering, others) if reached == self._rows[1] and len(covering) > 1 else ([], parts)

    def _widen(self, state: _State) -> None:
        """Make the state one in the state dtype that may be written to."""
        if state.is_owned and state.tensors[0].dtype == self._state_dtype:
            return
        state.tensors = tuple([x.to(self._state_dtype, copy=not state.is_owned) for x in state.tensors])
        state.is_owned = True

    def _add_to_state(self, state: _State, heads: Span, by_batch: dict[Span, list[Part]]) -> None:
        of_state = heads[0] - state.heads[0], heads[1] - state.heads[0]
        for batch, group in by_batch.items():
            for index in range(0, len(group), MAX_PARTS):
                parts = group[index : index + MAX_PARTS]
                # Only the rows between the first and the last part are read and written.
                start, stop = parts[0].rows
                for part in parts:
                    start, stop = min(start, part.rows[0]), max(stop, part.rows[1])
                rows = cut_all(state.tensors, batch, of_state, (start, stop))
                self._combine(rows, rows, parts, start)

    def _complete(self, state: _State, heads: Span, by_batch: dict[Span, list[Part]]) -> None:
        """Add the last parts to some heads, and write these heads to the result."""
        # A state of all heads in the dtype of the result becomes the result, if it is owned or is not written to.
        is_result = self._result is state.tensors or (self._result is None and state.heads == self._heads)
        may_be_result = state.is_owned or (heads == self._heads and not by_batch)
        if is_result and may_be_result and state.tensors[0].dtype == self._dtype:
            self._add_to_state(state, heads, by_batch)
            self._result = state.tensors
            return
        # One launch combines the state with up to MAX_PARTS parts of all batch rows; other parts are added before.
        parts = by_batch.get(self._batch, [])
        if len(parts) > MAX_PARTS or by_batch.keys() - {self._batch}:
            self._widen(state)
            self._add_to_state(state, heads, by_batch)
            parts = []
        if self._result is None:
            self._result = self._empty(self._shape[1], self._dtype)
        of_state = heads[0] - state.heads[0], heads[1] - state.heads[0]
        base = cut_all(state.tensors, None, of_state, None)
        self._combine(cut_all(self._result, None, heads, None), base, parts, 0)
        state.completed += heads[1] - heads[0]
        if state.completed == state.heads[1] - state.heads[0]:
            self._states.remove(state)  # frees its memory

    def _empty(self, heads: int, dtype: torch.dtype) -> Tensors:
        """Return uninitialised tensors of all rows of some heads."""
        batch, _, rows, dim = self._shape
        shape, like = (batch, heads, rows, dim), self._like
        # Kernels need outputs and gradients in equal order: that of `like`, by its strides where the shapes agree.
        if like.shape == shape:
            whole = torch.empty_like(like, dtype=dtype)
        else:
            whole = empty_in_order_of(like[:, :heads], dim, dtype)
        if not self._floats_of_lse:
            return (whole,)
        return whole, empty_lse(like, shape[:3], self._state_dtype, self._floats_of_lse == 2)

    def _combine(self, result: Sequence[Tensor], base: Sequence[Tensor], parts: Sequence[Part], first_row: int) -> None:
        """Write base and up to MAX_PARTS parts to `result`, whose row 0 is `first_row`. May be in place."""
        results, stacks = [], []
        for _, (start, stop), (first, *others) in parts:
            rows = start - first_row, stop - first_row
            if self._floats_of_lse:
                results.append((rows, first, others[0]))
            else:
                stacks.append((rows, first if first.dim() == 5 else first.unsqueeze(0)))
        if self._floats_of_lse:
            merge(result[0], result[1], base[0], base[1], results)
        else:
            add_parts(result[0], base[0], stacks, self._state_dtype)


@dataclass(eq=False)
class _State:
    """The state of some heads that were added together at first."""

    heads: Span
    tensors: Tensors
    is_owned: bool
    """True if the tensors may be written to."""
    completed: int = 0
    """Number of heads that have had their last part."""


def place_sums(out: Tensor, parts: Sequence[Part], sum_dtype: torch.dtype) -> None:
    """Write gradients to their rows of `out` (B, H, S, D): summed where parts overlap, rounded once."""
    target = torch.zeros_like(out, dtype=sum_dtype) if len(parts) > 1 and _overlap(parts) else out
    for batch, rows, tensors in parts:
        here = cut(target, batch, None, rows)
        if target is out:
            here.copy_(tensors[0])
        else:
            here.add_(tensors[0])
    if target is not out:
        out.copy_(target)


def _overlap(parts: Sequence[Part]) -> bool:
    """Return whether two parts have rows in common; their spans of batch rows are equal or disjoint."""
    spans = pairwise(sorted([part[:2] for part in parts]))
    return any(batch == next_batch and rows[1] > next_rows[0] for (batch, rows), (next_batch, next_rows) in spans)
