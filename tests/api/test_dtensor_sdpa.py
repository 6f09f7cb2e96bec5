"""SDPA on DTensors equals SDPA of their full tensors. Ranks are threads, so shards are even; see `test_gloo.py`."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.dtensor_checks import (
    CAUSAL,
    CP,
    DP,
    GROUPED,
    PROBLEMS,
    SELF,
    TP,
    Placements,
    R,
    check_equals_full_tensors,
    check_problems,
    check_refused,
    distributed,
    sdpa,
    torch_before_2_12,
)
from support.problems import Problem, reference
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import enable_context_parallel_dispatcher
from cp_dtensor.engine.attend import Attention


@pytest.fixture
def _dispatcher() -> Iterator[None]:
    with enable_context_parallel_dispatcher():
        yield


TWO_AXES = st.tuples(*[st.sampled_from((R, DP, TP, CP, Shard(3)))] * 2)


@pytest.mark.usefixtures("_dispatcher")
@settings(max_examples=examples(30))
@given(TWO_AXES, TWO_AXES, TWO_AXES, st.sampled_from(list(PROBLEMS.values())))
def test_any_placements_of_a_two_dim_mesh(q: Placements, k: Placements, v: Placements, problem: Problem) -> None:
    assume(CP in (*q, *k, *v))
    out = run_ranks(4, check_equals_full_tensors, (2, 2), problem, (q, k, v))[0]
    assert [placement == CP for placement in out] == [CP in column for column in zip(q, k, v, strict=True)]


def _partial_inputs(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    *qkv, grad_out = CAUSAL.draw(seed=0)
    summands = [tensor * (rank + 1) / 10 for tensor in qkv]  # 1 + 2 + 3 + 4 tenths
    q = DTensor.from_local(summands[0], mesh, (Partial(),)).requires_grad_()
    k, v = (distribute_tensor(tensor, mesh, (CP,), src_data_rank=None) for tensor in qkv[1:])
    out = sdpa(CAUSAL, q, k, v)
    out.backward(distribute_tensor(grad_out, mesh, (CP,), src_data_rank=None))
    expected = reference(CAUSAL, *qkv, grad_out)
    torch.testing.assert_close(out.full_tensor(), expected[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(q.grad.full_tensor(), expected[1], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("_dispatcher")
def test_partial_queries_are_summed() -> None:
    run_ranks(4, _partial_inputs)


# Without sequence shards


def _unsharded(rank: int, problem: Problem, placements: tuple[Placements, ...]) -> object:
    """Local results, or the error."""
    mesh = init_device_mesh("cpu", (4,))
    *qkv, grad_out = problem.draw(seed=0)
    inputs = distributed(tuple(qkv), mesh, placements)
    try:
        out = sdpa(problem, *inputs)
        out.backward(distribute_tensor(grad_out, mesh, out.placements, src_data_rank=None))
    except Exception as error:
        return type(error), str(error)
    return [(tensor.placements, tensor.to_local().tolist()) for tensor in (out, *(each.grad for each in inputs))]


@pytest.mark.parametrize("problem", [SELF, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("placements", [((DP,),) * 3, ((TP,),) * 3, ((R,),) * 3, ((DP,), (R,), (R,))], ids=str)
def test_without_sequence_shards_everything_is_as_with_the_dispatcher_off(
    placements: tuple[Placements, ...], problem: Problem
) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # of its fused CPU op, torch has no strategy; of causal, the error is compared
        off = run_ranks(4, _unsharded, problem, placements)
        with enable_context_parallel_dispatcher():
            on = run_ranks(4, _unsharded, problem, placements)
    assert on == off


def _other_dims(rank: int, shape: tuple[int, ...], dim: int) -> object:
    generator = torch.Generator().manual_seed(0)
    qkv = tuple(torch.randn(shape, generator=generator) for _ in "qkv")
    out = F.scaled_dot_product_attention(*distributed(qkv, init_device_mesh("cpu", (4,)), ((Shard(dim),),) * 3))
    return out.placements, out.to_local().tolist()


@torch_before_2_12
@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 16, 8), 0), ((4, 16, 8), 1), ((4, 16, 8), 2), ((2, 2, 4, 16, 8), 2), ((2, 2, 4, 16, 8), 3)]
)
def test_inputs_of_other_than_four_dims_are_as_with_the_dispatcher_off(shape: tuple[int, ...], dim: int) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        off = run_ranks(4, _other_dims, shape, dim)
        with enable_context_parallel_dispatcher():
            assert run_ranks(4, _other_dims, shape, dim) == off


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize("placements", [(DP, TP), (TP, TP), (DP, DP), (R, TP)], ids=str)
def test_batch_and_head_shards_attend_without_a_ring(placements: Placements, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "forward", None)  # not callable
    run_ranks(4, check_problems, (2, 2), [GROUPED], (placements,) * 3, placements)


# Refusals, alike on every rank


def _refused(rank: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    q, k, v = distributed(CAUSAL.draw(seed=0)[:3], mesh, ((CP,),) * 3)
    if kind == "mask":
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(4, 16, dtype=torch.bool))
    elif kind == "mask on other mesh":
        mask = torch.ones(16, 16, dtype=torch.bool)
        of_two_dims = distribute_tensor(mask, init_device_mesh("cpu", (2, 2)), (R, R), src_data_rank=None)
        F.scaled_dot_product_attention(q, k, v, attn_mask=of_two_dims)
    elif kind == "plain tensor":
        F.scaled_dot_product_attention(q, k.to_local(), v)
    elif kind == "other mesh":
        other = init_device_mesh("cpu", (2, 2))
        v = distributed(CAUSAL.draw(seed=0)[2:3], other, ((CP, R),))[0]
        F.scaled_dot_product_attention(q, k, v)
    elif kind == "group query heads":
        k, v = distributed(GROUPED.draw(seed=0)[1:3], mesh, ((CP,),) * 2)
        F.scaled_dot_product_attention(q, k, v)


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("mask", ValueError, "expected attn_mask to be a DTensor on the mesh of q.*got Tensor; distribute_tensor"),
        ("mask on other mesh", ValueError, r"attn_mask to be a DTensor on the mesh of q.*got a DTensor on .*\(2, 2\)"),
        ("plain tensor", ValueError, "all to be DTensors.* k torch.Tensor"),
        ("other mesh", ValueError, "on one mesh"),
        ("group query heads", ValueError, "enable_gqa=True"),
    ],
)
def test_refusals(kind: str, error: type[Exception], message: str) -> None:
    run_ranks(4, check_refused, error, message, _refused, kind)
