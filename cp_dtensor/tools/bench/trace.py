"""Chrome traces of a few iterations, one file per rank; chrome://tracing and ui.perfetto.dev show them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from cp_dtensor.tools.bench.devices import Device

_WARMUP = 3
_ITERATIONS = 3


def write_trace(work: Callable[[], object], device: Device, barrier: Callable[[], object], path: Path) -> None:
    """Profiles a few calls, each from a common start of all ranks, into `path` (gzipped if it ends in .gz).

    Tiles, merges and transfers of this library carry labels that begin with "cp_dtensor:".
    """
    for _ in range(_WARMUP):
        work()
    device.synchronize()
    activities = [ProfilerActivity.CPU]
    if device.torch_device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for number in range(_ITERATIONS):
            barrier()
            with record_function(f"iteration {number}"):
                work()
                device.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
