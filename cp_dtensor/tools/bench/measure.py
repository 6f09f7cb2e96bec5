"""Measures one baseline: timings, launch cost, memory. All ranks run the same phases, and fail together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from cp_dtensor.tools.bench.devices import Call, Device
from cp_dtensor.tools.bench.ranks import Ranks
from cp_dtensor.tools.bench.work import Work

T = TypeVar("T")
N = TypeVar("N", int, float)
_MOST_WARM_CALLS = 30
_LAUNCH_CALLS = 5
"""Few enough for all their launches to fit into the device's queue; a full queue makes the host wait."""
_FEWEST = 3


@dataclass(frozen=True)
class Effort:
    """How much time a row may take."""

    repeats: int
    """Timed calls, if there is time for them."""
    seconds: float
    """Of timed calls; slower rows are repeated less often, but at least three times."""
    warm_ms: float = 400.0
    """Before. A GPU that has just begun to work is faster than one whose clocks have settled."""

    def repeats_of(self, call_ms: float) -> int:
        """How often a call is timed.

        >>> effort = Effort(repeats=20, seconds=3.0)
        >>> [effort.repeats_of(call_ms) for call_ms in (1.0, 300.0, 4000.0)]
        [20, 10, 3]
        """
        return max(min(self.repeats, int(self.seconds * 1e3 / max(call_ms, 1e-3))), min(self.repeats, _FEWEST))


@dataclass(frozen=True)
class Measurement:
    """Of the ranks that took part."""

    samples_ms: tuple[tuple[float, ...], ...]
    """Every timed call of every rank."""
    cpu_us: float | None
    """Median time of a launch on the slowest rank."""
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
    """Measures repeated calls; `work` has the results of the last one afterwards.

    Args:
        work: of this rank; None where it does not take part, and then rank 0 alone does.
        device: of this rank.
        ranks: all of them.
        effort: how often.
        workspace_bytes: memory in use that the device does not count.
        captured: run it as a CUDA graph.

    Raises:
        Failed: on every rank.
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

    # Launch and wait are apart, so that a rank that fails to launch is known before the others wait for it.
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
