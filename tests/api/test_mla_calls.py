"""Options, refusals, bytes and errors of multi-head latent attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import errors_by_rank, kinds, recorded_collectives
from support.latent_problems import LatentCase, LatentProblem, check_latents
from support.problems import shard
from support.ranks import run_ranks
from support.shared_memory import shared_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from cp_dtensor import Balanced, Causal, Documents, Full, HeadTail, Striped, context_parallel, context_parallel_mla

RANKS = 3
MASK = Documents([0, 5, 12, 24], within=Causal())


@pytest.mark.parametrize("layout", [HeadTail(), Striped(3)], ids=str)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_through_shared_memory(method: str, layout: Any) -> None:
    """Rows of 16 bytes or multiples of it, as exchanges of heads need them."""
    sizes = {"q_heads": 4, "head_dim": 6, "rotary_dim": 2, "value_dim": 4, "latent_dim": 8}
    some = [
        LatentCase(LatentProblem(29, 29, mask, 2, **sizes), layout, (("method", method), ("rotate_method", "symm_mem")))
        for mask in (Full(), Causal(), Documents([0, 9, 29], within=Causal()))
    ]
    with shared_memory() as machine:
        for _ in range(2):  # the second calls reuse the memory of the first
            check_latents(some, (4,))
    assert machine.copies > 0


def inputs(rank: int, ranks: int, length: int = 24, **options: Any) -> tuple[torch.Tensor, ...]:
    problem = LatentProblem(length, length, Full(), **options)
    return problem.shards(problem.draw(0), HeadTail(), rank, ranks)


@pytest.mark.parametrize("heads", [3, 12])
@pytest.mark.parametrize(("method", "rotate_method"), [("ring", "allgather"), ("ring", "alltoall"), ("ulysses", None)])
def test_latents_travel_once_and_not_the_keys_of_heads(method: str, rotate_method: str | None, heads: int) -> None:
    """Every rank sends R + Dr values of each of its tokens to each other rank, and gets gradients of as many back."""
    problem = LatentProblem(24, 24, Full(), 2, heads)
    row = problem.latent_dim + problem.rotary_dim

    def body(rank: int) -> None:
        q, latent, k_rope, up, grad_out = problem.shards(problem.draw(0), HeadTail(), rank, RANKS)
        out = context_parallel_mla(
            q.requires_grad_(), latent, k_rope, up=up, mesh=dist.group.WORLD, method=method,
            rotate_method=rotate_method, seq_len=24,
        )  # fmt: skip
        out.backward(grad_out)

    with recorded_collectives() as collectives:
        run_ranks(RANKS, body)
    own = 24 // RANKS * 2
    if method == "ring":  # K/V in both passes, and the gradients
        expected = 3 * own * (RANKS - 1) * row
    else:  # a collective passes a rank its own part, too; backward does not send latents again
        expected = 2 * own * RANKS * row + 2 * own * heads * (problem.head_dim + problem.value_dim)
    for rank in range(RANKS):
        assert sum(x.numel() for each in collectives if each.rank == rank for x in each.sent) == expected


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"latent": [1.0]}, TypeError, "expected latent to be a torch.Tensor, got list"),
    "four dims": ({"k_rope": torch.ones(1, 1, 8, 2)}, ValueError, r"k_rope \(batch, sequence, Dr\).*k_rope \(1, 1, 8"),
    "dtypes": ({"up": torch.ones(21, 6, dtype=torch.bfloat16)}, ValueError, "one dtype.*torch.bfloat16"),
    "devices": ({"latent": torch.ones(1, 8, 6, device="meta")}, ValueError, "one device.*cpu, meta, cpu, cpu"),
    "batches": ({"latent": torch.ones(2, 8, 6)}, ValueError, "one batch size"),
    "lengths": ({"k_rope": torch.ones(1, 7, 2)}, ValueError, "one sequence length"),
    "columns": ({"up": torch.ones(21, 5)}, ValueError, "as many columns as latent"),
    "no rotary dims": ({"k_rope": torch.ones(1, 8, 0)}, ValueError, "at least one batch row, head, R and Dr"),
    "rotary dims only": ({"k_rope": torch.ones(1, 8, 5)}, ValueError, r"q of more dims than k_rope"),
    "rows of heads": ({"up": torch.ones(20, 6)}, ValueError, r"rows for each of 3 heads, more than Dn = 3"),
    "no values": ({"up": torch.ones(9, 6)}, ValueError, r"rows for each of 3 heads, more than Dn = 3; got q"),
}


def good() -> dict[str, Any]:
    tensors = {"latent": (1, 8, 6), "k_rope": (1, 8, 2), "up": (21, 6)}
    return {"q": torch.ones(1, 3, 8, 5), **{name: torch.ones(shape) for name, shape in tensors.items()}}


@pytest.mark.parametrize(("bad", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_before_any_collective(bad: dict[str, Any], error: type[Exception], message: str) -> None:
    with recorded_collectives() as collectives, pytest.raises(error, match=message):
        run_ranks(2, lambda _: context_parallel_mla(**{**good(), "mesh": dist.group.WORLD, **bad}))
    assert kinds(collectives) == []


@pytest.mark.parametrize("name", ["q", "latent", "k_rope", "up"])
def test_dtensors_are_refused(name: str) -> None:
    def body(_: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        arguments = good()
        arguments[name] = DTensor.from_local(arguments[name], mesh, [Replicate()])
        context_parallel_mla(**arguments, mesh=mesh)

    with pytest.raises(TypeError, match=rf"expected {name} to be a plain tensor.*to_local"):
        run_ranks(2, body)


@pytest.mark.parametrize("grads", [False, True])
def test_ranks_that_disagree_about_the_up_projection_are_named(grads: bool) -> None:
    def body(rank: int) -> None:
        q, latent, k_rope, up, _ = inputs(rank, 2)
        up = up.requires_grad_(rank == 1) if grads else torch.cat((up, up[: 3 * rank]))
        context_parallel_mla(q.requires_grad_(), latent, k_rope, up=up, mesh=dist.group.WORLD, debug=True)

    errors = errors_by_rank(2, body)
    assert all(isinstance(error, ValueError) and "disagree about up" in str(error) for error in errors), errors


@pytest.mark.parametrize("layout", [Striped(1), Balanced(MASK, 24)], ids=["Striped", "Balanced"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_layout_and_mask_of_a_context(method: str, layout: Any) -> None:
    problem = LatentProblem(24, 24, MASK, 2)
    (expected, *grads, _), of_up = problem.results(problem.draw(0))

    def body(rank: int) -> torch.Tensor:
        mesh = dist.group.WORLD
        *tensors, grad_out = problem.shards(problem.draw(0), layout, rank, 2)
        leaves = [tensor.requires_grad_() for tensor in tensors]
        with context_parallel(mesh, layout=layout, mask=MASK):
            out = context_parallel_mla(*leaves[:3], up=leaves[3], mesh=mesh, method=method)
        *found, share = torch.autograd.grad(out, leaves, grad_out)
        for got, whole, dim in zip((out, *found), (expected, *grads), (2, 2, 1, 1), strict=True):
            torch.testing.assert_close(got, shard(whole, layout, rank, 2, dim), rtol=1e-10, atol=1e-10)
        return share

    torch.testing.assert_close(sum(run_ranks(2, body)), of_up, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["ring", "ulysses", "auto"])
@pytest.mark.parametrize("ranks", [1, RANKS])
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (1, 3)], ids=str)
def test_some_inputs_need_gradients(needed: tuple[int, ...], ranks: int, method: str) -> None:
    problem = LatentProblem(24, 24, Causal())
    (_, *grads, _), of_up = problem.results(problem.draw(0))

    def body(rank: int) -> list[torch.Tensor]:
        *tensors, grad_out = problem.shards(problem.draw(0), HeadTail(), rank, ranks)
        leaves = [tensor.requires_grad_(index in needed) for index, tensor in enumerate(tensors)]
        out = context_parallel_mla(
            *leaves[:3], up=leaves[3], mesh=dist.group.WORLD, is_causal=True, method=method, deterministic=True
        )
        out.backward(grad_out)
        assert all((leaf.grad is not None) == (index in needed) for index, leaf in enumerate(leaves))
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    found = run_ranks(ranks, body)
    for rank, of_rank in enumerate(found):
        for index, (whole, dim) in enumerate(zip(grads, (2, 1, 1), strict=True)):
            if index in needed:
                torch.testing.assert_close(
                    of_rank[index], shard(whole, HeadTail(), rank, ranks, dim), rtol=1e-10, atol=1e-10
                )
    if 3 in needed:
        torch.testing.assert_close(sum(of_rank[3] for of_rank in found), of_up, rtol=1e-10, atol=1e-10)


def test_autocast_casts_the_weight_too() -> None:
    def body(rank: int) -> None:
        leaves = [tensor.float().requires_grad_() for tensor in inputs(rank, 2)[:4]]
        with torch.autocast("cpu", torch.bfloat16):
            out = context_parallel_mla(*leaves[:3], up=leaves[3], mesh=dist.group.WORLD, is_causal=True)
        assert out.dtype == torch.bfloat16
        halves = [leaf.detach().bfloat16() for leaf in leaves]
        same = context_parallel_mla(*halves[:3], up=halves[3], mesh=dist.group.WORLD, is_causal=True)
        assert torch.equal(out, same)
        out.sum().backward()
        assert {leaf.grad.dtype for leaf in leaves if leaf.grad is not None} == {torch.float32}

    run_ranks(2, body)
