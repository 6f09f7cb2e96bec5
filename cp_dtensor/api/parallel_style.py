"""Parallel style that makes attention inside of a module context parallel."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from cp_dtensor import _torch
from cp_dtensor.api.context import entered
from cp_dtensor.api.flex_attention import flex_redirection
from cp_dtensor.api.hooks import context_hooks
from cp_dtensor.comm.groups import Mesh, SequenceRanks
from cp_dtensor.comm.transports import transport_by_name
from cp_dtensor.engine.arguments import checked_context_sinks, refuse_sinks
from cp_dtensor.engine.call import (
    Call,
    call_of,
    checked_bools,
    checked_layout,
    checked_lengths,
    checked_mask,
    checked_method,
)
from cp_dtensor.engine.contexts import CAPTURED_BEFORE, OpenContext, current, inherited, innermost
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask


class ContextParallel(ParallelStyle):
    """Make SDPA inside of a module see all tokens: `parallelize_module(attention, mesh["cp"], ContextParallel())`.

    The module form of `context_parallel`. The module's forward opens its own context whenever it runs: under any
    activation checkpointing, after any context, in any thread. It does not shard inputs: pass shards, for example of
    `context_parallel_shard`. A DTensor sharded along the sequence has local parts in the layout `Contiguous()`.

    The module's `state_dict` is unchanged. Copy it by `copy.deepcopy`: after `copy.copy`, the copy computes with the
    parameters of the original. It cannot be pickled.

    Args:
        method, deterministic, debug: as for `context_parallel_attention`.
        mask, layout: as there, for all attention inside; None takes that of the context (or module) around the call.
            Pass both if recomputation by other means than `torch.utils.checkpoint` may run after that context.
        rotate_method: as there; None takes the process default when parallelize_module is called.
        seq_len: the global length that attention runs over, or a tuple of several; trusted, as those of a context are.
            Of another length, all ranks have equally many tokens.
        sinks: as there, a tensor, or the name of the module's attribute that is read at each call: `sinks="sinks"` for
            `self.sinks = nn.Parameter(...)`. None takes the sinks of the context around the call. Not in compiled
            code: call `context_parallel_attention(sinks=...)` there.

    Raises:
        TypeError, ValueError: arguments that do not fit. From parallelize_module: a mesh that is neither one axis nor
            two that share the sequence, a module that has the style already, a name in `sinks` that is no attribute.

    Two ranks, 8 tokens, one head of width 16; each rank passes 4 tokens:

        attention = parallelize_module(attention, init_device_mesh("cpu", (2,)), ContextParallel(layout=Contiguous()))
        out = attention(x[:, 4 * rank : 4 * rank + 4])
    """

    def __init__(
        self, *, method: str = "auto", mask: Mask | None = None, layout: Layout | None = None,
        rotate_method: str | None = None, seq_len: int | tuple[int, ...] | None = None,
        sinks: torch.Tensor | str | None = None, deterministic: bool = False, debug: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        # Arguments are checked here, although there is no mesh yet.
        checked_bools(debug=debug, deterministic=deterministic)
        self._call_of = functools.partial(
            Call.of, method=checked_method(method), mask=checked_mask(mask, False), layout=layout,
            rotate_method=rotate_method, debug=debug, deterministic=deterministic,
        )  # fmt: skip
        self._inherits = {"layout": layout is None, "mask": mask is None}
        transport_by_name(rotate_method)
        self._lengths = checked_lengths(checked_layout(layout), seq_len)
        self._sinks = sinks if sinks is None or isinstance(sinks, str) else checked_context_sinks(sinks)

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        if isinstance(module.forward, _ContextForward):
            raise ValueError(f"{type(module).__name__} is context parallel already")
        if isinstance(self._sinks, str) and not hasattr(module, self._sinks):
            raise ValueError(f"expected sinks to name an attribute of {type(module).__name__}, got {self._sinks!r}")
        call = replace(self._call_of(device_mesh), lengths=self._lengths)
        has_replaced_layers = context_hooks.module(module)
        module.forward = _ContextForward(
            module, vars(module).get("forward"), call, self._sinks, self._inherits, has_replaced_layers
        )
        return module


@dataclass(eq=False, repr=False)
class _ContextForward:
    """Forward of a module in a context; an object, not a closure, so that a copy of the module has its own."""

    module: nn.Module
    replaced: Callable[..., Any] | None
    """The forward that the module had as an instance attribute, if any."""
    call: Call
    sinks: torch.Tensor | str | None
    """A tensor, or the name of the module's attribute."""
    inherits: dict[str, bool]
    """`layout` and `mask`: True if the context around a call decides."""
    has_replaced_layers: bool
    """True if functions of recurrent layers are replaced, which lasts as long as this object."""

    def __post_init__(self) -> None:
        self._context = OpenContext(self.call, is_constant=True)
        self._key = self._context.key
        # Compiled code depends on the redirection of FlexAttention, so it stays as long as the module.
        flex_redirection.acquire()
        weakref.finalize(self, flex_redirection.release)
        if self.has_replaced_layers:
            weakref.finalize(self, context_hooks.acquire().close)
        functools.update_wrapper(self, self.replaced or type(self.module).forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.replaced or self._module_forward
        if torch.compiler.is_dynamo_compiling():
            if self.has_replaced_layers:
                raise NotImplementedError(
                    f"{type(self.module).__name__} with ContextParallel has a convolution or a recurrent layer, which "
                    "compiled code would run on this rank's shard alone: compile it inside of context_parallel instead"
                )
            inherits = self.inherits
            key = _key_in_trace(self._key, inherits["layout"], inherits["mask"], self.sinks is not None)
            if not key:
                return forward(*args, **kwargs)
            # Code is compiled for the key; the context is entered when the captured forward is traced further.
            _torch.begin_traced_scope(key)  # FlexAttention is redirected while Dynamo traces forward
            try:
                return _torch.traced_inside(functools.partial(_in_context_of, key), forward, *args, **kwargs)
            finally:
                _torch.end_traced_scope()
        return _run_in_context(self._context_of_call(), False, forward, *args, **kwargs)

    def _context_of_call(self) -> OpenContext:
        context = self._context
        call = inherited("ContextParallel", self.call, **self.inherits)
        if call != self.call:  # compiled code inside asks for what is inherited
            context = OpenContext(replace(call, in_context=True))
        sinks = self.sinks
        if sinks is None:
            sinks = _inherited_sinks(call.ranks)
        elif isinstance(sinks, str):
            sinks = checked_context_sinks(getattr(self.module, sinks))
        return context if sinks is None else replace(context, sinks=sinks)

    def _module_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self.module).__name__} with ContextParallel cannot be pickled, since it holds process groups: "
            "save its state_dict(), and parallelize the module that is made to load it"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _ContextForward:
        # The call is shared: it holds process groups and no tensors.
        return _ContextForward(
            copy.deepcopy(self.module, memo), copy.deepcopy(self.replaced, memo), self.call,
            copy.deepcopy(self.sinks, memo), self.inherits, self.has_replaced_layers,
        )  # fmt: skip


