"""Measurement of one method on all ranks: timings, launch cost, memory and traces.

Ranks run and fail together. They exchange values and failures between their host processes, through a store and not
through the devices: a rank that waits there keeps its device idle, and learns of another rank's failure before it waits
for a collective that the other rank never joined.
"""

from __future__ import annotations

import base64
import pickle
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from cp_dtensor.comm.symm_mem_workspace import allocated_bytes, release
from cp_dtensor.tools.bench.cases import Attention, Inputs

T = TypeVar("T")
N = TypeVar("N", int, float)
Call = Callable[[], object]
_CALLS_BEFORE_CAPTURE = 3
MOST_WARM_CALLS = 30
_LAUNCH_CALLS = 5
"""Few enough for all their launches to fit into the device's queue; a full queue makes the host wait."""
_FEWEST_REPEATS = 3
_TRACE_WARMUP, _TRACED_CALLS = 3, 3
_TIMEOUT = timedelta(minutes=60)  # one GPU takes long for a sequence that is made for many
_LONGEST_MESSAGE = 300
_LIBRARIES = {
    "attention_forward_kernel": "ours", "attention_dq_kernel": "ours", "attention_dkv_kernel": "ours",
    "FlashAttentionForward": "FlashAttention-4", "FlashAttentionBackward": "FlashAttention-4",
    "pytorch_flash": "FlashAttention-2", "fmha_cutlass": "efficient", "cudnn": "cuDNN", "nccl": "NCCL",
}  # fmt: skip
"""Libraries by a part of their kernels' names."""
_MOST_CHARACTERS = 40
"""Of the names of other kernels."""


# Exchange between ranks


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
    """This rank, and its exchange of values with the other ranks through a store."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._round = 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. Waits on the host; values must be picklable."""
        self._round += 1
        self._store.set(self._key(self._round, self.rank), base64.b64encode(pickle.dumps(value)).decode())
        keys = [self._key(self._round, rank) for rank in range(self.world_size)]
        self._store.wait(keys, _TIMEOUT)
        values = [pickle.loads(base64.b64decode(self._store.get(key))) for key in keys]
        # All ranks are in this round, so all ranks have read the values of the round before.
        self._store.delete_key(self._key(self._round - 1, self.rank))
        return values

    def is_first(self, event: str) -> bool:
        """True on the rank that asks first, once a name of an event."""
        return bool(self._store.add(event, 1) == 1)

    def together(self, function: Callable[[], T], taking_part: bool = True) -> list[T]:
        """Calls a function on the ranks that take part, waits for all, and returns the results in rank order.

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
        answers = [answer for answer in self.gather((taking_part, value, error)) if answer[0]]
        errors = [error for _, _, error in answers]
        failed = {rank: error for rank, error in enumerate(errors) if error is not None}
        if failed:
            if len({None if error is None else _kind(error) for error in errors}) == 1:
                raise Failed(failed[min(failed)], alike=True)
            raise Failed("; ".join(f"rank {rank}: {error}" for rank, error in failed.items()), alike=False)
        return [value for _, value, _ in answers]

    def on_each(self, function: Callable[[], T], taking_part: bool = True) -> T | None:
        """Calls a function like `together`, and returns this rank's result; None if it does not take part."""
        results: list[T] = []
        self.together(lambda: results.append(function()), taking_part)
        return results[0] if results else None

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"bench/{number}/{rank}"


def _kind(error: str) -> str:
    """The beginning of an error message without digits: equal for errors with one cause on several ranks."""
    return "".join(letter for letter in error if not letter.isdigit())[:50]


# Clocks and memory counters


class Device:
    """Clock and memory counter of the current CUDA device or, with `use_gpu=False`, of the CPU."""

    def __init__(self, use_gpu: bool) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
        self._is_gpu = use_gpu

    def synchronize(self) -> None:
        """Waits for everything that was launched."""
        if self._is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def time_ms(self, call: Call) -> float:
        """The milliseconds from the start of a call to the end of all that it launched."""
        if not self._is_gpu:
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
        """The host's median microseconds of a call among calls without waits; None on CPUs."""
        if not self._is_gpu:
            return None
        seconds = []
        self.synchronize()
        for _ in range(calls):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        self.synchronize()
        return statistics.median(seconds) * 1e6

    def extra_bytes(self, call: Call, prepare: Call = lambda: None) -> int | None:
        """Makes both calls; returns the peak memory of `call` above the memory in use before both. None on CPUs.

        Symmetric memory does not count: see `mapped_bytes`.
        """
        if not self._is_gpu:
            prepare()
            call()
            return None
        before = torch.cuda.memory_allocated(self.torch_device)
        prepare()
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def captured(self, call: Call) -> Call:
        """Captures `call` in a CUDA graph and returns its replay."""
        if not self._is_gpu:
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
        """The kernels that take a tenth or more of the GPU's time of a call, the longest first; none on CPUs.

        Kernels of attention have the name of their library.
        """
        if not self._is_gpu:
            return ()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            self.synchronize()
        times: Counter[str] = Counter()
        for event in profiler.key_averages():
            library = (shown for part, shown in _LIBRARIES.items() if part in event.key)
            times[next(library, event.key[:_MOST_CHARACTERS])] += event.self_device_time_total
        return tuple(name for name, time in times.most_common() if time > 0 and time >= 0.1 * times.total())

    def free_unused(self) -> None:
        """Frees cached memory and symmetric memory; no rank may still be at work, and no CUDA graph may be kept."""
        release()
        if self._is_gpu:
            torch.cuda.empty_cache()

    def mapped_bytes(self) -> int:
        """The symmetric memory that was mapped since `free_unused`, which torch's allocator does not count."""
        return allocated_bytes(self.torch_device)


