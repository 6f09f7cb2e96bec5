"""Choice of the backend that computes a call."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.cache import capturing
from cp_dtensor._torch.tensors import TRITON_AVAILABLE
from cp_dtensor.attention.backends import cudnn_flex, flash4
from cp_dtensor.attention.backends.aten import (
    CpuFlashAttention,
    CudnnAttention,
    EfficientAttention,
    FlashAttention,
    MathAttention,
)
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.backends.packages import has_package_kernels, log_missing
from cp_dtensor.attention.masked import MAX_HEAD_DIM
from cp_dtensor.plan.partition import CallSpec, SequencePartition, masking_of
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.logs import log_once
from cp_dtensor.spec.masks import as_plain

_BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend for backend in (CudnnAttention(), FlashAttention(), EfficientAttention(), MathAttention())
}
PACKAGES = (flash4.PACKAGE, cudnn_flex.PACKAGE)
"""Optional packages of kernels, of the extra `kernels`."""
_CPU_FLASH = CpuFlashAttention()
_INTERVALS = IntervalAttention()
_WIDE_GRADIENTS = IntervalAttention(wide_gradients=True)

# Orders of preference for full and causal tiles, measured (docs/kernels.md).
_PACKAGE_GPU_ORDER = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
"""Hopper and datacenter Blackwell. FlashAttention-4, the package, comes before these if FLASH_ATTENTION is allowed,
also in a user's order: programs put cuDNN first that know of torch's kernels only, as TorchTitan does."""
_LEFT_TO_CUDNN = frozenset({("backward", True), ("backward", False)})
"""Backward of head dim 256 on Hopper: on an H100 cuDNN is 13 to 35% faster, on an H200 from 6% slower to 16% faster
(docs/kernels.md)."""
_DEFAULT_ORDER = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")
"""Other GPUs. On Ampere and workstation Blackwell torch's flash is faster than cuDNN."""


class Allowed(NamedTuple):
    """Process-wide SDPA settings, read in forward and used for its backward too."""

    enabled: tuple[bool, ...]
    """True for each backend of `_BACKENDS` that is enabled."""
    order: tuple[str, ...] | None
    """The user's order of preference among torch's kernels, None without one."""
    deterministic: bool = False
    """True after `torch.use_deterministic_algorithms(True)`."""
    torch_flash: bool = False
    """True if the user has activated another implementation of torch's flash than FlashAttention-4."""
    registered: tuple[AttentionBackend, ...] = ()
    """Backends of `register_backend`, the latest first."""


_registered: list[AttentionBackend] = []


def register_backend(backend: AttentionBackend) -> ExitStack:
    """Let a backend compute the calls that it does not refuse, before those of this package and earlier ones.

    Args:
        backend: a frozen value; calls whose settings allow a single backend (`sdpa_kernel`) may still take it.

    Returns:
        a lease: the backend is removed by its `close()`, or at the end of a `with` block of it.

    Raises:
        TypeError: anything but an `AttentionBackend`.
    """
    if not isinstance(backend, AttentionBackend):
        raise TypeError(f"expected an AttentionBackend, got {type(backend).__name__}")
    _registered.insert(0, backend)
    lease = ExitStack()
    lease.callback(_registered.remove, backend)
    return lease


def allowed_backends() -> Allowed:
    """Read the settings at this moment: `sdpa_kernel`, `torch.backends.cuda` and the others of `Allowed`."""
    order = _torch.user_sdpa_priority()
    return Allowed(
        _torch.enabled_sdpa_backends(),
        None if order is None else tuple(order),
        torch.are_deterministic_algorithms_enabled(),
        torch.nn.attention.current_flash_attention_impl() not in (None, "FA4"),
        tuple(_registered),
    )


def is_deterministic(q: Tensor, allowed: Allowed, asked: bool = False) -> bool:
    """Return whether kernels must be deterministic: torch or the call (`asked`) says so. False on CPUs: all are."""
    return q.is_cuda and (allowed.deterministic or asked)


