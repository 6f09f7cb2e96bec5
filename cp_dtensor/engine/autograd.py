"""The autograd node of a context-parallel attention call, and the interface of plans that it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors, differentiated_once, refuse_batches, refuse_tangents
from cp_dtensor._torch.tensors import no_autocast, on_device, wide_dtype
from cp_dtensor.attention.lse import rounded_lse
from cp_dtensor.attention.masked import attention_delta
from cp_dtensor.attention.merge import sinks_gradient
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.comm.calls import NO_SIGNATURE, Calls, Signature
from cp_dtensor.comm.faults import PeerError
from cp_dtensor.comm.groups import SequenceRanks

Result = tuple[torch.Tensor, torch.Tensor, Tensors]
"""out, lse, and the tensors that backward needs."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq, dk and dv."""


class CallValues(NamedTuple):
    """Values of a call besides the tensors that travel."""

    modifiers: Modifiers
    """Those of this rank's queries."""
    ranks: SequenceRanks
    """The ranks of the plan's partition; not used for a rank alone."""
    scale: float
    """Factor of the logits, positive."""


class AttentionPlan(ABC):
    """The plan of attention on one rank: steps, transports and backends, without process groups and softmax scale.

    Frozen, so that plans are cached; `BoundCall` has the rest. Backward reads nothing but the two.
    """

    saves_rows_of_others: bool = False
    """True if `forward` saves tensors that other ranks have sent; otherwise `remake_saved` does not communicate."""

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CallValues, needs_lse: bool) -> Result:
        """Attention of this rank's queries to the keys of all ranks.

        Args:
            q: (B, H, S, D), this rank's shard.
            k: (B, Hkv, T, D), this rank's shard.
            v: (B, Hkv, T, Dv), this rank's shard.
            needs_lse: False if lse may be empty.

        Returns:
            out: (B, H, S, Dv) in q's dtype.
            lse: (B, H, S), natural log of the softmax denominator over all keys, float32 (float64 for float64); with
                an additive bias in two floats, (B, H, S, 2).
            saved: the tensors that `backward` needs.
        """

    @abstractmethod
    def backward(
        self, grad_out: torch.Tensor, saved: Tensors, call: CallValues, grad_bias: torch.Tensor | None
    ) -> Gradients:
        """Gradients of this rank's q, k and v. The gradient of the bias is added to `grad_bias`, unless it is None."""

    def remake_saved(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, call: CallValues
    ) -> Tensors:
        """Makes the tensors that `forward` saved again, from this rank's arguments and results. May communicate.

        Compiled code saves only tensors whose shapes it can compute, which excludes those of exchanged heads.
        """
        return q, k, v, out, lse

    @abstractmethod
    def abandon(self, ranks: SequenceRanks) -> None:
        """Drops what a pass that raised left in flight, so that the next call works. All ranks call it."""


@dataclass(frozen=True)
class BoundCall:
    """A plan with the ranks and the softmax scale of one call: all that the autograd node needs besides tensors.

    A context manager around each pass: a pass that raises leaves nothing in flight.
    """

    plan: AttentionPlan
    ranks: SequenceRanks
    scale: float
    signature: Signature = NO_SIGNATURE
    calls: tuple[Calls, ...] = ()
    """Those that count the passes; none for a rank that has all rows."""
    debug: bool = False

    def begin(self, x: torch.Tensor, *, backward: bool = False) -> None:
        """Counts a pass before it exchanges anything; `x` is a tensor of the pass.

        Raises:
            PeerError: the ranks have made different calls.
        """
        for calls in self.calls:
            calls.begin(self.signature, backward=backward, on_cpu=not x.is_cuda, debug=self.debug)

    def values(self, modifiers: Modifiers = NO_MODIFIERS) -> CallValues:
        """The values of a pass."""
        return CallValues(modifiers, self.ranks, self.scale)

    def __enter__(self) -> None:
        return

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self.plan.abandon(self.ranks)
        if error is not None and issubclass(error, PeerError):
            for calls in self.calls:
                calls.compare()  # this rank may have waited for another that is at another call, which this names


class Attention(torch.autograd.Function):
    """Autograd node of a `BoundCall`. Second derivatives are not defined."""

    jvp = staticmethod(refuse_tangents)

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
        sinks: torch.Tensor | None, modifiers: Modifiers, call: BoundCall, needs_lse: bool,
        up: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """`out`, `lse` and `origin`. `bias`, `sinks` and `up` are those of `modifiers`, for autograd to see."""
        # The memory of tensors with a pending minus sign, such as `x.conj().imag`, has the opposite values.
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        if modifiers.bias is not None and modifiers.bias.is_neg():
            modifiers = replace(modifiers, bias=modifiers.bias.resolve_neg())
        call.begin(q)
        # Autocast has cast q, k and v before the call; inside, each dtype is chosen explicitly.
        with no_autocast(q), _torch.below_autograd(), call:
            out, lse, saved = call.plan.forward(q, k, v, call.values(modifiers), needs_lse)
        if modifiers.bias is not None:
            lse = rounded_lse(lse)
        for_sinks = (sinks, out, lse) if ctx.needs_input_grad[4] else (None, None, None)
        # Stands for the inputs in `differentiated_once` where none of them is saved.
        origin = q.new_empty(0) if call.plan.saves_rows_of_others else None
        ctx.save_for_backward(modifiers.bias, modifiers.seed, up, *for_sinks, origin, *saved)
        ctx.modifiers = modifiers
        if modifiers is not NO_MODIFIERS:
            ctx.modifiers = replace(modifiers, bias=None, seed=None, sinks=None, up=None)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse, origin

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, all_saved: Tensors, grad_out: torch.Tensor, *_others: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        refuse_batches(grad_out)
        ctx.call.begin(grad_out, backward=True)
        bias, seed, up, sinks, out, lse, _origin, *saved = all_saved
        modifiers = ctx.modifiers
        grad_up = zeros_for_sums(up) if up is not None and ctx.needs_input_grad[8] else None
        if modifiers is not NO_MODIFIERS:
            modifiers = replace(modifiers, bias=bias, seed=seed, up=up, grad_up=grad_up)
        grad_bias = zeros_for_sums(bias) if ctx.needs_input_grad[3] else None
        call = ctx.call
        with no_autocast(grad_out), _torch.below_autograd(), call:
            grad_sinks = None if sinks is None else gradient_of_sinks(sinks, grad_out, out, lse)
            grads = call.plan.backward(grad_out.resolve_neg(), tuple(saved), call.values(modifiers), grad_bias)
        of_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        of_up = None if grad_up is None else grad_up.to(up.dtype)
        return *grads, of_bias, grad_sinks, None, None, None, of_up


def zeros_for_sums(of: torch.Tensor) -> torch.Tensor:
    """Zeros to which tiles add their shares of the gradient of a bias or an up-projection."""
    return torch.zeros_like(of, dtype=wide_dtype(of))


def gradient_of_sinks(
    sinks: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """The share of this rank's rows in the gradient of the sinks (H,), in their dtype, from the results of the call.

    Each rank's share is that of its own tokens, as for any parameter, also where other ranks computed these rows.
    """
    with on_device(out.device):
        return sinks_gradient(sinks, rounded_lse(lse), attention_delta(grad_out, out)).to(sinks.dtype)
