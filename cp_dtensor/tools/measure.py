"""Measurement of one method on all ranks: timings, launch cost, memory and traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from cp_dtensor.tools.cases import Attention, Inputs
from cp_dtensor.tools.ranks import Call, Device, Ranks

T = TypeVar("T")
N = TypeVar("N", int, float)
MOST_WARM_CALLS = 30
_LAUNCH_CALLS = 5
"""Few enough for all their launches to fit into the device's queue; a full queue makes the host wait."""
_FEWEST_REPEATS = 3
_TRACE_WARMUP, _TRACED_CALLS = 3, 3


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
