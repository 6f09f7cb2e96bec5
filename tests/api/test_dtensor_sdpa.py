"""SDPA on DTensors: with the dispatcher, and in contexts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.dtensor_checks import (
    CAUSAL,
    CP,
    DP,
    GROUPED,
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
from support.masked_problems import MaskedProblem, Tensors
from support.problems import reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import (
    HeadTail,
    SlidingWindow,
    context_parallel,
    context_parallel_attention,
    enable_context_parallel_dispatcher,
)
from cp_dtensor.comm.collective import CollectiveTransport
from cp_dtensor.spec.masks import Full


@pytest.fixture
def _dispatcher() -> Iterator[None]:
    with enable_context_parallel_dispatcher():
        yield


def place(x: torch.Tensor, mesh: Any, on: Placements) -> DTensor:
    return distribute_tensor(x, mesh, on, src_data_rank=None).detach().requires_grad_(x.is_floating_point())


def close(got: Any, expected: torch.Tensor) -> None:
    assert isinstance(got, DTensor)
    torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("_dispatcher")
def test_partial_queries_are_summed() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        *qkv, grad_out = CAUSAL.draw(seed=0)
        q = DTensor.from_local(qkv[0] * (rank + 1) / 10, mesh, (Partial(),)).requires_grad_()  # 1 + 2 + 3 + 4 tenths
        k, v = (place(tensor, mesh, (CP,)) for tensor in qkv[1:])
        out = sdpa(CAUSAL, q, k, v)
        out.backward(place(grad_out, mesh, (CP,)).detach())
        for got, expected in zip((out, q.grad), reference(CAUSAL, *qkv, grad_out), strict=False):
            close(got, expected)

    run_ranks(4, body)


# Masks and dropout

OF_KEYS = MaskedProblem(16, 16, Full(), 4, 4, 2)


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize("on_qkv", [R, DP, TP], ids=str)
@pytest.mark.parametrize("bias", ["boolean bhs", "boolean b", "additive bhs"])
@pytest.mark.parametrize("in_context", [False, True])
def test_masks_of_tensors_that_are_not_sharded_along_the_sequence(
    on_qkv: Placement, bias: str, in_context: bool
) -> None:
    case = MaskedProblem(16, 16, Full(), 4, 4, 2, bias=bias)
    whole = case.draw(0)
    out_and_grads = case.reference(*whole)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        leaves, mask = [place(tensor, mesh, (on_qkv,)) for tensor in whole[:3]], place(whole[4], mesh, (R,))
        with context_parallel(dist.group.WORLD) if in_context else nullcontext():
            out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
            out.backward(place(whole[3], mesh, (on_qkv,)).detach())
        results = [out, *(leaf.grad for leaf in leaves), *([mask.grad] if mask.requires_grad else [])]
        for got, expected in zip(results, (*out_and_grads[:4], *out_and_grads[5:]), strict=True):
            close(got, expected)

    run_ranks(2, body)


@pytest.mark.usefixtures("_dispatcher")
def test_dropout_is_that_of_the_full_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch rows and heads are counted in the whole; the seed is the first rank's."""
    seeds = iter(range(10**6))
    monkeypatch.setattr(torch, "randint", lambda *_args, **_options: torch.tensor(next(seeds)))
    monkeypatch.setattr("torch.distributed.broadcast", lambda seed, **_options: seed.fill_(77))

    def dropped(rank: int, shape: tuple[int, ...], names: tuple[str, ...], on: Placements) -> Tensors:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        *leaves, grad_out = (place(tensor, mesh, on) for tensor in OF_KEYS.draw(0))
        out = F.scaled_dot_product_attention(*leaves, dropout_p=0.4, enable_gqa=True)
        out.backward(grad_out.detach())
        return tuple(tensor.full_tensor().detach() for tensor in (out, *(leaf.grad for leaf in leaves)))

    (alone,) = run_ranks(1, dropped, (1,), ("cp",), (CP,))
    for shape, names, on in (
        ((4,), ("cp",), (CP,)), ((2, 2), ("dp", "cp"), (DP, CP)), ((2, 2), ("cp", "tp"), (CP, TP)),
    ):  # fmt: skip
        for results in run_ranks(4, dropped, shape, names, on):
            torch.testing.assert_close(results, alone, rtol=1e-10, atol=1e-10)


