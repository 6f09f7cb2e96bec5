"""Parallel style that makes attention inside of a module context parallel."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from cp_dtensor import _torch
from cp_dtensor.api.context import entered
from cp_dtensor.api.flex_attention import flex_redirection
from cp_dtensor.api.functional import takes_options
from cp_dtensor.api.hooks import hooks_held, loaded_hooks
from cp_dtensor.comm.groups import Mesh, SequenceRanks
from cp_dtensor.engine.arguments import checked_of_heads, refuse_beside
from cp_dtensor.engine.call import (
    OF_CALLS,
    OF_CONTEXTS,
    Call,
    ContextOptions,
    call_of,
    checked_lengths,
    refuse_unknown,
)
from cp_dtensor.engine.contexts import CAPTURED_BEFORE, OpenContext, current, inherited, innermost

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ContextParallel(ParallelStyle):
    """Make SDPA inside of a module see all tokens: `parallelize_module(attention, mesh["cp"], ContextParallel())`.

    The module form of `context_parallel`. The module's forward opens its own context whenever it runs: under any
    activation checkpointing, after any context, in any thread. It does not shard inputs: pass shards, for example of
    `context_parallel_shard`. A DTensor sharded along the sequence has local parts in the layout `Contiguous()`.

    The module's `state_dict` is unchanged. Copy it by `copy.deepcopy`: after `copy.copy`, the copy computes with the
    parameters of the original. It cannot be pickled.

    Args:
        method, debug, options: as for `context_parallel_attention`.
        mask, layout: as there, for all attention inside; None takes that of the context (or module) around the call.
            Pass both if recomputation by other means than `torch.utils.checkpoint` may run after that context.
        rotate_method: as there; None takes the process default when parallelize_module is called.
        seq_len: the global length that attention runs over, or a tuple of several; trusted, as those of a context are.
            Of another length, all ranks have equally many tokens.
        sinks: as there, a tensor, or the name of the module's attribute that is read at each call: `sinks="sinks"` for
            `self.sinks = nn.Parameter(...)`. None takes the sinks of the context around the call. Not in compiled
            code: call `context_parallel_attention(sinks=...)` there.

    Raises:
        TypeError, ValueError: unknown options, `sinks` that is no tensor or name. From parallelize_module: arguments
            that do not fit, a mesh that is neither one axis nor two that share the sequence, a module that has the
            style already, a name in `sinks` that is no attribute.
        NotImplementedError: from parallelize_module, layers of transformers that see this rank's shard only.

    Two ranks, 8 tokens, one head of width 16; each rank passes 4 tokens:

        attention = parallelize_module(attention, init_device_mesh("cpu", (2,)), ContextParallel(layout=Contiguous()))
        out = attention(x[:, 4 * rank : 4 * rank + 4])
    """

    @takes_options("mesh", *OF_CALLS)
    def __init__(
        self, *, seq_len: int | tuple[int, ...] | None = None, sinks: torch.Tensor | str | None = None,
        **options: Unpack[ContextOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_unknown("ContextParallel", options, OF_CONTEXTS)
        self._options, self._seq_len = options, seq_len
        self._inherits = {name: options.get(name) is None for name in ("layout", "mask")}
        named: dict[str, object] = {} if sinks is None else {"sinks": sinks}
        self._beside = {name: x if isinstance(x, str) else checked_of_heads(name, x) for name, x in named.items()}

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        if isinstance(module.forward, _ContextForward):
            raise ValueError(f"{type(module).__name__} is context parallel already")
        for name, given in self._beside.items():
            if isinstance(given, str) and not hasattr(module, given):
                raise ValueError(f"expected {name} to name an attribute of {type(module).__name__}, got {given!r}")
        call = Call.of(device_mesh, **self._options)
        call = replace(call, lengths=checked_lengths(call.layout, self._seq_len))
        has_replaced_layers = True in [hook.module(module) for hook in loaded_hooks()]  # all of them are called
        module.forward = _ContextForward(
            module, module.forward, call, self._beside, self._inherits, has_replaced_layers
        )
        return module


@dataclass(eq=False, repr=False)
class _ContextForward:
    """Forward of a module in a context; an object, not a closure, so that a copy of the module has its own."""

    module: nn.Module
    forward: Callable[..., Any]
    """The module's own."""
    call: Call
    beside: dict[str, torch.Tensor | str]
    """As those of a context, or the names of the module's attributes."""
    inherits: dict[str, bool]
    """`layout` and `mask`: True if the context around a call decides."""
    has_replaced_layers: bool
    """True if functions of layers are replaced, which lasts as long as this object."""

    def __post_init__(self) -> None:
        self._context = OpenContext(self.call, is_constant=True)
        self._key = self._context.key
        # Compiled code depends on the redirection of FlexAttention, so it stays as long as the module.
        weakref.finalize(self, flex_redirection.held().close)
        if self.has_replaced_layers:
            weakref.finalize(self, hooks_held().close)
        functools.update_wrapper(self, self.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if self.has_replaced_layers:
                raise NotImplementedError(
                    f"{type(self.module).__name__} with ContextParallel has a layer that mixes or counts tokens (a "
                    "convolution, a recurrence, positions), which compiled code would run on this rank's shard alone: "
                    "compile it inside of context_parallel instead"
                )
            inherits = self.inherits
            key = _key_in_trace(self._key, inherits["layout"], inherits["mask"], tuple(self.beside))
            if not key:
                return self.forward(*args, **kwargs)
            # Code is compiled for the key; the context is entered when the captured forward is traced further.
            _torch.begin_traced_scope(key)  # FlexAttention is redirected while Dynamo traces forward
            try:
                return _torch.traced_inside(functools.partial(_in_context_of, key), self.forward, *args, **kwargs)
            finally:
                _torch.end_traced_scope()
        return _run_in_context(self._context_of_call(), False, self.forward, *args, **kwargs)

    def _context_of_call(self) -> OpenContext:
        call = inherited("ContextParallel", self.call, **self.inherits)
        # Compiled code inside asks for what is inherited.
        context = self._context if call == self.call else OpenContext(replace(call, in_context=True))
        beside = {} if self.beside else _inherited_beside(call.ranks)
        for name, given in self.beside.items():
            beside[name] = checked_of_heads(name, getattr(self.module, given)) if isinstance(given, str) else given
        return replace(context, beside=beside) if beside else context

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self.module).__name__} with ContextParallel cannot be pickled, since it holds process groups: "
            "save its state_dict(), and parallelize the module that is made to load it"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _ContextForward:
        # The call is shared: it holds process groups and no tensors.
        return _ContextForward(
            copy.deepcopy(self.module, memo), copy.deepcopy(self.forward, memo), self.call,
            copy.deepcopy(self.beside, memo), self.inherits, self.has_replaced_layers,
        )  # fmt: skip


