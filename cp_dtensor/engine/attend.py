"""`attend`: the one entry of every front. Eager calls run in an autograd node; traced ones are one operator.

The operators are `torch.ops.cp_dtensor.attention` and `attention_backward`. The bodies of node and operators are `run`
and `run_backward`. Constants of compiled code are the key of the call, and numbers that may be symbols. What a call
finds when it runs (the mask and lengths of the open context) goes to its backward in a handle. Calls that find
something are the overload `live`, which Inductor leaves out of CUDA graphs: a replay would use what the capture found.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors as Saved
from cp_dtensor._torch.autograd import (
    differentiated_once,
    refuse_batches,
    refuse_tangents,
    refuse_traced_transforms,
    refuse_transforms,
)
from cp_dtensor.attention.backends.select import allowed_backends
from cp_dtensor.attention.lse import dense_lse, rounded_lse, with_gradient_of_lse
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.engine.arguments import drawn_seed, positive_scale
from cp_dtensor.engine.base import READS_LSE, Done, Tensors
from cp_dtensor.engine.call import Call, call_of
from cp_dtensor.engine.contexts import Left
from cp_dtensor.engine.handles import fake_handle, keep_beside, kept_beside
from cp_dtensor.engine.planner import planned
from cp_dtensor.engine.run import run, run_backward

Constants = tuple[str, bool]
"""Constants of a call in compiled code: its key, and True if it is live."""
_SEED = Tensors._fields.index("seed")
_BESIDE = len(Tensors._fields[3:-1])
"""Tensors beside q, k and v that a pass reads."""


def attend(call: Call, t: Tensors, *, needs_lse: bool = False) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of checked local shards: (B, H, S, Dv) and (B, H, S); lse may be empty without `needs_lse`.

    Args:
        needs_lse: True to get lse, which is differentiable; all ranks differentiate it, or none does.

    Raises:
        TypeError, ValueError, NotImplementedError: what does not fit, before any exchange of rows.
    """
    if _torch.is_traced(t.q):
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


# Compiled code


def constants_of(call: Call) -> Constants:
    """Return the constants of a call that is traced, with the backends that are allowed now."""
    if call.backends is None:
        call = replace(call, backends=allowed_backends())  # Dynamo recompiles on a change
    return call.key, call.is_live


def attend_traced(
    constants: Constants, t: Tensors, factors: list[float], numbers: list[int], needs_lse: bool
) -> tuple[Tensor, Tensor]:
    """Return `attend` of a call in a program that is being captured, whose `constants` are by `constants_of`."""
    refuse_traced_transforms()
    key, is_live = constants
    q, scale = positive_scale(t.q, factors[0])
    tensors = [q, *t[1:]]
    if factors[2] and t.seed is None:
        tensors[_SEED] = drawn_seed(q.device)
    operator = torch.ops.cp_dtensor.attention
    out, lse, _ = (operator.live if is_live or t.mask is not None else operator.default)(
        *tensors, key, [scale, *factors[1:]], numbers, needs_lse, torch.is_grad_enabled()
    )
    return out, rounded_lse(lse)


def _keeps_rows(done: Done, q: Tensor) -> bool:
    """Return whether the rows of other ranks are kept: if the plan saves them, unless a CUDA graph is captured.

    A graph's memory is written again at each replay, and Inductor has to know all of it.
    """
    return done.plan.saves_rows_of_others and not (q.is_cuda and _torch.is_in_cuda_graph(q.device))


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, key, factors, numbers, needs_lse, needs_backward = arguments
    t, call = Tensors(*tensors), call_of(key, factors, numbers)
    found = Left.by(call, t.q, t.k)
    # Also where rows are kept: all ranks send LSE, and a single rank may lose its rows before backward.
    gives_lse = needs_lse or needs_backward
    out, lse, saved, done = run(found.call, t, gives_lse)
    out, lse = _row_after_row(out), dense_lse(lse) if gives_lse else lse.new_empty(0)
    left = t.q.new_empty(0, dtype=torch.int64)
    if call.is_live or t.mask is not None:
        found.done = done
        left = found.handle(needs_backward)
    if needs_backward:
        keep_beside(left, (done, saved if _keeps_rows(done, t.q) else ()))
    return out, lse, left


