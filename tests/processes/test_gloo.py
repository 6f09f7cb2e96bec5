"""Real processes: every rank with its own interpreter and gloo between them, many cases for each start."""

import random
import time
from functools import cache, partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.dtensor_checks import CP, DP, TP, Placements, R, check_equals_full_tensors, torch_before_2_12
from support.method_checks import RING_ULYSSES, ULYSSES_RING, place
from support.problems import Problem, assert_close, reference, shard
from support.processes import Processes
from support.ranks import RanksFailed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cp_dtensor import (
    ContextParallel,
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    enable_context_parallel_dispatcher,
)
from cp_dtensor.engine import planner
from cp_dtensor.plan.partition import head_stages

LAYOUTS = (Contiguous(), HeadTail(), Striped(1), Striped(3), MirroredBatch())
Names = tuple[str, ...]


@cache  # the processes serve many tests; see `check_equals_full_tensors`
def mesh_of(names: Names) -> DeviceMesh:
    return init_device_mesh("cpu", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)


def random_problem(draw: random.Random) -> Problem:
    kv_heads, q_len = draw.choice([1, 2, 3, 4, 8]), draw.randint(1, 40)
    return Problem(
        q_len=q_len, kv_len=draw.choice([q_len, q_len, draw.randint(1, 40)]), batch=draw.randint(1, 3),
        q_heads=kv_heads * draw.randint(1, 4), kv_heads=kv_heads, head_dim=draw.choice([4, 8]),
        is_causal=draw.random() < 0.5, scale=draw.choice([None, 0.3]),
    )  # fmt: skip


# Fewer tokens than ranks or chunks.
LENGTHS = [(1, 1), (3, 3), (7, 7), (2, 9), (9, 2)]
SMALL = [
    Problem(*each, batch=2, q_heads=4, kv_heads=2, is_causal=is_causal)
    for each, is_causal in product(LENGTHS, (False, True))
]


def _cases(rank: int, names: Names, method: str, transport: str, cases: list[tuple[Problem, Layout, int]]) -> None:
    mesh = mesh_of(names)
    here = place(list(mesh.get_coordinate() or []), names, tuple(mesh.shape))
    for seed, (problem, layout, stages) in enumerate(cases):
        *qkv, grad_out = problem.draw(seed)
        q, k, v = (shard(tensor, layout, here, 4).requires_grad_() for tensor in qkv)
        staging = partial(head_stages, flops_per_stage=1e-3, most=stages)
        with mock.patch.object(planner, "head_stages", staging):
            out, _ = context_parallel_attention(
                q, k, v, mesh=mesh, method=method, is_causal=problem.is_causal, scale=problem.scale,
                enable_gqa=True, layout=layout, rotate_method=transport, return_lse=True,
                seq_len=(problem.q_len, problem.kv_len),
            )  # fmt: skip
        out.backward(shard(grad_out, layout, here, 4))
        for actual, whole in zip((out, q.grad, k.grad, v.grad), reference(problem, *qkv, grad_out), strict=True):
            assert_close(actual, shard(whole, layout, here, 4), (problem, layout, stages, names, method))


@pytest.mark.parametrize(
    ("names", "method", "transport"),
    [
        (("cp",), "ring", "allgather"), (("cp",), "ring", "alltoall"), (("cp",), "ulysses", "auto"),
        (RING_ULYSSES, "hybrid", "auto"), (ULYSSES_RING, "hybrid", "alltoall"), (RING_ULYSSES, "ring", "auto"),
        (("cp_node", "cp_gpu"), "auto", "alltoall"),
    ],
    ids=str,
)  # fmt: skip
def test_any_problem_by_any_method(four_processes: Processes, names: Names, method: str, transport: str) -> None:
    draw = random.Random(f"{names} {method} {transport}")
    problems = [*SMALL, *(random_problem(draw) for _ in range(20))]
    cases = [(each, draw.choice(LAYOUTS), draw.randint(1, 4)) for each in problems]
    four_processes.run(_cases, names, method, transport, cases)


# DTensors with uneven shards