def _inherited_beside(ranks: SequenceRanks) -> dict[str, torch.Tensor]:
    """Return the tensors of the context around a call, if that is over these ranks."""
    outer = innermost()
    if outer is None or not outer.beside or not outer.call.ranks.shares_sequence_with(ranks):
        return {}
    current()  # refuses a backward that may not belong to the context
    return {**outer.beside}


@_torch.constant_in_trace
def _key_in_trace(key: str, inherits_layout: bool, inherits_mask: bool, beside: tuple[str, ...]) -> str:
    """Return the key of a module's call with what it inherits; "" if compiled code asks the context around it."""
    call = call_of(key)
    refuse_beside(beside or _inherited_beside(call.ranks), "a compiled module with ContextParallel")
    call = inherited("ContextParallel", call, layout=inherits_layout, mask=inherits_mask, traced=True)
    if not call.context:
        return call.key
    context = innermost()
    if context is not None and context.asked_later(replace(call, in_context=True)) != context.inside(None, traced=True):
        others = ", ".join(sorted(OF_CONTEXTS - {"layout", "mask"}))
        raise NotImplementedError(
            "ContextParallel got layout=None and mask=None in compiled code inside of a context whose mask or layout "
            f"may differ at the next call, and other options than the context: pass the context's ({others}), or "
            "layout= and mask= (Full() for none)"
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
