"""Versions, devices and available features of this machine; `python -m cp_dtensor info`."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist

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
from cp_dtensor.spec.layouts import Contiguous
from cp_dtensor.spec.masks import Causal

_NONE = "none"
ALL_GPUS = "all GPUs of this node"


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    description = "Prints versions, devices and the features that the library can use on this machine."
    argparse.ArgumentParser(prog="python -m cp_dtensor info", description=description).parse_args(arguments)
    if int(os.environ.get("RANK", 0)):
        return  # one of several ranks of torchrun
    rows = list(facts())
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def facts() -> Iterator[tuple[str, str]]:
    """Yields the rows of the table: name and value."""
    yield "cp_dtensor", _version("cp_dtensor")
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "torch", torch.__version__ + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", CPU only")
    yield "Triton", _triton()
    yield "cuDNN", _cudnn_version()
    yield "NCCL", _nccl_version() or _NONE
    yield "devices", _devices()
    yield "process groups", ", ".join(name for name in ("gloo", "nccl") if _has_process_group(name)) or _NONE
    yield "peer access", peer_access()
    if torch.cuda.is_available():
        yield "symmetric memory", "available" if peer_access() == ALL_GPUS else "needs GPUs with peer access"
        for dtype in (torch.bfloat16, torch.float32):
            yield f"backends, {str(dtype).removeprefix('torch.')}", ", ".join(backends("cuda", dtype)) or _NONE
    else:
        yield "symmetric memory", "needs GPUs"
        yield "backends", ", ".join(backends("cpu", torch.float32)) or _NONE
    for package in PACKAGES:
        yield package.title, package.version or f"not installed: {INSTALL}"
    yield from kernels()


def kernels() -> Iterator[tuple[str, str]]:
    """Yields which kernel computes what on the first device, by dtype, head dims of q and v, and key heads.

    FlashAttention-4 and cuDNN's FlexAttention step back where their first results in a process are wrong.
    """
    device, capability = "cpu", None
    if torch.cuda.is_available():
        device, capability = "cuda:0", torch.cuda.get_device_capability(0)
    for dtype, shapes in (("bfloat16", _SHAPES), ("float32", _SHAPES[1:2])):
        for kv_heads, dim, v_dim in shapes:
            spec = CallSpec(
                _PARTITION, Causal(), 1, 4, kv_heads, dim, v_dim, dtype, device=device, capability=capability
            )
            masked = replace(spec, masking=Masking.INTERVALS)
            biased = replace(spec, masking=Masking.INTERVALS_UNBROKEN)
            served = {
                "causal, full": choose_backend(spec), "masks": choose_backend(masked),
                "bias, dropout": choose_backend(biased),
            }  # fmt: skip
            if device != "cpu":  # where all are deterministic
                served["deterministic"] = _chosen_if_deterministic(spec)
            shown = str(dim) if dim == v_dim else f"{dim}/{v_dim}{', grouped' if kv_heads < 4 else ''}"
            text = "; ".join(f"{what}: {_kernel(backend, spec)}" for what, backend in served.items())
            yield f"kernels, {dtype}, {shown}", text


def _chosen_if_deterministic(spec: CallSpec) -> AttentionBackend:
    allowed = allowed_backends()
    by_row = replace(spec, masking=Masking.INTERVALS, deterministic=True)
    return choose_backend(masked_by_shape(by_row, allowed), allowed)


def _kernel(backend: AttentionBackend, spec: CallSpec) -> str:
    if backend.name == "INTERVALS":
        return "ours in Triton" if has_triton_kernels(spec) else "torch operations"
    name = _KERNELS[backend.name]
    if not isinstance(backend, Flash4Attention) or not backend.left:
        return name
    other = _kernel(backend.instead, spec)
    left = (
        f"{'causal' if is_causal else 'full'} {direction}: {other}" for direction, is_causal in sorted(backend.left)
    )
    return f"{name} ({', '.join(left)})"


_SHAPES = ((1, 64, 64), (1, 128, 128), (4, 192, 128), (1, 192, 128), (1, 256, 256), (1, 512, 512))
"""Key heads for four query heads, head dims of q and of v. Groups change the kernel only where the dims differ."""
_PARTITION = LayoutPartition(Contiguous(), 8, 8, 1, 1)
_KERNELS = {
    "FLASH_ATTENTION_4": "FlashAttention-4",
    "CUDNN_FLEX_ATTENTION": "cuDNN's FlexAttention",
    "CUDNN_ATTENTION": "cuDNN",
    "FLASH_ATTENTION": "torch's flash",
    "EFFICIENT_ATTENTION": "torch's efficient",
    "MATH": "torch's math",
    "WIDE_GRADIENTS": "ours in Triton",
}


def environment() -> str:
    """Hardware and versions as Markdown, for reports of measurements."""
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if not torch.cuda.is_available():
        return f"{', '.join(versions)}  \nCPU only ({platform.machine()})"
    versions += [f"triton {_version('triton')}", f"CUDA {torch.version.cuda}", f"cuDNN {_cudnn_version()}"]
    versions += [f"NCCL {nccl}"] if (nccl := _nccl_version()) else []
    versions += versions_of_packages()
    return f"{', '.join(versions)}  \n{torch.cuda.device_count()} x {torch.cuda.get_device_name()} visible"


def versions_of_packages() -> list[str]:
    """Names and versions of the installed packages of the extra `kernels`."""
    return [f"{package.distribution} {package.version}" for package in PACKAGES if package.version]


def _cudnn_version() -> str:
    number = torch.backends.cudnn.version()  # 91900 is 9.19.0
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else _NONE


def backends(device: str, dtype: torch.dtype, head_dim: int = 64) -> list[str]:
    """The backends of `F.scaled_dot_product_attention` that compute a causal call and its gradients."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 2, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
    names = {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    served = []
    for name, backend in names.items():
        if device == "cpu" and name in ("cuDNN", "efficient"):
            continue  # CPUs have flash and math
        try:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's reasons why a backend refuses the call
                F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        except RuntimeError:
            continue
        served.append(name)
    return served


def _version(package: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    with suppress(ImportError):
        return getattr(importlib.import_module(package), "__version__", "not installed, imported from its folder")
    return _NONE


def _triton() -> str:
    version = _version("triton")
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if version == _NONE:
        return _NONE
    if interpreted:
        return f"{version}, interpreter (TRITON_INTERPRET)"
    return f"{version}, compiler" if torch.cuda.is_available() else f"{version}, no GPU to compile for"


def _nccl_version() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if _has_process_group("nccl") else None


def _has_process_group(backend: str) -> bool:
    return dist.is_available() and (dist.is_gloo_available() if backend == "gloo" else dist.is_nccl_available())


def _devices() -> str:
    if not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    names: dict[str, int] = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        name = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB, capability {capability})"
        names[name] = names.get(name, 0) + 1
    return "; ".join(f"{count} x {name}" for name, count in names.items())


def peer_access() -> str:
    """The pairs of GPUs of this host that read each other's memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return "needs two GPUs"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    able = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    return ALL_GPUS if able == len(pairs) else f"{able} of {len(pairs)} pairs of GPUs"
