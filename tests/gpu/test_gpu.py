"""Two ranks on two GPUs over NCCL: backends, autograd's threads, and other features of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.gpu_checks import WORLD_SIZE, with_nccl
from support.problems import Problem, reference, shard
from support.processes import Processes
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from cp_dtensor import HeadTail, Striped, context_parallel, enable_context_parallel_dispatcher, ring_attention

pytestmark = pytest.mark.gpu(WORLD_SIZE)
aten = torch.ops.aten
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _relative_errors(ours: Any, truth: Any) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(ours, truth, strict=True)]


def _ring_errors(rank: int, problem: Problem, backend: str, transport: str, seed: int) -> list[list[float]]:
    """Relative errors of out, dq, dk, dv: of this rank's part, and of one GPU on the whole."""
    q, k, v, grad_out = problem.draw(seed, "cuda")
    truth = reference(problem, q, k, v, grad_out)
    layout = HeadTail()
    gqa = problem.q_heads != problem.kv_heads
    with sdpa_kernel(BACKENDS[backend]):
        local = [shard(tensor, layout, rank, WORLD_SIZE).requires_grad_() for tensor in (q, k, v)]
        out = ring_attention(
            *local, mesh=_group(), is_causal=problem.is_causal, enable_gqa=gqa, rotate_method=transport,
            seq_len=(problem.q_len, problem.kv_len),
        )  # fmt: skip
        out.backward(shard(grad_out, layout, rank, WORLD_SIZE))
        whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        if backend == "efficient":  # no GQA on one device
            group = problem.q_heads // problem.kv_heads
            expanded = [whole[0], *(tensor.repeat_interleave(group, 1) for tensor in whole[1:])]
            single = F.scaled_dot_product_attention(*expanded, is_causal=problem.is_causal)
        else:
            single = F.scaled_dot_product_attention(*whole, is_causal=problem.is_causal, enable_gqa=gqa)
        single.backward(grad_out)
    ours = _relative_errors(
        (out, *(tensor.grad for tensor in local)), [shard(each, layout, rank, WORLD_SIZE) for each in truth]
    )
    return [ours, _relative_errors((single, *(tensor.grad for tensor in whole)), truth)]


