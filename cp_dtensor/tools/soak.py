"""Random attention calls for minutes or hours, with memory watched; `python -m cp_dtensor soak`."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import itertools
import logging
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from cp_dtensor.comm.symm_mem_workspace import allocated_bytes
from cp_dtensor.spec.cache import LRUCache
from cp_dtensor.tools.info import environment
from cp_dtensor.tools.parsing import command_parser, positive, positive_number, refuse_other_ranks, uses_gpu
from cp_dtensor.tools.ranks import Ranks, leave, start
from cp_dtensor.tools.soak_cases import Case, draw_case, errors_of

_DESCRIPTION = """\
Makes random attention calls in one process group, one after the other: functions, contexts, buffers, modules, DTensors,
packed documents, FlexAttention and latents; all masks, layouts, methods and KV transports; nested contexts, checkpoints
and backward after exit. Out and all gradients are compared with dense attention in float64. A wrong or failing case is
printed as a program. New cases take memory for libraries, compiled kernels and caches (of bounded bytes); the last
third of the time repeats the cases, which needs no more. The last line is the verdict. Exits with status 1 after wrong
cases, or if memory has grown while cases were repeated.

    python -m cp_dtensor soak --minutes 30
    torchrun --nproc-per-node 2 -m cp_dtensor soak --minutes 8 --seed 7
    python -m cp_dtensor soak --minutes 8 --ranks 2        (with one GPU: both ranks share it, with gloo)
"""
_MIB = 1 << 20


_NEW_CASES = 2 / 3
"""Share of the time for new cases; the rest repeats them."""


def main(arguments: Sequence[str]) -> None:
    """Runs cases until the time is over."""
    options = parse_options(arguments)
    if "RANK" not in os.environ:
        sys.exit(_launch(options.ranks or (torch.cuda.device_count() if options.use_gpu else 2), arguments))
    faulthandler.enable()
    ranks, *_ = start("-m cp_dtensor soak", arguments, options.use_gpu, 120, may_share_gpus=True)
    passed = soak(options, ranks)
    leave()
    sys.exit(not passed)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line, and `use_gpu`."""
    parser = command_parser("soak", _DESCRIPTION)
    parser.add_argument("--minutes", type=positive_number, default=1.0, help="how long; default: 1")
    parser.add_argument("--cases", type=positive, help="end after so many calls, if the minutes are not over before")
    parser.add_argument("--seed", type=int, help="of the cases; default: drawn, and printed")
    parser.add_argument("--ranks", type=positive, help="without torchrun; default: a rank for each GPU, or 2")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    growth = "most growth of a rank's memory (RSS, and allocated on its GPU) while cases are repeated; default: 64"
    parser.add_argument("--growth", type=positive, default=64, metavar="MIB", help=growth)
    parser.add_argument("--verbose", action="store_true", help="print each case before it runs, as for crashes")
    options = parser.parse_args(arguments)
    refuse_other_ranks(parser, options.ranks)
    options.use_gpu = uses_gpu(parser, options.device)
    return options


def _launch(ranks: int, arguments: Sequence[str]) -> int:
    """Runs the command on ranks; its status. Ranks print the reasons of failures, so torchrun's report is left out."""
    # Torch keeps code for each shape of a product of matrices in bfloat16 on CPUs, in oneDNN's cache and, where oneDNN
    # has brgemm (AVX-512 and AMX), in one without a bound: hundreds of MiB, which are not this package's.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    command = ["--standalone", f"--nproc-per-node={ranks}", "-m", "cp_dtensor", "soak", *arguments]
    try:
        torchrun.run(torchrun.parse_args(command))
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            # A signal let it print nothing; torchrun terminates the other ranks.
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                print(f"failed: rank {rank} was ended by {failure.signal_name()}", flush=True)
        return 1
    return 0


def run(case: Case) -> None:
    """Runs one case on the ranks that torchrun started, and prints its errors as multiples of what is allowed."""
    use_gpu = torch.cuda.is_available() and case.dtype != "float64"
    start("-m cp_dtensor soak", (), use_gpu, 120, may_share_gpus=True)
    print(f"rank {dist.get_rank()}: {errors_of(case, _meshes(use_gpu)[case.mesh])}")
    leave()


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


