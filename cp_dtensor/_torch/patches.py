"""Reversible patches of torch's Python code."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

NON_REENTRANT = "_checkpoint_without_reentrant_generator"
"""The function behind `torch.utils.checkpoint(use_reentrant=False)`; from torch 2.14 on this name is only a shim."""
if hasattr(torch.utils.checkpoint, f"{NON_REENTRANT}_impl"):
    NON_REENTRANT += "_impl"


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute by `make(original)`; on exit restores it unless other code has replaced it since."""
    original = vars(owner)[name]
    ours = make(original)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if vars(owner)[name] is ours:
            setattr(owner, name, original)


@contextmanager
def entry_replaced(table: dict[Any, Any], key: Any, value: Any) -> Iterator[None]:
    """Sets an entry of a table (None removes it); on exit restores it unless other code has changed it since."""
    missing = object()
    before = table.get(key, missing)
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
    try:
        yield
    finally:
        if table.get(key) is value:  # None if the entry was removed, and not set since
            if before is missing:
                table.pop(key, None)
            else:
                table[key] = before


@contextmanager
def checkpointed_functions_bound(bind: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While open, `torch.utils.checkpoint`, in either mode, runs `bind(function)` instead of its function.

    The recompute in backward then runs the bound function too, at any time and in any thread.
    """
    module = torch.utils.checkpoint

    def reentrant(original: staticmethod[..., Any]) -> staticmethod[..., Any]:
        def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            return original.__func__(ctx, bind(run_function), *args)

        return staticmethod(forward)

    def non_reentrant(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(bind(fn), *args, **kwargs)

        return generator

    with ExitStack() as stack:
        stack.enter_context(patched(module.CheckpointFunction, "forward", reentrant))
        # torch's composable checkpoint imports the generator by name.
        for user in (module, sys.modules.get("torch.distributed._composable.checkpoint_activation")):
            if user is not None:
                stack.enter_context(patched(user, NON_REENTRANT, non_reentrant))
        yield


@contextmanager
def lower_right_bias_redirected(redirect: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While open, SDPA with a `causal_lower_right` of unequal lengths as its mask goes to `redirect(original)`.

    The module of such biases, which loads Dynamo, is not loaded here: if the program has not, it has no such bias.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None:
        yield
        return

    def dispatch(original: staticmethod[..., Any]) -> staticmethod[..., Any]:
        redirected = redirect(original.__func__)

        def chosen(*args: Any, **kwargs: Any) -> Any:
            bias = kwargs["attn_mask"] if "attn_mask" in kwargs else args[3]
            is_triangle = bias.variant != module.CausalVariant.LOWER_RIGHT or bias.seq_len_q == bias.seq_len_kv
            return (original.__func__ if is_triangle else redirected)(*args, **kwargs)

        return staticmethod(chosen)

    with patched(module.CausalBias, "_dispatch", dispatch):
        yield


@contextmanager
def multihead_attention_ends_in_sdpa(check: Callable[[bool, bool], None]) -> Iterator[None]:
    """While open, `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take the path that calls SDPA.

    Their fused inference path computes attention in one opaque op. With `need_weights` they do not call SDPA at all.

    Args:
        check: called with `need_weights`, and with True if keys are appended (`add_bias_kv`, `add_zero_attn`); it may
            raise.
    """

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            extra_keys = call.arguments["bias_k"] is not None or call.arguments["add_zero_attn"]
            check(call.arguments["need_weights"], extra_keys)
            return original(*args, **kwargs)

        return multi_head_attention_forward

    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with patched(torch.nn.functional, "multi_head_attention_forward", checked):
            yield
    finally:
        if not torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def module_buffers_broadcast_but(is_left_out: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """While open, `DistributedDataParallel` does not broadcast buffers for which `is_left_out` returns True.

    It broadcasts rank 0's buffers when it is made and, by default, at every forward pass.
    """
    module = torch.nn.parallel.distributed

    def leaving_out(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def broadcast(self: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
            others = [tensor for tensor in tensors if not is_left_out(tensor)]
            if others:
                original(self, others, *args, **kwargs)

        return broadcast

    def ignoring(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def synchronize(*args: Any, **kwargs: Any) -> None:
            call = signature.bind(*args, **kwargs).arguments
            ignored = call["params_and_buffers_to_ignore"]
            named = (*call["module"].named_parameters(), *call["module"].named_buffers())
            call["params_and_buffers_to_ignore"] = {name for name, x in named if name in ignored or is_left_out(x)}
            original(**call)

        return synchronize

    with (
        patched(module.DistributedDataParallel, "_distributed_broadcast_coalesced", leaving_out),
        patched(module, "_sync_module_states", ignoring),
    ):
        yield
