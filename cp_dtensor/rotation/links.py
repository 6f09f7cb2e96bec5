"""The speed of the links between the ranks of a group, measured once."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_dtensor._torch_private import all_gather_single, prepared

_MOST_BYTES_A_RANK, _MOST_BYTES = 16 << 20, 256 << 20
_REPEATS = 4


@dataclass(frozen=True)
class Links:
    """What the ranks of a group have in common, by the weakest of them."""

    speed: float
    """Bytes per second into each rank while all ranks gather from all others."""
    capability: int
    """Major CUDA compute capability."""
    multiprocessors: int


class _Measured:
    """What has been measured in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: WeakKeyDictionary[dist.ProcessGroup, Links] = WeakKeyDictionary()

    def of(self, group: dist.ProcessGroup, device: torch.device) -> Links:
        with self._lock:
            links = self._links.get(group)
        if links is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    'rotate_method "auto" has to measure the links of this group, which a CUDA graph cannot '
                    "capture: run one call before capturing, or name a rotation"
                )
            links = prepared(lambda: _measure(group, device))  # a collective: other groups must not wait for it
            with self._lock:
                self._links[group] = links
        return links


_measured = _Measured()


def links_of(group: dist.ProcessGroup, device: torch.device) -> Links:
    """The same value on all ranks. The first call for a group is a collective and takes some milliseconds.

    Raises:
        RuntimeError: that first call is in the capture of a CUDA graph.
    """
    return _measured.of(group, device)


def _measure(group: dist.ProcessGroup, device: torch.device) -> Links:
    count = min(_MOST_BYTES_A_RANK, _MOST_BYTES // group.size())
    rows = torch.zeros(count, dtype=torch.uint8, device=device)
    gathered = torch.empty(group.size() * count, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(_REPEATS):  # the first makes connections
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        all_gather_single(gathered, rows, group=group)
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    properties = torch.cuda.get_device_properties(device)
    mine = [
        (group.size() - 1) * count / best if group.size() > 1 else float("inf"),
        properties.major,
        properties.multi_processor_count,
    ]
    weakest = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(weakest, dist.ReduceOp.MIN, group=group)
    speed, capability, multiprocessors = weakest.tolist()
    return Links(speed, int(capability), int(multiprocessors))
