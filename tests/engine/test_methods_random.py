"""Random methods, ranks, layouts, lengths, heads and stages, compared with one device; cases found by the search."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.method_checks import RING_ULYSSES, ULYSSES_RING, check, place
from support.problems import Problem, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped, context_parallel_attention
from cp_dtensor.engine import planner
from cp_dtensor.plan.partition import head_stages


@dataclass(frozen=True)
class Ranks:
    """A mesh and a method that it can do."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    method: str


any_layout = st.one_of(
    st.sampled_from([Contiguous(), HeadTail(), MirroredBatch()]), st.builds(Striped, block=st.integers(1, 4))
)
one_axis = st.builds(
    Ranks, st.just(("cp",)), st.tuples(st.integers(1, 6)), st.sampled_from(["ulysses", "ring", "auto"])
)
two_axes = st.builds(
    Ranks,
    st.sampled_from([RING_ULYSSES, ULYSSES_RING, ("cp_node", "cp_gpu")]),
    st.sampled_from([(outer, inner) for outer in range(1, 5) for inner in range(1, 5) if outer * inner <= 8]),
    st.sampled_from(["hybrid", "ring", "auto"]),
)


@st.composite
def any_problem(draw: st.DrawFn) -> Problem:
    kv_heads, q_len = draw(st.integers(1, 8)), draw(st.integers(0, 30))
    return Problem(
        q_len=q_len,
        kv_len=draw(st.one_of(st.just(q_len), st.integers(1, 30))),
        batch=draw(st.integers(1, 3)),
        q_heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2,
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -0.3, 0.0])),
    )


def check_staged(problem: Problem, layout: Layout, ranks: Ranks, stages: int, rotate_method: str) -> None:
    staging = partial(head_stages, flops_per_stage=1e-3, most=stages)  # however little work a stage has
    with mock.patch.object(planner, "head_stages", staging):
        check(problem, layout, ranks.names, ranks.shape, method=ranks.method, rotate_method=rotate_method)


@settings(max_examples=examples(100))
@given(
    any_problem(),
    any_layout,
    st.one_of(one_axis, two_axes),
    st.integers(1, 4),
    st.sampled_from(["auto", "allgather", "alltoall"]),
)
def test_any_method_of_any_problem_equals_one_device(
    problem: Problem, layout: Layout, ranks: Ranks, stages: int, rotate_method: str
) -> None:
    check_staged(problem, layout, ranks, stages, rotate_method)


@pytest.mark.parametrize("names", [RING_ULYSSES, ULYSSES_RING], ids=", ".join)
@pytest.mark.parametrize("method", ["hybrid", "ring"])
@pytest.mark.parametrize(
    ("block", "q_len", "kv_len"), [(1, 5, 5), (3, 13, 13), (3, 13, 2), (3, 2, 13), (2, 9, 1)], ids=str
)
def test_ends_of_stripes_that_some_ranks_have_and_others_do_not(
    block: int, q_len: int, kv_len: int, method: str, names: tuple[str, ...]
) -> None:
    problem = Problem(q_len, kv_len, q_heads=4, kv_heads=2, head_dim=4, is_causal=True)
    check(problem, Striped(block), names, (2, 2), method=method)


def odd_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, the head dim outermost in memory."""
    return tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("requires_grad", [(True, True, True), (False, False, True), (True, False, False)], ids=str)
@pytest.mark.parametrize(
    ("names", "shape", "method"),
    [(("cp",), (4,), "ulysses"), (ULYSSES_RING, (2, 2), "hybrid"), (RING_ULYSSES, (2, 2), "ring")],
    ids=str,
)
def test_wider_values_in_memory_of_any_order_of_which_some_need_gradients(
    names: tuple[str, ...], shape: tuple[int, ...], method: str, requires_grad: tuple[bool, ...], stages: int
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
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        here = place(list(mesh.get_coordinate() or []), names, shape)
        *qkv, grad = (odd_memory(shard(tensor, HeadTail(), here, 4)) for tensor in whole)
        for tensor, needed in zip(qkv, requires_grad, strict=True):
            tensor.requires_grad_(needed)
        out = context_parallel_attention(*qkv, mesh=mesh, method=method, is_causal=True, enable_gqa=True, seq_len=13)
        torch.testing.assert_close(out, shard(expected_out, HeadTail(), here, 4), rtol=0, atol=1e-10)
        (out * grad.expand(3, -1, -1, -1, -1)).sum().backward()  # whose gradient is an expanded view
        for tensor, of_whole in zip(qkv, alone, strict=True):
            if tensor.requires_grad:
                wanted = 3 * shard(of_whole.grad, HeadTail(), here, 4)
                torch.testing.assert_close(tensor.grad, wanted, rtol=0, atol=1e-10)
            else:
                assert tensor.grad is None

    with mock.patch.object(planner, "head_stages", partial(head_stages, flops_per_stage=1e-3, most=stages)):
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
