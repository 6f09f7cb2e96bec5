"""Dropout in compiled code: a new seed at every call; for DTensors, one pattern for all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compile_checks import check_equals_eager, compiled, run_fresh
from support.dtensor_checks import CP, DP, TP, Placements, distributed
from support.masked_problems import MaskedProblem
from support.problems import shard
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import HeadTail, context_parallel, context_parallel_attention, enable_context_parallel_dispatcher
from cp_dtensor.spec.masks import Full

CASE = MaskedProblem(16, 16, Full(), 4, 4, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, enable_gqa=True)


def eager_and_compiled(function: Any, leaves: list[Any], grad_out: Any, seed: int) -> Any:
    """Compares out and gradients of a compiled call with those of an eager one of the same seed; returns out."""

    def seeded(call: Any) -> Any:
        def call_with_seed(*args: Any) -> Any:
            torch.manual_seed(seed)
            return call(*args)

        return call_with_seed

    return check_equals_eager(seeded(function), seeded(compiled(function)), leaves, grad_out)[0]


def of_shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def by_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return context_parallel_attention(q, k, v, mesh=mesh, dropout_p=0.4, enable_gqa=True)

    *qkv, grad_out = (shard(tensor, HeadTail(), rank, 2) for tensor in CASE.draw(4))
    leaves = [each.requires_grad_() for each in qkv]
    first = eager_and_compiled(by_name, leaves, grad_out, 7)
    assert not torch.equal(compiled(by_name)(*leaves), first), "another draw"


def test_it_is_drawn_at_every_call(two_processes: Processes) -> None:
    two_processes.run(run_fresh, of_shards)


def of_dtensors(rank: int, shape: tuple[int, ...], names: tuple[str, ...], on: Placements) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    leaves = distributed(CASE.draw(4)[:3], mesh, (on,) * 3)
    (grad_out,) = (tensor.detach() for tensor in distributed(CASE.draw(4)[3:4], mesh, (on,)))
    with enable_context_parallel_dispatcher():
        # Generators of the ranks are not equal.
        return [eager_and_compiled(attend, leaves, grad_out, seed + 100 * rank) for seed in (7, 8)]


@pytest.mark.parametrize(
    ("shape", "names", "on"),
    [((4,), ("cp",), (CP,)), ((2, 2), ("dp", "cp"), (DP, CP)), ((2, 2), ("cp", "tp"), (CP, TP))],
    ids=str,
)
def test_of_dtensors(
    four_processes: Processes, shape: tuple[int, ...], names: tuple[str, ...], on: Placements
) -> None:  # fmt: skip
    by_rank = four_processes.run(run_fresh, of_dtensors, shape, names, on)
    assert not torch.equal(*by_rank[0]), "another draw"
    assert all(map(torch.equal, outs, by_rank[0]) for outs in by_rank)


def over_heads_in_a_context(rank: int) -> None:
    """Tensor parallel inside of a context: heads that a rank has are counted among all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    here = mesh.get_local_rank("cp")
    equal_heads = [shard(t[:, :1].expand(-1, 4, -1, -1), HeadTail(), here, 2).contiguous() for t in CASE.draw(4)]
    *leaves, grad_out = distributed(tuple(equal_heads), mesh["tp"], ((TP,),) * 4)
    with context_parallel(mesh["cp"]):
        dropped = eager_and_compiled(attend, leaves, grad_out.detach(), 7 + here)
    assert all(not torch.equal(dropped[:, one], dropped[:, other]) for one in range(4) for other in range(one))


def test_over_heads_in_a_context(four_processes: Processes) -> None:
    four_processes.run(run_fresh, over_heads_in_a_context)