# Measurement


class Work:
    """One pass of a method over this rank's inputs; keeps the results of the last call.

    `kv_heads` are those of the case; `inputs` may have more, repeated for methods that cannot share them.
    """

    def __init__(self, attention: Attention, inputs: Inputs, pass_name: str, kv_heads: int) -> None:
        self._attention = attention
        self._backward = pass_name == "fwdbwd"
        self._leaves = [tensor.detach().requires_grad_(self._backward) for tensor in (inputs.q, inputs.k, inputs.v)]
        self._grad_out = inputs.grad_out
        self._kv_heads = kv_heads
        self._out: torch.Tensor | None = None

    def __call__(self) -> None:
        self.release()
        with torch.set_grad_enabled(self._backward):
            out = self._attention(*self._leaves)
            if self._backward:
                out.backward(self._grad_out)
        self._out = out.detach()

    def release(self) -> None:
        """Frees the results."""
        self._out = None
        for leaf in self._leaves:
            leaf.grad = None

    def results(self) -> tuple[torch.Tensor, ...]:
        """Copies of out, or of (out, dq, dk, dv); dK and dV of repeated heads are summed in float64."""
        assert self._out is not None, "no call has run yet"
        results = [self._out]
        for leaf, heads in zip(self._leaves, (self._leaves[0].size(1), self._kv_heads, self._kv_heads), strict=True):
            if self._backward:
                assert leaf.grad is not None
                grad = leaf.grad
                results.append(grad if grad.size(1) == heads else grad.unflatten(1, (heads, -1)).double().sum(2))
        return tuple(result.clone() for result in results)


@dataclass(frozen=True)
class Effort:
    """Time that a row may take."""

    repeats: int
    """Timed calls, if there is time for them."""
    seconds: float
    """Time of all timed calls; slower calls are repeated less often, but at least three times."""
    warm_ms: float = 400.0
    """Time of calls before the timed ones: a GPU that has just begun to work is faster than one with settled clocks."""

    def repeats_of(self, call_ms: float) -> int:
        """The number of times that a call is timed.

        >>> effort = Effort(repeats=20, seconds=3.0)
        >>> [effort.repeats_of(call_ms) for call_ms in (1.0, 300.0, 4000.0)]
        [20, 10, 3]
        """
        affordable = int(self.seconds * 1e3 / max(call_ms, 1e-3))
        return max(min(self.repeats, affordable), min(self.repeats, _FEWEST_REPEATS))


def measure(work: Work | None, device: Device, ranks: Ranks, effort: Effort, *, captured: bool) -> dict[str, Any]:
    """The numbers of repeated calls, fields of a `Row`; afterwards `work` has the results of the last call.

    Args:
        work: work of this rank on `device`; None if only rank 0 works.
        captured: True to run the work as a CUDA graph.

    Raises:
        Failed: on every rank, if the work raised on any rank.
    """
    call: Any = work  # called on ranks that have work only
    alone = not all(ranks.gather(work is not None))

    def together(function: Callable[[], T]) -> list[T]:
        return ranks.together(function, work is not None)

    def timed() -> float:
        device.synchronize()
        if not alone:
            dist.barrier()
        return device.time_ms(call)

    # Launch and wait are separate, so that all ranks learn of a failed launch before any rank waits for that rank.
    together(call)
    together(device.synchronize)
    together(lambda: call.release())
    if captured:
        replay: list[Call] = []
        # A replay allocates nothing: the graph's own pool is filled at the capture.
        extra = together(lambda: device.extra_bytes(lambda: replay.append(device.captured(call))))
        call = replay[0] if replay else None
    else:
        extra = together(lambda: device.extra_bytes(call))
    first_ms = max(together(timed))
    repeats = effort.repeats_of(first_ms)
    warm_calls = min(MOST_WARM_CALLS, int(effort.warm_ms / max(first_ms, 1e-3)))
    together(lambda: [timed() for _ in range(warm_calls)])
    samples = together(lambda: tuple(timed() for _ in range(repeats)))
    cpu_us = together(lambda: device.launch_us(call, min(_LAUNCH_CALLS, repeats)))
    workspaces = together(device.mapped_bytes)
    kernels = dict.fromkeys(kernel for of_rank in together(lambda: device.kernels_of(call)) for kernel in of_rank)
    needed = [None if peak is None else peak + more for peak, more in zip(extra, workspaces, strict=True)]
    cpu_and_memory = {"cpu_us": _largest(cpu_us), "extra_bytes": _largest(needed)}
    return {"samples_ms": tuple(samples), "kernels": tuple(kernels), **cpu_and_memory}


def _largest(values: Sequence[N | None]) -> N | None:
    return max((value for value in values if value is not None), default=None)


def write_trace(call: Call, device: Device, path: Path) -> None:
    """Writes a Chrome trace of a few calls, each from a common start of all ranks; gzipped if `path` ends in .gz.

    chrome://tracing and ui.perfetto.dev show it. The library's tiles, merges and transfers have labels that begin with
    "cp_dtensor:".
    """
    for _ in range(_TRACE_WARMUP):
        call()
    device.synchronize()
    activities = [ProfilerActivity.CPU]
    if device.torch_device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for number in range(_TRACED_CALLS):
            dist.barrier()
            with record_function(f"iteration {number}"):
                call()
                device.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