# In contexts


@pytest.mark.parametrize(
    ("shape", "placements"), [((4,), (CP,)), ((4,), (TP,)), ((4,), (DP,)), ((2, 2), (CP, TP))], ids=str
)
def test_over_the_ranks_of_a_context_or_more_they_mean_their_full_tensors(shape: Any, placements: Placements) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cp", "tp")[: len(shape)])
        out = check_equals_full_tensors(rank, shape, GROUPED, (placements,) * 3, context=context_parallel(mesh["cp"]))
        assert out == placements

    run_ranks(4, body)


def test_in_a_context_of_one_rank_heads_over_other_ranks_have_its_mask() -> None:
    *whole, _ = CAUSAL.draw(seed=0)
    allowed = torch.ones(CAUSAL.q_len, CAUSAL.kv_len, dtype=torch.bool).tril().triu(-2)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("cp", "tp"))
        with context_parallel(mesh["cp"], mask=SlidingWindow(2, 0)):
            out = sdpa(CAUSAL, *distributed(tuple(whole), mesh["tp"], ((TP,),) * 3))
        close(out, F.scaled_dot_product_attention(*whole, allowed, scale=CAUSAL.scale))

    run_ranks(2, body)


@pytest.mark.parametrize("placement", [TP, DP], ids=str)
@pytest.mark.parametrize("names", [("cp", "tp"), ("tp", "cp")], ids=str)
def test_local_heads_of_dtensors_over_other_ranks_are_shards(names: tuple[str, str], placement: Placement) -> None:
    *qkv, grad_out = GROUPED.draw(seed=0)
    expected = reference(GROUPED, *qkv, grad_out)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        local = [shard(each, HeadTail(), mesh["cp"].get_local_rank(), 2) for each in (*qkv, grad_out, *expected)]
        q, k, v = distributed(tuple(local[:3]), mesh["tp"], ((placement,),) * 3)
        with context_parallel(mesh["cp"]):
            out = sdpa(GROUPED, q, k, v)
        assert out.device_mesh == mesh["tp"]
        out.backward(distribute_tensor(local[3], mesh["tp"], (placement,), src_data_rank=None))
        for actual, want in zip((out, q.grad, k.grad, v.grad), local[4:], strict=True):
            assert actual.placements == (placement,)
            close(actual, want)

    run_ranks(4, body)


@pytest.mark.parametrize(("on_mask", "bias"), [(R, "boolean s"), (R, "additive bhs"), (TP, "boolean bhs")])
def test_masks_and_dropout_of_tensor_parallel_heads_in_a_context(
    on_mask: Placement, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "randint", lambda *_args, **_options: torch.tensor(77))
    case = MaskedProblem(16, 16, Full(), 2, 4, 2, bias=bias)
    whole = case.draw(0)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        here = mesh.get_local_rank("cp")
        q, k, v, _, mask = case.shard(whole, HeadTail(), here, 2)
        with context_parallel(mesh["cp"]):
            out = F.scaled_dot_product_attention(
                *(place(x, mesh["tp"], (TP,)) for x in (q, k, v)), place(mask, mesh["tp"], (on_mask,)), enable_gqa=True
            )
            equal_heads = [place(x[:, :1].expand(-1, 4, -1, -1), mesh["tp"], (TP,)) for x in (q, k, v)]
            dropped = F.scaled_dot_product_attention(*equal_heads, dropout_p=0.5).full_tensor()
        close(out, shard(case.reference(*whole)[0], HeadTail(), here, 2))
        assert all(not torch.equal(dropped[:, one], dropped[:, other]) for one in range(4) for other in range(one))

    run_ranks(4, body)


