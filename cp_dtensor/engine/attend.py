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
from cp_dtensor.attention.lse import rounded_lse
from cp_dtensor.engine.arguments import drawn_seed, positive_scale
from cp_dtensor.engine.base import Tensors, need_lse
from cp_dtensor.engine.call import Call
from cp_dtensor.engine.compiled import attend_traced, constants_of
from cp_dtensor.engine.run import run, run_backward


def attend(
    call: Call, t: Tensors, *, needs_lse: bool = False, traced: bool | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `(out, lse)` of checked local shards: (B, H, S, Dv) and (B, H, S); lse may be empty without `needs_lse`.

    Args:
        call: the call.
        t: its tensors.
        needs_lse: True to get lse.
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
        out, lse, _ = Attention.apply(call, needs_lse or (t.sinks is not None and need_lse(t.sinks)), *t)
    except RuntimeError:
        refuse_transforms()  # torch refuses them by the names of its internals; a check before would take time
        raise
    return out, lse


class Attention(torch.autograd.Function):
    """Autograd node of a call. Backward reads nothing but its `ctx`. Second derivatives are not defined."""

    jvp = staticmethod(refuse_tangents)

    @staticmethod
    def forward(ctx: Any, call: Call, needs_lse: bool, *tensors: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        t = Tensors(*tensors)
        out, lse, saved, ctx.done = run(call, t, needs_lse, ctx.needs_input_grad[2:])
        if t.bias is not None:
            lse = rounded_lse(lse)
        # Ulysses saves other ranks' rows instead of q, k and v. This empty tensor keeps an edge to the inputs, so that
        # a second derivative raises instead of returning zero.
        origin = t.q.new_empty(0) if ctx.done.plan.saves_rows_of_others else None
        of_sinks = (t.sinks, out, lse) if ctx.needs_input_grad[6] else (None, None, None)
        ctx.save_for_backward(t.bias, t.seed, t.up, *of_sinks, origin, *saved)
        ctx.mark_non_differentiable(lse)
        return out, lse, origin

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, all_saved: Saved, grad_out: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batches(grad_out)
        bias, seed, up, sinks, out, lse, _origin, *saved = all_saved
        t = Tensors(grad_out, grad_out, grad_out, bias, sinks, seed, up)
        needs = ctx.needs_input_grad
        results = None if out is None or lse is None else (out, lse)
        *grads, of_bias, of_sinks, of_up = run_backward(
            ctx.done, t, tuple(saved), grad_out, results, (needs[5], needs[6], needs[8])
        )
        return None, None, *grads, of_bias, of_sinks, None, of_up, None