@pytest.mark.parametrize("transport", ["allgather", "alltoall", "symm_mem"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("is_causal", "length"), [(True, 1024), (False, 1024), (True, 1001), (False, 997)])
def test_bf16_errors_are_near_those_of_one_gpu(
    gpus: Processes, backend: str, transport: str, is_causal: bool, length: int
) -> None:
    problem = Problem(length, length, 2, q_heads=8, kv_heads=2, head_dim=64, is_causal=is_causal, dtype=torch.bfloat16)
    for ours, single in gpus.run(_ring_errors, problem, backend, transport, length):
        assert all(a <= 1.5 * b for a, b in zip(ours, single, strict=True)), (ours, single)


def _recompute_body(rank: int, how: str, backward_inside: bool) -> list[float]:
    problem = Problem(37, 37, 2, q_heads=4, kv_heads=2, is_causal=True)
    q, k, v, grad_out = problem.draw(5, "cuda")
    truth = reference(problem, q, k, v, grad_out)
    layout = Striped(3)
    local = [shard(tensor, layout, rank, WORLD_SIZE).requires_grad_() for tensor in (q, k, v)]
    local_grad = shard(grad_out, layout, rank, WORLD_SIZE)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with context_parallel(_group(), layout=layout, seq_len=37):
        out = RECOMPUTE[how](attention, *local)
        if backward_inside:
            out.backward(local_grad)
    if not backward_inside:
        out.backward(local_grad)
    expected = [shard(each, layout, rank, WORLD_SIZE) for each in truth]
    results = (out, *(tensor.grad for tensor in local))
    return [(a - b).abs().max().item() for a, b in zip(results, expected, strict=True)]


class _OwnRecompute(torch.autograd.Function):
    """A recompute that torch.utils.checkpoint knows nothing of."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            out = ctx.function(*tensors)
        return (None, *torch.autograd.grad(out, tensors, grad_out))


RECOMPUTE: dict[str, Callable[..., torch.Tensor]] = {
    "reentrant": lambda function, *tensors: checkpoint(function, *tensors, use_reentrant=True),
    "non-reentrant": lambda function, *tensors: checkpoint(function, *tensors, use_reentrant=False),
}


@pytest.mark.parametrize(
    ("how", "backward_inside"),
    [
        ("reentrant", True),
        ("reentrant", False),
        ("non-reentrant", True),
        ("non-reentrant", False),
    ],
)
def test_recompute_in_autograds_own_threads_is_ring_attention(gpus: Processes, how: str, backward_inside: bool) -> None:
    for errors in gpus.run(_recompute_body, how, backward_inside):
        assert all(each < 1e-10 for each in errors)


def _dtensor_body(
    rank: int, backend: str, dtype: torch.dtype, head_dim: int, placements: tuple[Placement, ...], length: int
) -> list[list[float]]:
    problem = Problem(length, length, 2, q_heads=4, kv_heads=4, head_dim=head_dim, is_causal=True, dtype=dtype)
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    q, k, v, grad_out = problem.draw(11, "cuda")
    truth = reference(problem, q, k, v, grad_out)
    with sdpa_kernel(BACKENDS[backend]):
        inputs = [
            distribute_tensor(tensor, mesh, [placement], src_data_rank=None).requires_grad_()
            for tensor, placement in zip((q, k, v), placements, strict=True)
        ]
        with enable_context_parallel_dispatcher():
            out = F.scaled_dot_product_attention(*inputs, is_causal=True)
            out.backward(distribute_tensor(grad_out, mesh, out.placements, src_data_rank=None))
        whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        single = F.scaled_dot_product_attention(*whole, is_causal=True)
        single.backward(grad_out)
    if length % WORLD_SIZE == 0:  # torch 2.11 gathers gradients of uneven shards, whatever the operation
        assert [tensor.grad.placements for tensor in inputs] == [(placement,) for placement in placements]
    return _errors_of_shards((out, *(tensor.grad for tensor in inputs)), (single, *(x.grad for x in whole)), truth)


def _errors_of_shards(ours: tuple[Any, ...], single: tuple[Any, ...], truth: Any) -> list[list[float]]:
    """Relative errors of this rank's shards of DTensors, and of the same rows on one GPU."""

    def sharded(tensors: Any) -> list[torch.Tensor]:
        return [
            distribute_tensor(tensor.detach(), mine.device_mesh, mine.placements, src_data_rank=None).to_local()
            for tensor, mine in zip(tensors, ours, strict=True)
        ]

    exact = sharded(truth)
    return [_relative_errors([mine.to_local() for mine in ours], exact), _relative_errors(sharded(single), exact)]


def _own_recompute_body(rank: int) -> str:
    q = torch.randn(1, 2, 8, 16, device="cuda").add_(rank).requires_grad_()
    with context_parallel(_group()):
        out = _OwnRecompute.apply(lambda q: F.scaled_dot_product_attention(q, q, q), q)
        try:
            out.sum().backward()
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_a_recompute_that_is_not_torchs_is_refused(gpus: Processes) -> None:
    for message in gpus.run(_own_recompute_body):
        assert "is ambiguous" in message


SEQUENCE, MIXED = (Shard(2), Shard(2), Shard(2)), (Shard(2), Replicate(), Replicate())
LIMIT = max(1.5, (1 + WORLD_SIZE / 2) ** 0.5)
"""Of errors: all-reduces of gradients of replicated tensors round at each hop, and shards of few rows vary more."""
LENGTHS = [256, pytest.param(101, marks=with_nccl)]
"""DTensor gathers gradients of uneven shards in torch 2.11, and those of replicated tensors."""


@pytest.mark.parametrize(
    "placements", [SEQUENCE, pytest.param(MIXED, marks=with_nccl)], ids=["all on the sequence", "k and v replicated"]
)
@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim"),
    [
        ("cudnn", torch.bfloat16, 64),
        ("flash", torch.bfloat16, 64),
        ("efficient", torch.float32, 64),
        ("math", torch.float64, 64),
        ("math", torch.float32, 33),
    ],
)
@pytest.mark.parametrize("length", LENGTHS)
def test_sdpa_of_dtensors_is_that_of_the_full_tensors(
    gpus: Processes, backend: str, dtype: torch.dtype, head_dim: int, placements: tuple[Placement, ...], length: int
) -> None:
    for ours, single in gpus.run(_dtensor_body, backend, dtype, head_dim, placements, length):
        assert all(a <= LIMIT * b + 1e-12 for a, b in zip(ours, single, strict=True)), (ours, single)


def _fused_op_body(rank: int, op: str, length: int) -> list[list[float]]:
    """A fused op and its autograd formula's backward op, called directly on DTensors."""
    dtype = torch.bfloat16
    problem = Problem(length, length, 2, q_heads=4, kv_heads=4, head_dim=64, is_causal=True, dtype=dtype)
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    q, k, v, grad_out = problem.draw(13, "cuda")
    truth = reference(problem, q, k, v, grad_out)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if op == "flash":
            return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        if op == "efficient":
            return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]

    inputs = [distribute_tensor(tensor, mesh, [Shard(2)], src_data_rank=None).requires_grad_() for tensor in (q, k, v)]
    with enable_context_parallel_dispatcher():
        out = call(*inputs)
        assert isinstance(out, DTensor)
        assert out.placements == (Shard(2),)
        out.backward(distribute_tensor(grad_out, mesh, out.placements, src_data_rank=None))
    whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    single = call(*whole)
    single.backward(grad_out)
    return _errors_of_shards((out, *(tensor.grad for tensor in inputs)), (single, *(x.grad for x in whole)), truth)


@pytest.mark.parametrize("op", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("length", LENGTHS)
def test_fused_ops_called_on_dtensors_ring(gpus: Processes, op: str, length: int) -> None:
    for ours, single in gpus.run(_fused_op_body, op, length):
        assert all(a <= 1.5 * b for a, b in zip(ours, single, strict=True)), (ours, single)