def choose_backend(spec: CallSpec, allowed: Allowed | None = None) -> AttentionBackend:
    """Return the backend that computes the tiles of a call: torch's kernels, those of an optional package, or our own.

    1. A backend of `register_backend` is taken if it does not refuse the call.
    2. For full and causal tiles FlashAttention-4, a package, is taken if FLASH_ATTENTION is allowed and it does not
       refuse the call. Otherwise the first of torch's kernels is taken that the user allows and that does not refuse
       it, in the user's order (`set_priority=True`), or in one that was measured on such GPUs.
    3. Tiles with other masks, a bias or dropout are computed by cuDNN's FlexAttention, a package, if CUDNN_ATTENTION is
       allowed and it does not refuse the call; otherwise by our own kernels, which refuse nothing.

    Args:
        spec: the call: shapes, dtype, device, and how tiles are masked.
        allowed: the user's settings: `torch.nn.attention.sdpa_kernel` and flags of `torch.backends.cuda`. None: now.

    Raises:
        NotImplementedError: every allowed backend refuses full or causal tiles; the message has the reason of each.
    """
    allowed = allowed or allowed_backends()
    for backend in allowed.registered:
        if (spec.masking is Masking.BY_SHAPE or backend.takes_intervals) and backend.refusal(spec) is None:
            return backend
    if has_package_kernels(spec.capability) and spec.dtype in ("bfloat16", "float16"):
        log_missing(tuple(package.distribution for package in PACKAGES if not package.version))
    if spec.masking is Masking.BY_SHAPE and spec.deterministic:
        return _flash4(spec)  # see masked_by_shape
    if spec.masking is Masking.BY_SHAPE:
        choose = _chosen if capturing() else _choose  # a capture refuses what was not tried before it
        return choose(spec, allowed.enabled, allowed.order, allowed.torch_flash)
    flex = CudnnFlexAttention(has_gradients=not spec.deterministic)
    may_be_cudnn = allowed.enabled[_torch.SDPA_BACKENDS.index("CUDNN_ATTENTION")]
    is_plain = spec.masking is Masking.INTERVALS  # without bias and dropout
    chosen: AttentionBackend = flex if is_plain and may_be_cudnn and flex.refusal(spec) is None else _INTERVALS
    if spec.device_type == "cuda" and chosen is _INTERVALS and not has_triton_kernels(spec):
        log_once(
            "attention", logging.WARNING,
            f"masks, bias and dropout of {spec.dtype}, head dim {max(spec.head_dim, spec.v_head_dim)}, run as torch "
            "operations, many times slower: our kernels need Triton, compute capability 8.0, and in bfloat16 and "
            "float16 head dims up to 256, in float32 up to 128",
        )  # fmt: skip
    return chosen


@lru_cached
def masked_by_shape(spec: CallSpec, allowed: Allowed) -> CallSpec:
    """Return the spec of a deterministic call, with tiles masked by shape where that is faster: with FlashAttention-4.

    Of the other kernels of full and causal tiles few are deterministic, and those are slower than ours of intervals.
    """
    partition = spec.partition
    if not isinstance(partition, SequencePartition) or spec.masking is not Masking.INTERVALS:
        return spec
    if masking_of(partition, spec.mask) is not Masking.BY_SHAPE:
        return spec
    is_allowed = allowed.enabled[_torch.SDPA_BACKENDS.index("FLASH_ATTENTION")] and not allowed.torch_flash
    shaped = replace(spec, masking=Masking.BY_SHAPE, mask=as_plain(spec.mask))
    return shaped if is_allowed and _flash4(shaped).refusal(shaped) is None else spec


