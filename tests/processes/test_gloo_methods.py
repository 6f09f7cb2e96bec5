"""Ulysses, hybrids and a nested ring on real processes with gloo between them, many cases for each start."""

from __future__ import annotations

import random
from functools import cache, partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.dtensor_checks import CP, DP, TP, Placements, R, check_equals_full_tensors, torch_before_2_12
from support.masked_problems import MaskedProblem
from support.method_checks import RING_ULYSSES, ULYSSES_RING, place
from support.problems import Problem, assert_close, reference, shard
from support.processes import Processes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import (
    Causal,
    Contiguous,
    Documents,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    context_parallel_unshard,
    enable_context_parallel_dispatcher,
)
from cp_dtensor.engine import planner as planning
from cp_dtensor.plan.partition import head_stages

LAYOUTS = (Contiguous(), HeadTail(), Striped(1), Striped(3), MirroredBatch())
Names = tuple[str, ...]
WAYS: list[tuple[Names, str]] = [
    (("cp",), "ulysses"),
    (RING_ULYSSES, "hybrid"),
    (ULYSSES_RING, "hybrid"),
    (RING_ULYSSES, "ring"),
    (ULYSSES_RING, "ring"),
    (("cp_node", "cp_gpu"), "auto"),
]
each_way = pytest.mark.parametrize(("names", "method"), WAYS, ids=str)


@cache  # the processes serve many tests; see `check_equals_full_tensors`
def mesh_of(names: Names) -> DeviceMesh:
    return init_device_mesh("cpu", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)


def place_on(mesh: DeviceMesh) -> int:
    coordinate, names = mesh.get_coordinate(), mesh.mesh_dim_names
    assert coordinate is not None
    assert names is not None
    return place(list(coordinate), names, tuple(mesh.shape))


def random_problem(draw: random.Random) -> Problem:
    kv_heads, q_len = draw.choice([1, 2, 3, 4, 8]), draw.randint(1, 40)
    return Problem(
        q_len=q_len,
        kv_len=draw.choice([q_len, q_len, draw.randint(1, 40)]),
        batch=draw.randint(1, 3),
        q_heads=kv_heads * draw.randint(1, 4),
        kv_heads=kv_heads,
        head_dim=draw.choice([4, 8]),
        is_causal=draw.random() < 0.5,
        scale=draw.choice([None, 0.3]),
    )


SMALL = [  # fewer tokens than ranks or chunks
    Problem(q_len, kv_len, batch=2, q_heads=4, kv_heads=2, is_causal=is_causal)
    for (q_len, kv_len), is_causal in product([(1, 1), (3, 3), (5, 5), (2, 9), (9, 2)], [False, True])
]


def _cases(rank: int, names: Names, method: str, cases: list[tuple[Problem, Layout, int]]) -> None:
    mesh = mesh_of(names)
    here = place_on(mesh)
    for seed, (problem, layout, stages) in enumerate(cases):
        *qkv, grad_out = problem.draw(seed)
        q, k, v = (shard(tensor, layout, here, 4).requires_grad_() for tensor in qkv)
        staging = partial(head_stages, flops_per_stage=1e-3, most=stages)
        with mock.patch.object(planning, "head_stages", staging):
            out, _ = context_parallel_attention(
                q, k, v, mesh=mesh, method=method, is_causal=problem.is_causal, scale=problem.scale, enable_gqa=True,
                layout=layout, return_lse=True, seq_len=(problem.q_len, problem.kv_len),
            )  # fmt: skip
        out.backward(shard(grad_out, layout, here, 4))
        for actual, whole in zip((out, q.grad, k.grad, v.grad), reference(problem, *qkv, grad_out), strict=True):
            assert_close(actual, shard(whole, layout, here, 4), (problem, layout, stages, names, method))


@each_way
def test_any_problem_by_any_method(four_processes: Processes, names: Names, method: str) -> None:
    draw = random.Random(f"{names} {method}")
    problems = [*SMALL, *(random_problem(draw) for _ in range(30))]
    four_processes.run(_cases, names, method, [(each, draw.choice(LAYOUTS), draw.randint(1, 4)) for each in problems])


