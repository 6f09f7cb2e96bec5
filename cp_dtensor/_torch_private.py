"""The one door to torch's private symbols. Everything that depends on torch's version is decided here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# --------------------------------------------------------------------------------------------------------------------
# Collectives that were renamed in torch 2.13

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether collectives of CPU tensors run on this group."""
    return any(device.type == "cpu" for device in group._device_types)


# --------------------------------------------------------------------------------------------------------------------
# SDPA backend selection

_BACKEND_NAMES = {int(value): name for name, value in torch.nn.attention.SDPBackend.__members__.items()}
_DEFAULT_PRIORITY = list(torch._C._get_sdp_priority_order())


def sdpa_backend_enabled(name: str) -> bool:
    """Whether `sdpa_kernel` or the `torch.backends.cuda` flags allow a backend."""
    flags = torch.backends.cuda
    enabled = {
        "MATH": flags.math_sdp_enabled,
        "FLASH_ATTENTION": flags.flash_sdp_enabled,
        "EFFICIENT_ATTENTION": flags.mem_efficient_sdp_enabled,
        "CUDNN_ATTENTION": flags.cudnn_sdp_enabled,
    }
    return enabled[name]()


def user_sdpa_priority() -> list[str] | None:
    """Backend names in the order that the user asked for, None if the order is torch's own."""
    order = list(torch._C._get_sdp_priority_order())
    return None if order == _DEFAULT_PRIORITY else [_BACKEND_NAMES[value] for value in order]


# --------------------------------------------------------------------------------------------------------------------
# Thread-local state that autograd carries over to the threads that run a backward


def get_thread_local(key: str) -> Any:
    """The object stored under `key` in this thread, or, inside of a backward, in the thread that called it."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def set_thread_local(key: str, value: Any) -> None:
    """Stores an object for `get_thread_local`."""
    torch._C._stash_obj_in_tls(key, value)
