"""Real processes: every rank with its own interpreter and gloo between them, many cases for each start."""

import random
import time
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.dtensor_checks import CP, DP, TP, Placements, R, check_equals_full_tensors, torch_before_2_12
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
    context_parallel_shard,
    enable_context_parallel_dispatcher,
    ring_attention,
)

LAYOUTS = (Contiguous(), HeadTail(), Striped(1), Striped(3), MirroredBatch())
TRANSPORTS = ("allgather", "alltoall")


def random_problem(draw: random.Random) -> Problem:
    kv_heads = draw.randint(1, 3)
    q_len = draw.randint(1, 40)
    return Problem(
        q_len=q_len,
        kv_len=draw.choice([q_len, q_len, draw.randint(1, 40)]),
        batch=draw.randint(1, 3),
        q_heads=kv_heads * draw.randint(1, 3),
        kv_heads=kv_heads,
        head_dim=draw.choice([4, 8]),
        is_causal=draw.random() < 0.5,
        scale=draw.choice([None, 0.3]),
    )


# ring_attention


def _ring_cases(rank: int, layout: Layout, transport: str, problems: list[Problem]) -> None:
    world_size = dist.get_world_size()
    for seed, problem in enumerate(problems):
        *qkv, grad_out = problem.draw(seed)
        q, k, v = (shard(tensor, layout, rank, world_size).requires_grad_() for tensor in qkv)
        out, _ = ring_attention(
            q, k, v, mesh=dist.group.WORLD, is_causal=problem.is_causal, scale=problem.scale, enable_gqa=True,
            layout=layout, rotate_method=transport, return_lse=True,
            seq_len=(problem.q_len, problem.kv_len),
        )  # fmt: skip
        out.backward(shard(grad_out, layout, rank, world_size))
        for actual, whole in zip((out, q.grad, k.grad, v.grad), reference(problem, *qkv, grad_out), strict=True):
            assert_close(actual, shard(whole, layout, rank, world_size), (problem, layout, transport))


SMALL = [  # fewer tokens than ranks or chunks
    Problem(q_len, kv_len, batch=2, is_causal=is_causal)
    for (q_len, kv_len), is_causal in product([(1, 1), (3, 3), (7, 7), (2, 9), (9, 2)], [False, True])
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ring_attention_of_any_lengths(four_processes: Processes, layout: Layout, transport: str) -> None:
    draw = random.Random(f"{layout} {transport}")
    four_processes.run(_ring_cases, layout, transport, [*SMALL, *(random_problem(draw) for _ in range(15))])


# DTensors with uneven shards


def _dtensor_cases(rank: int, seed: int) -> None:
    draw = random.Random(seed)
    meshes = _meshes()
    with enable_context_parallel_dispatcher():
        for _ in range(12):
            problem, shape = random_problem(draw), draw.choice([*meshes])
            placements = [[draw.choice([R, DP, TP, CP, CP]) for _ in shape] for _ in "qkv"]
            placements[draw.randrange(3)][0] = CP
            check_equals_full_tensors(rank, shape, problem, tuple(map(tuple, placements)), mesh=meshes[shape])


@cache  # see check_equals_full_tensors; the processes serve many tests
def _meshes() -> dict[tuple[int, ...], DeviceMesh]:
    return {shape: init_device_mesh("cpu", shape) for shape in [(4,), (2, 2)]}


@torch_before_2_12
@pytest.mark.parametrize("seed", range(4))
def test_dtensors_with_uneven_shards(four_processes: Processes, seed: int) -> None:
    four_processes.run(_dtensor_cases, seed)


def _dtensors_shorter_than_the_mesh(rank: int) -> None:
    cases: list[tuple[tuple[Placements, ...], Placements]] = [
        (((CP,),) * 3, (CP,)), (((CP, CP),) * 3, (CP, CP)), (((TP, CP), (TP, R), (TP, R)), (TP, CP)),
    ]  # fmt: skip
    meshes = _meshes()
    with enable_context_parallel_dispatcher():
        for problem, (inputs, out) in product(SMALL, cases):
            shape = (4,) if len(out) == 1 else (2, 2)
            check_equals_full_tensors(rank, shape, problem, inputs, out, mesh=meshes[shape])


@torch_before_2_12
def test_dtensors_shorter_than_the_mesh(four_processes: Processes) -> None:
    four_processes.run(_dtensors_shorter_than_the_mesh)


# Contexts over one axis of a mesh


def _context_over_one_axis(rank: int, cp_axis: int) -> None:
    names = ("cp", "dp") if cp_axis == 0 else ("dp", "cp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for transport, is_causal in product(TRANSPORTS, (False, True)):
        problem = Problem(13, 13, batch=2, q_heads=4, kv_heads=2, is_causal=is_causal)
        *whole, grad_out = problem.draw(seed=mesh["dp"].get_local_rank())  # other data for each replica
        expected = reference(problem, *whole, grad_out)
        buffers = [tensor.clone() for tensor in (*whole, grad_out)]
        with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[2] * 4, rotate_method=transport):
            q, k, v, grad = (buffer.clone() for buffer in buffers)
            for tensor in (q, k, v):
                tensor.requires_grad_()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        out.backward(grad)
        wanted = context_parallel_shard(mesh["cp"], expected, [2] * 4)
        for actual, want in zip((out, q.grad, k.grad, v.grad), wanted, strict=True):
            assert_close(actual, want, (transport, problem))
        assert all(map(torch.equal, buffers, (*whole, grad_out)))


@pytest.mark.parametrize("cp_axis", [0, 1])
def test_a_context_over_one_axis_of_a_mesh_leaves_replicas_alone(four_processes: Processes, cp_axis: int) -> None:
    four_processes.run(_context_over_one_axis, cp_axis)


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


# Ranks that disagree or fail


def _disagreement(rank: int, what: str) -> str:
    length, scale, layout = 4, 0.5, HeadTail()
    is_causal, dropout_p = rank == 2 and what == "mask", 0.1 if rank == 2 and what == "dropout_p" else 0.0
    if rank == 2 and what == "scale":
        scale = 0.25
    if rank == 2 and what == "layout":
        layout = Contiguous()
    dtype = torch.float64 if rank == 2 and what == "dtype" else torch.float32
    q = torch.zeros(1, 1, length, 4, dtype=dtype)
    with (
        pytest.raises(ValueError, match="disagree") as caught,
        context_parallel(dist.group.WORLD, layout=layout, debug=True),
    ):
        F.scaled_dot_product_attention(q, q, q, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    return str(caught.value)


@pytest.mark.parametrize("what", ["mask", "dropout_p", "scale", "layout", "dtype"])
def test_debug_names_the_rank_that_disagrees_on_every_rank(four_processes: Processes, what: str) -> None:
    for message in four_processes.run(_disagreement, what):
        assert f"disagree about {what}: rank 2 says" in message


def _lengths_of_no_layout(rank: int) -> str:
    q = torch.zeros(1, 1, 5 if rank == 3 else 4, 4)
    with pytest.raises(ValueError, match="pass seq_len=") as caught:
        ring_attention(q, q, q, mesh=dist.group.WORLD)
    return str(caught.value)


def test_lengths_that_no_layout_gives_are_refused_on_every_rank(four_processes: Processes) -> None:
    messages = four_processes.run(_lengths_of_no_layout)
    assert len(set(messages)) == 1
    assert "rank 3 says (20, 20), the others (16, 16)" in messages[0]


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
