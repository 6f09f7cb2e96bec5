"""Methods on ranks that are threads: what travels, orders of memory, rounding and autocast."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.collectives import recorded_collectives, rows_in_place
from support.masked_problems import MaskedProblem
from support.memory_orders import MEMORY
from support.method_checks import RING_ULYSSES, ULYSSES_RING, check, place
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from support.ring_checks import attend
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    Causal,
    Contiguous,
    HeadTail,
    Layout,
    context_parallel_attention,
    ring_attention,
)
from cp_dtensor.engine import planner
from cp_dtensor.engine.base import Values
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.plan.partition import head_stages

Ranks = tuple[tuple[str, ...], tuple[int, ...], str]
"""Names and sizes of the axes, and a method."""
RING, ULYSSES = (("cp",), (4,), "ring"), (("cp",), (4,), "ulysses")
HYBRID, SWAPPED, NESTED = (
    (RING_ULYSSES, (2, 2), "hybrid"),
    (ULYSSES_RING, (2, 2), "hybrid"),
    (RING_ULYSSES, (2, 2), "ring"),
)


@pytest.mark.parametrize("ranks", [ULYSSES, RING, HYBRID, SWAPPED, NESTED], ids=str)
def test_rows_that_travel_straight_between_their_places(ranks: Ranks) -> None:
    """As on GPUs, where nothing is packed."""
    names, shape, method = ranks
    problem = Problem(53, 53, batch=3, q_heads=8, kv_heads=4, head_dim=4, is_causal=True)
    with rows_in_place(), recorded_collectives() as collectives:
        check(problem, HeadTail(), names, shape, method=method)
    assert {collective.kind for collective in collectives} == {"AllToAll"}


def test_a_step_of_which_nobody_sees_anything_takes_no_inner_ring() -> None:
    """2 x 2 ranks: each takes one hop of the outer ring, and inner rings of one hop against each node that it sees."""

    def forward(rank: int, layout: Layout) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=RING_ULYSSES)
        q = torch.zeros(1, 2, 2, 4)
        context_parallel_attention(
            q, q, q, mesh=mesh, method="ring", layout=layout, is_causal=True, seq_len=8, rotate_method="alltoall"
        )

    for layout, exchanges in (
        (HeadTail(), 4 * (1 + 2)),
        (Contiguous(), 4 * (1 + 2) - 2),  # the first node sees nothing of the second
    ):
        with recorded_collectives() as recorded:
            run_ranks(4, forward, layout)
        assert [collective.kind for collective in recorded] == ["AllToAllBase"] * exchanges


@pytest.mark.parametrize(("method", "plan"), [("ring", RingPlan), ("ulysses", UlyssesPlan)])
def test_no_kernel_sees_a_minus_sign_that_torch_leaves_for_later(
    method: str, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `x.conj().imag`: it is not in memory, which is what kernels and copies between GPUs read."""
    seen: list[bool] = []

    def looked_at(run: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            values = next(each for each in args if isinstance(each, Values))
            tensors = [each for each in (*args, values.modifiers.bias) if isinstance(each, torch.Tensor)]
            seen.extend(each.is_neg() for each in tensors)
            return run(self, *args)

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(plan, name, looked_at(getattr(plan, name)))
    problem = MaskedProblem(9, 9, Causal(), bias="additive s")
    whole = problem.draw(0)
    expected = problem.reference(*whole)

    def body(rank: int) -> None:
        q, k, v, grad_out, bias = (torch._neg_view(-shard(each, HeadTail(), rank, 2)) for each in whole)
        leaves = [each.requires_grad_() for each in (q, k, v, bias)]
        out = context_parallel_attention(
            q, k, v, mesh=dist.group.WORLD, method=method, mask=Causal(), attn_mask=bias, seq_len=9
        )
        grads = torch.autograd.grad(out, leaves, grad_out)
        for got, wanted in zip((out, *grads), (*expected[:4], expected[5]), strict=True):
            assert_close(got, shard(wanted, HeadTail(), rank, 2))

    run_ranks(2, body)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("requires_grad", [(True, True, True), (False, False, True), (True, False, False)], ids=str)
@pytest.mark.parametrize("ranks", [ULYSSES, SWAPPED, NESTED], ids=str)
def test_wider_values_in_memory_of_any_order_of_which_some_need_gradients(
    ranks: Ranks, requires_grad: tuple[bool, ...]
) -> None:
    """Another order for each tensor and rank; the gradient of a sum has no strides."""
    names, shape, method = ranks
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(2, heads, 13, dim, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, dim in ((16, 3), (8, 3), (8, 5))
    ]
    expected_out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected_out.sum().backward()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        here = place(list(mesh.get_coordinate() or []), names, shape)
        mine = [shard(x.detach(), HeadTail(), here, 4) for x in whole]
        leaves = [memory(x) for x, memory in zip(mine, [*MEMORY.values()][1 + rank % 3 :], strict=False)]
        for leaf, needed in zip(leaves, requires_grad, strict=True):
            leaf.requires_grad_(needed)
        out: Any = context_parallel_attention(
            *leaves, mesh=mesh, method=method, is_causal=True, enable_gqa=True, seq_len=13
        )
        assert_close(out, shard(expected_out, HeadTail(), here, 4))
        out.sum().backward()
        for leaf, of_whole in zip(leaves, whole, strict=True):
            assert_close(leaf.grad, shard(of_whole.grad, HeadTail(), here, 4) if leaf.requires_grad else None)

    with mock.patch.object(planner, "head_stages", partial(head_stages, flops_per_stage=1e-3, most=2)):
        run_ranks(4, body)


@pytest.mark.parametrize("rotate_method", ["allgather", "alltoall"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_errors_are_at_most_one_and_a_half_times_those_of_one_device(dtype: torch.dtype, rotate_method: str) -> None:
    problem = Problem(256, 256, q_heads=4, kv_heads=4, head_dim=32, is_causal=True, dtype=dtype)
    *qkv, grad_out = tensors = problem.draw(seed=0)
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    alone = out.detach(), *torch.autograd.grad(out, leaves, grad_out)
    by_rank = run_ranks(8, attend, 8, tensors, problem, HeadTail(), {"rotate_method": rotate_method})
    for of_ranks, theirs, exact in zip(zip(*by_rank, strict=True), alone, reference(problem, *tensors), strict=True):
        assert all(each.dtype == dtype for each in of_ranks)
        errors = [each.double() - shard(exact, HeadTail(), rank, 8) for rank, each in enumerate(of_ranks)]
        assert torch.cat(errors, 2).norm() <= 1.5 * (theirs.double() - exact).norm()


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),  # autocast leaves it alone
        (torch.float32, torch.float32, torch.bfloat16),  # q and k come from RoPE in float32, v from a linear layer
    ],
    ids=["float32", "float64", "mixed"],
)
def test_autocast_casts_as_it_does_for_sdpa(dtypes: tuple[torch.dtype, ...]) -> None:
    leaves = [x.to(dtype).requires_grad_() for x, dtype in zip(Problem(16, 16).draw(seed=0), dtypes, strict=False)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(*leaves, is_causal=True)
    expected.float().sum().backward()

    def body(rank: int) -> None:
        local = [shard(leaf.detach(), HeadTail(), rank, 2).requires_grad_() for leaf in leaves]
        with torch.autocast("cpu", torch.bfloat16):
            out: Any = ring_attention(*local, mesh=dist.group.WORLD, is_causal=True)
        out.float().sum().backward()
        wholes: Any = (expected.detach(), *(leaf.grad for leaf in leaves))
        for got, whole in zip((out, *(x.grad for x in local)), wholes, strict=True):
            # Checks the dtypes too.
            torch.testing.assert_close(got, shard(whole, HeadTail(), rank, 2), rtol=0.02, atol=0.02)

    run_ranks(2, body)
