"""Versions, devices and available features of this machine; `python -m cp_dtensor doctor --info`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import permutations

import torch
import torch.distributed as dist

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

_SHAPES = ((1, 64, 64), (1, 128, 128), (4, 192, 128), (1, 192, 128), (1, 256, 256), (1, 512, 512))
"""Key heads for four query heads, head dims of q and of v. Groups change the kernel only where the dims differ."""
_KERNELS = {
    "FLASH_ATTENTION_4": "FlashAttention-4", "CUDNN_FLEX_ATTENTION": "cuDNN's FlexAttention",
    "CUDNN_ATTENTION": "cuDNN", "FLASH_ATTENTION": "torch's flash", "EFFICIENT_ATTENTION": "torch's efficient",
    "MATH": "torch's math", "WIDE_GRADIENTS": "ours in Triton",
}  # fmt: skip


def facts() -> Iterator[tuple[str, str]]:
    """Yield name and value of each row of the table."""
    yield from versions()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield "Triton runs in its", "interpreter (TRITON_INTERPRET)"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = Counter(
        f"{each.name} ({each.total_memory / 2**30:.0f} GiB, capability {each.major}.{each.minor})"
        for each in map(torch.cuda.get_device_properties, range(count))
    )
    yield "devices", "; ".join(f"{n} x {name}" for name, n in gpus.items()) or f"CPU, {os.cpu_count()} cores"
    pairs = list(permutations(range(count), 2))
    able = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    yield "peer access", f"{able} of {len(pairs)} pairs of GPUs" if pairs else "needs two GPUs"
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
    has_gpu, allowed = torch.cuda.is_available(), allowed_backends()
    device, capability = ("cuda:0", torch.cuda.get_device_capability(0)) if has_gpu else ("cpu", None)
    partition = LayoutPartition(Contiguous(), 8, 8, 1, 1)
    for dtype, shapes in (("bfloat16", _SHAPES), ("float32", _SHAPES[1:2])):
        for kv_heads, dim, v_dim in shapes:
            spec = CallSpec(
                partition, Causal(), 1, 4, kv_heads, dim, v_dim, dtype, device=device, capability=capability
            )  # fmt: skip
            by_row = replace(spec, masking=Masking.INTERVALS)
            specs = {
                "causal, full": spec, "masks": by_row,
                "bias, dropout": replace(spec, masking=Masking.INTERVALS_UNBROKEN),
            }  # fmt: skip
            if has_gpu:  # on CPUs all are deterministic
                specs["deterministic"] = masked_by_shape(replace(by_row, deterministic=True), allowed)
            shape = str(dim) if dim == v_dim else f"{dim}/{v_dim}{', grouped' if kv_heads < 4 else ''}"
            text = "; ".join(f"{what}: {_kernel(choose_backend(each, allowed), spec)}" for what, each in specs.items())
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


def gpu_name() -> str | None:
    """Return the name in `GPUS` of the current GPU; None for others, whose peaks are not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return None if "PCIe" in name or "NVL" in name else next((each for each in GPUS if each in name.split()), None)
