"""Torch's attention: enabled backends, overrides of SDPA, `varlen_attn` and `flex_attention`, and `BlockMask`."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import FlexAttentionHOP
from torch._library.autograd import make_autograd_impl
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from cp_dtensor._torch.compiler import when_loaded
from cp_dtensor._torch.patches import attribute_replaced, entry_replaced, wrapped

_BACKEND_NAMES = {value.value: name for name, value in SDPBackend.__members__.items()}
_DEFAULT_PRIORITY = list(torch._C._get_sdp_priority_order())


SDPA_BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def enabled_sdpa_backends() -> tuple[bool, ...]:
    """Return, for each of `SDPA_BACKENDS`, whether `sdpa_kernel` and the `torch.backends.cuda` flags allow it."""
    cuda = torch.backends.cuda
    return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def user_sdpa_priority() -> list[str] | None:
    """Return backend names in the order that the user asked for, None if the order is torch's own.

    On Hopper and datacenter Blackwell the first SDPA of a process makes cuDNN the first backend of torch's own order.
    """
    order = torch._C._get_sdp_priority_order()
    if order == _DEFAULT_PRIORITY:
        return None
    names = [_BACKEND_NAMES[value] for value in order]
    return None if [name for name in names if name in SDPA_BACKENDS] == [*SDPA_BACKENDS] else names


FUSED_SDPA_OPS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_DTENSORS: Any = DTensor._op_dispatcher
# Autograd keys serve ordinary calls; the backend keys serve calls in inference mode, which skip autograd.
_SDPA_KEYS = (
    "AutogradCPU", "AutogradCUDA", "CPU", "CUDA",
    "AutogradNestedTensor", "NestedTensorCPU", "NestedTensorCUDA",
)  # fmt: skip
# torch.vmap decomposes SDPA above these keys.
_VMAP_KEY = "FuncTorchVmapMode"


@contextmanager
def sdpa_overridden(kernel: Callable[..., torch.Tensor], under_vmap: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Compute every scaled_dot_product_attention by a kernel in torch's dispatcher while open.

    Calls inside of torch.vmap are computed by `under_vmap`, even if none of their arguments is batched.
    """
    _suppress_override_warning()
    library = torch.library.Library("aten", "IMPL")
    for key in _SDPA_KEYS:
        library.impl("scaled_dot_product_attention", kernel, key)
    library.impl("scaled_dot_product_attention", under_vmap, _VMAP_KEY)
    _SDPA._dispatch_cache.clear()  # of torch's dispatcher in Python, which traces
    try:
        yield
    finally:
        library._destroy()
        _SDPA._dispatch_cache.clear()


@lru_cache(maxsize=1)
def _suppress_override_warning() -> None:
    """Suppress the warning that torch gives once in a process when a kernel of its own is overridden."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        library.impl("scaled_dot_product_attention", original_sdpa, _VMAP_KEY)
        library._destroy()


def dtensor_sdpa_handled(sdpa: Callable[..., torch.Tensor]) -> AbstractContextManager[None]:
    """Make DTensor, while open, compute SDPA by a function. In inference mode torch brings SDPA itself to DTensor."""
    return entry_replaced(_DTENSORS._custom_op_handlers, _SDPA, lambda _op, args, kwargs: sdpa(*args, **kwargs))


def original_sdpa(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute SDPA as torch does without the override, for every kind of tensor."""
    return _SDPA.decompose(*args, **kwargs)


