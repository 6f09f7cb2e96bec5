"""Context parallelism as a property of a module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from cp_dtensor import _torch
from cp_dtensor.api.active_context import CAPTURED_BEFORE, ActiveContext
from cp_dtensor.api.left_out import refuse_left_out
from cp_dtensor.api.patches import entered
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.engine.compiled_spec import CompiledCallSpec, call_spec_of
from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.engine.validation import (
    Mesh,
    checked_layout,
    checked_length,
    checked_mask,
    checked_method,
    refuse_other_lengths,
)
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask


class ContextParallel(ParallelStyle):
    """`parallelize_module(attention, mesh["cp"], ContextParallel())`: SDPA inside of `attention` sees all tokens.

    The module form of `context_parallel`. It belongs to the module, so it holds whenever and wherever its forward
    runs: in a recompute under any activation checkpointing, after any context, in any thread. It does not shard
    inputs; pass it shards, from `context_parallel_shard` say. Of a DTensor sharded along the sequence, the local part
    is one in the layout `Contiguous()`. Copy the module by `copy.deepcopy`: what `copy.copy` makes computes with the
    parameters of the original, as it does of any module whose `forward` was replaced. It cannot be pickled; its
    `state_dict` is that of the module without it.

    Args:
        method: "ring", "ulysses", "hybrid" or "auto" (see `context_parallel_attention`).
        mask: which query may see which key in all attention inside, by global position, if it is always the same; with
            a call's `is_causal` and `attn_mask` (see `context_parallel`), what all of them show.
        layout: which rank owns which tokens, `HeadTail()` if None. Inside of a context (or a module) over these ranks
            that has another layout, calls of a module without one are refused, as those without a mask are if it has a
            mask; `mask=Full()` says that it is not to hold.
        rotate_method: "auto", "symm_mem", "allgather" or "alltoall" (see `set_rotate_method`); the process default (at
            the time of parallelize_module) if None.
        seq_len: global number of tokens, if it is always the same. It saves an exchange, and checks nothing: on GPUs,
            without it and for other lengths, the ranks exchange their local lengths in one small collective per call;
            on CPUs they always do.
        debug: at every attention call, let the ranks compare what must agree; a disagreement names the rank.

    Raises:
        TypeError, ValueError: arguments that do not fit, when it is made; from parallelize_module, a mesh that is
            neither one axis nor two that share the sequence, or a module that has the style already.
    """

    def __init__(
        self,
        *,
        method: str = "auto",
        mask: Mask | None = None,
        layout: Layout | None = None,
        rotate_method: str | None = None,
        seq_len: int | None = None,
        debug: bool = False,
    ) -> None:
        super().__init__()
        self._layout = layout
        checked_layout(layout)
        self._method = checked_method(method)
        self._mask = None if mask is None else checked_mask(mask, False)
        self._rotate_method = rotate_method
        transport_by_name(rotate_method)  # refuses unknown names here already
        self._lengths = None if seq_len is None else (checked_length(seq_len),)
        self._debug = debug
        if seq_len is not None:
            refuse_other_lengths(checked_layout(layout), seq_len, "seq_len")

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        if isinstance(module.forward, _ContextForward):
            raise ValueError(f"{type(module).__name__} is context parallel already")
        settings = AttentionConfig.of(device_mesh, self._method, self._layout, self._rotate_method, debug=self._debug)
        context = ActiveContext(replace(settings, declared_lengths=self._lengths, mask=self._mask))
        module.forward = _ContextForward(
            module, vars(module).get("forward"), context, _Said(self._layout is not None, self._mask is not None)
        )
        return module


@dataclass(frozen=True)
class _Said:
    """What the caller has said, rather than left to its default."""

    layout: bool
    mask: bool


class _ContextForward:
    """A module's forward, run in a region. An object and not a closure, so that a copy of the module has its own."""

    def __init__(
        self,
        module: nn.Module,
        replaced: Callable[..., Any] | None,
        context: ActiveContext,
        said: _Said,
    ) -> None:
        self._module = module
        self._replaced = replaced  # a forward that the module had as an instance attribute before
        self._context = context
        self._said = said
        self._token = context.ambient.key
        functools.update_wrapper(self, replaced or type(module).forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._replaced or self._module_forward
        if torch.compiler.is_dynamo_compiling():
            _refuse_left_out_of(self._token, self._said.layout, self._said.mask)
            # The token is what code is compiled for; the region itself is entered when what Dynamo captures of forward
            # is traced further.
            enter = functools.partial(_in_context_of, self._token)
            return _torch.traced_inside(enter, forward, *args, **kwargs)
        refuse_left_out("ContextParallel", self._context.settings.ranks, layout=self._said.layout, mask=self._said.mask)
        return _run_in_context(self._context, forward, *args, **kwargs)

    def _module_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._module).forward(self._module, *args, **kwargs)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self._module).__name__} with ContextParallel cannot be pickled, since it holds process groups: "
            "save its state_dict(), and parallelize the module that is made to load it"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _ContextForward:
        # The region is shared: it holds a process group and no tensors.
        return _ContextForward(
            copy.deepcopy(self._module, memo), copy.deepcopy(self._replaced, memo), self._context, self._said
        )


@_torch.constant_in_trace
def _refuse_left_out_of(token: str, layout: bool, mask: bool) -> None:
    call_spec = call_spec_of(token)
    assert isinstance(call_spec, CompiledCallSpec)
    refuse_left_out("ContextParallel", call_spec.settings().ranks, layout=layout, mask=mask)


def _in_context_of(token: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run in a region of the settings that `token` stands for."""
    call_spec = call_spec_of(token)
    assert isinstance(call_spec, CompiledCallSpec)
    return functools.partial(_run_captured, ActiveContext(call_spec.settings()), function)


@_torch.never_compiled
def _run_in_context(context: ActiveContext, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with entered(context):
        return function(*args, **kwargs)


@_torch.never_compiled
def _run_captured(context: ActiveContext, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `_run_in_context`, for code captured outside of the context: FlexAttention in it sees local shards only."""
    with entered(context), _torch.thread_state(CAPTURED_BEFORE, context):
        return function(*args, **kwargs)
