"""Chunked linear recurrences of one device in torch operations: gated linear attention and gated delta rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dtensor.api.extension import wide_dtype


class Rows(NamedTuple):
    """Arguments of a recurrence over T tokens; H is a multiple of H'. For predictions, of any T on the meta device."""

    v: Tensor
    """(B, T, H, V)."""
    q: Tensor
    """(B, T, H', K)."""
    k: Tensor
    """(B, T, H', K)."""
    g: Tensor | None
    """(B, T, H) or (B, T, H, K)."""
    beta: Tensor | None
    """(B, T, H), of a delta rule."""

    @property
    def decays_by_channel(self) -> bool:
        return self.g is not None and self.g.dim() == 4

    @property
    def out_bytes(self) -> int:
        """Bytes of a token's output, all batch rows, in the dtype of q, as of kernels."""
        return self.v.size(0) * math.prod(self.v.shape[2:]) * self.q.itemsize

    @property
    def map_bytes(self) -> int:
        """Bytes of the map of a run: a matrix with the delta rule, else a diagonal, and a state."""
        batch, _, heads, columns = self.v.shape
        width = 1 if self.beta is None else self.q.size(3)
        return batch * heads * self.q.size(3) * (width + columns) * wide_dtype(self.v).itemsize

    def copies_of_keys(self, ranks: int) -> int:
        """Return the copies of each head of q and k by which ranks get whole heads of them, with those of v."""
        of_keys, each = self.q.size(2), self.v.size(2) // self.q.size(2)
        return next(times for times in range(1, each + 1) if each % times == 0 and of_keys * times % ranks == 0)


def token_bytes(*tensors: Tensor | None) -> int:
    """Return the bytes of a token of some tensors (B, T, ...), all batch rows."""
    return sum(x.size(0) * math.prod(x.shape[2:]) * x.itemsize for x in tensors if x is not None)


Maps = tuple[Tensor, Tensor]
"""`(transition, state)` of some pieces: a piece maps the state S that enters it to M S + state. M is a matrix (K, K) or
a diagonal (K,)."""


CHUNK = 64
"""Tokens of a chunk."""
BY_CHANNEL_CHUNK = 16
"""Tokens of a chunk whose decays differ by channel: C C K decays of a chunk and head are in memory."""