def jagged_sdpa_checked(check: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `check`, which may raise, while open, before SDPA of jagged tensors, which the dispatcher never sees."""
    name = "jagged_scaled_dot_product_attention"

    def change(module: types.ModuleType) -> AbstractContextManager[None]:
        return wrapped(module, name, partial(_checked, check)) if hasattr(module, name) else nullcontext()

    return when_loaded("torch.nested._internal.ops", change)


# `varlen_attn`, torch's attention of packed documents
#
# Its module loads Dynamo, so it is not loaded here: a kernel may be registered before its operator.

VarlenHandler = Callable[[dict[str, Any]], Any]
"""Gets all arguments by name. Returns the result of the call, or None, in which case torch computes it."""

# Autograd keys serve ordinary calls. Calls in inference mode skip them and pass the key before all backends, at which
# torch has no kernel, so that kernels of backends stay as they are.
_VARLEN_AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA")
_BEFORE_BACKENDS = "BackendSelect"
_BACKEND_KEYS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_VARLEN_OPS = ("_varlen_attn", "_varlen_attn_out")  # the latter from torch 2.13 on


@contextmanager
def varlen_attn_overridden(handler: VarlenHandler) -> Iterator[None]:
    """Call a handler, while open, before torch computes a `varlen_attn`, also in captured programs.

    It returns (out, lse, random state), as the operator does. A call that has an argument `out` writes into it.
    """
    library = torch.library.Library("torch_attn", "IMPL")
    for name in _VARLEN_OPS:
        for key in (*_VARLEN_AUTOGRAD_KEYS, _BEFORE_BACKENDS):
            kernel = partial(_varlen, name, handler, key in _VARLEN_AUTOGRAD_KEYS)
            library.impl(name, kernel, key, with_keyset=True)
    _clear_varlen_caches()
    try:
        yield
    finally:
        library._destroy()
        _clear_varlen_caches()


def _clear_varlen_caches() -> None:
    """Make torch's dispatcher in Python, which is used while code is traced, find the kernels anew."""
    for name in _VARLEN_OPS:
        if hasattr(torch.ops.torch_attn, name):
            _varlen_op(name)._dispatch_cache.clear()


def _varlen(name: str, handler: VarlenHandler, has_autograd: bool, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a call by the handler or, where it returns None, by the kernel that torch would have taken."""
    op = _varlen_op(name)
    result = handler(_bound_arguments(op, args, kwargs))
    if result is not None:
        return result
    if has_autograd:
        return _original_varlen(name)(keyset, *args, **kwargs)
    return op.redispatch(keyset & _BACKEND_KEYS, *args, **kwargs)


@lru_cache(maxsize=2)
def _original_varlen(name: str) -> Callable[..., Any]:
    """Return torch's autograd kernel of an operator, which ours replaces at the autograd keys."""
    return make_autograd_impl(_varlen_op(name), getattr(sys.modules["torch.nn.attention.varlen"], name))


def _bound_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an op's arguments by name, defaults included."""
    arguments = {argument.name: argument.default_value for argument in op._schema.arguments}
    arguments.update(zip(arguments, args, strict=False))
    return {**arguments, **kwargs}


def _varlen_op(name: str) -> Any:
    return getattr(torch.ops.torch_attn, name).default


# Torch's own context parallelism

_TORCHS = "torch.distributed.tensor.experimental"


def torchs_context_parallel_is_open() -> bool:
    """Return True while torch's own `context_parallel`, or its dispatcher, is open in this process."""
    handler = _DTENSORS._custom_op_handlers.get(FUSED_SDPA_OPS[0])
    return str(getattr(handler, "__module__", "")).startswith(_TORCHS)


def torchs_modules_checked(check: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `check`, which may raise, while open, before torch's `_ContextParallel` makes DTensors of shards.

    Modules have its methods as hooks, bound before. All of these read the sequence dim, which is a property while open.
    """

    def read(self: Any) -> Any:
        check()
        return vars(self)["seq_dim"]

    def write(self: Any, value: Any) -> None:
        vars(self)["seq_dim"] = value

    def change(module: types.ModuleType) -> AbstractContextManager[None]:
        style = getattr(module, "_ContextParallel", None)
        if getattr(style, "__module__", None) != module.__name__:  # other code has replaced it
            return nullcontext()
        return attribute_replaced(style, "seq_dim", property(read, write))

    return when_loaded(f"{_TORCHS}._context_parallel._attention", change)


# FlexAttention

WHOLE_BLOCK: int = flex._LARGE_SPARSE_BLOCK_SIZE
"""The block size of a mask that is a single block, whatever the lengths."""


def _copied(function: types.FunctionType) -> types.FunctionType:
    """Copy a function; the copy keeps its code when the code of the original is replaced."""
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_public: Any = flex.flex_attention
original_flex_attention: Callable[..., Any] = _copied(_public)
"""FlexAttention of whole tensors, never redirected."""


def _redirected(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
    enable_gqa: Any = False, return_lse: Any = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    # This code runs with the globals of torch's flex. Dynamo, which traces it, expects the original's parameters.
    from cp_dtensor._torch.attention import redirection

    return redirection.call(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux=return_aux
    )


FLEX_ATTENTION_IS_KNOWN = (
    list(signature(_redirected).parameters) == list(signature(_public).parameters) and not _public.__closure__
)
"""True if the installed `flex_attention` has the parameters that `_redirected` has."""


class _Redirection:
    """The handler of redirected calls."""

    handler: Callable[..., Any] | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the handler, or torch's function if another thread has just removed the last handler."""
        handler = self.handler
        return original_flex_attention(*args, **kwargs) if handler is None else handler(*args, **kwargs)


redirection = _Redirection()


@contextmanager
def flex_attention_redirected(handler: Callable[..., Any]) -> Iterator[None]:
    """Redirect calls of `flex_attention` while open to `handler`, which takes the same arguments.

    The code of the function is replaced, so earlier imports are redirected too, and Dynamo traces into the handler.
    """
    if not FLEX_ATTENTION_IS_KNOWN:
        yield
        return
    before, redirection.handler = redirection.handler, handler
    code, ours = _public.__code__, _redirected.__code__
    _public.__code__ = ours
    try:
        yield
    finally:
        if _public.__code__ is ours:
            _public.__code__ = code
        redirection.handler = before


def flex_attention_is_redirected() -> bool:
    """Return whether calls of `flex_attention`, also those that Dynamo traces, go to a handler."""
    return _public.__code__ is _redirected.__code__ and redirection.handler is not None


def captured_flex_attention_checked(check: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `check`, which may raise, while open, when FlexAttention that Dynamo captured is run or traced."""
    return wrapped(FlexAttentionHOP, "__call__", partial(_checked, check))


def _checked(check: Callable[[], None], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    check()
    return original(*args, **kwargs)


def with_write_order_like(mask: BlockMask, whole: Any) -> BlockMask:
    """Give the mask of some rows an order of the writes to dQ in backward if the whole has one; refuse a tensor."""
    if getattr(whole, "dq_write_order", None) is None:  # torch 2.11 has none
        return mask
    if whole.dq_kv_order is not None:
        raise NotImplementedError(
            "a block mask with an explicit dq_kv_order is not supported on sequence shards: got a tensor of shape "
            f"{tuple(whole.dq_kv_order.shape)}, expected a bool or None"
        )
    ordered: Any = mask
    ordered.dq_write_order, ordered.dq_write_order_full = flex._compute_dq_write_order_from_block_mask(
        mask, dq_kv_order=whole.dq_kv_order_spt
    )
    ordered.dq_kv_order_spt = whole.dq_kv_order_spt
    return mask
