"""attn_mask and dropout of DTensors equal those of their full tensors, for all placements."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import MaskedProblem, Tensors
from support.problems import shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from cp_dtensor import HeadTail, context_parallel, enable_context_parallel_dispatcher
from cp_dtensor.spec.masks import Full

R, DP, TP, CP = Replicate(), Shard(0), Shard(1), Shard(2)
Placements = tuple[Placement, ...]


@pytest.fixture(autouse=True)
def _dispatcher() -> Iterator[None]:
    with enable_context_parallel_dispatcher():
        yield


def distributed(tensor: torch.Tensor, mesh: Any, placements: Placements) -> DTensor:
    placed = distribute_tensor(tensor, mesh, placements, src_data_rank=None).detach()
    return placed.requires_grad_(tensor.is_floating_point())


def _masked(rank: int, on_qkv: Placements, on_mask: Placements, bias: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    case = MaskedProblem(16, 16, Full(), 4, 4, 2, bias=bias)
    whole: Tensors = case.draw(0)
    leaves = [distributed(tensor, mesh, on_qkv) for tensor in whole[:3]]
    mask = distributed(whole[4], mesh, on_mask)
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    out.backward(distributed(whole[3], mesh, on_qkv).detach())
    expected = case.reference(*whole)
    results = [out, *(leaf.grad for leaf in leaves), *([mask.grad] if mask.requires_grad else [])]
    for got, wanted in zip(results, (*expected[:4], *expected[5:]), strict=True):
        torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-10, atol=1e-10)


def _dropped(rank: int, shape: tuple[int, ...], names: tuple[str, ...], on_qkv: Placements) -> Tensors:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    q, k, v, grad_out = MaskedProblem(16, 16, Full(), 4, 4, 2).draw(0)
    leaves = [distributed(tensor, mesh, on_qkv) for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, dropout_p=0.4, enable_gqa=True)
    out.backward(distributed(grad_out, mesh, on_qkv).detach())
    return tuple(tensor.full_tensor().detach() for tensor in (out, *(leaf.grad for leaf in leaves)))


def test_dropout_is_that_of_the_full_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch rows and heads are counted in the whole; the seed is the first rank's."""
    seeds = iter(range(10**6))
    monkeypatch.setattr(torch, "randint", lambda *_args, **_options: torch.tensor(next(seeds)))
    monkeypatch.setattr("torch.distributed.broadcast", lambda seed, **_options: seed.fill_(77))
    (alone,) = run_ranks(1, _dropped, (1,), ("cp",), (CP,))
    for shape, names, on_qkv in (
        ((4,), ("cp",), (CP,)),
        ((2, 2), ("dp", "cp"), (DP, CP)),
        ((2, 2), ("cp", "tp"), (CP, TP)),
    ):
        for results in run_ranks(4, _dropped, shape, names, on_qkv):
            for got, wanted in zip(results, alone, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def _over_heads_in_a_context(rank: int, on_mask: Placement, bias: str) -> None:
    """Tensor parallel inside of a context: a DTensor's local heads are shards of the context."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    case = MaskedProblem(16, 16, Full(), 2, 4, 2, bias=bias)
    whole = case.draw(0)
    here = mesh.get_local_rank("cp")
    q, k, v, _, mask = case.shard(whole, HeadTail(), here, 2)
    placed = [distributed(tensor, mesh["tp"], (TP,)) for tensor in (q, k, v)]
    on_tp = distributed(mask, mesh["tp"], (on_mask,))
    with context_parallel(mesh["cp"]):
        out = F.scaled_dot_product_attention(*placed, attn_mask=on_tp, enable_gqa=True)
        same_heads = [distributed(t[:, :1].expand(-1, 4, -1, -1), mesh["tp"], (TP,)) for t in (q, k, v)]
        dropped = F.scaled_dot_product_attention(*same_heads, dropout_p=0.5).full_tensor()
    expected = shard(case.reference(*whole)[0], HeadTail(), here, 2)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-10, atol=1e-10)
    assert all(not torch.equal(dropped[:, one], dropped[:, other]) for one in range(4) for other in range(one))


@pytest.mark.parametrize(("on_mask", "bias"), [(R, "boolean s"), (R, "additive bhs"), (TP, "boolean bhs")])
def test_tensor_parallel_inside_of_a_context(on_mask: Placement, bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randint", lambda *_args, **_options: torch.tensor(77))
    run_ranks(4, _over_heads_in_a_context, on_mask, bias)


@pytest.mark.parametrize("on_qkv", [R, DP, TP], ids=str)
@pytest.mark.parametrize("bias", ["boolean bhs", "boolean b", "additive bhs"])
@pytest.mark.parametrize("in_context", [False, True])
def test_masks_of_tensors_that_are_not_sharded_along_the_sequence(
    on_qkv: Placement, bias: str, in_context: bool
) -> None:
    def body(rank: int) -> None:
        with context_parallel(dist.group.WORLD) if in_context else nullcontext():
            _masked(rank, (on_qkv,), (R,), bias)

    run_ranks(2, body)
