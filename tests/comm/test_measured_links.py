"""The measurement of links, on a clock of the host and one of the GPU that the test advances."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor.comm import links
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.plan.cluster import Cluster

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


def measured(ranks: int, submission: float, slowest: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the speed that a rank measures if its slowest peer measures `slowest` bytes a second."""
    clocks = Clocks(submission)

    def all_reduce(value: torch.Tensor, operation: Any, group: Any) -> None:
        assert operation == dist.ReduceOp.MIN
        value.fill_(min(float(value), slowest))

    monkeypatch.setattr(links, "all_gather_single", clocks.all_gather)
    monkeypatch.setattr(torch.cuda, "Event", clocks.event)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    group: Any = SimpleNamespace(size=lambda: ranks)
    return links.link_speed(group, CPU)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("submission", [20e-6, 150e-6, 350e-6])
def test_a_slow_host_does_not_make_links_slow(ranks: int, submission: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(ranks, submission, float("inf"), monkeypatch) == pytest.approx(LINK, rel=1e-3)


def test_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(4, 20e-6, 7e9, monkeypatch) == 7e9


@pytest.mark.parametrize(("without", "speed_of_kernels"), [(3, 590e12), (None, 675e12)])
def test_ranks_that_differ_have_the_weakest_values_in_common(
    without: int | None, speed_of_kernels: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `auto` would choose differently on them. The innermost tier is the first; links are measured once."""
    calls = []

    def speed(group: Any, device: torch.device) -> float:
        calls.append(dist.get_rank())
        return 1e9 * (25 + dist.get_rank() + 100 * (group == SequenceRanks.along(meshes[dist.get_rank()], (1,)).outer))

    def properties(device: torch.device) -> Any:
        return SimpleNamespace(major=9 + (dist.get_rank() == 1), multi_processor_count=132 - dist.get_rank())

    monkeypatch.setattr(links, "installed_version", lambda distribution: "1.0" if dist.get_rank() != without else None)
    meshes: dict[int, Any] = {}
    monkeypatch.setattr(links, "link_speed", speed)
    monkeypatch.setattr(links, "p2p_obstacle", lambda group, device: "it is far" if dist.get_rank() == 2 else None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    def body(rank: int) -> tuple[Cluster, Cluster]:
        mesh = meshes[rank] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
        ranks = SequenceRanks.along(mesh, (0, 1))
        return links.cluster_of(ranks, CPU, 2), links.cluster_of(ranks, CPU, 4)

    found = run_ranks(4, body)
    assert all(each == found[0] for each in found)
    assert sorted(calls) == [0, 0, 1, 1, 2, 2, 3, 3]
    half, single = found[0]
    assert [tier.speed for tier in half.tiers] == [125e9, 25e9]
    assert not any(tier.shares_memory for tier in half.tiers)
    assert half.gpu.multiprocessors == 129
    assert half.gpu.flops == pytest.approx(speed_of_kernels) == single.gpu.flops / 0.05
