"""What an attention call is to autograd, however its work is spread over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cp_dtensor.tensors import no_autocast

Tensors = tuple[torch.Tensor, ...]


class AttentionCall(ABC):
    """One call, decided and frozen: which ranks do what, by which implementations. Backward reads nothing else."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needs_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """Attention of this rank's queries to the keys of all ranks.

        Args:
            q: (B, H, S, D), this rank's shard.
            k: (B, Hkv, T, D), this rank's shard.
            v: (B, Hkv, T, Dv), this rank's shard.
            needs_lse: whether the caller reads lse; if not, it may be empty.

        Returns:
            out: (B, H, S, Dv) in q's dtype.
            lse: (B, H, S), natural log of the softmax denominator over all keys, in float32 (float64 for float64).
            saved: what `backward` needs.
        """

    @abstractmethod
    def backward(self, grad_out: torch.Tensor, saved: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of this rank's q, k and v."""

    @abstractmethod
    def saved_again(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> Tensors:
        """What `forward` saved, from this rank's arguments and results alone; may communicate.

        Compiled code keeps tensors whose shapes it knows, which those of exchanged heads are not.
        """


@contextmanager
def cleaned_up_on_error(clean_up: Callable[[], None]) -> Iterator[None]:
    """What has raised half-way must not be in the way of the next call."""
    try:
        yield
    except BaseException:
        clean_up()
        raise


class Attention(torch.autograd.Function):
    """Autograd node of an `AttentionCall`. Second derivatives are not defined."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall, needs_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with no_autocast(q):  # casting has happened before the call; inside, dtypes are chosen with care
            out, lse, saved = call.forward(q, k, v, needs_lse)
        ctx.save_for_backward(*saved)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor, _grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with no_autocast(grad_out):
            return (*ctx.call.backward(grad_out, ctx.saved_tensors), None, None)
