"""Random attention calls for minutes or hours, with memory watched; `python -m cp_dtensor soak`."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import random
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor.tools.bench.command import start
from cp_dtensor.tools.info import environment
from cp_dtensor.tools.parsing import positive, positive_number
from cp_dtensor.tools.soak_cases import Case, draw_case, errors_of

_DESCRIPTION = """\
Makes random attention calls in one process group, one after the other: functions, contexts, buffers, modules, DTensors,
packed documents, FlexAttention and latents; all masks, layouts, methods and KV transports; nested contexts, checkpoints
and backward after exit. Out and all gradients are compared with dense attention in float64. A wrong or failing case is
printed as a program. Exits with status 1 after wrong cases, or if memory has grown.

    python -m cp_dtensor soak --minutes 30
    torchrun --nproc-per-node 2 -m cp_dtensor soak --minutes 8 --seed 7
    python -m cp_dtensor soak --minutes 8 --ranks 2        (with one GPU: both ranks share it, with gloo)
"""
_MIB = 1 << 20


def main(arguments: Sequence[str]) -> None:
    """Runs cases until the time is over."""
    parser = argparse.ArgumentParser(
        prog="python -m cp_dtensor soak",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=positive_number, default=1.0, help="how long; default: 1")
    parser.add_argument("--cases", type=positive, help="end after so many cases, if the minutes are not over before")
    parser.add_argument("--seed", type=int, help="of the cases; default: drawn, and printed")
    parser.add_argument("--ranks", type=positive, help="without torchrun; default: a rank for each GPU, or 2")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    growth = "most growth of a rank's memory (RSS, and allocated on its GPU) after the first quarter; default: 256"
    parser.add_argument("--growth", type=positive, default=256, metavar="MIB", help=growth)
    options = parser.parse_args(arguments)
    use_gpu = options.device != "cpu" and torch.cuda.is_available()
    if options.device == "cuda" and not use_gpu:
        parser.error("--device cuda: torch sees no GPU")
    if "RANK" not in os.environ:
        ranks = options.ranks or (torch.cuda.device_count() if use_gpu else 2)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        # Torch keeps code for each shape of a product of matrices in bfloat16 on CPUs, in oneDNN's cache and, where
        # oneDNN has brgemm (AVX-512 and AMX), in one without a bound: hundreds of MiB, which are not this package's.
        environ = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "ONEDNN_MAX_CPU_ISA": "AVX2", **os.environ}
        command = [*launch, "-m", "cp_dtensor", "soak", *arguments]
        sys.exit(subprocess.run(command, env=environ, check=False).returncode)
    start("soak", arguments, use_gpu, 120, may_share_gpus=True)
    failed = _soak(options.minutes * 60, options.cases, options.seed, options.growth, use_gpu)
    dist.destroy_process_group()
    sys.exit(failed)


def run(case: Case) -> None:
    """Runs one case on the ranks that torchrun started, and prints its errors as multiples of what is allowed."""
    use_gpu = torch.cuda.is_available() and case.dtype != "float64"
    start("soak", (), use_gpu, 120, may_share_gpus=True)
    print(f"rank {dist.get_rank()}: {errors_of(case, _meshes(use_gpu)[case.mesh])}")
    dist.destroy_process_group()


def program(case: Case) -> str:
    """Program that runs a case."""
    return (
        f"# torchrun --nproc-per-node {dist.get_world_size()} case.py\n"
        "from cp_dtensor import *\n"
        "from cp_dtensor.spec.masks import *\n"
        "from cp_dtensor.tools.soak import Case, run\n\n"
        f"run({case!r})\n"
    )


def _meshes(use_gpu: bool) -> dict[tuple[int, ...], DeviceMesh]:
    """One axis, and all divisions of the ranks into two; made once, since every mesh makes process groups."""
    kind, size = "cuda" if use_gpu else "cpu", dist.get_world_size()
    shapes = [(size,), *((n, size // n) for n in range(1, size + 1) if size % n == 0)]
    names = {1: ("cp",), 2: ("ring", "ulysses")}
    return {shape: init_device_mesh(kind, shape, mesh_dim_names=names[len(shape)]) for shape in shapes}


def _soak(seconds: float, most_cases: int | None, seed: int | None, growth: int, use_gpu: bool) -> bool:
    """Runs cases; True if some were wrong or memory has grown."""
    warnings.simplefilter("ignore")
    meshes, rank, size = _meshes(use_gpu), dist.get_rank(), dist.get_world_size()
    [seed] = _agreed([random.randrange(1 << 30) if seed is None else seed], use_gpu, of_first=True)
    _say(f"{environment()}\n{size} ranks, seed {seed}")
    begun, wrong, reported, grown, base = time.monotonic(), 0, 0, 0, [0, 0]
    for number in itertools.count():
        case = draw_case(number, seed, size, use_gpu=use_gpu)
        try:
            errors = errors_of(case, meshes[case.mesh])
        except BaseException:
            print(f"rank {rank} failed in case {number}:\n{traceback.format_exc()}\n{program(case)}", flush=True)
            raise
        elapsed = time.monotonic() - begun
        odd = {name: error for name, error in errors.items() if not error <= 1}
        over = elapsed >= seconds or number + 1 == most_cases
        # All ranks end alike, and know of each other's errors and memory.
        bad, ends, *memory = _agreed([len(odd), int(over and rank == 0), *_memory(use_gpu)], use_gpu)
        if odd:
            print(f"rank {rank}, case {number}: errors in multiples of what is allowed: {odd}", flush=True)
        if bad:
            wrong += 1
            _say(f"case {number} is wrong:\n\n{program(case)}")
        if not any(base) and (4 * elapsed >= seconds or 4 * (number + 1) >= (most_cases or sys.maxsize)):
            base = memory
        if 10 * elapsed >= seconds * (reported + 1) or ends:
            reported = int(10 * elapsed / seconds)
            of_gpu = f", allocated on a GPU {memory[1]} MiB" if use_gpu else ""
            _say(f"{elapsed / 60:6.1f} min {number + 1:7} cases, {wrong} wrong, RSS of a rank {memory[0]} MiB{of_gpu}")
        if ends:
            grown = max(now - before for now, before in zip(memory, base, strict=True))
            _say(f"memory has grown by {grown} MiB after the first quarter, {growth} MiB are allowed")
            break
    return wrong > 0 or grown > growth


def _memory(use_gpu: bool) -> list[int]:
    """RSS, and bytes allocated on the GPU, in MiB. 0 where the system does not tell."""
    # Tensors of many sizes leave gaps in the heap of the C library, 100 MiB within minutes, which are no leak.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    statm = Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // _MIB if statm.exists() else 0
    return [resident, torch.cuda.memory_allocated() // _MIB if use_gpu else 0]


def _agreed(numbers: list[int], use_gpu: bool, *, of_first: bool = False) -> list[int]:
    """Maxima over the ranks, or the numbers of the first rank."""
    numbers = [0] * len(numbers) if of_first and dist.get_rank() else numbers
    tensor = torch.tensor(numbers, device="cuda" if use_gpu else "cpu")
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [int(each) for each in tensor.tolist()]


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
