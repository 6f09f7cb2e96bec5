"""Reversible patches of torch's Python code."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

NON_REENTRANT = "_checkpoint_without_reentrant_generator"
"""The function behind `torch.utils.checkpoint(use_reentrant=False)`; from torch 2.14 on this name is only a shim."""
if hasattr(torch.utils.checkpoint, f"{NON_REENTRANT}_impl"):
    NON_REENTRANT += "_impl"


_MISSING = object()


@contextmanager
def _replaced(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> Iterator[None]:
    """Write a value; on exit write what was before, unless other code has written since. `_MISSING` is no value."""
    before = read()
    write(value)
    try:
        yield
    finally:
        if read() is value:
            write(before)


def attribute_replaced(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """Set an attribute of a class or module while open, unless other code replaces it meanwhile."""

    def write(value: Any) -> None:
        delattr(owner, name) if value is _MISSING else setattr(owner, name, value)

    return _replaced(lambda: vars(owner).get(name, _MISSING), write, value)


def entry_replaced(table: dict[Any, Any], key: Any, value: Any) -> AbstractContextManager[None]:
    """Set an entry of a table (None removes it) while open, unless other code changes it meanwhile."""

    def write(value: Any) -> None:
        table.pop(key, None) if value is _MISSING else table.update({key: value})

    return _replaced(lambda: table.get(key, _MISSING), write, _MISSING if value is None else value)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> AbstractContextManager[None]:
    """Make calls of a function `owner.name`, while open, `around(original, *args, **kwargs)`."""
    before = vars(owner)[name]
    is_static = isinstance(before, staticmethod)
    original = before.__func__ if is_static else before

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return attribute_replaced(owner, name, staticmethod(call) if is_static else call)


@contextmanager
def checkpointed_functions_bound(bind: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Make `torch.utils.checkpoint`, in either mode, run `bind(function)` instead of its function while open.

    The recompute in backward then runs the bound function too, at any time and in any thread.
    """
    module = torch.utils.checkpoint

    def reentrant(original: Callable[..., Any], ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return original(ctx, bind(function), *args)

    def non_reentrant(original: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(bind(fn), *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(wrapped(module.CheckpointFunction, "forward", reentrant))
        # torch's composable checkpoint imports the generator by name.
        for user in (module, sys.modules.get("torch.distributed._composable.checkpoint_activation")):
            if user is not None:
                stack.enter_context(wrapped(user, NON_REENTRANT, non_reentrant))
        yield


def hooks_detached(is_replaced_later: Callable[[Any], bool]) -> AbstractContextManager[None]:
    """Make hooks of saved tensors that are pushed while open keep aliases of some tensors.

    Hooks get the Python object that is saved, and many keep it: a checkpoint's recompute, or `save_on_cpu` of tensors
    on the CPU. Hooks that are pushed before or in other threads are for `present_hooks_detached`.

    Args:
        is_replaced_later: True for tensors whose Python objects will have other contents.
    """

    def enter(_original: Callable[..., None], self: Any) -> None:
        _push_hooks(is_replaced_later, self.pack_hook, self.unpack_hook)

    return wrapped(torch.autograd.graph.saved_tensors_hooks, "__enter__", enter)


@contextmanager
def present_hooks_detached(is_replaced_later: Callable[[Any], bool]) -> Iterator[None]:
    """Make the hooks of saved tensors that this thread has on entry keep aliases of some tensors while open.

    See `hooks_detached`. Hooks that are pushed meanwhile may stay longer.
    """
    hooks = torch._C._autograd
    present = hooks._top_saved_tensors_default_hooks(True)
    ours = None if present is None else _push_hooks(is_replaced_later, *present)
    try:
        yield
    finally:
        later = []
        while ours is not None:
            pack, unpack = hooks._top_saved_tensors_default_hooks(True)
            hooks._pop_saved_tensors_default_hooks()
            if pack is ours:
                break
            later.append((pack, unpack))
        for pair in reversed(later):
            hooks._push_saved_tensors_default_hooks(*pair)


class _PackAlias:
    """Hook that packs aliases. Its attributes are those of `pack`: torch marks the hooks of checkpoints by them."""

    def __init__(self, is_replaced_later: Callable[[Any], bool], pack: Callable[..., Any]) -> None:
        self._is_replaced_later, self._pack = is_replaced_later, pack

    def __call__(self, tensor: torch.Tensor) -> Any:
        if self._is_replaced_later(tensor):
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        return self._pack(tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pack, name)


def _push_hooks(is_replaced_later: Callable[[Any], bool], pack: Callable[..., Any], unpack: Callable[..., Any]) -> Any:
    """Push hooks of saved tensors that pack aliases; return the hook that packs."""
    # Hooks that are graphs are part of compiled code, which is compiled again for other objects.
    ours = pack if isinstance(pack, torch.nn.Module) else _PackAlias(is_replaced_later, pack)
    torch._C._autograd._push_saved_tensors_default_hooks(ours, unpack)
    return ours


@contextmanager
def lower_right_bias_redirected(redirect: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Redirect SDPA with a `causal_lower_right` of unequal lengths as its mask to `redirect(original)` while open.

    The module of such biases, which loads Dynamo, is not loaded here: if the program has not, it has no such bias.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    if module is None:
        yield
        return

    def dispatch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bias = kwargs["attn_mask"] if "attn_mask" in kwargs else args[3]
        is_triangle = bias.variant != module.CausalVariant.LOWER_RIGHT or bias.seq_len_q == bias.seq_len_kv
        return (original if is_triangle else redirect(original))(*args, **kwargs)

    with wrapped(module.CausalBias, "_dispatch", dispatch):
        yield


@contextmanager
def multihead_attention_ends_in_sdpa(check: Callable[[bool, bool], None]) -> Iterator[None]:
    """Make `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take the path that calls SDPA while open.

    Their fused inference path computes attention in one opaque op. With `need_weights` they do not call SDPA at all.

    Args:
        check: called with `need_weights`, and with True if keys are appended (`add_bias_kv`, `add_zero_attn`); it may
            raise.
    """

    signature = inspect.signature(torch.nn.functional.multi_head_attention_forward)

    def checked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        extra_keys = call.arguments["bias_k"] is not None or call.arguments["add_zero_attn"]
        check(call.arguments["need_weights"], extra_keys)
        return original(*args, **kwargs)

    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with wrapped(torch.nn.functional, "multi_head_attention_forward", checked):
            yield
    finally:
        if not torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def module_buffers_broadcast_but(is_left_out: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Keep `DistributedDataParallel` from broadcasting buffers for which `is_left_out` returns True while open.

    It broadcasts rank 0's buffers when it is made and, by default, at every forward pass.
    """
    module = torch.nn.parallel.distributed

    signature = inspect.signature(module._sync_module_states)

    def leaving_out(
        original: Callable[..., None], self: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        others = [tensor for tensor in tensors if not is_left_out(tensor)]
        if others:
            original(self, others, *args, **kwargs)

    def ignoring(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs).arguments
        ignored = call["params_and_buffers_to_ignore"]
        named = (*call["module"].named_parameters(), *call["module"].named_buffers())
        call["params_and_buffers_to_ignore"] = {name for name, x in named if name in ignored or is_left_out(x)}
        original(**call)

    with (
        wrapped(module.DistributedDataParallel, "_distributed_broadcast_coalesced", leaving_out),
        wrapped(module, "_sync_module_states", ignoring),
    ):
        yield
