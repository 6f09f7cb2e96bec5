"""The speed of the links between the ranks of a group, measured once."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_dtensor._torch_private import all_gather_single

_BYTES = 16 << 20
_REPEATS = 4


class _Measured:
    """What has been measured in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._speeds: WeakKeyDictionary[dist.ProcessGroup, float] = WeakKeyDictionary()

    def speed(self, group: dist.ProcessGroup, device: torch.device) -> float:
        with self._lock:
            if group not in self._speeds:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        'rotate_method "auto" has to measure the links of this group, which a CUDA graph cannot '
                        "capture: run one call before capturing, or name a rotation"
                    )
                self._speeds[group] = _measure(group, device)
            return self._speeds[group]


_measured = _Measured()


def link_speed(group: dist.ProcessGroup, device: torch.device) -> float:
    """Bytes per second into each rank while all ranks gather from all others; the same value on all ranks.

    The first call for a group is a collective and takes some milliseconds.
    """
    return _measured.speed(group, device)


def _measure(group: dist.ProcessGroup, device: torch.device) -> float:
    rows = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    gathered = torch.empty(group.size() * _BYTES, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(_REPEATS):  # the first makes connections
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        all_gather_single(gathered, rows, group=group)
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    seconds = torch.tensor([best], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return (group.size() - 1) * _BYTES / seconds.item()
