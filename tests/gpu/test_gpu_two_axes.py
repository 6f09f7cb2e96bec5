"""Hybrids and nested rings of four ranks on two GPUs, neighbours on each axis on different ones; or on one GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
from support.problems import Problem, reference, shard
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, Striped, context_parallel_attention
from cp_dtensor.engine import planner as planning
from cp_dtensor.plan.partition import head_stages

pytestmark = pytest.mark.gpu(2)
WORLD_SIZE = 4
DEVICES = (0, 1, 1, 0)  # of ranks (0, 0), (0, 1), (1, 0), (1, 1)
PROBLEMS = (
    Problem(203, 203, 2, 8, 4, 32, is_causal=True),
    Problem(96, 160, 1, 8, 2, 16),
    Problem(64, 64, 1, 6, 3, 8, is_causal=True),
)
METHODS = [("hybrid", "symm_mem"), ("hybrid", "alltoall"), ("ring", "symm_mem"), ("ring", "allgather")]


@pytest.fixture(scope="module")
def gpus() -> Iterator[Processes]:
    # Neighbours need NCCL between GPUs; "nccl" is gloo where all ranks share one.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() > 1 else "nccl"
    processes = Processes(WORLD_SIZE, timeout=120, backend=backend)
    yield processes
    processes.stop()


def _errors(
    rank: int, names: tuple[str, str], methods: list[tuple[str, str]], layouts: list[Layout], stages: int
) -> list[str]:
    torch.cuda.set_device(DEVICES[rank] % torch.cuda.device_count())
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=names)
    inner = names.index("ulysses")
    here = mesh.get_local_rank(1 - inner) * 2 + mesh.get_local_rank(inner)
    wrong = []
    draw = random.Random(rank)
    with ExitStack() as stack:
        staging = partial(head_stages, flops_per_stage=1e-3, most=stages)
        stack.enter_context(mock.patch.object(planning, "head_stages", staging))
        for problem in PROBLEMS:
            drawn = problem.draw(5, "cuda")
            expected = reference(problem, *drawn)
            for layout in layouts:
                for method, rotate_method in methods:
                    *qkv, grad_out = (shard(tensor, layout, here, WORLD_SIZE) for tensor in drawn)
                    q, k, v = (tensor.requires_grad_() for tensor in qkv)
                    torch.cuda._sleep(draw.randrange(1_000_000))
                    out = context_parallel_attention(
                        q, k, v, mesh=mesh, method=method, is_causal=problem.is_causal, enable_gqa=True, layout=layout,
                        rotate_method=rotate_method, seq_len=(problem.q_len, problem.kv_len),
                    )  # fmt: skip
                    assert isinstance(out, torch.Tensor)
                    out.backward(grad_out)
                    for name, ours, whole in zip(
                        ("out", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad), expected, strict=True
                    ):
                        error = (ours - shard(whole, layout, here, WORLD_SIZE)).abs().max().item()
                        if not error < 1e-10:
                            wrong.append(f"{method} {rotate_method} {layout} {problem}: {name} by {error}")
    return wrong


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("names", [("ring", "ulysses"), ("ulysses", "ring")], ids=str)
def test_two_axes_equal_one_device_in_float64(gpus: Processes, names: tuple[str, str], stages: int) -> None:
    for wrong in gpus.run(_errors, names, METHODS, [HeadTail(), Contiguous(), Striped(1)], stages):
        assert not wrong, wrong
