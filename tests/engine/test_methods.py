"""Every method on ranks that are threads, compared with one device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.collectives import recorded_collectives, rows_in_place
from support.masked_problems import MaskedProblem
from support.method_checks import RING_ULYSSES, ULYSSES_RING, check, place
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    Causal,
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    context_parallel_attention,
    ring_attention,
)
from cp_dtensor.engine import planner
from cp_dtensor.engine.base import Values
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.plan.partition import head_stages


@dataclass(frozen=True)
class Ranks:
    """A mesh and a method that it can do."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    method: str


ULYSSES_4, RING_4 = Ranks(("cp",), (4,), "ulysses"), Ranks(("cp",), (4,), "ring")
HYBRID, NESTED = Ranks(RING_ULYSSES, (2, 2), "hybrid"), Ranks(RING_ULYSSES, (2, 2), "ring")
SWAPPED = Ranks(ULYSSES_RING, (2, 2), "hybrid")

any_layout = st.one_of(
    st.sampled_from([Contiguous(), HeadTail(), MirroredBatch()]), st.builds(Striped, block=st.integers(1, 4))
)
one_axis = st.builds(
    Ranks, st.just(("cp",)), st.tuples(st.integers(1, 8)), st.sampled_from(["ulysses", "ring", "auto"])
)
two_axes = st.builds(
    Ranks,
    st.sampled_from([RING_ULYSSES, ULYSSES_RING, ("cp_node", "cp_gpu")]),
    st.sampled_from([(outer, inner) for outer in range(1, 5) for inner in range(1, 5) if outer * inner <= 8]),
    st.sampled_from(["hybrid", "ring", "auto"]),
)


@st.composite
def any_problem(draw: st.DrawFn) -> Problem:
    kv_heads, q_len = draw(st.integers(1, 8)), draw(st.integers(0, 40))
    return Problem(
        q_len=q_len, kv_len=draw(st.one_of(st.just(q_len), st.integers(0, 40))), batch=draw(st.integers(1, 3)),
        q_heads=kv_heads * draw(st.integers(1, 3)), kv_heads=kv_heads, head_dim=2, is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -0.3, 0.0])),
    )  # fmt: skip


def causal(q_len: int, kv_len: int, heads: tuple[int, int] = (4, 2), **options: Any) -> Problem:
    return Problem(q_len, kv_len, q_heads=heads[0], kv_heads=heads[1], head_dim=4, is_causal=True, **options)


@settings(max_examples=examples(150))
@given(
    any_problem(),
    any_layout,
    st.one_of(one_axis, two_axes),
    st.integers(1, 4),
    st.sampled_from(["allgather", "alltoall"]),
)
# Ends of stripes that some ranks have and others do not; more ranks than tokens or heads; copies of key heads.
@example(causal(13, 2), Striped(3), NESTED, 1, "allgather")
@example(causal(2, 13), Striped(3), SWAPPED, 1, "allgather")
@example(causal(1, 30), HeadTail(), RING_4, 1, "alltoall")
@example(causal(26, 26, (6, 2), batch=2), HeadTail(), ULYSSES_4, 1, "allgather")
@example(causal(26, 26, (8, 2), batch=2), MirroredBatch(), ULYSSES_4, 2, "allgather")
@example(causal(53, 53, (12, 4), batch=3), HeadTail(), Ranks(RING_ULYSSES, (2, 3), "hybrid"), 3, "alltoall")
@example(causal(29, 29, (10, 5), batch=2, scale=-0.3), Contiguous(), HYBRID, 4, "alltoall")
def test_any_method_of_any_problem_equals_one_device(
    problem: Problem, layout: Layout, ranks: Ranks, stages: int, rotate_method: str
) -> None:
    staging = partial(head_stages, flops_per_stage=1e-3, most=stages)  # however little work a stage has
    with mock.patch.object(planner, "head_stages", staging):
        check(problem, layout, ranks.names, ranks.shape, method=ranks.method, rotate_method=rotate_method)


