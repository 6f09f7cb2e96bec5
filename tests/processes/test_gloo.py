"""Real processes with gloo between them, beyond the matrix: placements, replicas, tensor parallelism, failing ranks."""

import random
import time
from datetime import timedelta
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.dtensor_checks import CP, DP, TP, R, check_equals_full_tensors, torch_before_2_12
from support.problems import Problem, assert_close, reference
from support.processes import Processes
from support.ranks import RanksFailed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cp_dtensor import (
    ContextParallel,
    Contiguous,
    context_parallel,
    context_parallel_shard,
    enable_context_parallel_dispatcher,
    indexed_attention,
    indexer_loss,
    pool_blocks,
    pooled_attention,
    select_keys,
    select_pooled,
    shift,
)
from cp_dtensor._torch import group_timeout
from cp_dtensor.comm import faults
from cp_dtensor.comm.submeshes import submesh

Names = tuple[str, ...]
NAMES: list[Names] = [("cp",), ("cp", "cp2"), ("ring", "ulysses"), ("ulysses", "ring"), ("ulysses", "tp")]


@cache  # DTensor caches by equality of meshes, see `check_equals_full_tensors`
def mesh_of(names: Names) -> DeviceMesh:
    return init_device_mesh("cpu", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)


def _drawn(draw: random.Random) -> tuple[Problem, Names, list[Any]]:
    """A problem, also of fewer tokens than ranks, with placements of which one at least shards the sequence."""
    kv_heads, q_len, names = draw.choice([1, 2, 3, 4]), draw.randint(1, draw.choice([9, 40])), draw.choice(NAMES)
    problem = Problem(
        q_len, draw.choice([q_len, q_len, draw.randint(1, 40)]), batch=draw.randint(1, 3),
        q_heads=kv_heads * draw.randint(1, 3), kv_heads=kv_heads, head_dim=draw.choice([4, 8]),
        is_causal=draw.random() < 0.5, scale=draw.choice([None, 0.3]),
    )  # fmt: skip
    placements: list[Any] = [[draw.choice([R, DP, TP, CP, CP, Shard(3)]) for _ in names] for _ in "qkv"]
    if draw.random() < 0.5:  # of self-attention
        placements = [[CP, *(draw.choice([CP, CP, TP, DP]) for _ in names[1:])]] * 3
    placements[draw.randrange(3)][0] = CP
    return problem, names, [tuple(each) for each in placements]


def _dtensors(rank: int, seed: int) -> None:
    draw = random.Random(seed)
    with enable_context_parallel_dispatcher():
        for _ in range(14):
            problem, names, (q, k, v) = _drawn(draw)
            check_equals_full_tensors(rank, (2, 2), problem, (q, k, v), mesh=mesh_of(names))


@torch_before_2_12
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_dtensors_with_uneven_shards(four_processes: Processes, seed: int) -> None:
    four_processes.run(_dtensors, seed)


def _context_over_one_axis(_rank: int, names: Names) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    problem = Problem(13, 13, batch=2, q_heads=4, kv_heads=2, is_causal=True)
    whole = problem.draw(seed=mesh["dp"].get_local_rank())  # other data for each replica
    buffers = [tensor.clone() for tensor in whole]
    with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[2] * 4):
        *qkv, grad = (buffer.clone() for buffer in buffers)
        leaves = [each.requires_grad_() for each in qkv]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    found = out, *torch.autograd.grad(out, leaves, grad)
    for actual, want in zip(
        found, context_parallel_shard(mesh["cp"], reference(problem, *whole), [2] * 4), strict=True
    ):
        assert_close(actual, want, names)
    assert all(map(torch.equal, buffers, whole))


@pytest.mark.parametrize("names", [("cp", "dp"), ("dp", "cp")], ids=str)
def test_a_context_over_one_axis_of_a_mesh_leaves_replicas_alone(four_processes: Processes, names: Names) -> None:
    four_processes.run(_context_over_one_axis, names)


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


@pytest.mark.parametrize(("as_module", "local_heads"), [*product([False, True], repeat=2)])
def test_tensor_parallel_attention_under_context_parallel(
    four_processes: Processes, as_module: bool, local_heads: bool
) -> None:
    four_processes.run(_tensor_parallel_attention, as_module, local_heads)


def _shifted(rank: int) -> list[int]:
    """By groups of two axes, which differ between ranks, with lengths that nobody has declared."""
    tokens = torch.arange(2) + 2 * rank
    return shift(tokens, -1, mesh=mesh_of(("ring", "ulysses")), dim=0, layout=Contiguous()).tolist()


def test_undeclared_lengths_of_a_shift(four_processes: Processes) -> None:
    assert four_processes.run(_shifted) == [[1, 2], [3, 4], [5, 6], [7, 0]]


