"""Torch's fused SDPA ops, called on DTensors themselves while the dispatcher is enabled."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.dtensor_checks import (
    CAUSAL,
    CP,
    CROSS,
    DP,
    GROUPED,
    TP,
    Placements,
    R,
    check_refused,
    distributed,
)  # fmt: skip
from support.problems import Problem, reference
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from cp_dtensor import SlidingWindow, _torch, context_parallel, enable_context_parallel_dispatcher

aten = torch.ops.aten
FORWARD = {
    "flash": aten._scaled_dot_product_flash_attention.default,
    "efficient": aten._scaled_dot_product_efficient_attention.default,
    "cudnn": aten._scaled_dot_product_cudnn_attention.default,
    "cpu": aten._scaled_dot_product_flash_attention_for_cpu.default,
}
BACKWARD = {
    "flash": aten._scaled_dot_product_flash_attention_backward.default,
    "efficient": aten._scaled_dot_product_efficient_attention_backward.default,
    "cudnn": aten._scaled_dot_product_cudnn_attention_backward.default,
    "cpu": aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


@pytest.fixture
def _dispatcher() -> Iterator[None]:
    with enable_context_parallel_dispatcher():
        yield


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert isinstance(actual, DTensor)
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=0, atol=1e-10)


def logsumexp(problem: Problem, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    logits = q @ k.repeat_interleave(problem.q_heads // problem.kv_heads, 1).mT * scale
    if problem.is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
    return logits.logsumexp(-1)


# The op of CPU tensors


def _forward_and_backward(
    rank: int, mesh_shape: tuple[int, ...], problem: Problem, q_on: Placements, kv_on: Placements, grad_kv: Placements
) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    *qkv, grad_out = problem.draw(seed=0)
    out_want, *grads_want = reference(problem, *qkv, grad_out)
    q, k, v = (each.detach() for each in distributed(tuple(qkv), mesh, (q_on, kv_on, kv_on)))
    out, lse = FORWARD["cpu"](q, k, v, 0.0, problem.is_causal, scale=problem.scale)
    close(out, out_want)
    close(lse, logsumexp(problem, *qkv[:2]))
    assert out.placements == lse.placements == q_on
    grad = distribute_tensor(grad_out, mesh, q_on, src_data_rank=None)
    grads = BACKWARD["cpu"](grad, q, k, v, out, lse, 0.0, problem.is_causal, scale=problem.scale)
    for actual, want in zip(grads, grads_want, strict=True):
        close(actual, want)
    assert [each.placements for each in grads] == [q_on, grad_kv, grad_kv]


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize("problem", [CAUSAL, GROUPED, CROSS], ids=["causal", "gqa", "cross"])
@pytest.mark.parametrize(
    ("mesh_shape", "q", "kv", "grad_kv"),
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
    mesh_shape: tuple[int, ...], q: Placements, kv: Placements, grad_kv: Placements, problem: Problem
) -> None:
    run_ranks(4, _forward_and_backward, mesh_shape, problem, q, kv, grad_kv)


def _through_autograd(rank: int, placements: tuple[Placements, ...]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    *qkv, grad_out = CAUSAL.draw(seed=0)
    inputs = distributed(tuple(qkv), mesh, placements)
    out, _ = FORWARD["cpu"](*inputs, 0.0, True, scale=CAUSAL.scale)
    out.backward(distribute_tensor(grad_out, mesh, out.placements, src_data_rank=None))
    for actual, want in zip((out, *(each.grad for each in inputs)), reference(CAUSAL, *qkv, grad_out), strict=True):
        close(actual, want)


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize(
    "placements",
    [((CP, TP),) * 3, ((R, CP), (CP, R), (CP, R)), ((CP, CP),) * 3, ((R, TP), (CP, R), (R, DP))],
    ids=str,
)
def test_cpu_op_redistributes_inputs_that_do_not_fit(placements: tuple[Placements, ...]) -> None:
    run_ranks(4, _through_autograd, placements)


# The ops of CUDA tensors, on DTensors of the CPU


def _flash(rank: int, mesh_shape: tuple[int, ...], on: tuple[Placements, Placements]) -> None:
    mesh, (q_on, kv_on) = init_device_mesh("cpu", mesh_shape), on
    *qkv, grad_out = GROUPED.draw(seed=0)
    inputs = distributed(tuple(qkv), mesh, (q_on, kv_on, kv_on))
    out, lse, *_, q_len, kv_len, _, _, _ = FORWARD["flash"](*inputs, 0.0, True)
    assert (q_len, kv_len) == (GROUPED.q_len, GROUPED.kv_len)
    close(lse, logsumexp(GROUPED, *qkv[:2]))
    out.backward(distribute_tensor(grad_out, mesh, out.placements, src_data_rank=None))
    for actual, want in zip((out, *(each.grad for each in inputs)), reference(GROUPED, *qkv, grad_out), strict=True):
        close(actual, want)


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize(
    ("mesh_shape", "on"),
    [((4,), ((CP,), (CP,))), ((4,), ((CP,), (R,))), ((2, 2), ((CP, CP), (CP, CP))), ((2, 2), ((TP, CP), (TP, R)))],
    ids=str,
)
def test_flash_op_of_sequence_shards(mesh_shape: tuple[int, ...], on: tuple[Placements, Placements]) -> None:
    run_ranks(4, _flash, mesh_shape, on)


def _op_of_another_device(rank: int, name: str) -> None:
    q, k, v = distributed(CAUSAL.draw(seed=0)[:3], init_device_mesh("cpu", (4,)), ((CP,),) * 3)
    FORWARD[name](q, k, v, None, True)


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize(
    ("name", "backend"), [("efficient", "EFFICIENT_ATTENTION"), ("cudnn", "CUDNN_ATTENTION")], ids=str
)
def test_ops_name_the_only_backend(name: str, backend: str) -> None:
    run_ranks(4, check_refused, NotImplementedError, f"  {backend}: ", _op_of_another_device, name)


def _in_context(rank: int, settings: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (4,))
    q, k, v = (each.detach() for each in distributed(CAUSAL.draw(seed=0)[:3], mesh, ((CP,),) * 3))
    with context_parallel(mesh, **settings):
        FORWARD["cpu"](q, k, v)


@pytest.mark.parametrize(
    "settings", [{"mask": SlidingWindow(2, 0)}, {"sinks": torch.zeros(8)}, {"deterministic": True}], ids=str
)
def test_ops_refuse_settings_of_contexts(settings: dict[str, Any]) -> None:
    (name,) = settings
    run_ranks(4, check_refused, NotImplementedError, f"does not take the {name} of its context", _in_context, settings)
    run_ranks(4, _in_context, {})


def _by_torchs_rules(rank: int) -> None:
    mesh, (a, b) = init_device_mesh("cpu", (4,)), torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    sharded = [distribute_tensor(x, mesh, (Replicate(),), src_data_rank=None) for x in (a, b)]
    for on in ((DP, TP), (TP, DP), (DP, R), (DP, DP)):
        left, right = (x.redistribute(placements=(each,)) for x, each in zip(sharded, on, strict=True))
        product = _torch.dispatched_by_default(aten.mm.default, (left, right), {})
        assert product.placements == (left @ right).placements
        torch.testing.assert_close(product.full_tensor(), a @ b)


def test_dispatch_by_default_redistributes_as_torch_does() -> None:
    run_ranks(4, _by_torchs_rules)


# On GPUs: the ops themselves, every rank in its own thread on one of them


def _cuda_op(rank: int, name: str, q_on: Placements, kv_on: Placements) -> None:
    mesh = init_device_mesh("cuda", (2,))
    problem = Problem(128, 256, batch=2, q_heads=4, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    q, k, v, grad_out = problem.draw(seed=0, device="cuda")
    expected = reference(problem, q, k, v, grad_out)
    inputs = distributed((q, k, v), mesh, (q_on, kv_on, kv_on))
    options = {"flash": (), "efficient": (None, True), "cudnn": (None, True)}[name]
    with torch.autograd.set_multithreading_enabled(False):  # one GPU, so one autograd thread for all ranks otherwise
        out = FORWARD[name](*inputs, *options)[0]
        out.backward(distribute_tensor(grad_out, mesh, out.placements, src_data_rank=None))
    for actual, want in zip((out, *(each.grad for each in inputs)), expected, strict=True):
        torch.testing.assert_close(actual.full_tensor().double(), want, rtol=0.02, atol=0.02)
    dist.barrier()


@pytest.mark.gpu
@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize(("q", "kv"), [((CP,), (CP,)), ((CP,), (R,))], ids=str)
def test_cuda_ops(name: str, q: Placements, kv: Placements) -> None:
    run_ranks(2, _cuda_op, name, q, kv)
