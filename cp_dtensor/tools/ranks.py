"""Ranks of a command: their start and end, their devices, and their exchange of values and failures.

Ranks run and fail together. They exchange values and failures between their host processes, by gloo and not
through the devices: a rank that waits there keeps its device idle, and learns of another rank's failure before it waits
for a collective that the other rank never joined.
"""

from __future__ import annotations

import os
import shlex
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.links import link_speed
from cp_dtensor.comm.symm_mem_workspace import allocated_bytes, release

T = TypeVar("T")
Call = Callable[[], object]
_CALLS_BEFORE_CAPTURE = 3
_TIMEOUT = timedelta(minutes=60)  # one GPU takes long for a sequence that is made for many
_GATHERED = 4 << 20
"""Bytes of each CPU rank in a timed all-gather."""
_LONGEST_MESSAGE = 300
REFUSAL = "NotImplementedError: "
"""Beginning of the message of a failure by which a method says that it does not support a case."""
_LIBRARIES = {
    "attention_forward_kernel": "ours", "attention_dq_kernel": "ours", "attention_dkv_kernel": "ours",
    "FlashAttentionForward": "FlashAttention-4", "FlashAttentionBackward": "FlashAttention-4",
    "cudnnflex_attention": "cuDNN's FlexAttention", "cudnn": "cuDNN", "pytorch_flash": "FlashAttention-2",
    "fmha_cutlass": "efficient", "nccl": "NCCL", "sparse_attn_fwd": "FlashMLA", "nvjet": "cuBLAS",
}  # fmt: skip
"""Libraries by a part of their kernels' names; the first that fits counts."""


def start(
    program: str, arguments: Sequence[str], use_gpu: bool, timeout_seconds: float, nodes: int | None = None
) -> tuple[Ranks, Device]:
    """Join the ranks that torchrun started; return them and the device of this rank.

    `program` is a module such as "-m cp_dtensor bench", with `arguments`. With `nodes`, the ranks stand for those of so
    many nodes.
    """
    if "RANK" not in os.environ:
        count = torch.cuda.device_count() if use_gpu else 2
        sys.exit(f"start with torchrun: torchrun --nproc-per-node {count} {program} {shlex.join(arguments)}".rstrip())
    gpu = int(os.environ.get("LOCAL_RANK", 0))
    if nodes is not None:
        stand_for_nodes(nodes)
        gpu %= max(torch.cuda.device_count(), 1)
    if use_gpu:
        torch.cuda.set_device(gpu)
    device, timeout = Device(use_gpu), timedelta(seconds=timeout_seconds)
    of_device = device.torch_device if use_gpu else None
    dist.init_process_group("nccl" if use_gpu else "gloo", timeout=timeout, device_id=of_device)
    return Ranks(dist.new_group(backend="gloo", timeout=_TIMEOUT)), device


