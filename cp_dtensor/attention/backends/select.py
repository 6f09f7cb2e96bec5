"""Which backend computes a call: the one place that knows an order of preference."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

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
from cp_dtensor.attention.backends.wide_gradients import WideGradients
from cp_dtensor.attention.masked import MAX_HEAD_DIM, IntervalAttention
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiling import Masking

_BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend for backend in (CudnnAttention(), FlashAttention(), EfficientAttention(), MathAttention())
}
_CPU_FLASH = CpuFlashAttention()
_BY_ROW = IntervalAttention()


class Allowed(NamedTuple):
    """What the process's settings ask of attention; read in forward, and the same for its backward."""

    enabled: tuple[bool, ...]
    """Each backend of torch, in the order of `_torch.SDPA_BACKENDS`."""
    order: tuple[str, ...] | None
    """The user's order of them, if there is one."""
    deterministic: bool = False
    """Whether torch is to be deterministic (see `is_deterministic`)."""


def allowed_backends() -> Allowed:
    """What `torch.nn.attention.sdpa_kernel`, the `torch.backends.cuda` flags and
    `torch.use_deterministic_algorithms` say at this moment."""
    order = _torch.user_sdpa_priority()
    return Allowed(
        _torch.enabled_sdpa_backends(),
        None if order is None else tuple(order),
        torch.are_deterministic_algorithms_enabled(),
    )


def is_deterministic(q: torch.Tensor, allowed: Allowed, asked: bool = False) -> bool:
    """Whether kernels must be such that equal inputs give equal bits: torch is to be so, or the call has asked for it.

    False on CPUs, where all of them are.
    """
    return q.is_cuda and (allowed.deterministic or asked)


def choose_backend(spec: CallSpec, allowed: Allowed | None = None) -> AttentionBackend:
    """The first backend, in order of preference, that the user allows and that does not refuse the spec.

    `torch.nn.attention.sdpa_kernel` decides what is allowed, and the order too if called with `set_priority=True`.
    Otherwise cuDNN comes first on Hopper and newer (measured fastest there), then flash, efficient and math.

    What is masked by row has one backend, which is none of torch's and is always allowed.

    Raises:
        NotImplementedError: every allowed backend refuses; the message has each one's reason.
    """
    if spec.masking is not Masking.BY_SHAPE:
        return _BY_ROW
    allowed = allowed or allowed_backends()
    return _choose(spec, allowed.enabled, allowed.order)


def with_wide_gradients(backend: AttentionBackend, spec: CallSpec) -> AttentionBackend | None:
    """The backend with gradients in float32, where our kernels make them nearly as fast; None elsewhere.

    In backward of a causal tile of 4,096 to 32,768 rows on an H200 they take 4 to 22% longer than cuDNN. On newer GPUs
    they have not been measured, and cuDNN has been written anew for those.
    """
    is_half = spec.dtype in ("bfloat16", "float16")
    is_hopper = spec.capability is not None and spec.capability[0] == 9
    head_dim = max(spec.head_dim, spec.v_head_dim)
    is_ours = is_half and is_hopper and TRITON_AVAILABLE and head_dim <= MAX_HEAD_DIM[getattr(torch, spec.dtype)]
    return WideGradients(backend) if is_ours and isinstance(backend, (CudnnAttention, FlashAttention)) else None


def backend_by_name(name: str, device_type: str) -> AttentionBackend:
    """The backend of an `SDPBackend` name, on a device type."""
    return _CPU_FLASH if (name, device_type) == ("FLASH_ATTENTION", "cpu") else _BACKENDS[name]


@lru_cache(maxsize=1024)
def _choose(spec: CallSpec, enabled: tuple[bool, ...], user_order: tuple[str, ...] | None) -> AttentionBackend:
    is_enabled = dict(zip(_torch.SDPA_BACKENDS, enabled, strict=True))
    refusals = []
    for name in _by_preference(spec, user_order):
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


def _by_preference(spec: CallSpec, user_order: tuple[str, ...] | None) -> list[str]:
    """The names of all backends, the one to try first at the front."""
    if user_order is not None:
        return sorted(_BACKENDS, key=user_order.index)
    others = ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    is_hopper = spec.capability is not None and spec.capability >= (9, 0)
    return ["CUDNN_ATTENTION", *others] if is_hopper else [*others, "CUDNN_ATTENTION"]
