"""Operators that torch.compile captures: `torch.ops.cp_dtensor.attention` and `attention_backward`.

The operators take the key of a `CompiledCallSpec`; global lengths, and with them the plan, are found when they run, by
the code of eager calls, which do not use the operators. Calls that read lengths or a mask at run time are the overload
`found`, which Inductor leaves out of CUDA graphs: a replay would use those of the capture.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors, differentiated_once
from cp_dtensor._torch.tensors import joined_rows, no_autocast, split_rows, wide_dtype
from cp_dtensor.attention.backends.select import Allowed
from cp_dtensor.attention.lse import dense_lse, empty_lse
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.engine.autograd import BoundCall, gradient_of_sinks, zeros_for_sums
from cp_dtensor.engine.compiled_spec import (
    RuntimeValues,
    compiled_spec_of,
    mask_keys,
    pending_backwards,
    runtime_numbers,
)
from cp_dtensor.engine.named_masks import named_mask
from cp_dtensor.engine.planner import bound_call
from cp_dtensor.spec.documents import PackedEdges
from cp_dtensor.spec.masks import Mask

# Rows saved for backward
#
# Compiled code saves tensors whose shapes it can compute, which excludes those of exchanged heads. These are saved as
# an attribute of the storage of an operator's result, which autograd, AOTAutograd and checkpoint policies save. A copy
# of it (by offloading or a CUDA graph) has no such attribute: backward then plans the call and exchanges rows again.

_ATTRIBUTE = "_cp_dtensor_saved"
"""Attribute of the storage of `numbers`, an operator's last result: a `SavedCall`."""


class SavedCall:
    """A call that has run forward, and the rows that its backward needs; () if they are not saved."""

    def __init__(self, call: BoundCall | None = None, rows: Tensors = ()) -> None:
        self.call, self.rows = call, rows


def saves_rows(call: BoundCall, q: Tensor) -> bool:
    """True if the rows of a call are saved here: those of other ranks, unless a CUDA graph is captured.

    A graph's memory is written again at each replay, and Inductor has to know all of it. Other calls save arguments and
    results of the operator only, as autograd does.
    """
    return call.plan.saves_rows_of_others and not (q.is_cuda and _torch.is_in_cuda_graph(q.device))


# Operators

Optional = Tensor | None
"""An argument that a call may lack."""
CuSeqlens = tuple[Tensor, Tensor]
"""Integers: the edges of packed documents among queries and among keys."""


@lru_cache(maxsize=64)
def _backends(key: str) -> Allowed:
    return Allowed(*literal_eval(key))


