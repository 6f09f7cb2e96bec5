"""`run` and `run_backward`: an attention call on this rank, eager or as the body of the compiled operator."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors as Saved
from cp_dtensor._torch.tensors import joined_rows, no_autocast, on_device, split_rows
from cp_dtensor.attention.lse import dense_lse, rounded_lse
from cp_dtensor.attention.masked import attention_delta
from cp_dtensor.attention.merge import sinks_gradient
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.engine.arguments import check_bias
from cp_dtensor.engine.base import Done, Plan, Result, Tensors, Values, modifiers_of, zeros_for_sums
from cp_dtensor.engine.call import Call, both_masks
from cp_dtensor.engine.handles import handle_of, value_of
from cp_dtensor.engine.planner import planned
from cp_dtensor.spec.masks import Mask


class CallMask(NamedTuple):
    """The mask of a call that a handle names: what `of_call(call)` of the named object returns, maybe by a collective.

    What it is may be known only when the call runs.
    """

    mask: Mask
    """Of the whole sequence; together with that of the call."""
    pair: tuple[int, int] | None = None
    """The global (queries, keys), if the mask tells them."""
    rows: int = 1
    """Batch rows whose tokens make up the one row of packed tensors, one after the other."""


def run(
    call: Call, t: Tensors, needs_lse: bool, needs_grads: tuple[bool, ...] | None = None
) -> tuple[Tensor, Tensor, Saved, Done]:
    """Compute a forward: `out`, `lse` (maybe split, or empty without `needs_lse`), tensors and values for backward.

    Args:
        call: its scale is None or positive.
        t: checked tensors, with a seed if there is dropout.
        needs_lse: False if lse may be empty.
        needs_grads: True for each of `t` whose gradient is needed; None in compiled code, which does not know.

    Raises:
        TypeError, ValueError, NotImplementedError: what does not fit, before any exchange of rows; alike on every rank
            at the first call of its signature.
        PeerError: ranks have made different calls.
    """
    rows = 1
    if t.mask is not None:
        own, pair, rows = value_of(t.mask).of_call(call)
        call = replace(call, mask=both_masks(own, call.mask), pair=pair or call.pair)
        if rows > 1:
            t = t._replace(q=split_rows(t.q, rows), k=split_rows(t.k, rows), v=split_rows(t.v, rows))
    done = planned(call, t, rows, needs_lse, needs_grads)
    if t.bias is not None and call.placed is None:
        check_bias(t.q, t.bias, done.pair, call)
    # Nothing is refused from here on. The memory of tensors with a pending minus sign, such as `x.conj().imag`, has the
    # opposite values.
    q, k, v = t.q.resolve_neg(), t.k.resolve_neg(), t.v.resolve_neg()
    if t.bias is not None:
        t = t._replace(bias=t.bias.resolve_neg())
    done.begin(q)
    # Autocast has cast q, k and v before the call; inside, each dtype is chosen explicitly.
    with no_autocast(q), _torch.below_autograd(), done:
        values = Values(modifiers_of(call, t), done.ranks, done.scale)
        if _torch.open_modes() and _torch.in_selective_checkpoint():
            out, lse, saved = _forward_in_checkpoint(done.plan, q, k, v, values, needs_lse)
        else:
            out, lse, saved = done.plan.forward(q, k, v, values, needs_lse)
    if rows > 1:
        out, lse = joined_rows(out, rows), joined_rows(lse, rows) if needs_lse else lse
    return out, lse, saved, done


def _forward_in_checkpoint(plan: Plan, q: Tensor, k: Tensor, v: Tensor, values: Values, needs_lse: bool) -> Result:
    """Compute a forward, as one operator if a selective checkpoint keeps its results, so that its recompute skips it.

    What backward needs is made again in the recompute, for which Ulysses exchanges rows.
    """
    made: list[Saved] = []

    def forward() -> tuple[Tensor, Tensor]:
        out, lse, saved = plan.forward(q, k, v, values, True)
        made.append(saved)
        return out, dense_lse(lse)

    with _torch.no_modes():
        handle, results = handle_of(forward), values.modifiers.empty_results(q, v)
    with _torch.checkpoint_keeps(_KEPT, handle, results) as keeps:
        if not keeps:
            return plan.forward(q, k, v, values, needs_lse)
        out, lse = _KEPT(handle)
    if not made:
        with _torch.no_modes():  # the checkpoint has not seen these operations in forward
            made.append(plan.remake_saved(q, k, v, out, lse, values))
    return out, lse, made[0]


_torch.define_operator(
    "kept_forward(Tensor handle) -> (Tensor out, Tensor lse)", lambda handle: value_of(handle)(), lambda _: None
)
_KEPT = torch.ops.cp_dtensor.kept_forward.default


def run_backward(
    done: Done, t: Tensors, saved: Saved, grad_out: Tensor, results: tuple[Tensor, Tensor] | None,
    needed: tuple[bool, ...],
) -> Tensors:  # fmt: skip
    """Compute the gradient of each of `Tensors`, in its dtype; None for those that are not needed or have none.

    Args:
        done: that of the forward, which the pass reads besides its arguments.
        t: the tensors of the forward; q, k and v are not read if there are `saved`.
        saved: the tensors that the plan saved; () if they were not kept, and are made again from `t` and `results`.
        grad_out: (B, H, S, Dv).
        results: out and lse, if a gradient is made of lse (`READS_LSE`) or nothing is `saved`.
        needed: True for each of `Tensors` whose gradient is asked for. Those of q, k and v are returned anyway.
    """
    needs = Tensors(*needed)  # type: ignore[arg-type]
    grad_bias = zeros_for_sums(t.bias) if needs.bias and t.bias is not None else None
    grad_up = zeros_for_sums(t.up) if needs.up and t.up is not None else None
    grad_sinks = None
    if t.bias is not None:
        t = t._replace(bias=t.bias.resolve_neg())
    modifiers = modifiers_of(done.call, t)
    if modifiers is not NO_MODIFIERS:  # the plan adds no gradients of sinks, which concern merged rows only
        modifiers = replace(modifiers, sinks=None, grad_up=grad_up)
    out, lse = results or (grad_out, grad_out)
    rows = done.rows
    if rows > 1:
        grad_out, out, lse = split_rows(grad_out, rows), split_rows(out, rows), split_rows(lse, rows)
    done.begin(grad_out, backward=True)
    with no_autocast(grad_out), _torch.below_autograd(), done:
        values = Values(modifiers, done.ranks, done.scale)
        if not saved:
            q, k, v = split_rows(t.q, rows), split_rows(t.k, rows), split_rows(t.v, rows)
            saved = done.plan.remake_saved(q, k, v, out, dense_lse(lse), values)
        if needs.sinks and t.sinks is not None and results is not None:
            # Each rank's share is that of its own tokens, as for any parameter, also where others computed these rows.
            with on_device(grad_out.device):
                of_rows = sinks_gradient(t.sinks, rounded_lse(lse), attention_delta(grad_out, out))
                grad_sinks = of_rows.to(t.sinks.dtype)
        grads = done.plan.backward(grad_out.resolve_neg(), saved, values, grad_bias)
    if rows > 1:
        grads = joined_rows(grads[0], rows), joined_rows(grads[1], rows), joined_rows(grads[2], rows)
    if grad_bias is not None and t.bias is not None:
        grad_bias = grad_bias.to(t.bias.dtype)
    if grad_up is not None and t.up is not None:
        grad_up = grad_up.to(t.up.dtype)
    return Tensors(*grads, grad_bias, grad_sinks, None, grad_up)
