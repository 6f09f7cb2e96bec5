"""Dropout in compiled code: a new seed at every call; for DTensors, one pattern for all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.compile_checks import compiled, fresh
from support.dtensor_checks import CP, DP, TP, Placements, distributed
from support.masked_problems import MaskedProblem
from support.problems import assert_close, shard
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from cp_dtensor import HeadTail, context_parallel, context_parallel_attention, enable_context_parallel_dispatcher
from cp_dtensor.spec.masks import Full

P = 0.4
CASE = MaskedProblem(16, 16, Full(), 4, 4, 2)
NAMES = ("out", "dq", "dk", "dv")


def of_shards(rank: int) -> None:
    fresh()
    mesh = init_device_mesh("cpu", (2,))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return context_parallel_attention(q, k, v, mesh=mesh, dropout_p=P, enable_gqa=True)

    whole = CASE.draw(4)
    leaves = [shard(tensor, HeadTail(), rank, 2).requires_grad_() for tensor in whole[:3]]
    grad_out = shard(whole[3], HeadTail(), rank, 2)
    results = []
    for function in (attend, compiled(attend), compiled(attend)):
        torch.manual_seed(7)
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, grad_out)))
    for result in results[1:]:
        for name, got, expected in zip(NAMES, result, results[0], strict=True):
            assert_close(got, expected, name)
    assert not torch.equal(compiled(attend)(*leaves), results[0][0]), "another draw"


def test_it_is_drawn_at_every_call(two_processes: Processes) -> None:
    two_processes.run(of_shards)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=P, enable_gqa=True)


def of_dtensors(rank: int, shape: tuple[int, ...], names: tuple[str, ...], on: Placements) -> list[torch.Tensor]:
    """The full out, and the kept weights of compiled and uncompiled calls are equal; generators are not."""
    fresh()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    leaves = distributed(CASE.draw(4)[:3], mesh, (on,) * 3)
    (grad_out,) = (tensor.detach() for tensor in distributed(CASE.draw(4)[3:4], mesh, (on,)))
    outs = []
    with enable_context_parallel_dispatcher():
        function = compiled(attend)
        for seed in (7, 8):
            results = []
            for call in (attend, function):
                torch.manual_seed(seed + 100 * rank)
                out = call(*leaves)
                results.append((out, *torch.autograd.grad(out, leaves, grad_out)))
            for name, got, expected in zip(NAMES, *results[::-1], strict=True):
                assert isinstance(got, DTensor)
                assert_close(got.full_tensor(), expected.full_tensor(), name)
            outs.append(results[1][0].full_tensor().detach())
    return outs


@pytest.mark.parametrize(
    ("shape", "names", "on"),
    [((4,), ("cp",), (CP,)), ((2, 2), ("dp", "cp"), (DP, CP)), ((2, 2), ("cp", "tp"), (CP, TP))],
    ids=str,
)
def test_of_dtensors(
    four_processes: Processes, shape: tuple[int, ...], names: tuple[str, ...], on: Placements
) -> None:  # fmt: skip
    by_rank = four_processes.run(of_dtensors, shape, names, on)
    first, second = by_rank[0]
    assert not torch.equal(first, second), "another draw"
    for outs in by_rank[1:]:
        assert all(map(torch.equal, outs, by_rank[0]))


def over_heads_in_a_context(rank: int) -> None:
    """Tensor parallel inside of a context: heads that a rank has are counted among all."""
    fresh()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    here = mesh.get_local_rank("cp")
    same_heads = [shard(t[:, :1].expand(-1, 4, -1, -1), HeadTail(), here, 2).contiguous() for t in CASE.draw(4)[:3]]
    leaves = distributed(tuple(same_heads), mesh["tp"], ((TP,),) * 3)
    with context_parallel(mesh["cp"]):
        results = []
        for call in (attend, compiled(attend)):
            torch.manual_seed(7 + here)
            out = call(*leaves)
            results.append([each.full_tensor() for each in (out, *torch.autograd.grad(out.sum(), leaves))])
    for name, expected, got in zip(NAMES, *results, strict=True):
        assert_close(got, expected, name)
    dropped = results[1][0]
    assert all(not torch.equal(dropped[:, one], dropped[:, other]) for one in range(4) for other in range(one))


def test_over_heads_in_a_context(four_processes: Processes) -> None:
    four_processes.run(over_heads_in_a_context)
