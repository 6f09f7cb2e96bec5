"""Torch's fused SDPA ops, called on DTensors themselves while the dispatcher is enabled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.dtensor_checks import CAUSAL, CP, CROSS, DP, GROUPED, TP, Placements, R, check_refused, distributed
from support.problems import Problem, dense, reference
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from cp_dtensor import SlidingWindow, _torch, context_parallel, enable_context_parallel_dispatcher

aten = torch.ops.aten
OPS = {
    name: tuple(getattr(aten, f"_scaled_dot_product_{name}{suffix}").default for suffix in ("", "_backward"))
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
}
CPU = OPS["flash_attention_for_cpu"]


@pytest.fixture
def _dispatcher() -> Iterator[None]:
    with enable_context_parallel_dispatcher():
        yield


def check(results: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for actual, wanted in zip(results, expected, strict=True):
        assert isinstance(actual, DTensor)
        torch.testing.assert_close(actual.full_tensor().double(), wanted, rtol=0, atol=tolerance)


def logsumexp(problem: Problem, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    seen = torch.ones(problem.q_len, problem.kv_len, dtype=torch.bool)
    return dense(q, k, k, seen.tril() if problem.is_causal else seen, problem.scale)[1]


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize("problem", [CAUSAL, GROUPED, CROSS], ids=["causal", "gqa", "cross"])
@pytest.mark.parametrize(
    ("mesh_shape", "q_on", "kv_on", "grad_kv"),
    [
        ((4,), (CP,), (CP,), (CP,)),
        ((4,), (CP,), (R,), (Partial(),)),
        ((4,), (TP,), (TP,), (TP,)),
        ((2, 2), (CP, DP), (CP, DP), (CP, DP)),
        ((2, 2), (TP, CP), (TP, CP), (TP, CP)),
        ((2, 2), (TP, CP), (TP, R), (TP, Partial())),
        ((2, 2), (CP, CP), (CP, R), (CP, Partial())),
    ],
    ids=str,
)
def test_cpu_op_keeps_placements(
    mesh_shape: tuple[int, ...], q_on: Placements, kv_on: Placements, grad_kv: Placements, problem: Problem
) -> None:
    *qkv, grad_out = problem.draw(seed=0)
    expected, *expected_grads = reference(problem, *qkv, grad_out)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", mesh_shape)
        q, k, v = (each.detach() for each in distributed(tuple(qkv), mesh, (q_on, kv_on, kv_on)))
        out, lse = CPU[0](q, k, v, 0.0, problem.is_causal, scale=problem.scale)
        check((out, lse), (expected, logsumexp(problem, *qkv[:2])))
        assert out.placements == lse.placements == q_on
        grad = distribute_tensor(grad_out, mesh, q_on, src_data_rank=None)
        grads = CPU[1](grad, q, k, v, out, lse, 0.0, problem.is_causal, scale=problem.scale)
        check(grads, expected_grads)
        assert [each.placements for each in grads] == [q_on, grad_kv, grad_kv]

    run_ranks(4, body)


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize(
    ("name", "problem", "mesh_shape", "placements"),
    [
        *(("flash_attention_for_cpu", CAUSAL, (2, 2), on)  # inputs that do not fit are redistributed
          for on in (((CP, TP),) * 3, ((R, CP), (CP, R), (CP, R)), ((CP, CP),) * 3, ((R, TP), (CP, R), (R, DP)))),
        *(("flash_attention", GROUPED, shape, (q, kv, kv)) for shape, q, kv in (
            ((4,), (CP,), (CP,)), ((4,), (CP,), (R,)), ((2, 2), (CP, CP), (CP, CP)), ((2, 2), (TP, CP), (TP, R)))),
    ],
    ids=str,
)  # fmt: skip
def test_through_autograd(
    name: str, problem: Problem, mesh_shape: tuple[int, ...], placements: tuple[Placements, ...]
) -> None:
    """That of CUDA tensors, too, on DTensors of the CPU."""
    *qkv, grad_out = problem.draw(seed=0)
    options = {} if problem.scale is None else {"scale": problem.scale}

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", mesh_shape)
        inputs = distributed(tuple(qkv), mesh, placements)
        out, lse, *others = OPS[name][0](*inputs, 0.0, True, **options)
        out.backward(distribute_tensor(grad_out, mesh, out.placements, src_data_rank=None))
        check((out, *(each.grad for each in inputs)), reference(problem, *qkv, grad_out))
        check((lse,), (logsumexp(problem, *qkv[:2]),))
        assert not others or others[2:4] == [problem.q_len, problem.kv_len]

    run_ranks(4, body)


def _refused(rank: int, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (4,))
    q, k, v = (each.detach() for each in distributed(CAUSAL.draw(seed=0)[:3], mesh, ((CP,),) * 3))
    with context_parallel(mesh, **options):
        OPS[name][0](q, k, v, *args)


@pytest.mark.parametrize(
    ("name", "args", "options", "message"),
    [
        ("efficient_attention", (None, True), {}, "  EFFICIENT_ATTENTION: "),
        ("cudnn_attention", (None, True), {}, "  CUDNN_ATTENTION: "),
        *(("flash_attention_for_cpu", (), {option: value}, f"does not take the {option} of its context")
          for option, value in (("mask", SlidingWindow(2, 0)), ("sinks", torch.zeros(8)), ("deterministic", True))),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(name: str, args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    """They name the only backend, and options of contexts that they do not take."""
    run_ranks(4, check_refused, NotImplementedError, message, _refused, name, args, options)
    run_ranks(4, _refused, "flash_attention_for_cpu", (), {})


def test_dispatch_by_default_redistributes_as_torch_does() -> None:
    def body(rank: int) -> None:
        mesh, (a, b) = init_device_mesh("cpu", (4,)), torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
        sharded = [distribute_tensor(x, mesh, (Replicate(),), src_data_rank=None) for x in (a, b)]
        for on in ((DP, TP), (TP, DP), (DP, R), (DP, DP)):
            left, right = (x.redistribute(placements=(each,)) for x, each in zip(sharded, on, strict=True))
            product = _torch.dispatched_by_default(aten.mm.default, (left, right), {})
            assert product.placements == (left @ right).placements
            torch.testing.assert_close(product.full_tensor(), a @ b)

    run_ranks(4, body)


@pytest.mark.gpu
@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "cudnn_attention"])
@pytest.mark.parametrize(("q_on", "kv_on"), [((CP,), (CP,)), ((CP,), (R,))], ids=str)
def test_cuda_ops(name: str, q_on: Placements, kv_on: Placements) -> None:
    """Every rank is a thread on one GPU."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cuda", (2,))
        problem = Problem(128, 256, batch=2, q_heads=4, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
        *qkv, grad_out = problem.draw(seed=0, device="cuda")
        inputs = distributed(tuple(qkv), mesh, (q_on, kv_on, kv_on))
        options = () if name == "flash_attention" else (None, True)
        with torch.autograd.set_multithreading_enabled(
            False
        ):  # one GPU, so one autograd thread for all ranks otherwise
            out = OPS[name][0](*inputs, *options)[0]
            out.backward(distribute_tensor(grad_out, mesh, out.placements, src_data_rank=None))
        check((out, *(each.grad for each in inputs)), reference(problem, *qkv, grad_out), 0.02)
        dist.barrier()

    run_ranks(2, body)
