"""Tools for autograd functions: single differentiation, clean-up after errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from cp_dtensor._torch.tensors import is_batched

Tensors = tuple[torch.Tensor, ...]


@contextmanager
def cleaned_up_on_error(clean_up: Callable[[], None]) -> Iterator[None]:
    """What has raised half-way must not be in the way of the next call."""
    try:
        yield
    except BaseException:
        clean_up()
        raise


class _NoSecondDerivative(torch.autograd.Function):
    """A gradient, and an error for whoever differentiates it."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *_differentiable: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "trying to differentiate twice: attention of sequence shards, and context_parallel_unshard, have first "
            "derivatives only; got create_graph=True and then a derivative of their gradients"
        )


def differentiated_once(backward: Callable[..., tuple[torch.Tensor | None, ...]]) -> Callable[..., Any]:
    """A backward whose gradients cannot be differentiated, and say so.

    torch's `once_differentiable` says so only if the incoming gradients can be differentiated themselves. Those of
    `out.sum()` cannot, and a second derivative would silently lack what comes through q, k and v. So the gradients
    depend, for autograd, on all that they could be derived by: the incoming ones, and what was saved of the inputs, or
    of the outputs, which stand for all inputs. (Not only on some leaf: where unused inputs are allowed, as
    in `torch.autograd.functional`, autograd goes no way that leads to none of those asked for, and answers zero.)

    `backward(ctx, saved, *grads)` is handed `ctx.saved_tensors`, which are unpacked once only: checkpoints give them no
    second time.
    """

    @wraps(backward)
    def first_only(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            saved = ctx.saved_tensors
            found = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():  # no create_graph=True
            return found
        made = torch.zeros((), device="cpu", requires_grad=True)
        origins = [x for x in (*grads, *saved) if x is not None and x.requires_grad]
        return tuple(None if grad is None else _NoSecondDerivative.apply(grad, made, *origins) for grad in found)

    return first_only


def refuse_batches(*grads: torch.Tensor) -> None:
    """For gradients that travel: several at once, which is for transformations that no transport knows of.

    Raises:
        NotImplementedError: a batch of gradients.
    """
    if any(map(is_batched, grads)):
        raise NotImplementedError(
            "attention of sequence shards, and what is summed over ranks, takes one gradient at a time, got a batch of "
            "them (is_grads_batched=True, vectorize=True or torch.vmap around a backward): go through them in a loop"
        )
