"""Linear recurrences of one device by the kernels of flash-linear-attention, where the package is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_dtensor.api.extension import autograd_recorded, quiet, wrong_result
from cp_dtensor.layers.chunked import ChunkedRecurrence, Maps, Rows, no_maps
from cp_dtensor.layers.exchange import tables_on
from cp_dtensor.layers.package_kernels import PackageKernels

_PACKAGE = PackageKernels("fla-core", "fla.ops", "recurrent layers", extra="hybrid")
LARGEST_ERROR = 3e-2
"""Relative to the largest element; rounding to bfloat16 explains a third of it."""
CHECKED = (1948, 100)
"""Tokens of the pieces that the first use of a kernel computes."""
_ZERO = -104.0
"""exp of it is 0 in float32. Kernels subtract sums of decays, so -inf would be NaN."""
_KERNELS = {
    (True, False): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("fla.ops.kda", "chunk_kda"),
    (False, False): ("fla.ops.simple_gla", "chunk_simple_gla"),
    (False, True): ("fla.ops.gla", "chunk_gla"),
}
"""By (delta rule, decays by channel): module and function."""


@dataclass
class FlaRecurrence:
    """The recurrence of `ChunkedRecurrence`, whose pieces are sequences of variable length to a kernel.

    The map of a piece is the state at its end from a state of zero, and its transition, with the delta rule, the state
    at its end from the identity and values of zero: both are columns of one run, which does the work within chunks
    once. Without the delta rule the transition is the product of the decays. Outputs are linear in the entering state
    S: those of a state of zero, plus `queries` S. The outputs from the identity are these queries (without the delta
    rule: decayed q), so that pieces whose maps are known do not go through a kernel again.

    Maps have gradients for what `layers.scan` makes of them, the state M S + B that leaves a piece: see `_FromZero`.
    """

    rows: Rows
    """(1, B * T, H, ...), batch row after batch row, with as many heads of q and k as of v."""
    scale: float
    batch: int
    lengths: tuple[int, ...]
    """Tokens of each piece, the same in each batch row; none is empty."""
    _of_maps: tuple[Sequence[int], Tensor, Tensor, list[Tensor | None]] | None = None
    """The pieces whose maps are known, their outputs from a state of zero, their queries, and the states that enter."""

    @classmethod
    def of(cls, given: Rows, scale: float, lengths: Sequence[int]) -> FlaRecurrence:
        """Take the arguments of `ChunkedRecurrence.of`."""
        given = given._replace(q=given.q.to(given.v.dtype), k=given.k.to(given.v.dtype))
        flat: list[Any] = [x if x is None else x.flatten(0, 1).unsqueeze(0) for x in given]
        return cls(Rows(*flat), scale, given.v.size(0), tuple(lengths))

    def maps(self, pieces: Sequence[int]) -> Maps:
        """Return maps of some pieces: transition (pieces, B, H, ...) and state (pieces, B, H, K, V)."""
        if not pieces:
            v, q, *others = self.rows
            given = [x for x in (v, *others) if x is not None]
            return no_maps(self.batch, v.size(2), q.size(-1), v.size(-1), self.rows.beta is not None, given)
        some = self._of_pieces(pieces)
        static, entered = (some.scale, some.batch, some.lengths), list[Tensor | None]()
        out, ends, queries, transition = _FromZero.apply(static, entered, *some.rows)
        self._of_maps = tuple(pieces), out, queries, entered
        by_piece = [x.unflatten(0, (self.batch, -1)).transpose(0, 1) for x in (transition, ends)]
        return by_piece[0], by_piece[1]

    def _from_zero(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return outputs and last states from a state of zero; queries and transitions."""
        v, _, k, _, beta = self.rows
        columns, width = v.size(-1), k.size(-1)
        if beta is None:
            out, ends = self._run(v, None, True)
            queries, transition = self._decayed()
            return out, ends, queries.to(out.dtype), transition
        identity = torch.eye(width, dtype=torch.float32, device=v.device)
        identity = identity.expand(self.batch * len(self.lengths), k.size(2), width, width).contiguous()
        found = self._run(F.pad(v, (0, width)), F.pad(identity, (columns, 0)), True)
        (out, queries), (ends, transition) = (x.split([columns, width], -1) for x in found)
        return out, ends, queries, transition

    def _of_pieces(self, pieces: Sequence[int]) -> FlaRecurrence:
        """Return the tokens of some pieces."""
        if len(pieces) == len(self.lengths):
            return self
        firsts = [0, *accumulate(self.lengths)]
        tokens = torch.cat(
            [
                torch.arange(firsts[piece], firsts[piece + 1], device=self.rows.v.device) + row * firsts[-1]
                for row in range(self.batch)
                for piece in pieces
            ]
        )
        some: list[Any] = [x if x is None else x.index_select(1, tokens) for x in self.rows]
        return FlaRecurrence(Rows(*some), self.scale, self.batch, tuple(self.lengths[piece] for piece in pieces))

    def outputs(self, states: Sequence[Tensor | None], final: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Compute `ChunkedRecurrence.outputs`; no states leave after `maps`."""
        if self._of_maps is None:
            out, ends = self._run(self.rows.v, self._entering(states), final)
            leaving = [] if not final else list(ends.unflatten(0, (self.batch, -1)).unbind(1))
            return out.squeeze(0).unflatten(0, (self.batch, -1)), leaving
        assert not final
        pieces, from_zero, queries, entered = self._of_maps
        state = self._entering([states[piece] for piece in pieces])
        entered[:] = [None if state is None else state.detach()]
        others = [piece for piece in range(len(self.lengths)) if piece not in pieces]
        outs = self._by_piece(pieces, from_zero)
        for (row, piece), of_piece in self._by_piece(pieces, queries).items():
            state = states[piece]
            if state is not None:
                out, of_piece = (x.transpose(0, 1) for x in (outs[row, piece], of_piece))
                outs[row, piece] = torch.baddbmm(out, of_piece, state[row].to(out.dtype)).transpose(0, 1)
        if others:
            some = self._of_pieces(others)
            out, _ = some._run(some.rows.v, some._entering([states[piece] for piece in others]), False)
            outs |= self._by_piece(others, out)
        return torch.cat([outs[each] for each in sorted(outs)]).unflatten(0, (self.batch, -1)), []

    def _by_piece(self, pieces: Sequence[int], x: Tensor) -> dict[tuple[int, int], Tensor]:
        """Return tokens (1, tokens of some pieces, ...) by batch row and piece."""
        places = [(row, piece) for row in range(self.batch) for piece in pieces]
        return dict(zip(places, x.squeeze(0).split([self.lengths[piece] for _, piece in places]), strict=True))

    def _entering(self, states: Sequence[Tensor | None]) -> Tensor | None:
        """Return the states that enter the pieces, as kernels take them; None if all are zeros."""
        given = [state for state in states if state is not None]
        if not given:
            return None
        entering = [torch.zeros_like(given[0]) if state is None else state for state in states]
        return torch.stack(entering, 1).flatten(0, 1).float().contiguous()

    def _run(self, v: Tensor, initial: Tensor | None, final: bool) -> tuple[Tensor, Any]:
        """Return outputs, and the last states (sequences, H, K, V) if `final`."""
        options = {"scale": self.scale, "initial_state": initial, "output_final_state": final}
        options["cu_seqlens"] = _edges(self.lengths * self.batch, v.device)
        _, q, k, g, beta = self.rows
        kernel = _kernel(beta is not None, self.rows.decays_by_channel)
        if g is None and beta is not None:
            g = torch.zeros(v.shape[:3], dtype=torch.float32, device=v.device)
        decays = {} if g is None else {"g": g.float().clamp(min=_ZERO)}
        rates = {} if beta is None else {"beta": beta}
        result: tuple[Tensor, Any] = kernel(q, k, v, **decays, **rates, **options)
        return result

    def _decayed(self) -> tuple[Tensor, Tensor]:
        """Return queries, scaled and decayed from the start of their piece; each piece's decay, (B * pieces, H, K)."""
        _, q, k, g, _ = self.rows
        if g is None:
            decays = k.new_ones(self.batch * len(self.lengths), *k.shape[2:], dtype=torch.float32)
            return q * self.scale, decays
        sums = [x.cumsum(0) for x in g.squeeze(0).float().split(list(self.lengths * self.batch))]
        by_channel = [x if x.dim() == 3 else x.unsqueeze(-1) for x in sums]
        decays = torch.stack([x[-1] for x in by_channel]).exp().expand(-1, -1, k.size(-1))
        return q * self.scale * torch.cat(by_channel).exp().unsqueeze(0), decays


class _FromZero(torch.autograd.Function):
    """`FlaRecurrence._from_zero`, with the backward of one run.

    Let do be the gradient of out = out(0) + queries S, and dB that of the leaving state M S + B. Then gradients of
    queries are do S^T, and those of M dB S^T: all of them together are the gradients of one run from S, with do and dB.
    So queries and transitions need none of their own, and the pieces run once more, from the states that entered them.
    """

    @staticmethod
    def forward(ctx: Any, static: tuple[Any, ...], entered: list[Tensor | None], *tensors: Any) -> tuple[Tensor, ...]:
        ctx.static, ctx.entered = static, entered  # `outputs` writes the states that enter
        ctx.save_for_backward(*tensors)
        out, ends, queries, transition = FlaRecurrence(Rows(*tensors), *static)._from_zero()
        # Ranks join the same collectives: for q alone, maps have no gradient, as those of a rank that sends none. Then
        # queries have one, ignored: it saves the states, so that a checkpoint computes them again, by an exchange.
        of_maps = dict(zip(Rows._fields, ctx.needs_input_grad[2:], strict=True)) | {"q": False}
        ctx.mark_non_differentiable(transition, queries if any(of_maps.values()) else ends)
        return out, ends, queries, transition

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_ends: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        tensors: list[Any] = [x if x is None else x.detach() for x in ctx.saved_tensors]
        leaves = [x.requires_grad_() for x, is_needed in zip(tensors, needed, strict=True) if is_needed]
        with torch.enable_grad():
            again = FlaRecurrence(Rows(*tensors), *ctx.static)
            found = again._run(again.rows.v, ctx.entered[0] if ctx.entered else None, True)
        given = [pair for pair in zip(found, (grad_out, grad_ends), strict=True) if pair[0].requires_grad]
        results, sizes = zip(*given, strict=True)
        grads = iter(torch.autograd.grad(results, leaves, sizes, allow_unused=True))
        return None, None, *[next(grads) if is_needed else None for is_needed in needed]


def _edges(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where sequences begin and end, (1 + sequences,) int64.

    All layers get one object: its upload makes the host wait for the device, and the package reads each new one back.
    """

    def made() -> tuple[Tensor]:
        return (torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=device),)

    return tables_on(device, lengths, made)[0]


def fla_serves(rows: Rows, lengths: Sequence[int]) -> bool:
    """Return whether kernels of the package compute a recurrence in q's dtype; at first use a small one is compared."""
    v, q, _, g, beta = rows
    if not all(lengths):  # a rank with few tokens
        return False
    is_served = q.dtype in (torch.bfloat16, torch.float16) and q.size(-1) <= 256
    refusal = None if is_served else "they need bfloat16 or float16, and K up to 256"
    decays, is_delta = "" if g is None else "by channel" if rows.decays_by_channel else "by head", beta is not None
    kernel = is_delta, decays, q.dtype, q.size(-1), v.size(-2), v.size(-1)
    return _PACKAGE.serve(q, refusal, kernel, partial(_small_error, q, v, decays, is_delta))


def _kernel(is_delta: bool, by_channel: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
    module, name = _KERNELS[is_delta, by_channel]
    function: Callable[..., tuple[Tensor, Tensor | None]] = getattr(importlib.import_module(module), name)
    return function


@quiet()  # the package is imported and compiles
def _small_error(q: Tensor, v: Tensor, decays: str, is_delta: bool) -> str:
    """Compare outputs, maps and gradients of two pieces in two batch rows with float64; "" if they are right.

    `decays` is "by head", "by channel", or "" for none.
    With as many heads as the call: the package compiles and tunes its kernels for a number of heads, once.
    """
    width, heads, columns = q.size(-1), v.size(-2), v.size(-1)
    generator = torch.Generator(v.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, device=v.device)

    tokens = sum(CHECKED)
    k = F.normalize(normal(tokens, heads, width), dim=-1)
    small = [x.to(q.dtype) for x in (normal(tokens, heads, columns), normal(tokens, heads, width), k)]
    by_channel, g = decays == "by channel", None
    if decays:
        g = F.logsigmoid(normal(tokens, heads, width) if by_channel else normal(tokens, heads))
        g[:, :, ::2] *= 0.02  # so that much of a state passes through a piece
    beta = normal(tokens, heads).sigmoid().to(q.dtype) if is_delta else None
    given = (*small, g, beta, normal(2, heads, width, columns))
    results: list[list[Tensor]] = []
    weights: list[Tensor] = []
    for kind, dtype, most in ((FlaRecurrence, None, heads), (ChunkedRecurrence, torch.float64, 2)):
        with autograd_recorded():  # the first call may be an operator of compiled code
            # All tensors have heads in dim 2. Two of them are compared.
            mine: Any = [x if x is None else x.detach()[:, :, :most].to(dtype or x.dtype) for x in given]
            leaves = [x.requires_grad_() for x in mine if x is not None]
            *of_tokens, states = mine
            recurrence = kind.of(Rows(*of_tokens), 0.5, CHECKED)
            transition, state = recurrence.maps([1])
            entering = states[1:].to(transition.dtype)
            passed = transition @ entering if is_delta else transition.unsqueeze(-1) * entering
            found = [recurrence.outputs(list(states))[0], passed + state, transition, state]
            weights = weights or [torch.randn(x.shape, generator=generator, device=v.device) for x in found[:2]]
            sums = [(x.double() * weight[:, :, : x.size(2)]).sum() for x, weight in zip(found, weights, strict=False)]
            grads = torch.autograd.grad(torch.stack(sums).sum(), leaves)
            results.append([x.detach()[:, :, :2] for x in (*found, *grads)])
    of_grads = ["dv", "dq", "dk", *["dg"] * bool(decays), *["dbeta"] * is_delta, "d(state)"]
    names = ["out", "leaving state", "transition", "state", *of_grads]
    return wrong_result(names, results[0], results[1], LARGEST_ERROR)
