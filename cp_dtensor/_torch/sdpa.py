"""SDPA: enabled backends, and an override in torch's dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend

_BACKEND_NAMES = {value.value: name for name, value in SDPBackend.__members__.items()}
_DEFAULT_PRIORITY = list(torch._C._get_sdp_priority_order())


def sdpa_backend_enabled(name: str) -> bool:
    """Returns True if `sdpa_kernel` and the `torch.backends.cuda` flags allow a backend."""
    flags = torch.backends.cuda
    enabled = {
        "MATH": flags.math_sdp_enabled,
        "FLASH_ATTENTION": flags.flash_sdp_enabled,
        "EFFICIENT_ATTENTION": flags.mem_efficient_sdp_enabled,
        "CUDNN_ATTENTION": flags.cudnn_sdp_enabled,
    }
    return enabled[name]()


def user_sdpa_priority() -> list[str] | None:
    """Returns backend names in the order that the user has set, None if the order is torch's default."""
    order = list(torch._C._get_sdp_priority_order())
    return None if order == _DEFAULT_PRIORITY else [_BACKEND_NAMES[value] for value in order]


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
