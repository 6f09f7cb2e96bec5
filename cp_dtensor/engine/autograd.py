"""What an attention call is to autograd, however its work is spread over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import (
    Tensors,
    differentiated_once,
    refuse_batches,
)
from cp_dtensor._torch.tensors import no_autocast, on_device_of
from cp_dtensor.attention.masked import attention_delta
from cp_dtensor.attention.merge import sinks_gradient
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers


class AttentionCall(ABC):
    """One call, decided and frozen: which ranks do what, by which implementations. Backward reads nothing else."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, needs_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """Attention of this rank's queries to the keys of all ranks.

        Args:
            q: (B, H, S, D), this rank's shard.
            k: (B, Hkv, T, D), this rank's shard.
            v: (B, Hkv, T, Dv), this rank's shard.
            extras: of this rank's queries.
            needs_lse: whether the caller reads lse; if not, it may be empty.

        Returns:
            out: (B, H, S, Dv) in q's dtype.
            lse: (B, H, S), natural log of the softmax denominator over all keys, in float32 (float64 for float64).
            saved: what `backward` needs.
        """

    @abstractmethod
    def backward(
        self, grad_out: torch.Tensor, modifiers: Modifiers, saved: Tensors, grad_bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of this rank's q, k and v. That of the bias is added to `grad_bias`, unless that is None."""

    @property
    @abstractmethod
    def saves_rows_of_others(self) -> bool:
        """Whether `forward` saves what other ranks have sent; if not, `saved_again` communicates nothing."""

    @abstractmethod
    def saved_again(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> Tensors:
        """What `forward` saved, from this rank's arguments and results alone; may communicate.

        Compiled code keeps tensors whose shapes it knows, which those of exchanged heads are not.
        """


class Attention(torch.autograd.Function):
    """Autograd node of an `AttentionCall`. Second derivatives are not defined."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        modifiers: Modifiers,
        call: AttentionCall,
        needs_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`bias` and `sinks` are those of `extras`, here so that autograd sees them. Returns out, lse and `origin`."""
        # A minus sign that torch leaves for later, as in `x.conj().imag`, is not in the memory that kernels read.
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        if modifiers.bias is not None and modifiers.bias.is_neg():
            modifiers = replace(modifiers, bias=modifiers.bias.resolve_neg())
        # Casting has happened before the call; inside, dtypes are chosen with care.
        with no_autocast(q), _torch.below_autograd():
            out, lse, saved = call.forward(q, k, v, modifiers, needs_lse)
        of_sinks = (sinks, out, lse) if ctx.needs_input_grad[4] else (None, None, None)
        # Stands for the inputs, in `differentiated_once`, where nothing of these is saved.
        origin = q.new_empty(0) if call.saves_rows_of_others else None
        ctx.save_for_backward(modifiers.bias, modifiers.seed, *of_sinks, origin, *saved)
        ctx.modifiers = modifiers if modifiers is NO_MODIFIERS else replace(modifiers, bias=None, seed=None, sinks=None)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse, origin

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, of_forward: Tensors, grad_out: torch.Tensor, *_others: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        refuse_batches(grad_out)
        bias, seed, sinks, out, lse, _origin, *saved = of_forward
        modifiers = ctx.modifiers if ctx.modifiers is NO_MODIFIERS else replace(ctx.modifiers, bias=bias, seed=seed)
        grad_bias = new_grad_bias(bias) if ctx.needs_input_grad[3] else None
        with no_autocast(grad_out), _torch.below_autograd():
            grad_sinks = None if sinks is None else gradient_of_sinks(sinks, grad_out, out, lse)
            grads = ctx.call.backward(grad_out.resolve_neg(), modifiers, tuple(saved), grad_bias)
        return (*grads, None if grad_bias is None else grad_bias.to(bias.dtype), grad_sinks, None, None, None)


def new_grad_bias(bias: torch.Tensor) -> torch.Tensor:
    """Zeros to which tiles add their shares of the gradient of a bias."""
    return torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))


def gradient_of_sinks(
    sinks: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """This rank's rows' share of the gradient of the sinks (H,), from what the call has returned, in their dtype.

    Whoever has computed the rows: so each rank's share is that of its own tokens, as of any parameter.
    """
    with on_device_of(out):
        return sinks_gradient(sinks, lse, attention_delta(grad_out, out)).to(sinks.dtype)