def _inherited_sinks(ranks: SequenceRanks) -> torch.Tensor | None:
    """Return the sinks of the context around a call, if that is over these ranks."""
    outer = innermost()
    if outer is None or outer.sinks is None or not outer.call.ranks.shares_sequence_with(ranks):
        return None
    current()  # refuses a backward that may not belong to the context
    return outer.sinks


@_torch.constant_in_trace
def _key_in_trace(key: str, inherits_layout: bool, inherits_mask: bool, has_sinks: bool) -> str:
    """Return the key of a module's call with what it inherits; "" if compiled code asks the context around it."""
    call = call_of(key)
    has_sinks = has_sinks or _inherited_sinks(call.ranks) is not None
    refuse_sinks(has_sinks, "a compiled module with ContextParallel")
    call = inherited("ContextParallel", call, layout=inherits_layout, mask=inherits_mask, traced=True)
    if not call.context:
        return call.key
    context = innermost()
    if context is not None and context.asked_later(replace(call, in_context=True)) != context.inside(None, traced=True):
        raise NotImplementedError(
            "ContextParallel got layout=None and mask=None in compiled code inside of a context whose mask or layout "
            "may differ at the next call, and other options than the context: pass the method, rotate_method, "
            "deterministic and debug of the context, or layout= and mask= (Full() for none)"
        )
    return ""


def _in_context_of(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, run in a context with the call of the key."""
    return functools.partial(_run_in_context, OpenContext(call_of(key), is_constant=True), True, function)


@_torch.never_compiled
def _run_in_context(
    context: OpenContext, is_captured: bool, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a function in a context; `is_captured`: True if Dynamo captured the function outside of the context."""
    with _torch.thread_state(CAPTURED_BEFORE, context if is_captured else None), entered(context):
        return function(*args, **kwargs)
