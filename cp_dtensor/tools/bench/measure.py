"""Measurement of one method: timings, launch cost, memory and traces. All ranks run and fail together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from cp_dtensor.tools.bench.method import Work
from cp_dtensor.tools.bench.ranks import Ranks

T = TypeVar("T")
N = TypeVar("N", int, float)
Call = Callable[[], object]
_CALLS_BEFORE_CAPTURE = 3
_MOST_WARM_CALLS = 30
_LAUNCH_CALLS = 5
"""Few enough for all their launches to fit into the device's queue; a full queue makes the host wait."""
_FEWEST_REPEATS = 3
_TRACE_WARMUP, _TRACED_CALLS = 3, 3


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
        """Returns the milliseconds from the start of a call to the end of all that it launched."""
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
        """Returns the host's median microseconds of a call among calls without waits; None on CPUs."""
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

    def extra_bytes(self, call: Call) -> int | None:
        """Makes a call and returns its peak memory above the memory in use before it; None on CPUs."""
        if not self._is_gpu:
            call()
            return None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
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

    def free_unused(self) -> None:
        """Frees cached memory."""
        if self._is_gpu:
            torch.cuda.empty_cache()


# Measurement


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
        """Returns how often a call is timed.

        >>> effort = Effort(repeats=20, seconds=3.0)
        >>> [effort.repeats_of(call_ms) for call_ms in (1.0, 300.0, 4000.0)]
        [20, 10, 3]
        """
        affordable = int(self.seconds * 1e3 / max(call_ms, 1e-3))
        return max(min(self.repeats, affordable), min(self.repeats, _FEWEST_REPEATS))


@dataclass(frozen=True)
class Measurement:
    """Numbers of one method, of the ranks that took part."""

    samples_ms: tuple[tuple[float, ...], ...]
    """Every timed call of every rank."""
    cpu_us: float | None
    """Median host time of a launch on the slowest rank."""
    extra_bytes: int | None
    """Peak memory above the inputs, on the rank that needs most."""


def measure(
    work: Work | None,
    device: Device,
    ranks: Ranks,
    effort: Effort,
    workspace_bytes: Callable[[], int],
    *,
    captured: bool,
) -> Measurement:
    """Measures repeated calls; afterwards `work` has the results of the last call.

    Args:
        work: work of this rank; None if only rank 0 works.
        device: device of this rank.
        ranks: all ranks.
        effort: number of calls.
        workspace_bytes: returns the memory in use that the device does not count.
        captured: True to run the work as a CUDA graph.

    Raises:
        Failed: on every rank, if the work raised on any rank.
    """
    call: Call = _nothing if work is None else work
    release: Call = _nothing if work is None else work.release
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
    together(release)
    if captured:
        replay: list[Call] = []
        # A replay allocates nothing: the graph's own pool is filled at the capture.
        extra = together(lambda: device.extra_bytes(lambda: replay.append(device.captured(call))))
        call = replay[0] if replay else call
    else:
        extra = together(lambda: device.extra_bytes(call))
    first_ms = max(together(timed))
    repeats = effort.repeats_of(first_ms)
    warm_calls = min(_MOST_WARM_CALLS, int(effort.warm_ms / max(first_ms, 1e-3)))
    together(lambda: [timed() for _ in range(warm_calls)])
    samples = together(lambda: tuple(timed() for _ in range(repeats)))
    cpu_us = together(lambda: device.launch_us(call, min(_LAUNCH_CALLS, repeats)))
    workspaces = together(workspace_bytes)
    needed = [None if peak is None else peak + more for peak, more in zip(extra, workspaces, strict=True)]
    return Measurement(tuple(samples), _largest(cpu_us), _largest(needed))


def _nothing() -> None:
    pass


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