@dataclass(frozen=True)
class ChunkedRecurrence:
    """S_t = exp(g_t) S_{t-1} + k_t^T v'_t and o_t = scale q_t S_t, in chunks of the pieces of a shard.

    v'_t = v_t, or beta_t (v_t - k_t exp(g_t) S_{t-1}) with a beta (the delta rule). Chunks are padded with tokens that
    leave the state as it is. All tensors are (chunks, B, H, C, ...), C tokens in a chunk; arithmetic is in float32, or
    float64 for float64.

    Source: Gated Delta Networks (arXiv 2412.06464), section 3.3; Kimi Linear (arXiv 2510.26692), section 3; Mamba-2
    (arXiv 2405.21060), section 6.
    """

    rows: Tensor
    """(T,): the place of each token of the shard among all tokens of chunks."""
    chunks: tuple[range, ...]
    """For each piece, its chunks."""
    q: Tensor
    """Queries, scaled and decayed from the chunk's start."""
    k: Tensor
    """Keys, decayed to the chunk's end."""
    v: Tensor
    """Values; with the delta rule: what a state of zero leaves of them."""
    erased: Tensor | None
    """(..., C, K): with the delta rule, v' = v - erased S for the state S that enters the chunk."""
    weights: Tensor
    """(..., C, C): of the chunk's values v' in its outputs."""
    decay: Tensor
    """(..., K or 1, 1): of the state over the chunk."""
    dtype: torch.dtype
    """Of the output."""

    @classmethod
    def of(cls, given: Rows, scale: float, lengths: Sequence[int]) -> ChunkedRecurrence:
        """Prepare the chunks of a shard with H = H'; `lengths` are the tokens of each piece."""
        v, q, k, g, beta = given
        by_channel = given.decays_by_channel
        chunk = BY_CHANNEL_CHUNK if by_channel else CHUNK
        places, rows, chunks = _grid(lengths, chunk, q.device)
        wide = wide_dtype(q)

        def in_chunks(x: Tensor) -> Tensor:
            padded = torch.cat([x.to(wide), x.new_zeros(x.size(0), 1, *x.shape[2:], dtype=wide)], 1)
            of_chunks = padded.index_select(1, places.view(-1)).unflatten(1, tuple(places.shape))
            return of_chunks.transpose(0, 1).transpose(2, 3)  # (chunks, B, H, C, ...)

        q_, k_, v_ = in_chunks(q) * scale, in_chunks(k), in_chunks(v)
        g_ = torch.zeros_like(q_[..., :1]) if g is None else in_chunks(g if by_channel else g.unsqueeze(-1))
        place = torch.arange(chunk, device=q.device)
        ahead = (place.unsqueeze(-1) - place).unsqueeze(-1)  # (C, C, 1)
        # A sum for each pair of tokens: differences of sums from the chunk's start are NaN after a decay of -inf, and
        # have lost the digits of small decays after a strong one.
        sums = g_.unsqueeze(-2).where(ahead > 0, 0).cumsum(-3)
        between = sums.masked_fill(ahead < 0, float("-inf")).exp()

        def products(x: Tensor) -> Tensor:
            if by_channel:
                return torch.einsum("...ik,...jk,...ijk->...ij", x, k_, between)
            return x @ k_.transpose(-1, -2) * between.squeeze(-1)

        weights, erased, since_start = products(q_), None, g_.cumsum(-2).exp()
        if beta is not None:
            beta_ = in_chunks(beta.unsqueeze(-1))
            system = (beta_ * products(k_)).tril(-1)  # its diagonal counts as ones
            both = torch.cat([beta_ * v_, beta_ * k_ * since_start], -1)
            solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
            v_, erased = solved.split([v.size(-1), k.size(-1)], -1)
        decay = since_start[..., -1:, :].transpose(-1, -2)
        to_end = k_ * between[..., -1, :, :]
        return cls(rows, chunks, q_ * since_start, to_end, v_, erased, weights, decay, v.dtype)

    def maps(self, pieces: Sequence[int]) -> Maps:
        """Return maps of some pieces, runs of tokens of one document, by their index in `chunks`.

        Transitions are (pieces, B, H, K, K) with the delta rule, else (pieces, B, H, K); states (pieces, B, H, K, V).
        """
        if not pieces:
            sizes = self.q.size(1), self.q.size(2), self.q.size(-1), self.v.size(-1)
            return no_maps(*sizes, self.erased is not None, (self.k, self.v, self.decay))
        transitions, states = zip(*(self._map(self.chunks[piece]) for piece in pieces), strict=True)
        return torch.stack(transitions), torch.stack(states)

    def _map(self, chunks: range) -> Maps:
        _, batch, heads, _, width = self.q.shape
        state = self._no_state()
        if self.erased is None:
            decay = self.decay.new_ones(batch, heads, self.decay.size(-2))
            for each in chunks:
                state = self.decay[each] * state + self.k[each].transpose(-1, -2) @ self.v[each]
                decay = decay * self.decay[each].squeeze(-1)
            return decay.expand(batch, heads, width), state
        # The columns of the identity enter beside a state of zero, and become those of the transition.
        identity = torch.eye(width, dtype=state.dtype, device=state.device).expand(batch, heads, width, width)
        state = torch.cat([state, identity], -1)
        for each in chunks:
            values = torch.nn.functional.pad(self.v[each], (0, width)) - self.erased[each] @ state
            state = self.decay[each] * state + self.k[each].transpose(-1, -2) @ values
        return state[..., -width:], state[..., :-width]

    def outputs(self, states: Sequence[Tensor | None], final: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Return outputs (B, T, H, V) of all tokens, given the state (B, H, K, V) that enters each piece.

        Also the state that leaves each piece, if `final`.
        """
        outs, leaving = [], []
        for chunks, entering in zip(self.chunks, states, strict=True):
            state = self._no_state() if entering is None else entering
            for each in chunks:
                values = self.v[each] if self.erased is None else self.v[each] - self.erased[each] @ state
                outs.append(self.q[each] @ state + self.weights[each] @ values)
                state = self.decay[each] * state + self.k[each].transpose(-1, -2) @ values
            leaving += [state] * final
        if not outs:
            given = [state for state in states if state is not None]
            nothing = zero_of(self.q, self.k, self.v, self.weights, self.decay, *given)
            nothing = nothing * nothing  # saves a tensor: a checkpoint recomputes up to here, past the exchange
            return (self.v.transpose(0, 1).transpose(2, 3).flatten(1, 2) + nothing).to(self.dtype), leaving
        of_chunks = torch.stack(outs, 1).transpose(2, 3).flatten(1, 2)
        return of_chunks.index_select(1, self.rows).to(self.dtype), leaving

    def _no_state(self) -> Tensor:
        _, batch, heads, _, width = self.q.shape
        return self.q.new_zeros(batch, heads, width, self.v.size(-1))


def zero_of(*arguments: Tensor) -> Tensor:
    """Return zero that depends on the arguments, so that backward of a rank without tokens joins the collectives."""
    return torch.stack([x.flatten()[:0].sum() for x in arguments]).sum()


def no_maps(batch: int, heads: int, width: int, columns: int, is_delta: bool, arguments: Sequence[Tensor]) -> Maps:
    """Return the maps of no pieces: a rank that sends nothing has the gradients of those that do."""
    zero, shape = zero_of(*arguments).to(wide_dtype(arguments[0])), (0, batch, heads, width)
    return zero.expand(*shape, *[width] * is_delta), zero.expand(*shape, columns)


def _grid(lengths: Sequence[int], chunk: int, device: torch.device) -> tuple[Tensor, Tensor, tuple[range, ...]]:
    """Return the tokens of each chunk (chunks, C), padding as the number of tokens; the inverse; chunks by piece."""
    ends = [*accumulate((-(-length // chunk) for length in lengths), initial=0)]
    starts = zip(lengths, ends, strict=False)
    rows = torch.cat([torch.arange(length, device=device) + chunk * first for length, first in starts])
    places = torch.full((ends[-1] * chunk,), len(rows), device=device)
    places[rows] = torch.arange(len(rows), device=device)
    return places.view(-1, chunk), rows, tuple(range(*each) for each in pairwise(ends))