def _fake_forward(*arguments: Any, leaves_handle: bool) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, _key, _factors, _numbers, needs_lse, needs_backward = arguments
    t = Tensors(*tensors)
    out, lse = Modifiers(t.bias, up=t.up).empty_results(t.q, t.v)
    if not (needs_lse or needs_backward):
        lse = lse.new_empty(0)
    return _row_after_row(out), lse, fake_handle() if leaves_handle else t.q.new_empty(0, dtype=torch.int64)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    grad_out, out, lse, left, *tensors, key, factors, numbers, (*needed, is_lse_differentiated) = arguments
    t, (done, rows) = Tensors(*tensors), kept_beside(left) or (None, ())
    found = Left.of(left, in_backward=True)
    if found is not None:
        done = found.done
    if done is None:  # a copy in a CUDA graph: the same plan as in forward, found without communication
        done = planned(call_of(key, factors, numbers), t)
    # A gradient of lse has changed out, which is among the rows that are kept.
    saved = rows if _keeps_rows(done, t.q) and not is_lse_differentiated else ()
    grads = run_backward(done, t, saved, grad_out, (out, lse), tuple(needed))
    return *map(_row_after_row, grads[:3]), *(t.q.new_empty(0) if grad is None else grad for grad in grads[3:-1])


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    _grad_out, _out, _lse, _left, *tensors, _key, _factors, _numbers, (*needed, _) = arguments
    t = Tensors(*tensors)
    of_qkv = [_row_after_row(x.new_empty(x.shape)) for x in t[:3]]
    others = zip(t[3:-1], needed[3:-1], strict=True)
    return *of_qkv, *(torch.empty_like(x) if need and x is not None else t.q.new_empty(0) for x, need in others)


def _row_after_row(tensor: Tensor) -> Tensor:
    """Return (B, H, S, D) in memory (B, S, H, D), as most backends give and projections take it, and fakes are."""
    row_after_row = tensor.transpose(1, 2)
    return tensor if row_after_row.is_contiguous() else row_after_row.contiguous().transpose(1, 2)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Without the handle of a mask, which code may make once more in backward, from tensors that have changed.
    *tensors, _mask, ctx.key, ctx.factors, ctx.numbers, needs_lse, _needs_backward = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(*output[1 + needs_lse :])
    ctx.set_materialize_grads(False)  # None for lse if it is not differentiated


@differentiated_once
def _gradients(
    ctx: Any, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    out, lse, left, *others = saved
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    if grad_lse is not None:
        out, grad_out = with_gradient_of_lse(out, rounded_lse(lse), grad_out, rounded_lse(grad_lse))
    needed, operator = ctx.needs_input_grad[: len(Tensors._fields)], torch.ops.cp_dtensor.attention_backward
    grads = (operator.live if left.numel() else operator.default)(
        grad_out, out, lse, left, *others, ctx.key, ctx.factors, ctx.numbers, [*needed, grad_lse is not None]
    )
    return *(x if need else None for x, need in zip(grads, needed, strict=False)), *[None] * 6


def _define() -> None:
    tensors = ", ".join(["Tensor q, Tensor k, Tensor v", *[f"Tensor? {name}" for name in Tensors._fields[3:-1]]])
    constants = "str key, float[] factors, SymInt[] numbers"
    results = "Tensor out, Tensor lse, Tensor left"
    grads = ", ".join(f"Tensor grad_{name}" for name in Tensors._fields[:-1])
    for name in ("default", "live"):
        suffix, in_graphs = "" if name == "default" else f".{name}", name == "default"
        fake = partial(_fake_forward, leaves_handle=not in_graphs)
        _torch.define_operator(
            f"attention{suffix}({tensors}, Tensor? mask, {constants}, bool needs_lse, bool needs_backward) -> "
            f"({results})",
            _forward, fake, gradients=_gradients, save=_save_for_backward, in_graphs=in_graphs,
        )  # fmt: skip
        _torch.define_operator(
            f"attention_backward{suffix}(Tensor grad_out, {results}, {tensors}, {constants}, bool[] needed) -> "
            f"({grads})",
            _backward, _fake_backward, in_graphs=in_graphs,
        )  # fmt: skip


_define()
