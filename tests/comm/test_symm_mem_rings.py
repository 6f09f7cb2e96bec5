"""Rings through symmetric memory on ranks that are threads: the order of submission, and memory of calls that raise."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.labels import record_labels
from support.problems import Problem
from support.ranks import run_ranks
from support.ring_checks import attend
from support.shared_memory import shared_memory
from support.staging import fine

from cp_dtensor import Contiguous
from cp_dtensor.comm import symm_mem
from cp_dtensor.comm import symm_mem_workspace as workspaces
from cp_dtensor.comm.collective import Staging
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.symm_mem_workspace import Workspace
from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.engine import ring


@pytest.fixture(params=[1, 2], ids=["at once", "by head"])
def stages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    staging = Staging() if request.param == 1 else fine(1, 1)
    monkeypatch.setitem(ROTATE_METHODS, "symm_mem", SymmetricMemory(staging))
    return int(request.param)


def test_tiles_do_not_wait_for_the_host_to_submit_copies(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies for the next step follow the tiles of this one; what others wait for goes before."""
    steps = record_labels(monkeypatch, (ring, symm_mem))
    problem = Problem(24, 24)
    with shared_memory():
        run_ranks(2, attend, 2, problem.draw(seed=0), problem, Contiguous(), {"rotate_method": "symm_mem"})
    travels = {"write K/V", "pull K/V", "wait for K/V", "pull dK/dV", "wait for dK/dV"}
    found = [step for step in steps[0] if step in travels or step == "tile"]
    first, last = ["write K/V", "tile", "pull K/V"], ["wait for K/V", "tile"]
    staged = [*last, "pull K/V"] * (stages - 1)
    forward = [*first, *staged, *last]
    assert found[: len(forward)] == forward
    staged_grads = [*last, "pull K/V", "pull dK/dV"] * (stages - 1)
    ends = ["wait for dK/dV"] * stages
    assert found[len(forward) :] == [*first, *staged_grads, *last, "pull dK/dV", *ends]


@pytest.mark.parametrize("of", ["kv_address", "grads_address"])
def test_each_rank_begins_with_another_peer(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ranks do not all pull from the same peer at once."""
    asked: dict[int, list[int]] = {}
    address = getattr(Workspace, of)

    def recorded(workspace: Workspace, rank: int) -> int:
        asked.setdefault(workspace.rank, []).append(rank)
        return int(address(workspace, rank))

    monkeypatch.setattr(Workspace, of, recorded)
    problem = Problem(24, 24)
    with shared_memory():
        run_ranks(4, attend, 4, problem.draw(seed=0), problem, Contiguous(), {"rotate_method": "symm_mem"})
    passes = 2 if of == "kv_address" else 1
    assert asked == {rank: [(rank + hop) % 4 for hop in (1, 2, 3)] * passes for rank in range(4)}


@pytest.mark.parametrize(
    ("transfers", "targets"),
    [
        (symm_mem._PulledKv, lambda each: [each._next_rows]),
        (symm_mem._PulledGrads, lambda each: [stack for own, _ in each._in_flight for _, stack in own]),
    ],
    ids=["K/V", "dK/dV"],
)
def test_memory_that_copies_write_to_outlives_a_call_that_raises(
    transfers: Any, targets: Callable[[Any], list[torch.Tensor]], stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the next call has waited for them: the allocator does not know of copies on other streams."""
    of_rank: dict[int, list[weakref.ref[torch.Tensor]]] = {}
    receive = transfers.receive

    def raising_at_first(self: Any) -> Any:
        rank = self._workspace.rank
        if rank in of_rank:
            return receive(self)
        if transfers is symm_mem._PulledKv:
            self.tiles_launched()
        of_rank[rank] = [weakref.ref(each) for each in targets(self)]
        raise torch.OutOfMemoryError

    monkeypatch.setattr(transfers, "receive", raising_at_first)
    problem = Problem(24, 24)

    def collect(rank: int) -> None:
        dist.barrier()
        if rank == 0:  # for both
            gc.collect()
        dist.barrier()

    def body(rank: int) -> None:
        call = rank, 2, problem.draw(seed=0), problem, Contiguous(), {"rotate_method": "symm_mem"}
        with pytest.raises(torch.OutOfMemoryError):
            attend(*call)  # type: ignore[arg-type]
        collect(rank)
        assert of_rank[rank]
        assert all(each() is not None for each in of_rank[rank])
        attend(*call)  # type: ignore[arg-type]
        collect(rank)
        assert all(each() is None for each in of_rank[rank])
        held = workspaces.workspace(dist.group.WORLD, torch.device("cpu"), 0, 0)  # type: ignore[arg-type]
        assert not held.in_flight, "what has arrived is not held"

    with shared_memory():
        run_ranks(2, body)