@pytest.mark.parametrize("ranks", [ULYSSES_4, RING_4, HYBRID, SWAPPED, NESTED], ids=str)
def test_rows_that_travel_straight_between_their_places(ranks: Ranks) -> None:
    """As on GPUs, where nothing is packed."""
    with rows_in_place(), recorded_collectives() as collectives:
        check(causal(53, 53, (8, 4), batch=3), HeadTail(), ranks.names, ranks.shape, method=ranks.method)
    assert {collective.kind for collective in collectives} == {"AllToAll"}


def test_a_step_of_which_nobody_sees_anything_takes_no_inner_ring() -> None:
    """2 x 2 ranks: each takes one hop of the outer ring, and inner rings of one hop against each node that it sees."""

    def forward(rank: int, layout: Layout) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=RING_ULYSSES)
        q = torch.zeros(1, 2, 2, 4)
        context_parallel_attention(
            q, q, q, mesh=mesh, method="ring", layout=layout, is_causal=True, seq_len=8, rotate_method="alltoall"
        )

    def exchanges(layout: Layout) -> int:
        with recorded_collectives() as recorded:
            run_ranks(4, forward, layout)
        assert {collective.kind for collective in recorded} == {"AllToAllBase"}
        return len(recorded)

    assert exchanges(HeadTail()) == 4 * (1 + 2)
    assert exchanges(Contiguous()) == 4 * (1 + 2) - 2  # the first node sees nothing of the second


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_no_kernel_sees_a_minus_sign_that_torch_leaves_for_later(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `x.conj().imag`: it is not in memory, which is what kernels and copies between GPUs read."""
    kind = {"ring": RingPlan, "ulysses": UlyssesPlan}[method]
    forward, backward, seen = kind.forward, kind.backward, []

    def looked_at(run: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            values = next(each for each in args if isinstance(each, Values))
            tensors = [each for each in (*args, values.modifiers.bias) if isinstance(each, torch.Tensor)]
            seen.extend(each.is_neg() for each in tensors)
            return run(self, *args)

        return call

    monkeypatch.setattr(kind, "forward", looked_at(forward))
    monkeypatch.setattr(kind, "backward", looked_at(backward))
    whole = MaskedProblem(9, 9, Causal(), bias="additive s").draw(0)
    expected = MaskedProblem(9, 9, Causal(), bias="additive s").reference(*whole)

    def body(rank: int) -> None:
        q, k, v, grad_out, bias = (torch._neg_view(-shard(each, HeadTail(), rank, 2)) for each in whole)
        leaves = [each.requires_grad_() for each in (q, k, v, bias)]
        out = context_parallel_attention(
            q, k, v, mesh=dist.group.WORLD, method=method, mask=Causal(), attn_mask=bias, seq_len=9
        )
        grads = torch.autograd.grad(out, leaves, grad_out)
        for got, wanted in zip((out, *grads), (*expected[:4], expected[5]), strict=True):
            torch.testing.assert_close(got, shard(wanted, HeadTail(), rank, 2), rtol=1e-10, atol=1e-10)

    run_ranks(2, body)
    assert seen
    assert not any(seen)


def odd_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, the head dim outermost in memory."""
    return tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


@pytest.mark.parametrize("requires_grad", [(True, True, True), (False, False, True), (True, False, False)], ids=str)
@pytest.mark.parametrize("ranks", [ULYSSES_4, SWAPPED, NESTED], ids=str)
def test_wider_values_in_memory_of_any_order_of_which_some_need_gradients(
    ranks: Ranks, requires_grad: tuple[bool, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(2, heads, 13, dim, generator=generator, dtype=torch.float64)
        for heads, dim in ((16, 3), (8, 3), (8, 5), (16, 5))
    ]
    *leaves, grad_out = whole
    alone = [tensor.clone().requires_grad_() for tensor in leaves]
    expected_out = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)
    expected_out.backward(grad_out)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", ranks.shape, mesh_dim_names=ranks.names)
        here = place(list(mesh.get_coordinate() or []), ranks.names, ranks.shape)
        *qkv, grad = (odd_memory(shard(tensor, HeadTail(), here, 4)) for tensor in whole)
        for tensor, needed in zip(qkv, requires_grad, strict=True):
            tensor.requires_grad_(needed)
        out = context_parallel_attention(
            *qkv, mesh=mesh, method=ranks.method, is_causal=True, enable_gqa=True, seq_len=13
        )
        torch.testing.assert_close(out, shard(expected_out, HeadTail(), here, 4), rtol=0, atol=1e-10)
        (out * grad.expand(3, -1, -1, -1, -1)).sum().backward()  # whose gradient is an expanded view
        for tensor, of_whole in zip(qkv, alone, strict=True):
            if tensor.requires_grad:
                wanted = 3 * shard(of_whole.grad, HeadTail(), here, 4)
                torch.testing.assert_close(tensor.grad, wanted, rtol=0, atol=1e-10)
            else:
                assert tensor.grad is None

    with mock.patch.object(planner, "head_stages", partial(head_stages, flops_per_stage=1e-3, most=2)):
        run_ranks(4, body)


@pytest.mark.parametrize("method", ["hybrid", "ring"])
def test_the_gradient_of_a_sum_which_has_no_strides(method: str) -> None:
    whole = [each.requires_grad_() for each in Problem(8, 8, q_heads=4, kv_heads=4).draw(0)[:3]]
    F.scaled_dot_product_attention(*whole).sum().backward()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=RING_ULYSSES)
        leaves = [shard(each.detach(), HeadTail(), rank, 4).requires_grad_() for each in whole]
        context_parallel_attention(*leaves, mesh=mesh, method=method).sum().backward()
        for leaf, of_whole in zip(leaves, whole, strict=True):
            torch.testing.assert_close(leaf.grad, shard(of_whole.grad, HeadTail(), rank, 4), rtol=0, atol=1e-10)

    run_ranks(4, body)


