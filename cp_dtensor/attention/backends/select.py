"""Choice of the backend that computes a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.tensors import TRITON_AVAILABLE
from cp_dtensor.attention.backends.aten import (
    CpuFlashAttention,
    CudnnAttention,
    EfficientAttention,
    FlashAttention,
    MathAttention,
)
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.interval import IntervalAttention, WideGradients
from cp_dtensor.attention.masked import MAX_HEAD_DIM
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.cache import lru_cached

_BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend for backend in (CudnnAttention(), FlashAttention(), EfficientAttention(), MathAttention())
}
_CPU_FLASH = CpuFlashAttention()
_INTERVALS = IntervalAttention()
_WIDE_GRADIENTS = WideGradients()

_HOPPER_ORDER = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
"""From compute capability 9.0 on. cuDNN is the fastest measured on H200."""
_DEFAULT_ORDER = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")


class Allowed(NamedTuple):
    """Process-wide SDPA settings, read in forward and used for its backward too."""

    enabled: tuple[bool, ...]
    """True for each backend of `_BACKENDS` that is enabled."""
    order: tuple[str, ...] | None
    """The user's order of preference, None without one."""
    deterministic: bool = False
    """True after `torch.use_deterministic_algorithms(True)`."""


def allowed_backends() -> Allowed:
    """Reads `sdpa_kernel`, the `torch.backends.cuda` flags and `torch.use_deterministic_algorithms`."""
    order = _torch.user_sdpa_priority()
    return Allowed(
        _torch.enabled_sdpa_backends(),
        None if order is None else tuple(order),
        torch.are_deterministic_algorithms_enabled(),
    )


def only_backend(name: str) -> Allowed:
    """Allows one backend, by its `SDPBackend` name, whatever `sdpa_kernel` and the flags allow."""
    return Allowed(tuple(each == name for each in _BACKENDS), None, torch.are_deterministic_algorithms_enabled())


def is_deterministic(q: Tensor, allowed: Allowed, asked: bool = False) -> bool:
    """True if kernels must be deterministic: torch is set so, or the call (`asked`). False on CPUs, where all are."""
    return q.is_cuda and (allowed.deterministic or asked)


def choose_backend(spec: CallSpec, allowed: Allowed | None = None) -> AttentionBackend:
    """The first backend, in order of preference, that the user allows and that does not refuse the spec.

    `torch.nn.attention.sdpa_kernel` sets the allowed backends, and with `set_priority=True` their order. The default
    order depends on the GPU. Interval-masked calls always use this package's own backend.

    Raises:
        NotImplementedError: every allowed backend refuses; the message has the reason of each.
    """
    if spec.masking is not Masking.BY_SHAPE:
        return _INTERVALS
    allowed = allowed or allowed_backends()
    return _choose(spec, allowed.enabled, allowed.order)


def with_wide_gradients(backend: AttentionBackend, spec: CallSpec) -> AttentionBackend | None:
    """The backend of float32 gradients in place of `backend`, None where its Triton kernels may be much slower.

    Only on Hopper GPUs and in half precision: backward of a causal tile of 4,096 to 32,768 rows on an H200 takes 4 to
    22% longer than with cuDNN. Newer GPUs are not measured.
    """
    is_half = spec.dtype in ("bfloat16", "float16")
    is_hopper = spec.capability is not None and spec.capability[0] == 9
    head_dim = max(spec.head_dim, spec.v_head_dim)
    is_ours = is_half and is_hopper and TRITON_AVAILABLE and head_dim <= MAX_HEAD_DIM[getattr(torch, spec.dtype)]
    return _WIDE_GRADIENTS if is_ours and isinstance(backend, (CudnnAttention, FlashAttention)) else None


def backend_by_name(name: str, device_type: str) -> AttentionBackend:
    """The backend with an `SDPBackend` name on a device type."""
    return _CPU_FLASH if (name, device_type) == ("FLASH_ATTENTION", "cpu") else _BACKENDS[name]


@lru_cached
def _choose(spec: CallSpec, enabled: tuple[bool, ...], user_order: tuple[str, ...] | None) -> AttentionBackend:
    is_enabled = dict(zip(_torch.SDPA_BACKENDS, enabled, strict=True))
    default_order = _HOPPER_ORDER if (spec.capability or (0, 0)) >= (9, 0) else _DEFAULT_ORDER
    refusals = []
    for name in sorted(_BACKENDS, key=user_order.index) if user_order else default_order:
        if not is_enabled[name]:
            refusals.append(f"{name} is disabled by sdpa_kernel or the torch.backends.cuda flags")
            continue
        backend = backend_by_name(name, spec.device_type)
        reason = backend.refusal(spec)
        if reason is None:
            return backend
        refusals.append(f"{name}: {reason}")
    raise NotImplementedError(
        f"no allowed SDPA backend can compute this attention ({spec}):\n  " + "\n  ".join(refusals)
    )
