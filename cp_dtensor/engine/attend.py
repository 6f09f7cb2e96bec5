"""`attend`: the one entry of every front. Eager calls run in an autograd node, traced ones are one operator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors as Saved
from cp_dtensor._torch.autograd import differentiated_once, refuse_batches, refuse_tangents, refuse_transforms
from cp_dtensor.attention.lse import rounded_lse, with_gradient_of_lse
from cp_dtensor.engine.arguments import drawn_seed, positive_scale
from cp_dtensor.engine.base import READS_LSE, Tensors
from cp_dtensor.engine.call import Call
from cp_dtensor.engine.compiled import attend_traced, constants_of
from cp_dtensor.engine.run import run, run_backward

_BESIDE = len(Tensors._fields[3:-1])
"""Tensors beside q, k and v that a pass reads."""


def attend(
    call: Call, t: Tensors, *, needs_lse: bool = False, traced: bool | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `(out, lse)` of checked local shards: (B, H, S, Dv) and (B, H, S); lse may be empty without `needs_lse`.

    Args:
        call: the call.
        t: its tensors.
        needs_lse: True to get lse, which is differentiable; all ranks differentiate it, or none does.
        traced: `is_traced(t.q)`, if it is known.

    Raises:
        TypeError, ValueError, NotImplementedError: what does not fit, before any exchange of rows.
    """
    if _torch.is_traced(t.q) if traced is None else traced:
        return attend_traced(constants_of(call), t, call.factors(t.q.size(3)), call.numbers, needs_lse)
    if call.scale is not None and not 0.0 < call.scale < math.inf:
        q, scale = positive_scale(t.q, call.scale)
        call, t = replace(call, scale=scale), t._replace(q=q)
    if call.dropout_p and t.seed is None:
        t = t._replace(seed=drawn_seed(t.q.device))
    try:
        reads_lse = t[READS_LSE]
        # Without gradients leaves, and views of them, still say that they require some.
        has_grads = torch.is_grad_enabled()
        gives_lse = needs_lse or (reads_lse is not None and reads_lse.requires_grad and has_grads)
        out, lse, _ = Attention.apply(call, needs_lse, gives_lse, has_grads, *t)
    except RuntimeError:
        refuse_transforms()  # torch refuses them by the names of its internals; a check before would take time
        raise
    return out, lse


class Attention(torch.autograd.Function):
    """Autograd node of a call. Backward reads nothing but its `ctx`. Second derivatives are not defined."""

    jvp = staticmethod(refuse_tangents)

    @staticmethod
    def forward(
        ctx: Any, call: Call, needs_lse: bool, gives_lse: bool, has_grads: bool, *tensors: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        t, needs = Tensors(*tensors), ctx.needs_input_grad[4:] if has_grads else (False,) * len(tensors)
        out, lse, saved, ctx.done = run(call, t, gives_lse, needs)
        keeps_results, results = needs_lse or needs[READS_LSE], (out, lse)
        if t.bias is not None:
            lse = rounded_lse(lse)
        # Ulysses saves other ranks' rows instead of q, k and v. This empty tensor keeps an edge to the inputs, so that
        # a second derivative raises instead of returning zero.
        origin = t.q.new_empty(0) if ctx.done.plan.saves_rows_of_others else None
        ctx.set_materialize_grads(False)  # None for lse if it is not differentiated
        if not needs_lse:
            ctx.mark_non_differentiable(lse)
        inputs = t[:3] if needs_lse else (None,) * 3
        ctx.save_for_backward(*(results if keeps_results else (None, None)), origin, *inputs, *t[3:-1], *saved)
        return out, lse, origin

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, all_saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        out, lse, _origin, q, k, v, *others = all_saved
        saved, results = tuple(others[_BESIDE:]), None if out is None or lse is None else (out, lse)
        if grad_out is None:  # only lse is differentiated
            assert out is not None
            grad_out = torch.zeros_like(out)
        refuse_batches(grad_out)
        t = Tensors(grad_out, grad_out, grad_out, *others[:_BESIDE])
        if grad_lse is not None and results is not None:
            refuse_batches(grad_lse)
            out, grad_out = with_gradient_of_lse(results[0], rounded_lse(results[1]), grad_out, grad_lse)
            t, saved, results = t._replace(q=q, k=k, v=v), (), (out, lse)
        return *(None,) * 4, *run_backward(ctx.done, t, saved, grad_out, results, ctx.needs_input_grad[4:])