def _dtensors(rank: int, seed: int) -> None:
    draw = random.Random(seed)
    with enable_context_parallel_dispatcher():
        for _ in range(12):
            names = draw.choice([("cp",), RING_ULYSSES, ULYSSES_RING, ("ulysses", "tp"), ("cp", "cp2")])
            placements: list[Placements] = [tuple(draw.choice([R, DP, TP, CP, CP]) for _ in names) for _ in "qkv"]
            placements[draw.randrange(3)] = (CP, *placements[0][1:])
            problem = draw.choice([random_problem(draw), random_problem(draw), draw.choice(SMALL)])
            inputs = (placements[0], placements[1], placements[2])
            check_equals_full_tensors(rank, tuple(mesh_of(names).shape), problem, inputs, mesh=mesh_of(names))


@torch_before_2_12
@pytest.mark.parametrize("seed", range(4))
def test_dtensors_with_uneven_shards(four_processes: Processes, seed: int) -> None:
    four_processes.run(_dtensors, seed)


# Tensor parallel


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32, bias=False, dtype=torch.float64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for linear in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def _tensor_parallel_attention(rank: int, as_module: bool, local_heads: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    torch.manual_seed(0)
    plain, parallel = Attention(), Attention()
    parallel.load_state_dict(plain.state_dict())
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    expected = plain(x)
    expected.square().sum().backward()

    columns = ColwiseParallel(use_local_output=local_heads)
    rows = RowwiseParallel(input_layouts=Shard(-1))
    parallelize_module(parallel, mesh["tp"], {"q": columns, "k": columns, "v": columns, "out": rows})
    (local_x,) = context_parallel_shard(mesh["cp"], [x], [1])
    if as_module:
        parallelize_module(parallel, mesh["cp"], ContextParallel())
        out = parallel(local_x)
    else:
        with context_parallel(mesh["cp"]):
            out = parallel(local_x)
    out.square().sum().backward()
    assert_close(out, context_parallel_shard(mesh["cp"], [expected.detach()], [1])[0], "out")
    for (name, weight), reference_weight in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        grad = weight.grad.full_tensor()
        dist.all_reduce(grad, group=mesh["cp"].get_group())  # each rank has the share of its tokens
        assert_close(grad, reference_weight.grad, name)


@pytest.mark.parametrize("local_heads", [False, True], ids=["DTensor heads", "local heads"])
@pytest.mark.parametrize("as_module", [False, True], ids=["context", "module"])
def test_tensor_parallel_attention_under_context_parallel(
    four_processes: Processes, as_module: bool, local_heads: bool
) -> None:
    four_processes.run(_tensor_parallel_attention, as_module, local_heads)


# Ranks that fail


def _one_rank_raises(rank: int) -> None:
    buffer = torch.arange(16.0).view(1, 1, 16, 1)
    try:
        with context_parallel(dist.group.WORLD, buffers=[buffer], buffer_seq_dims=[2]):
            if rank == 1:
                raise KeyError("only here")
            F.scaled_dot_product_attention(buffer, buffer, buffer)
    finally:
        assert buffer.flatten().tolist() == list(range(16))
        alone = F.scaled_dot_product_attention(buffer, buffer, buffer)
        assert alone.shape == buffer.shape


def test_a_rank_that_raises_makes_the_others_raise_soon() -> None:
    two = Processes(2, timeout=30)
    two.run(_nothing)
    start = time.monotonic()
    try:
        with pytest.raises(RanksFailed) as caught:
            two.run(_one_rank_raises)
    finally:
        two.stop()
    assert time.monotonic() - start < 25
    waiting, raising = caught.value.errors
    assert isinstance(raising, KeyError)
    assert isinstance(waiting, RuntimeError)  # of gloo, whose peer is gone; the context is left as it should be


def _nothing(rank: int) -> None:
    pass


def _one_rank_hangs(rank: int) -> int:
    if rank == 1:
        time.sleep(60)
    return rank


def test_a_rank_that_hangs_is_ended_by_the_timeout() -> None:
    two = Processes(2)
    two.run(_nothing)
    two.timeout = 1
    with pytest.raises(RanksFailed) as caught:
        two.run(_one_rank_hangs)
    assert caught.value.errors[0] is None
    assert isinstance(caught.value.errors[1], TimeoutError)
