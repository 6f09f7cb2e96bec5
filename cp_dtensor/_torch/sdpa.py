"""Which SDPA backends are allowed, and overriding SDPA in torch's dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend

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
# torch.vmap takes SDPA apart above these.
_VMAP_KEY = "FuncTorchVmapMode"


def override_sdpa(kernel: Callable[..., torch.Tensor], under_vmap: Callable[..., torch.Tensor]) -> Callable[[], None]:
    """Has torch's dispatcher call a kernel for every scaled_dot_product_attention, however it was imported.

    Args:
        kernel: for calls outside of torch.vmap.
        under_vmap: for those inside, also where nothing that they take is batched.

    Returns:
        a function that takes the override back.
    """
    _has_warned_of_overrides()
    library = torch.library.Library("aten", "IMPL")
    for key in _SDPA_KEYS:
        library.impl("scaled_dot_product_attention", kernel, key)
    library.impl("scaled_dot_product_attention", under_vmap, _VMAP_KEY)
    _SDPA._dispatch_cache.clear()  # of torch's dispatcher in Python, which traces

    def take_back() -> None:
        library._destroy()
        _SDPA._dispatch_cache.clear()

    return take_back


@lru_cache(maxsize=1)
def _has_warned_of_overrides() -> None:
    """torch says once in a process that a kernel of its own is overridden, as the one under vmap is: not for us."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        library.impl("scaled_dot_product_attention", original_sdpa, _VMAP_KEY)
        library._destroy()


def math_sdpa(call: Any) -> torch.Tensor:
    """SDPA in plain operations; `call` has the arguments as attributes."""
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(
        call.q, call.k, call.v, call.attn_mask, call.dropout_p, call.is_causal,
        scale=call.scale, enable_gqa=call.enable_gqa,
    )  # fmt: skip
    return out


def original_sdpa(*args: Any, **kwargs: Any) -> torch.Tensor:
    """What torch does without an override, for every kind of tensor."""
    return _SDPA.decompose(*args, **kwargs)
