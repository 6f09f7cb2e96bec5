"""Which backend computes a call: the one place that knows an order of preference."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from cp_dtensor import _torch_private
from cp_dtensor.local_attention.base import LocalAttention, Problem
from cp_dtensor.local_attention.by_row import ByRowAttention
from cp_dtensor.local_attention.cpu_flash import CpuFlashAttention
from cp_dtensor.local_attention.cudnn import CudnnAttention
from cp_dtensor.local_attention.efficient import EfficientAttention
from cp_dtensor.local_attention.flash import FlashAttention
from cp_dtensor.local_attention.math import MathAttention

_BACKENDS: tuple[LocalAttention, ...] = (
    CudnnAttention(),
    FlashAttention(),
    EfficientAttention(),
    CpuFlashAttention(),
    MathAttention(),
)
_BY_ROW = ByRowAttention()
_NAMES = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


class Allowed(NamedTuple):
    """What the process's settings ask of attention; read in forward, and the same for its backward."""

    enabled: tuple[bool, ...]
    """Each backend of torch, in the order of `_NAMES`."""
    order: tuple[str, ...] | None
    """The user's order of them, if there is one."""
    deterministic: bool = False
    """Whether results must be the same in every run."""


def allowed_backends() -> Allowed:
    """What `torch.nn.attention.sdpa_kernel`, the `torch.backends.cuda` flags and
    `torch.use_deterministic_algorithms` say at this moment."""
    order = _torch_private.user_sdpa_priority()
    return Allowed(
        tuple(map(_torch_private.sdpa_backend_enabled, _NAMES)),
        None if order is None else tuple(order),
        torch.are_deterministic_algorithms_enabled(),
    )


def choose_backend(problem: Problem, allowed: Allowed | None = None) -> LocalAttention:
    """The first backend, in order of preference, that the user allows and that does not refuse the problem.

    `torch.nn.attention.sdpa_kernel` decides what is allowed, and the order too if called with `set_priority=True`.
    Otherwise cuDNN comes first on Hopper and newer (measured fastest there), then flash, efficient and math.

    What is masked by row has one backend, which is none of torch's and is always allowed.

    Raises:
        NotImplementedError: every allowed backend refuses; the message has each one's reason.
    """
    if problem.by_row:
        return _BY_ROW
    allowed = allowed or allowed_backends()
    return _choose(problem, allowed.enabled, allowed.order)


@lru_cache(maxsize=1024)
def _choose(problem: Problem, enabled: tuple[bool, ...], user_order: tuple[str, ...] | None) -> LocalAttention:
    refusals = []
    for backend in sorted(_BACKENDS, key=_rank_by_preference(problem, user_order)):
        if not enabled[_NAMES.index(backend.name)]:
            refusals.append(f"{backend.name} is disabled by sdpa_kernel or the torch.backends.cuda flags")
            continue
        reason = backend.refusal(problem)
        if reason is None:
            return backend
        refusals.append(f"{backend.name}: {reason}")
    raise NotImplementedError(
        f"no allowed SDPA backend can compute this attention ({problem}):\n  " + "\n  ".join(refusals)
    )


def backend_by_name(name: str, device_type: str) -> LocalAttention:
    """The backend of an `SDPBackend` name, on a device type."""
    return next(
        backend
        for backend in _BACKENDS
        if backend.name == name and isinstance(backend, CpuFlashAttention) == (device_type == "cpu" and name != "MATH")
    )


def _rank_by_preference(problem: Problem, user_order: tuple[str, ...] | None) -> Callable[[LocalAttention], int]:
    if user_order is not None:
        return lambda backend: user_order.index(backend.name)
    hopper = problem.capability is not None and problem.capability >= (9, 0)
    order = ["CUDNN_ATTENTION"] * hopper + ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION"]
    return lambda backend: order.index(backend.name)
