"""Checks of one process of `python -m cp_dtensor doctor`: versions, settings, GPUs and kernels."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from cp_dtensor import GPUS
from cp_dtensor.attention.backends.packages import INSTALL, has_package_kernels, installed_version
from cp_dtensor.attention.backends.select import PACKAGES
from cp_dtensor.tools.info import ALL_GPUS, backends, environment, peer_access

OK, NOTE, PROBLEM = "ok", "note", "PROBLEM"
_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 15)
"""Versions that were tried."""
_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": (PROBLEM, "every launch waits for its kernel, so transfers never overlap attention"),
    "TRITON_INTERPRET": (PROBLEM, "Triton kernels run in the interpreter, a thousand times slower"),
    "NCCL_P2P_DISABLE": (PROBLEM, "NCCL sends through host memory instead of NVLink"),
    "NCCL_IB_DISABLE": (NOTE, "NCCL sends between hosts over sockets instead of InfiniBand"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (NOTE, "with 1, transfers may queue behind attention"),
}
"""Environment variables that matter if they are 1."""
_HEAD_DIMS = (64, 128, 256)
_LEAST_OF_PEAK = 0.5
_MATMUL, _MATMULS, _LAUNCHES = 8192, 100, 2000
_SLOW_LAUNCH = 15e-6
_SMI = ("clocks.current.sm", "clocks.max.sm", "temperature.gpu", "ecc.errors.uncorrected.volatile.total")


@dataclass(frozen=True)
class Finding:
    """The outcome of a check."""

    check: str
    status: str
    """`OK`, `NOTE` or `PROBLEM`."""
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        lines = [*self.text.splitlines(), *([f"-> {self.remedy}"] if self.remedy else [])]
        return f"{self.status:<8} {self.check:<17} " + f"\n{'':<27}".join(lines)


def versions() -> Iterator[Finding]:
    """Yields findings about Python, torch, cuDNN, Triton and the optional packages."""
    try:
        lines = environment().splitlines()
    except RuntimeError as error:  # torch refuses another cuDNN than that it was built with
        lines = [f"torch {torch.__version__}"]
        remedy = "take other versions of cuDNN off LD_LIBRARY_PATH, or reinstall torch with its own"
        yield Finding("cuDNN", PROBLEM, str(error).splitlines()[0], remedy)
    yield Finding("versions", OK, "; ".join(line.strip() for line in lines))
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    tried = f"{'.'.join(map(str, _OLDEST_TORCH))} to {'.'.join(map(str, _NEWEST_TORCH))}"
    if (major, minor) < _OLDEST_TORCH:
        yield Finding("torch", PROBLEM, f"{torch.__version__} is too old; {tried} were tried", "pip install -U torch")
    elif (major, minor) > _NEWEST_TORCH:
        yield Finding("torch", NOTE, f"{torch.__version__} is newer than those that were tried, {tried}")
    if sys.version_info >= (3, 14):
        yield Finding("Python", NOTE, f"{sys.version.split()[0]} is newer than those that were tried, 3.10 to 3.13")
    yield from _other_than_built_with()
    if torch.cuda.is_available():
        if installed_version("triton") is None:
            text = "not installed: masks, dropout and deterministic calls run as torch operations, many times slower"
            yield Finding("Triton", PROBLEM, text, "pip install triton")
        if has_package_kernels(torch.cuda.get_device_capability()):
            missing = [each.distribution for each in PACKAGES if installed_version(each.distribution) is None]
            if missing:
                text = f"{' and '.join(missing)} not installed: other kernels serve, slower in some calls"
                yield Finding("packages", NOTE, text, INSTALL)


def _other_than_built_with() -> Iterator[Finding]:
    """Yields findings about packages in other versions than torch was built with."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("torch") or ():
            pinned = re.match(r"(triton|nvidia-(?:cudnn|nccl)[\w-]*)\s*==\s*([\w.]+)", requirement)
            if pinned is None or (found := installed_version(pinned[1])) in (None, pinned[2]):
                continue
            text = f"{pinned[1]} {found} is installed, this torch was built with {pinned[2]}"
            yield Finding("versions", NOTE, text, f"if kernels fail: pip install {pinned[1]}=={pinned[2]}")


def settings() -> Iterator[Finding]:
    """Yields findings about environment variables and GPUs that torch does not see."""
    found = [(name, *finding) for name, finding in _SETTINGS.items() if os.environ.get(name) == "1"]
    for name, status, text in found:
        if torch.cuda.is_available():
            yield Finding("environment", status, f"{name}=1: {text}", f"unset {name}")
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    if list(Path("/dev").glob("nvidia[0-9]*")):
        if torch.version.cuda is None:
            remedy = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
            yield Finding("GPUs", PROBLEM, f"this host has GPUs, but torch {torch.__version__} is for CPUs", remedy)
        else:
            text = f"this host has GPUs, but torch cannot use them with CUDA {torch.version.cuda}"
            yield Finding("GPUs", PROBLEM, text, "update the driver: nvidia-smi names the CUDA that it supports")