def stand_for_nodes(nodes: int) -> None:
    """Make NCCL take the ranks of this host for those of so many nodes, with TCP sockets between them.

    Ranks of different nodes may share a GPU, which NCCL refuses to ranks of one node. Exit with a message if the nodes
    would have different numbers of ranks.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks % nodes:
        sys.exit(f"--nodes: expected a divisor of the number of ranks, {ranks}, got {nodes}")
    os.environ |= {  # NCCL takes ranks with different NCCL_HOSTID for ranks of different hosts
        "NCCL_HOSTID": f"node {rank // (ranks // nodes)}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0", "LOCAL_WORLD_SIZE": f"{ranks // nodes}",
    }  # fmt: skip


def links_of_nodes(mesh: DeviceMesh, ranks: Ranks) -> str:
    """Name the nodes and measure the links inside of them and between them; a collective.

    `mesh` has an axis across nodes and one inside of them.
    """
    count, size = mesh.shape
    hosts = ranks.gather(socket.gethostname())
    listed = "; ".join(
        f"{', '.join(dict.fromkeys(hosts[first : first + size]))}: ranks {first} to {first + size - 1}"
        for first in range(0, len(hosts), size)
    )
    between, inside = (_speed(mesh.get_group(axis), mesh.device_type) / 1e9 for axis in range(2))
    speeds = f"{inside:.3g} GB/s into each rank from its node, {between:.3g} from other nodes, all ranks at once"
    return f"{count} nodes of {size} ({listed})\n{speeds}"


def _speed(group: dist.ProcessGroup, device_type: str) -> float:
    """Return the bytes a second into the slowest rank of a group in an all-gather; a collective."""
    if device_type == "cuda":
        return link_speed(group, torch.device("cuda", torch.cuda.current_device()))
    rows, seconds = torch.zeros(_GATHERED, dtype=torch.uint8), list[float]()
    gathered = [torch.empty_like(rows) for _ in range(group.size())]
    for _ in range(3):
        began = time.perf_counter()
        dist.all_gather(gathered, rows, group=group)
        seconds.append(time.perf_counter() - began)
    slowest = torch.tensor((group.size() - 1) * _GATHERED / min(seconds))
    dist.all_reduce(slowest, dist.ReduceOp.MIN, group=group)
    return float(slowest)


def end(ranks: Ranks, lost: Failed | None) -> None:
    """Leave the process group after rank 0 has written; end the process if ranks failed differently."""
    if lost is not None:
        print(f"stopped: {lost}", file=sys.stderr, flush=True)
        ranks.gather(None)  # rank 0 has written
        os._exit(1)  # an orderly exit would wait for collectives that never finish
    dist.barrier()  # a rank that ends alone closes connections that others still use
    dist.destroy_process_group()


class Failed(Exception):
    """A rank raised an exception; every rank raises this one.

    Args:
        message: type and first line of the error; of each rank's error if they differ.
        alike: True if all ranks that took part raised the same error. If not, some ranks have launched collectives that
            others never joined, or have waited for them in vain: the process group is lost.
    """

    def __init__(self, message: str, alike: bool) -> None:
        super().__init__(message)
        self.alike = alike


class Ranks:
    """This rank, and its exchange of values with the other ranks through a group of their host processes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size, self._ranks = group.rank(), group.size(), SequenceRanks(group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. Waits on the host; values must be picklable."""
        return self._ranks.gather_objects(value, torch.device("cpu"))

    def together(self, function: Callable[[], T], taking_part: bool = True) -> list[T]:
        """Call a function on the ranks that take part, wait for all, and return the results in rank order.

        Raises:
            Failed: on every rank, also on ranks that do not take part, if the function raised on any rank.
        """
        value, error = None, None
        if taking_part:
            try:
                value = function()
            except Exception as caught:
                lines = str(caught).strip().splitlines()
                error = f"{type(caught).__name__}: {lines[0] if lines else ''}"[:_LONGEST_MESSAGE]
                if not isinstance(caught, NotImplementedError):  # now: others may wait for this rank in a collective
                    print(f"rank {self.rank}: {error}", file=sys.stderr, flush=True)
        answers = [answer for answer in self.gather((taking_part, value, error)) if answer[0]]
        errors = [error for _, _, error in answers]
        failed = {rank: error for rank, error in enumerate(errors) if error is not None}
        if failed:
            if len({None if error is None else _cause(error) for error in errors}) == 1:
                raise Failed(failed[min(failed)], alike=True)
            raise Failed("; ".join(f"rank {rank}: {error}" for rank, error in failed.items()), alike=False)
        return [value for _, value, _ in answers]

    def on_each(self, function: Callable[[], T], taking_part: bool = True) -> T | None:
        """Call a function like `together`, and return this rank's result; None if it does not take part."""
        results: list[T] = []
        self.together(lambda: results.append(function()), taking_part)
        return results[0] if results else None


def _cause(error: str) -> str:
    """Return the beginning of an error message without digits: equal for errors with one cause on several ranks."""
    return "".join(letter for letter in error if not letter.isdigit())[:50]


def library_of(kernel: str) -> str:
    """Return the library of an attention kernel by the kernel's name; of other kernels the beginning of the name.

    >>> library_of("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64")
    'cuDNN'
    >>> library_of("kernel_cutlass_kernel_cudnnflex_attentionkernels")
    "cuDNN's FlexAttention"
    >>> library_of("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForward")
    'FlashAttention-4'
    """
    return next((shown for part, shown in _LIBRARIES.items() if part in kernel), kernel[:40])


class Device:
    """Clock and memory counter of the current CUDA device or, with `use_gpu=False`, of the CPU."""

    def __init__(self, use_gpu: bool) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
        self.is_gpu = use_gpu

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def time_ms(self, call: Call) -> float:
        """Return the milliseconds from the start of a call to the end of all that it launched."""
        if not self.is_gpu:
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def launch_us(self, call: Call, calls: int) -> float | None:
        """Return the host's median microseconds of a call among calls without waits; None on CPUs."""
        if not self.is_gpu:
            return None
        self.synchronize()
        times = [time.perf_counter()]
        for _ in range(calls):
            call()
            times.append(time.perf_counter())
        self.synchronize()
        return statistics.median(end - start for start, end in pairwise(times)) * 1e6

    def allocated(self) -> int:
        """Return the bytes of tensors on the device; 0 on CPUs."""
        return torch.cuda.memory_allocated(self.torch_device) if self.is_gpu else 0

    def extra_bytes(self, call: Call, before: int | None = None) -> int | None:
        """Make a call; return its peak memory above `before`, None: above the memory in use. None on CPUs.

        Symmetric memory that was mapped since `free_unused` counts; torch's allocator does not know it.
        """
        before = self.allocated() if before is None else before
        if not self.is_gpu:
            call()
            return None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before + self.mapped_bytes()

    def captured(self, call: Call) -> Call:
        """Capture `call` in a CUDA graph and return its replay."""
        if not self.is_gpu:
            raise NotImplementedError("CUDA graphs need a GPU")
        # First calls make plans, communicators and workspaces: before the capture, on the capturing stream.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_CALLS_BEFORE_CAPTURE):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread queries events meanwhile, which must not end the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
        return graph.replay

    def kernels_of(self, call: Call) -> tuple[str, ...]:
        """Return the libraries whose kernels take a tenth or more of the GPU's time of a call, the longest first."""
        times: Counter[str] = Counter()
        for kernel, us in self.kernel_times(call).items():
            times[library_of(kernel)] += us
        return tuple(name for name, time in times.most_common() if time > 0 and time >= 0.1 * times.total())

    def kernel_times(self, call: Call) -> dict[str, int]:
        """Return the GPU's microseconds of each kernel of a call, by its name; none on CPUs."""
        if not self.is_gpu:
            return {}
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            self.synchronize()
        return {event.key: int(event.self_device_time_total) for event in profiler.key_averages()}

    def free_unused(self) -> None:
        """Free cached memory and symmetric memory; no rank may still be at work, and no CUDA graph may be kept."""
        release()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def mapped_bytes(self) -> int:
        """Return the symmetric memory that was mapped since `free_unused`."""
        return allocated_bytes(self.torch_device)