def _sinks(rank: int, names: Names, method: str) -> None:
    problem = MaskedProblem(29, 29, Documents([0, 9, 26], within=Causal()), 2, 6, 2, sinks=True)
    whole, sinks = problem.draw(0), problem.draw_sinks(1)
    assert sinks is not None
    *expected, of_rows = problem.reference(*whole, sinks=sinks)
    mesh = mesh_of(names)
    *leaves, grad_out = (shard(tensor, HeadTail(), place_on(mesh), 4) for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (*leaves, sinks)]
    options = {
        "mesh": mesh,
        "method": method,
        "mask": problem.mask,
        "enable_gqa": True,
        "return_lse": True,
        "seq_len": 29,
    }
    out, lse = context_parallel_attention(*leaves[:3], sinks=sinks, **options)
    out.backward(grad_out)
    for actual, each in zip((out, *(leaf.grad for leaf in leaves[:3]), lse), expected, strict=True):
        assert_close(actual, shard(each, HeadTail(), place_on(mesh), 4), (names, method))
    assert_close(sinks.grad, shard(of_rows, HeadTail(), place_on(mesh), 4).sum((0, 2)), ("dsinks", names, method))


@pytest.mark.parametrize(("names", "method"), [(RING_ULYSSES, "hybrid"), (ULYSSES_RING, "ring")], ids=str)
def test_sinks(four_processes: Processes, names: Names, method: str) -> None:
    four_processes.run(_sinks, names, method)


def _context(rank: int, names: Names, method: str) -> None:
    """With a checkpoint, and backward after exit."""
    mesh = mesh_of(names)
    problem = Problem(13, 13, batch=2, q_heads=4, kv_heads=2, is_causal=True)
    whole = problem.draw(seed=0)
    expected = reference(problem, *whole)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    buffers = [tensor.clone() for tensor in whole]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, method=method):
        *qkv, grad = (buffer.clone() for buffer in buffers)
        leaves = [tensor.requires_grad_() for tensor in qkv]
        out = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=False)
    assert all(map(torch.equal, buffers, whole))
    out.backward(grad)
    wanted = context_parallel_shard(mesh, expected, [2] * 4)
    results = [out.detach(), *(leaf.grad for leaf in leaves)]
    for actual, want in zip(results, wanted, strict=True):
        assert_close(actual, want, (names, method))
    for actual, want in zip(context_parallel_unshard(mesh, results, [2] * 4), expected, strict=True):
        assert_close(actual, want, (names, method))


@each_way
def test_a_context(four_processes: Processes, names: Names, method: str) -> None:
    four_processes.run(_context, names, method)


def _gradients_through_unshard(rank: int, names: Names) -> None:
    mesh = mesh_of(names)
    generator = torch.Generator().manual_seed(0)
    whole, weight = (torch.randn(2, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    for layout, grad in product(LAYOUTS, ("replicated", "partial")):
        mine = shard(whole, layout, place_on(mesh), 4, 1).requires_grad_()
        (back,) = context_parallel_unshard(mesh, [mine], [1], layout, grad=grad)
        assert torch.equal(back, whole)
        back.backward(weight * (rank + 1) / 10 if grad == "partial" else weight)  # 1 + 2 + 3 + 4 tenths
        assert_close(mine.grad, shard(weight, layout, place_on(mesh), 4, 1), (names, layout, grad))


@pytest.mark.parametrize("names", [RING_ULYSSES, ULYSSES_RING], ids=", ".join)
def test_gradients_through_unshard_are_summed_over_both_axes(four_processes: Processes, names: Names) -> None:
    four_processes.run(_gradients_through_unshard, names)


def _disagreement(rank: int) -> str:
    q = torch.zeros(1, 2, 4, 4)
    method = "ring" if rank == 1 else "hybrid"
    with pytest.raises(ValueError, match="disagree") as caught:
        context_parallel_attention(q, q, q, mesh=mesh_of(ULYSSES_RING), method=method, seq_len=16, debug=True)
    return str(caught.value)


def test_debug_names_the_place_of_the_rank_that_disagrees_on_every_rank(four_processes: Processes) -> None:
    """Rank 1 stands at (0, 1) of (Ulysses, ring): third in the sequence."""
    for message in four_processes.run(_disagreement):
        assert "disagree about method: rank 2 says 'ring', the others 'hybrid'" in message


def _dtensors(rank: int, seed: int) -> None:
    draw = random.Random(seed)
    with enable_context_parallel_dispatcher():
        for _ in range(12):
            names = draw.choice([RING_ULYSSES, ULYSSES_RING, ("ulysses", "tp"), ("cp", "cp2")])
            placements: list[Placements] = [(CP, draw.choice([CP, CP, TP, DP]))] * 3
            if draw.random() < 0.4:
                placements[draw.randrange(3)] = (draw.choice([CP, R]), draw.choice([CP, R, TP]))
            inputs = (placements[0], placements[1], placements[2])
            check_equals_full_tensors(rank, (2, 2), random_problem(draw), inputs, mesh=mesh_of(names))


@torch_before_2_12
@pytest.mark.parametrize("seed", range(2))
def test_dtensors_over_two_axes(four_processes: Processes, seed: int) -> None:
    four_processes.run(_dtensors, seed)