def kernels(on_gpu: bool) -> Iterator[Finding]:
    """Yields findings about the backends of SDPA by head dim, in bfloat16 on a GPU and float32 on a CPU."""
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    by_dim = {dim: backends(device, dtype, dim) for dim in _HEAD_DIMS}
    text = "; ".join(f"head dim {dim}: {', '.join(names) or 'none'}" for dim, names in by_dim.items())
    yield Finding("SDPA backends", OK, text)
    if on_gpu and torch.cuda.get_device_capability() >= (9, 0) and "cuDNN" not in by_dim[128]:
        text = "cuDNN does not serve head dim 128, the fastest kernel that torch has on this GPU"
        yield Finding("cuDNN", PROBLEM, text, "pip install -U the nvidia-cudnn package of torch's CUDA version")


def peers() -> Iterator[Finding]:
    """Yields a finding about peer access between this host's GPUs."""
    if torch.cuda.device_count() > 1:
        text = peer_access()
        expected = text == ALL_GPUS or gpu_name() is None  # other GPUs need not have NVLink
        remedy = "" if expected else "look for GPUs without NVLink or hidden from this process: nvidia-smi topo -p2p r"
        yield Finding("peer access", OK if expected else PROBLEM, text, remedy)


def gpu_name() -> str | None:
    """The name in `GPUS` of the current GPU; None for others, whose peaks are not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return None if "PCIe" in name or "NVL" in name else next((each for each in GPUS if each in name.split()), None)


def matmul_flops() -> float:
    """FLOPs per second of matrix products in bfloat16 on the current GPU, for about 0.2 seconds."""
    a = torch.randn(_MATMUL, _MATMUL, device="cuda", dtype=torch.bfloat16)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for count in (3, _MATMULS):  # the first are a warm-up
        start.record()
        for _ in range(count):
            a @ a
        stop.record()
    stop.synchronize()
    return _MATMULS * 2 * _MATMUL**3 / (start.elapsed_time(stop) / 1e3)


def launch_seconds() -> float:
    """Host seconds to launch one small kernel."""
    a = torch.zeros(1, device="cuda")
    for _ in range(_LAUNCHES // 2):
        a.add_(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_LAUNCHES // 2):
        a.add_(1)
    return (time.perf_counter() - start) / (_LAUNCHES // 2)


def speed(by_rank: list[tuple[float, float]]) -> Iterator[Finding]:
    """Yields findings about the matrix products and launches that each rank has timed, and about clocks."""
    flops, launches = zip(*by_rank, strict=True)
    gpu = gpu_name()
    peak = f" of {GPUS[gpu].flops / 1e12:.0f}" if gpu else ""
    text = f"{min(flops) / 1e12:.0f} to {max(flops) / 1e12:.0f}{peak} TFLOP/s in matrix products"
    look = "look for throttling and other processes: nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER"
    if gpu and min(flops) < _LEAST_OF_PEAK * GPUS[gpu].flops:
        yield Finding("GPU speed", PROBLEM, f"{text}; slowest: rank {flops.index(min(flops))}", look)
    elif min(flops) < 0.85 * max(flops):
        text += f"; all ranks wait for rank {flops.index(min(flops))}"
        yield Finding("GPU speed", PROBLEM, text, look)
    else:
        yield Finding("GPU speed", OK, text)
    text = f"{1e6 * min(launches):.1f} to {1e6 * max(launches):.1f} us of host time for a small kernel"
    slow = max(launches) > _SLOW_LAUNCH
    remedy = "short sequences: bind ranks to cores near their GPU, or capture CUDA graphs" if slow else ""
    yield Finding("launches", NOTE if slow else OK, text, remedy)


def clocks() -> Iterator[Finding]:
    """Yields findings about clocks, temperatures and memory errors of this host's GPUs, if nvidia-smi is there."""
    if shutil.which("nvidia-smi") is None:
        yield Finding("clocks", NOTE, "unknown without nvidia-smi")
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    if done.returncode or not all(len(row) == len(_SMI) for row in rows):
        yield Finding("clocks", NOTE, f"nvidia-smi does not tell: {done.stdout.strip() or done.stderr.strip()}"[:200])
        return
    text = "; ".join(f"{now} of {most} MHz, {degrees} C" for now, most, degrees, _ in rows)
    yield Finding("clocks", OK, text)
    broken = [index for index, row in enumerate(rows) if row[3].isdecimal() and int(row[3])]
    if broken:
        text = f"uncorrected memory errors on GPU {', '.join(map(str, broken))}: results may be wrong"
        yield Finding("memory errors", PROBLEM, text, "reset or replace the GPU")


def memory() -> Iterator[Finding]:
    """Yields a finding about memory that other processes hold on the current GPU."""
    free, total = torch.cuda.mem_get_info()
    held = total - free - torch.cuda.memory_reserved()
    if held > 0.1 * total:
        text = f"{held / 2**30:.0f} of {total / 2**30:.0f} GiB of GPU {torch.cuda.current_device()} are in use"
        yield Finding("GPU memory", NOTE, text, "end other processes on this GPU: nvidia-smi lists them")
