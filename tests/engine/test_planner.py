"""Plans are alike on every rank, and are cached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cp_dtensor import HeadTail, SlidingWindow, context_parallel_attention, enable_context_parallel_dispatcher
from cp_dtensor.comm.head_exchange import CollectiveHeads
from cp_dtensor.engine import planner
from cp_dtensor.plan.partition import head_stages


def tensor(length: int = 4, heads: int = 4) -> torch.Tensor:
    return torch.randn(1, heads, length, 8, dtype=torch.float64)


def test_hybrids_that_share_a_ring_axis_have_plans_of_their_own() -> None:
    """Equal ranks in both must not let a rank take one's plan for the other, where other ranks plan anew."""

    def body(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ring", "ulysses_b", "ulysses_c"))
        planned = []
        for name in ("ulysses_b", "ulysses_c", "ulysses_b"):
            q = tensor()
            context_parallel_attention(q, q, q, mesh=mesh["ring", name], method="hybrid", seq_len=16)
            planned.append(len(planner._plans[mesh.get_group("ring")]))
        return planned

    assert run_ranks(8, body) == [[1, 2, 2]] * 8


@pytest.mark.parametrize("who_shares", [(), (0, 1), (0, 1, 2, 3)], ids=str)
def test_hybrids_have_the_same_stages_whoever_shares_memory(
    who_shares: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group of the inner axis finds out for itself; the ring goes through all of them."""
    counts = list[int]()

    def counted(*args: Any, **options: Any) -> int:
        counts.append(head_stages(*args, **options, flops_per_stage=2500.0))
        return counts[-1]

    def obstacle(*_: Any) -> str | None:
        return None if dist.get_rank() in who_shares else "it is far"

    monkeypatch.setattr(planner, "head_stages", counted)
    monkeypatch.setattr(planner, "obstacle_to_shared_memory", obstacle)
    monkeypatch.setattr(planner, "shared_memory_heads", lambda *_: CollectiveHeads())

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
        q = tensor(8, 8)
        context_parallel_attention(q, q, q, mesh=mesh, layout=HeadTail(), mask=SlidingWindow(5, 0), method="hybrid")

    run_ranks(4, body)
    assert counts == [4] * 4


def test_attention_of_dtensors_by_heads_is_planned_once() -> None:
    """Each plan has an exchange of its own, with its own tables on the device."""

    def body(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
        planned = []
        with enable_context_parallel_dispatcher():
            for _ in range(3):
                q = DTensor.from_local(tensor(), mesh, [Shard(2)])
                F.scaled_dot_product_attention(q, q, q)
                planned.append(len(planner._plans[mesh.get_group()]))
        return planned

    assert run_ranks(2, body) == [[1, 1, 1]] * 2