def test_inference_mode_has_the_context() -> None:
    *whole, grad_out = GROUPED.draw(seed=0)
    expected_out, window = reference(GROUPED, *whole, grad_out)[0], SlidingWindow(2, 0)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        with torch.inference_mode():
            local = [shard(tensor, HeadTail(), mesh["cp"].get_local_rank(), 2) for tensor in (*whole, expected_out)]
            q, k, v = distributed(tuple(local[:3]), mesh["tp"], ((TP,),) * 3)
            with context_parallel(mesh["cp"]):
                close(sdpa(GROUPED, q, k, v), local[3])
            q, k, v = distributed(tuple(whole), mesh["cp"], ((CP,),) * 3)
            with context_parallel(mesh["cp"], mask=window):
                out = sdpa(GROUPED, q, k, v)
            close(out, context_parallel_attention(q, k, v, mask=window, enable_gqa=True).full_tensor())
            refused = pytest.raises(NotImplementedError, match="does not take the sinks of its context")
            with context_parallel(mesh["cp"], sinks=torch.zeros(GROUPED.q_heads)), refused:
                sdpa(GROUPED, q, k, v)

    run_ranks(4, body)


# Without sequence shards


def _results(rank: int, tensors: Tensors, placements: tuple[Placements, ...]) -> object:
    inputs = distributed(tensors, init_device_mesh("cpu", (4,)), placements)
    out = F.scaled_dot_product_attention(*inputs)
    out.backward(torch.ones_like(out))
    return [(x.placements, x.to_local().tolist()) for x in (out, *(each.grad for each in inputs))]


def _drawn(shape: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for _ in "qkv")


OF_OTHER_DIMS = [
    *((_drawn((4, 16, 8)), ((Shard(dim),),) * 3) for dim in range(3)),
    *((_drawn((2, 2, 4, 16, 8)), ((Shard(dim),),) * 3) for dim in (2, 3)),
]


@torch_before_2_12
@pytest.mark.parametrize(("tensors", "placements"), OF_OTHER_DIMS)
def test_without_four_dims_everything_is_as_with_the_dispatcher_off(
    tensors: Tensors, placements: tuple[Placements, ...]
) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # of its fused CPU op, torch has no strategy
        off = run_ranks(4, _results, tensors, placements)
        with enable_context_parallel_dispatcher():
            assert run_ranks(4, _results, tensors, placements) == off


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize("placements", [(DP, TP), (TP, TP), (DP, DP), (R, TP)], ids=str)
def test_batch_and_head_shards_attend_without_a_ring(placements: Placements, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectiveTransport, "start_kv", None)  # not callable
    run_ranks(4, check_problems, (2, 2), [GROUPED], (placements,) * 3, placements)


# Refusals, alike on every rank


def _refused(rank: int, kind: str) -> None:
    mesh, other = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    q, k, v = distributed(CAUSAL.draw(seed=0)[:3], mesh, ((CP,),) * 3)
    options: dict[str, Any] = {}
    if kind == "mask":
        options["attn_mask"] = torch.ones(4, 16, dtype=torch.bool)
    elif kind == "mask on another mesh":
        options["attn_mask"] = distribute_tensor(torch.ones(16, 16).bool(), other, (R, R), src_data_rank=None)
    elif kind == "plain tensor":
        k = k.to_local()
    elif kind == "another mesh":
        (v,) = distributed(CAUSAL.draw(seed=0)[2:3], other, ((CP, R),))
    elif kind == "shared heads":
        k, v = distributed(GROUPED.draw(seed=0)[1:3], mesh, ((CP,),) * 2)
    elif kind == "over the ranks of no context":
        q, k, v = distributed(SELF.draw(seed=0)[:3], other["tp"], ((CP,),) * 3)
    with context_parallel(other["cp"]) if "context" in kind else nullcontext():
        F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.usefixtures("_dispatcher")
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("mask", ValueError, "expected attn_mask to be a DTensor on the mesh of q.*got Tensor; distribute_tensor"),
        ("mask on another mesh", ValueError, r"to be a DTensor on the mesh of q.*got a DTensor on .*cp=2, tp=2"),
        ("plain tensor", ValueError, "all to be DTensors.* k torch.Tensor"),
        ("another mesh", ValueError, "on one mesh"),
        ("shared heads", ValueError, "enable_gqa=True"),
        ("over the ranks of no context", NotImplementedError, "sharded alike over batch"),
    ],
)
def test_refusals(kind: str, error: type[Exception], message: str) -> None:
    run_ranks(4, check_refused, error, message, _refused, kind)
