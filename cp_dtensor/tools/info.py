"""Versions, devices and available features of this machine; `python -m cp_dtensor doctor --info`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import GPUS, Causal, Contiguous
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.attention.backends.packages import INSTALL
from cp_dtensor.attention.backends.select import (
    PACKAGES,
    allowed_backends,
    choose_backend,
    has_triton_kernels,
    masked_by_shape,
)
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiling import Masking

ALL_GPUS = "all GPUs of this node"
_SHAPES = ((1, 64, 64), (1, 128, 128), (4, 192, 128), (1, 192, 128), (1, 256, 256), (1, 512, 512))
"""Key heads for four query heads, head dims of q and of v. Groups change the kernel only where the dims differ."""
_KERNELS = {
    "FLASH_ATTENTION_4": "FlashAttention-4", "CUDNN_FLEX_ATTENTION": "cuDNN's FlexAttention",
    "CUDNN_ATTENTION": "cuDNN", "FLASH_ATTENTION": "torch's flash", "EFFICIENT_ATTENTION": "torch's efficient",
    "MATH": "torch's math", "WIDE_GRADIENTS": "ours in Triton",
}  # fmt: skip


def facts() -> Iterator[tuple[str, str]]:
    """Yield name and value of each row of the table."""
    has_gpu, peers = torch.cuda.is_available(), peer_access()
    yield from versions()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield "Triton runs in its", "interpreter (TRITON_INTERPRET)"
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if has_gpu else 0)]
    found = Counter(
        f"{each.name} ({each.total_memory / 2**30:.0f} GiB, capability {each.major}.{each.minor})" for each in gpus
    )
    yield "devices", "; ".join(f"{n} x {name}" for name, n in found.items()) or f"CPU, {os.cpu_count()} cores"
    groups = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
    yield "process groups", ", ".join(name for name, is_here in groups.items() if is_here()) or "none"
    yield "peer access", peers
    yield "symmetric memory", "available" if peers == ALL_GPUS else "needs GPUs with peer access"
    for dtype in (torch.bfloat16, torch.float32):
        yield f"backends, {str(dtype).removeprefix('torch.')}", ", ".join(backends(dtype)) or "none"
    for package in PACKAGES:
        yield package.title, package.version or f"not installed: {INSTALL}"
    yield from kernels()


def versions() -> Iterator[tuple[str, str]]:
    """Yield what is installed: names and versions.

    Raises:
        RuntimeError: torch refuses another cuDNN than that it was built with.
    """
    for package in ("cp_dtensor", "torch", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            yield package, torch.__version__ if package == "torch" else importlib.metadata.version(package)
    yield "Python", platform.python_version()
    if torch.cuda.is_available():
        number = torch.backends.cudnn.version() or 0  # 91900 is 9.19.0
        yield "CUDA", str(torch.version.cuda)
        yield "cuDNN", f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        if dist.is_available() and dist.is_nccl_available():
            yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
        yield from ((package.distribution, package.version) for package in PACKAGES if package.version)


def kernels() -> Iterator[tuple[str, str]]:
    """Yield which kernel computes what on the first device, by dtype, head dims of q and v, and key heads.

    FlashAttention-4 and cuDNN's FlexAttention step back where their first results in a process are wrong.
    """
    has_gpu = torch.cuda.is_available()
    device, capability = ("cuda:0", torch.cuda.get_device_capability(0)) if has_gpu else ("cpu", None)
    partition = LayoutPartition(Contiguous(), 8, 8, 1, 1)
    for dtype, shapes in (("bfloat16", _SHAPES), ("float32", _SHAPES[1:2])):
        for kv_heads, dim, v_dim in shapes:
            spec = CallSpec(
                partition, Causal(), 1, 4, kv_heads, dim, v_dim, dtype, device=device, capability=capability
            )
            by_row = replace(spec, masking=Masking.INTERVALS)
            served = {"causal, full": choose_backend(spec), "masks": choose_backend(by_row)}
            served["bias, dropout"] = choose_backend(replace(spec, masking=Masking.INTERVALS_UNBROKEN))
            if has_gpu:  # on CPUs all are deterministic
                allowed = allowed_backends()
                alike = masked_by_shape(replace(by_row, deterministic=True), allowed)
                served["deterministic"] = choose_backend(alike, allowed)
            shape = str(dim) if dim == v_dim else f"{dim}/{v_dim}{', grouped' if kv_heads < 4 else ''}"
            text = "; ".join(f"{what}: {_kernel(backend, spec)}" for what, backend in served.items())
            yield f"kernels, {dtype}, {shape}", text


def _kernel(backend: AttentionBackend, spec: CallSpec) -> str:
    if backend.name == "INTERVALS":
        return "ours in Triton" if has_triton_kernels(spec) else "torch operations"
    name = _KERNELS[backend.name]
    if not isinstance(backend, Flash4Attention) or not backend.left:
        return name
    other = _kernel(backend.instead, spec)
    left = (f"{'causal' if causal else 'full'} {direction}: {other}" for direction, causal in sorted(backend.left))
    return f"{name} ({', '.join(left)})"


def backends(dtype: torch.dtype, head_dim: int = 64) -> list[str]:
    """Return the backends of `F.scaled_dot_product_attention` that compute a causal call and its gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(1, 2, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
    names = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}  # those of CPUs
    if device != "cpu":
        names = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, **names}
    served = []
    for name, backend in names.items():
        with suppress(RuntimeError), sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's reasons why a backend refuses the call
            F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
            served.append(name)
    return served


def peer_access() -> str:
    """Return the pairs of GPUs of this host that read each other's memory, in words."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return "needs two GPUs"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    able = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    return ALL_GPUS if able == len(pairs) else f"{able} of {len(pairs)} pairs of GPUs"


def gpu_name() -> str | None:
    """Return the name in `GPUS` of the current GPU; None for others, whose peaks are not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return None if "PCIe" in name or "NVL" in name else next((each for each in GPUS if each in name.split()), None)
