"""SDPA's enabled backends, and overrides of SDPA and of `varlen_attn` in torch's dispatcher."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch._library.autograd import make_autograd_impl
from torch.nn.attention import SDPBackend

from cp_dtensor._torch.dtensor import bound_arguments

_BACKEND_NAMES = {value.value: name for name, value in SDPBackend.__members__.items()}
_DEFAULT_PRIORITY = list(torch._C._get_sdp_priority_order())


SDPA_BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def enabled_sdpa_backends() -> tuple[bool, ...]:
    """For each of `SDPA_BACKENDS`, True if `sdpa_kernel` and the `torch.backends.cuda` flags allow it."""
    flags = torch.backends.cuda
    return (
        flags.cudnn_sdp_enabled(), flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(),
        flags.math_sdp_enabled(),
    )  # fmt: skip


def user_sdpa_priority() -> list[str] | None:
    """Backend names in the order that the user asked for, None if the order is torch's own."""
    order = torch._C._get_sdp_priority_order()
    return None if order == _DEFAULT_PRIORITY else [_BACKEND_NAMES[value] for value in order]


def activated_flash_attention() -> str | None:
    """The implementation of torch's flash attention that the user has activated, such as "FA3"; None for its own."""
    name: str | None = torch.nn.attention.current_flash_attention_impl()
    return name


FUSED_SDPA_OPS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
# Autograd keys serve ordinary calls; the backend keys serve calls in inference mode, which skip autograd.
_SDPA_KEYS = (
    "AutogradCPU", "AutogradCUDA", "CPU", "CUDA",
    "AutogradNestedTensor", "NestedTensorCPU", "NestedTensorCUDA",
)  # fmt: skip
# torch.vmap decomposes SDPA above these keys.
_VMAP_KEY = "FuncTorchVmapMode"


@contextmanager
def sdpa_overridden(
    kernel: Callable[..., torch.Tensor], under_vmap: Callable[..., torch.Tensor]
) -> Iterator[None]:  # fmt: skip
    """While open, kernels in torch's dispatcher compute every scaled_dot_product_attention.

    Args:
        kernel: for calls outside of torch.vmap.
        under_vmap: for calls inside of torch.vmap, even if none of their arguments is batched.
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
    """torch warns once in a process when a kernel of its own is overridden; that one warning is suppressed here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        library.impl("scaled_dot_product_attention", original_sdpa, _VMAP_KEY)
        library._destroy()


def math_sdpa(call: Any) -> torch.Tensor:
    """Computes SDPA in plain operations; `call` has the arguments as attributes."""
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(
        call.q, call.k, call.v, call.attn_mask, call.dropout_p, call.is_causal,
        scale=call.scale, enable_gqa=call.enable_gqa,
    )  # fmt: skip
    return out


def original_sdpa(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Computes SDPA as torch does without the override, for every kind of tensor."""
    return _SDPA.decompose(*args, **kwargs)


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
def varlen_attn_overridden(attend: VarlenHandler, attend_into: VarlenHandler) -> Iterator[None]:
    """While open, calls a handler before torch computes a `varlen_attn`, also in captured programs.

    Args:
        attend: returns (out, lse, random state), as the operator does.
        attend_into: handler of the operator that writes into a tensor `out`.
    """
    library = torch.library.Library("torch_attn", "IMPL")
    for name, handler in zip(_VARLEN_OPS, (attend, attend_into), strict=True):
        for key in _VARLEN_AUTOGRAD_KEYS:
            library.impl(name, partial(_varlen_with_autograd, name, handler), key, with_keyset=True)
        library.impl(name, partial(_varlen_without_autograd, name, handler), _BEFORE_BACKENDS, with_keyset=True)
    _clear_varlen_caches()
    try:
        yield
    finally:
        library._destroy()
        _clear_varlen_caches()


def _clear_varlen_caches() -> None:
    """Clears the caches of torch's dispatcher in Python, which traces."""
    for name in _VARLEN_OPS:
        if hasattr(torch.ops.torch_attn, name):
            _varlen_op(name)._dispatch_cache.clear()


def _varlen_with_autograd(name: str, handler: VarlenHandler, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    result = handler(bound_arguments(_varlen_op(name), args, kwargs))
    return _original_varlen(name)(keyset, *args, **kwargs) if result is None else result


def _varlen_without_autograd(name: str, handler: VarlenHandler, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    result = handler(bound_arguments(_varlen_op(name), args, kwargs))
    return _varlen_op(name).redispatch(keyset & _BACKEND_KEYS, *args, **kwargs) if result is None else result


@lru_cache(maxsize=2)
def _original_varlen(name: str) -> Callable[..., Any]:
    """Returns torch's own autograd kernel."""
    return make_autograd_impl(_varlen_op(name), getattr(sys.modules["torch.nn.attention.varlen"], name))


def _varlen_op(name: str) -> Any:
    return getattr(torch.ops.torch_attn, name).default