class _Constants(NamedTuple):
    """Arguments of the operators that are constants of compiled code, in the order of the schema."""

    spec_key: str
    backends: str
    mask: str
    dropout_p: float
    softcap: float
    first_batch: int
    first_head: int
    scale: float
    q_len: int
    """Global number of queries; -1 if it is known only when the code runs."""
    kv_len: int

    @property
    def mask_value(self) -> Mask:
        """The mask of the call alone."""
        return mask_keys.value_of(self.mask)

    def modifiers(self, bias: Optional, seed: Optional, sinks: Optional, up: Optional) -> Modifiers:
        return Modifiers.of(bias, self.dropout_p, seed, self.first_batch, self.first_head, sinks, self.softcap, up)

    def found_at_run_time(self, cu_seq_q: Tensor | None) -> bool:
        """True if lengths or mask are known only when the code runs."""
        unknown = isinstance(self.q_len, int) and self.q_len < 0  # a symbol of Dynamo is a known length
        return cu_seq_q is not None or unknown or compiled_spec_of(self.spec_key).reads_context


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional, seed: Optional, sinks: Optional, up: Optional,
    cu_seq_q: Optional, cu_seq_k: Optional, *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Results of a call; `cu_seq_q` without `cu_seq_k` names a mask (`named_masks`)."""
    *constants, needs_lse, needs_backward = others
    constant = _Constants(*constants)
    spec, scale, backends = compiled_spec_of(constant.spec_key), constant.scale, _backends(constant.backends)
    known = None if constant.q_len < 0 else (constant.q_len, constant.kv_len)
    modifiers = constant.modifiers(bias, seed, sinks, up)
    edges = None if cu_seq_q is None or cu_seq_k is None else PackedEdges.of(cu_seq_q, cu_seq_k)
    named = named_mask(cu_seq_q) if cu_seq_q is not None and cu_seq_k is None else None
    # Also where rows are saved: all ranks send LSE, and a single rank may lose its saved rows before backward.
    gives_lse = needs_lse or needs_backward
    lengths, found = spec.resolve(
        q, k, v, constant.mask_value, modifiers, scale, known, edges, named, gives_lse=gives_lse
    )
    q, k, v = (split_rows(x, found.rows) for x in (q, k, v))
    call = bound_call(q, k, v, spec.config(found.context), lengths, found.mask, modifiers, scale, backends)
    call.begin(q)
    with no_autocast(q), _torch.below_autograd(), call:
        out, lse, saved = call.plan.forward(q, k, v, call.values(modifiers), gives_lse)
        out = joined_rows(_row_after_row(out), found.rows)
        lse = dense_lse(joined_rows(lse, found.rows)) if gives_lse else lse.new_empty(0)
    begun_in = pending_backwards.begin(found, needs_backward)
    # Backward gets these values in a tensor: it needs no context and no communication to know them.
    if constant.found_at_run_time(cu_seq_q):
        numbers = torch.tensor([*lengths, runtime_numbers.number_of(found), begun_in], device="cpu")
    else:
        numbers = q.new_empty(0, dtype=torch.int64)
    if needs_backward:
        setattr(numbers.untyped_storage(), _ATTRIBUTE, SavedCall(call, saved if saves_rows(call, q) else ()))
    return out, lse, numbers


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional, seed: Optional, sinks: Optional, up: Optional,
    cu_seq_q: Optional, cu_seq_k: Optional, *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *constants, needs_lse, needs_backward = others
    batch, heads, length, _ = q.shape
    lse = q.new_empty(0, dtype=wide_dtype(q))
    if needs_lse or needs_backward:
        lse = empty_lse(q, (batch, heads, length), wide_dtype(q), Modifiers(bias).split_lse)
    at_run_time = _Constants(*constants).found_at_run_time(cu_seq_q)
    numbers = torch.empty(4 if at_run_time else 0, dtype=torch.int64, device="cpu" if at_run_time else q.device)
    out = q.new_empty(batch, heads, length, Modifiers(up=up).value_dim(q, v))
    return _row_after_row(out), lse, numbers


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, numbers: Tensor,
    bias: Optional, seed: Optional, sinks: Optional, up: Optional, *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *constants, needs_grad_bias, needs_grad_sinks, needs_grad_up = others
    constant = _Constants(*constants)
    spec = compiled_spec_of(constant.spec_key)
    lengths, found = (constant.q_len, constant.kv_len), RuntimeValues(spec.with_own_mask(constant.mask_value))
    if numbers.numel():
        *lengths_of_forward, number, begun_in = numbers.tolist()
        lengths, found = tuple(lengths_of_forward), runtime_numbers.of(number)
        pending_backwards.end(found, begun_in)
        q, k, v, out, lse, grad_out = (split_rows(x, found.rows) for x in (q, k, v, out, lse, grad_out))
    modifiers, grad_up = constant.modifiers(bias, seed, sinks, up), None
    if needs_grad_up and up is not None:
        grad_up = zeros_for_sums(up)
        modifiers = replace(modifiers, grad_up=grad_up)
    from_forward: SavedCall = getattr(numbers.untyped_storage(), _ATTRIBUTE, SavedCall())
    call = from_forward.call
    if call is None:  # the same as in forward, and found without communication
        config, backends = spec.config(found.context), _backends(constant.backends)
        call = bound_call(q, k, v, config, lengths, found.mask, modifiers, constant.scale, backends)
    call.begin(grad_out, backward=True)
    grad_bias = zeros_for_sums(bias) if needs_grad_bias and bias is not None else None
    with no_autocast(grad_out), _torch.below_autograd(), call:
        grad_sinks = gradient_of_sinks(sinks, grad_out, out, lse) if needs_grad_sinks and sinks is not None else None
        rows = from_forward.rows if saves_rows(call, q) else ()
        values = call.values(modifiers)
        saved = rows or call.plan.remake_saved(q, k, v, out, dense_lse(lse), values)
        grads = call.plan.backward(grad_out, saved, values, grad_bias)
        of_qkv = [joined_rows(_row_after_row(grad), found.rows) for grad in grads]
    sums = ((grad_bias, bias), (grad_sinks, sinks), (grad_up, up))
    return *of_qkv, *(q.new_empty(0) if x is None or of is None else x.to(of.dtype) for x, of in sums)


def _fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, numbers: Tensor,
    bias: Optional, seed: Optional, sinks: Optional, up: Optional, *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    of_qkv = [_row_after_row(tensor.new_empty(tensor.shape)) for tensor in (q, k, v)]
    of_modifiers = zip((bias, sinks, up), others[-3:], strict=True)
    nothing = q.new_empty(0)
    return *of_qkv, *(torch.empty_like(x) if needed and x is not None else nothing for x, needed in of_modifiers)


def _row_after_row(tensor: Tensor) -> Tensor:
    """(B, H, S, D) in memory (B, S, H, D), as most backends give and projections take it; fakes have these strides."""
    row_after_row = tensor.transpose(1, 2)
    return tensor if row_after_row.is_contiguous() else row_after_row.contiguous().transpose(1, 2)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, bias, seed, sinks, up, _cu_seq_q, _cu_seq_k, *ctx.constants, _needs_lse, _needs_backward = inputs
    out, lse, numbers = output
    ctx.save_for_backward(q, k, v, out, lse, numbers, bias, seed, sinks, up)
    ctx.mark_non_differentiable(lse, numbers)


def _gradients_by(overload: str) -> Callable[..., tuple[Tensor | None, ...]]:
    """Backward of the overload of that name."""

    @differentiated_once
    def gradients(ctx: Any, saved: Tensors, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        of_bias, _of_seed, *of_others = ctx.needs_input_grad[3:7]
        needed = (of_bias, *of_others)
        *grads, grad_bias, grad_sinks, grad_up = getattr(torch.ops.cp_dtensor.attention_backward, overload)(
            grad_out, *saved, *ctx.constants, *needed
        )
        given = zip((grad_bias, grad_sinks, grad_up), needed, strict=True)
        grad_bias, *of_modifiers = (x if is_needed else None for x, is_needed in given)
        return *grads, grad_bias, None, *of_modifiers, *[None] * (len(ctx.constants) + 4)

    return gradients


def _define() -> None:
    modifiers = "Tensor? bias, Tensor? seed, Tensor? sinks, Tensor? up"
    constants = "str spec_key, str backends, str mask, float dropout_p, float softcap, SymInt first_batch, "
    constants += "SymInt first_head, float scale, SymInt q_len, SymInt kv_len"
    forward = f"(Tensor q, Tensor k, Tensor v, {modifiers}, Tensor? cu_seq_q, Tensor? cu_seq_k, {constants}, "
    forward += "bool needs_lse, bool needs_backward) -> (Tensor out, Tensor lse, Tensor numbers)"
    backward = "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor numbers, "
    backward += f"{modifiers}, {constants}, bool needs_grad_bias, bool needs_grad_sinks, bool needs_grad_up) -> "
    backward += "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor grad_sinks, Tensor grad_up)"
    for overload in ("default", "found"):
        suffix = "" if overload == "default" else f".{overload}"
        _torch.define_operator(
            f"attention{suffix}{forward}", _forward, _fake_forward, gradients=_gradients_by(overload),
            save=_save_for_backward, in_graphs=overload == "default",
        )  # fmt: skip
        _torch.define_operator(
            f"attention_backward{suffix}{backward}", _backward, _fake_backward, in_graphs=overload == "default"
        )


_define()

ATTENTION_OPS = (torch.ops.cp_dtensor.attention.default, torch.ops.cp_dtensor.attention.found, *_torch.FUSED_SDPA_OPS)
"""Operators whose results a policy of selective activation checkpointing saves, so that attention is not recomputed.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` takes them as a list, or a policy looks for them. In
compiled code, attention of sharded sequences is one of the first two, and is saved whole: a recompute neither computes
nor communicates it. In eager code it consists of the others, tile by tile: their results are saved, and transfers and
merges run again.
"""