def soak(options: argparse.Namespace, ranks: Ranks) -> bool:
    """Runs cases; False if some were wrong or memory has grown. Ends the process if a case raises."""
    warnings.simplefilter("ignore")
    use_gpu, most_calls = options.use_gpu, options.cases or sys.maxsize
    meshes = _meshes(use_gpu)
    seed = ranks.gather(random.randrange(1 << 30) if options.seed is None else options.seed)[0]
    _say(f"{environment()}\n{ranks.world_size} ranks, seed {seed}")
    begun, reported, wrong, first_wrong = time.monotonic(), 0, 0, ""
    different, base = 0, []  # number of cases, and memory, when their repetition begins
    for call in itertools.count():
        number = (call - different) % different if different else call
        case = draw_case(number, seed, ranks.world_size, use_gpu=use_gpu)
        if options.verbose:
            _say(f"case {number}: {case}")
        try:
            errors = errors_of(case, meshes[case.mesh])
        except BaseException as error:
            _say_failure(ranks, f"case {number}", error, case)
            sys.exit(1)
        odd = {name: error for name, error in errors.items() if not error <= 1}
        if odd:
            print(f"rank {ranks.rank}, case {number}: errors in multiples of what is allowed: {odd}", flush=True)
        elapsed = time.monotonic() - begun
        states = ranks.gather((bool(odd), max(elapsed / (60 * options.minutes), (call + 1) / most_calls)))
        if any(is_odd for is_odd, _ in states):
            wrong += 1
            first_wrong = first_wrong or f"The first wrong case, {number}:\n\n{program(case)}"
            _say(f"case {number} is wrong:\n\n{program(case)}")
        done = states[0][1]  # alike on all ranks
        begins_again = not different and done >= _NEW_CASES
        if not (begins_again or int(10 * done) > reported):
            continue
        reported, memory = int(10 * done), ranks.gather(_memory(use_gpu))
        if begins_again:
            different, base = call + 1, memory
        _say(f"{elapsed / 60:6.1f} min {call + 1:7} calls, {wrong} wrong; MiB of ranks: {_by_rank(memory)}")
        if done >= 1:
            break
    grown = [{kind: now[kind] - before[kind] for kind in now} for now, before in zip(memory, base, strict=True)]
    most = max(max(of_rank.values()) for of_rank in grown)
    passed = not wrong and most <= options.growth
    _say(
        f"{first_wrong}{'passed' if passed else 'failed'}: {call + 1} calls of {different} cases, {wrong} wrong; while "
        f"cases were repeated, memory grew by {most} MiB, {options.growth} are allowed (ranks: {_by_rank(grown)})"
    )
    return passed


def _memory(use_gpu: bool) -> dict[str, int]:
    """MiB by kind: RSS (0 where the system does not tell), estimate of the caches, and what is allocated on the GPU."""
    gc.collect()
    cached = sum(each.nbytes for each in gc.get_objects() if type(each) is LRUCache) // _MIB
    # Tensors of many sizes leave gaps in the heap of the C library, 100 MiB within minutes, which are no leak.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    statm = Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // _MIB if statm.exists() else 0
    if not use_gpu:
        return {"RSS": resident, "caches": cached}
    device = torch.device("cuda", torch.cuda.current_device())
    of_gpu = torch.cuda.memory_allocated(device) + allocated_bytes(device)
    return {"RSS": resident, "caches": cached, "GPU": of_gpu // _MIB}


def _by_rank(memory: Sequence[dict[str, int]]) -> str:
    """Text of the memory of all ranks.

    >>> _by_rank([{"RSS": 520}, {"RSS": 531}])
    'RSS 520, 531'
    """
    return "; ".join(f"{kind} {', '.join(str(of_rank[kind]) for of_rank in memory)}" for kind in memory[0])


def _say_failure(ranks: Ranks, what: str, error: BaseException, case: Case) -> None:
    """Prints the error of the first rank that has one in full, and those of ranks that waited for it in short."""
    if ranks.is_first("failed"):
        print(f"{program(case)}\n{traceback.format_exc()}\nfailed: rank {ranks.rank} in {what}, above", flush=True)
    else:
        print(f"rank {ranks.rank} failed after it: {(str(error).splitlines() or [repr(error)])[0]}", flush=True)


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
