"""The measurement of links, on a clock of the host and one of the GPU that the test advances."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_dtensor.comm import select

LINK = 330e9
CPU = torch.device("cpu")


class Clocks:
    """Seconds of the host and of the GPU, which begins an all-gather when the host has submitted it."""

    def __init__(self, submission: float) -> None:
        self.submission, self.host, self.gpu = submission, 0.0, 0.0

    def all_gather(self, gathered: torch.Tensor, rows: torch.Tensor, group: Any) -> None:
        assert gathered.numel() == group.size() * rows.numel()
        assert rows.numel() % 16 == 0, "NCCL is slow with other sizes"
        self.host += self.submission
        self.gpu = max(self.gpu, self.host) + (gathered.numel() - rows.numel()) / LINK

    def event(self, enable_timing: bool) -> Any:
        """A stand-in for `torch.cuda.Event`."""
        assert enable_timing
        found = SimpleNamespace()

        def record() -> None:
            found.seconds = max(self.gpu, self.host)

        def synchronize() -> None:
            self.host = max(self.host, found.seconds)

        found.record, found.synchronize = record, synchronize
        found.elapsed_time = lambda end: 1e3 * (end.seconds - found.seconds)
        return found


def measured(ranks: int, submission: float, slowest: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the hardware that a rank measures if its slowest peer measures `slowest` bytes a second."""
    clocks = Clocks(submission)

    def all_reduce(values: torch.Tensor, operation: Any, group: Any) -> None:
        assert operation == dist.ReduceOp.MIN
        values[0] = min(float(values[0]), slowest)

    properties = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(select, "all_gather_single", clocks.all_gather)
    monkeypatch.setattr(torch.cuda, "Event", clocks.event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    group: Any = SimpleNamespace(size=lambda: ranks)
    return select.measure_bandwidth(group, CPU)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("submission", [20e-6, 150e-6, 350e-6])
def test_a_slow_host_does_not_make_links_slow(ranks: int, submission: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(ranks, submission, float("inf"), monkeypatch)
    assert found.link_speed == pytest.approx(LINK, rel=1e-3)
    assert found.multiprocessors == 132


def test_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(4, 20e-6, 7e9, monkeypatch).link_speed == 7e9