def _sparse(rank: int) -> None:
    """Over two axes as on a rank that is alone: indices to the bit."""
    alone, mesh = [dist.new_group([each]) for each in range(4)][rank], mesh_of(("ring", "ulysses"))
    torch.manual_seed(0)
    whole = [torch.randn(2, 13, *dims, dtype=torch.float64) for dims in ((2, 5), (5,))]
    up = torch.randn(14, 5, dtype=torch.float64)

    def results(mesh: Any, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        q, latent = (x.clone().requires_grad_() for x in shards)
        indices = select_keys(q, latent, q[..., 0], topk=4, mesh=mesh, seq_len=13)
        options: dict[str, Any] = {"up": up, "indices": indices, "mesh": mesh, "seq_len": 13}
        out = indexed_attention(q.transpose(1, 2), latent, latent[..., :2], **options)
        del options["up"]
        loss = indexer_loss(q, latent, q[..., 0], q.transpose(1, 2), q.transpose(1, 2), scale=0.5, **options)
        place: dict[str, Any] = {"size": 3, "mesh": mesh, "seq_len": 13}
        pooled, _ = pool_blocks(latent, latent * 2.0, **place)
        indices_of_blocks = select_pooled(q, pooled, q[..., 0], topk=2, **place)
        of_blocks = {"window": 4, "indices": indices_of_blocks, **place}
        out = out + pooled_attention(q.transpose(1, 2), latent, pooled, **of_blocks)[..., :4]
        grads = torch.autograd.grad(out.square().sum() + loss.sum(), [q, latent])
        return [indices, out.detach().transpose(1, 2), loss.detach(), *grads]

    expected = context_parallel_shard(mesh, results(alone, whole), [1] * 5)
    found = results(mesh, context_parallel_shard(mesh, whole, [1, 1]))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_sparse_attention_over_two_axes(four_processes: Processes) -> None:
    four_processes.run(_sparse)


# Ranks that fail


def _one_rank_raises(rank: int) -> None:
    buffer = torch.arange(16.0).view(1, 1, 16, 1)
    soon = mock.patch.object(faults, "REPORT_SECONDS", 0.3)
    try:
        with soon, context_parallel(dist.group.WORLD, buffers=[buffer], buffer_seq_dims=[2]):
            if rank == 1:
                raise KeyError("only here")
            F.scaled_dot_product_attention(buffer, buffer, buffer)
    finally:
        assert buffer.flatten().tolist() == list(range(16))
        assert F.scaled_dot_product_attention(buffer, buffer, buffer).shape == buffer.shape


def _one_rank_hangs(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


def _sums_over_parts(rank: int) -> list[float]:
    cpu, whole, sums = torch.device("cpu"), dist.new_group([*range(4)], timedelta(seconds=77)), []
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    mesh = DeviceMesh.from_group(whole, "cpu", mesh_dim_names=("cp",))
    for sizes in [(2, 2), (2, 1, 1), (3, 1), (1, 3), (2, 2), (4,)]:
        ones, group = torch.ones(1), submesh(mesh, sizes).get_group()
        dist.all_reduce(ones, group=group)
        assert (group_timeout(group, cpu), dist.get_backend_config(group)) == (77, dist.get_backend_config(whole))
        sums.append(float(ones))
    dist.barrier(dist.new_group([*range(4)], use_local_synchronization=True))  # the ranks name later groups alike
    return sums


def test_parts_of_a_mesh_where_only_some_are_new(four_processes: Processes) -> None:
    """Torch names groups by their number on a rank, so ranks with different numbers would wait for each other."""
    assert four_processes.run(_sums_over_parts) == [
        [2, 2, 3, 1, 2, 4], [2, 2, 3, 3, 2, 4], [2, 1, 3, 3, 2, 4], [2, 1, 1, 3, 2, 4]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "errors"), [(_one_rank_raises, (RuntimeError, KeyError)), (_one_rank_hangs, (type(None), TimeoutError))]
)
def test_ranks_that_raise_or_hang_end_soon(body: Any, errors: tuple[type[Any], ...]) -> None:
    """Gloo raises where a peer is gone, and the context is left as it should be; a timeout ends what hangs."""
    two = Processes(2, timeout=30)
    two.run(_nothing)
    two.timeout = 1 if body is _one_rank_hangs else 30
    start = time.monotonic()
    try:
        with pytest.raises(RanksFailed) as caught:
            two.run(body)
    finally:
        two.stop()
    assert time.monotonic() - start < 25
    assert all(map(isinstance, caught.value.errors, errors))


def _nothing(_rank: int) -> None:
    pass