@pytest.mark.parametrize("rotate_method", ["allgather", "alltoall"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_errors_are_at_most_one_and_a_half_times_those_of_one_device(
    dtype: torch.dtype, is_causal: bool, rotate_method: str
) -> None:
    problem = Problem(256, 256, q_heads=4, kv_heads=4, head_dim=32, is_causal=is_causal, dtype=dtype)
    tensors = problem.draw(seed=0)
    expected = reference(problem, *tensors)

    def attend(rank: int, size: int, attention: Any, options: dict[str, Any]) -> list[torch.Tensor]:
        q, k, v, grad_out = (shard(tensor, HeadTail(), rank, size) for tensor in tensors)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, is_causal=is_causal, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    alone = attend(0, 1, F.scaled_dot_product_attention, {})
    by_rank = run_ranks(
        8, lambda rank: attend(rank, 8, ring_attention, {"mesh": dist.group.WORLD, "rotate_method": rotate_method})
    )
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        of_shards = [
            result[index].double() - shard(expected[index], HeadTail(), rank, 8) for rank, result in enumerate(by_rank)
        ]
        ours, theirs = (
            torch.cat([x.flatten() for x in of_shards]).norm(),
            (alone[index].double() - expected[index]).norm(),
        )
        assert ours <= 1.5 * theirs, f"{name}: {ours:.3e} against {theirs:.3e} on one device"
        assert all(result[index].dtype == dtype for result in by_rank)


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
            out = ring_attention(*local, mesh=dist.group.WORLD, is_causal=True)
        out.float().sum().backward()  # type: ignore[union-attr]
        wholes = (expected, *(leaf.grad for leaf in leaves))
        for got, whole in zip((out, *(x.grad for x in local)), wholes, strict=True):
            assert whole is not None
            wanted = shard(whole.detach(), HeadTail(), rank, 2)
            torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)  # checks the dtypes too

    run_ranks(2, body)
