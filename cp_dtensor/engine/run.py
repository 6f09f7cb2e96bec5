"""`run` and `run_backward`: an attention call on this rank, eager or as the body of the compiled operator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple, cast

from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors as Saved
from cp_dtensor._torch.tensors import joined_rows, no_autocast, on_device, split_rows
from cp_dtensor.attention.lse import rounded_lse
from cp_dtensor.attention.masked import attention_delta
from cp_dtensor.attention.merge import sinks_gradient
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.engine.agreement import warn_of_zeros_and_ones
from cp_dtensor.engine.arguments import check_bias
from cp_dtensor.engine.base import Done, Gradients, Tensors, zeros_for_sums
from cp_dtensor.engine.call import Call, both_masks
from cp_dtensor.engine.handles import value_of
from cp_dtensor.engine.planner import planned
from cp_dtensor.spec.masks import Mask


class CallMask(NamedTuple):
    """The mask that a handle names, for a call."""

    mask: Mask
    """Of the whole sequence; together with that of the call."""
    pair: tuple[int, int] | None = None
    """The global (queries, keys), if the mask tells them."""
    rows: int = 1
    """Batch rows whose tokens make up the one row of packed tensors, one after the other."""


class NamedMask(ABC):
    """A mask that a handle names: what it is may be known only when the call runs."""

    @abstractmethod
    def of_call(self, call: Call) -> CallMask:
        """Return the mask for a call; the first call over some ranks may be a collective."""


def run(
    call: Call, t: Tensors, needs_lse: bool, needs_grads: tuple[bool, ...] | None = None
) -> tuple[Tensor, Tensor, Saved, Done]:
    """Compute a forward: `out`, `lse` (maybe split, or empty without `needs_lse`), tensors and values for backward.

    Args:
        call: the call, its scale None or positive.
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
    if t.bias is not None:
        if call.placed is None:
            check_bias(t.q, t.bias, done.pair, call)
        warn_of_zeros_and_ones(t.bias, call.ranks)
    # Nothing is refused from here on. The memory of tensors with a pending minus sign, such as `x.conj().imag`, has the
    # opposite values.
    q, k, v = t.q.resolve_neg(), t.k.resolve_neg(), t.v.resolve_neg()
    if t.bias is not None:
        t = t._replace(bias=t.bias.resolve_neg())
    done.begin(q)
    # Autocast has cast q, k and v before the call; inside, each dtype is chosen explicitly.
    with no_autocast(q), _torch.below_autograd(), done:
        out, lse, saved = done.plan.forward(q, k, v, done.values(t.modifiers(call)), needs_lse)
    if rows > 1:
        out, lse = joined_rows(out, rows), joined_rows(lse, rows) if needs_lse else lse
    return out, lse, saved, done


def run_backward(
    done: Done, t: Tensors, saved: Saved, grad_out: Tensor, results: tuple[Tensor, Tensor] | None,
    needed: tuple[bool, bool, bool] = (False, False, False),
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the gradients of q, k, v, bias, sinks and up, in their dtypes.

    Args:
        done: that of the forward, which the pass reads besides its arguments.
        t: the tensors of the forward; q, k and v are not read.
        saved: those that the plan has saved.
        grad_out: (B, H, S, Dv).
        results: out and lse, if sinks need a gradient.
        needed: True for each of bias, sinks and up whose gradient is asked for; None is returned for others.
    """
    grad_bias = zeros_for_sums(t.bias) if needed[0] and t.bias is not None else None
    grad_up = zeros_for_sums(t.up) if needed[2] and t.up is not None else None
    grad_sinks = None
    if t.bias is not None:
        t = t._replace(bias=t.bias.resolve_neg())
    modifiers = t.modifiers(done.call)
    if modifiers is not NO_MODIFIERS:  # the plan adds no gradients of sinks, which concern merged rows only
        modifiers = replace(modifiers, sinks=None, grad_up=grad_up)
    rows = done.rows
    if rows > 1:
        grad_out, results = (
            split_rows(grad_out, rows),
            results and (split_rows(results[0], rows), split_rows(results[1], rows)),
        )
    done.begin(grad_out, backward=True)
    with no_autocast(grad_out), _torch.below_autograd(), done:
        if needed[1] and t.sinks is not None and results is not None:
            grad_sinks = _gradient_of_sinks(t.sinks, grad_out, *results)
        grads = done.plan.backward(grad_out.resolve_neg(), saved, done.values(modifiers), grad_bias)
    of_bias = None if grad_bias is None or t.bias is None else grad_bias.to(t.bias.dtype)
    of_up = None if grad_up is None or t.up is None else grad_up.to(t.up.dtype)
    if rows > 1:
        grads = joined_rows(grads[0], rows), joined_rows(grads[1], rows), joined_rows(grads[2], rows)
    return *grads, of_bias, grad_sinks, of_up


def run_backward_again(
    call: Call, t: Tensors, grad_out: Tensor, out: Tensor, lse: Tensor
) -> Gradients:  # fmt: skip
    """Compute the gradients of q, k and v from the inputs and results of a forward that has left nothing."""
    done = planned(call, t)
    with done:
        saved = done.plan.remake_saved(t.q, t.k, t.v, out, lse, done.values())
    grad_q, grad_k, grad_v = run_backward(done, t, saved, grad_out, None)[:3]
    return cast(Gradients, (grad_q, grad_k, grad_v))


def _gradient_of_sinks(sinks: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the share of this rank's rows in the gradient of the sinks (H,), from the results of the call.

    Each rank's share is that of its own tokens, as for any parameter, also where other ranks computed these rows.
    """
    with on_device(out.device):
        return sinks_gradient(sinks, rounded_lse(lse), attention_delta(grad_out, out)).to(sinks.dtype)