def with_wide_gradients(backend: AttentionBackend, spec: CallSpec) -> AttentionBackend | None:
    """Return the backend of float32 gradients in place of `backend`, None where its Triton kernels may be much slower.

    Only on Hopper GPUs and in half precision: backward of a causal tile of 4,096 to 32,768 rows on an H200 takes 4 to
    22% longer than with cuDNN. Newer GPUs are not measured.
    """
    is_hopper = spec.capability is not None and spec.capability[0] == 9
    is_ours = spec.dtype in ("bfloat16", "float16") and is_hopper and has_triton_kernels(spec)
    return _WIDE_GRADIENTS if is_ours and isinstance(backend, (CudnnAttention, FlashAttention)) else None


def has_triton_kernels(spec: CallSpec) -> bool:
    """Return whether our kernels are compiled for the dtype and head dims of a call."""
    can_compile = TRITON_AVAILABLE and (spec.capability or (0, 0)) >= (8, 0)
    return can_compile and max(spec.head_dim, spec.v_head_dim) <= MAX_HEAD_DIM.get(getattr(torch, spec.dtype), 0)


def backend_by_name(name: str, device_type: str) -> AttentionBackend:
    """Return the backend with an `SDPBackend` name on a device type."""
    return _CPU_FLASH if (name, device_type) == ("FLASH_ATTENTION", "cpu") else _BACKENDS[name]


def _chosen(
    spec: CallSpec, enabled: tuple[bool, ...], user_order: tuple[str, ...] | None, torch_flash: bool
) -> AttentionBackend:
    """Return the backend of full and causal tiles."""
    is_enabled = dict(zip(_torch.SDPA_BACKENDS, enabled, strict=True))
    has_packages = has_package_kernels(spec.capability)
    order = [
        name for name in user_order or (_PACKAGE_GPU_ORDER if has_packages else _DEFAULT_ORDER) if name in _BACKENDS
    ]
    chosen: AttentionBackend | None = None
    refusals = []
    for name in order:
        if not is_enabled[name]:
            refusals.append(f"{name} is disabled by sdpa_kernel or the torch.backends.cuda flags")
            continue
        backend = backend_by_name(name, spec.device_type)
        reason = backend.refusal(spec)
        if reason is None:
            chosen = backend
            break
        refusals.append(f"{name}: {reason}")
    advice = ""
    if is_enabled["FLASH_ATTENTION"] and has_packages and not torch_flash:
        faster = _flash4(spec, chosen or _WIDE_GRADIENTS)
        chosen = faster if faster.refusal(spec) is None else chosen
    elif not is_enabled["FLASH_ATTENTION"] and flash4.PACKAGE.refusal(spec) is None:
        advice = "; FlashAttention-4 is faster in most cases, if sdpa_kernel allows FLASH_ATTENTION"
    if chosen is None:
        raise NotImplementedError(
            f"no allowed SDPA backend can compute this attention ({spec}):\n  " + "\n  ".join(refusals)
        )
    # A warning if it is torch's slowest one on a GPU, unasked.
    is_asked_for = all(" is disabled " in each for each in refusals)
    falls_back = chosen.name == "MATH" and spec.device_type == "cuda" and not is_asked_for
    why = f" ({'; '.join(refusals)})" if refusals else ""
    log_once(
        "attention", logging.WARNING if falls_back else logging.INFO,
        f"{chosen.name} computes full and causal tiles of {spec.dtype}, head dim {spec.dims}, on {spec.device_type}"
        f"{why}{advice}",
    )  # fmt: skip
    return chosen


_choose = lru_cached(_chosen)


def _flash4(spec: CallSpec, instead: AttentionBackend = _WIDE_GRADIENTS) -> Flash4Attention:
    """Return FlashAttention-4 with the backend of what it does not compute; our kernels are deterministic."""
    left, copies_kv = flash4.tiles_that_do_not_compile(spec), flash4.has_no_groups_in_backward(spec)
    dims = spec.head_dim, spec.v_head_dim
    if spec.deterministic:
        instead = _WIDE_GRADIENTS
    elif isinstance(instead, CudnnAttention) and dims == (256, 256) and spec.capability == (9, 0):
        left |= _LEFT_TO_CUDNN
    return Flash4Attention(instead, deterministic=spec.deterministic, left=left, copies_kv=copies_kv)
