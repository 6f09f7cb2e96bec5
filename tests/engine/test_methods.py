"""All methods on ranks that are threads, compared with one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import recorded_collectives, rows_in_place
from support.masked_problems import MaskedProblem
from support.method_checks import RING_ULYSSES, ULYSSES_RING, check, check_all
from support.problems import Problem, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Causal, Contiguous, HeadTail, Layout, MirroredBatch, Striped, context_parallel_attention
from cp_dtensor.engine import planner
from cp_dtensor.engine.base import Values
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.plan.partition import head_stages

LAYOUTS = [Contiguous(), HeadTail(), Striped(1), Striped(3), MirroredBatch()]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
each_mask = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
# (names, shape, method): every factorisation of 4, 6 and 8 ranks, in either order of axes.
MESHES = [
    *((("cp",), (ranks,), method) for ranks in (4, 6, 8) for method in ("ulysses", "ring", "auto")),
    *(
        (names, shape, method)
        for shape in ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2))
        for names in (RING_ULYSSES, ULYSSES_RING)
        for method in ("hybrid", "ring")
    ),
    (("cp_node", "cp_gpu"), (2, 2), "auto"),
    (RING_ULYSSES, (1, 4), "hybrid"),
    (RING_ULYSSES, (4, 1), "hybrid"),
    (RING_ULYSSES, (1, 4), "ring"),
]


@pytest.mark.parametrize(("names", "shape", "method"), MESHES, ids=lambda value: str(value).replace("'", ""))
@each_layout
def test_every_method_equals_one_device(
    layout: Layout, names: tuple[str, ...], shape: tuple[int, ...], method: str
) -> None:
    """With lengths that divide by nothing, every GQA factor, and more ranks than key heads.

    The masks take turns, so that any three of mesh, layout, GQA factor and mask meet.
    """
    turn = MESHES.index((names, shape, method)) + LAYOUTS.index(layout)
    problems = [
        Problem(53, 53, batch=3, q_heads=8, kv_heads=kv_heads, head_dim=4, is_causal=(turn + number) % 2 == 0)
        for number, kv_heads in enumerate((8, 4, 2, 1))
    ]
    check_all(problems, layout, names, shape, method=method)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (6, 2), (5, 5), (12, 4), (3, 1), (1, 1)]
)
@pytest.mark.parametrize(("names", "shape"), [(("cp",), (4,)), (RING_ULYSSES, (2, 3)), (ULYSSES_RING, (4, 2))])
def test_any_number_of_heads(q_heads: int, kv_heads: int, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    problem = Problem(26, 26, batch=2, q_heads=q_heads, kv_heads=kv_heads, head_dim=4, is_causal=True)
    check(problem, HeadTail(), names, shape, method="ulysses" if len(shape) == 1 else "hybrid")


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 8), (8, 4), (12, 6), (10, 5)])
@each_mask
def test_stages_of_heads_change_nothing(
    is_causal: bool, q_heads: int, kv_heads: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "head_stages", partial(head_stages, flops_per_stage=1e-3, most=stages))
    problem = Problem(29, 29, batch=2, q_heads=q_heads, kv_heads=kv_heads, head_dim=4, is_causal=is_causal)
    check(problem, HeadTail(), ("cp",), (2,), method="ulysses")
    check(problem, HeadTail(), RING_ULYSSES, (2, 2), method="hybrid")


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 31), (31, 5), (3, 3), (1, 1), (2, 40)])
@pytest.mark.parametrize(
    ("names", "shape", "method"),
    [(("cp",), (4,), "ulysses"), (RING_ULYSSES, (2, 2), "hybrid"), (RING_ULYSSES, (2, 2), "ring")],
)
@each_mask
def test_cross_attention_and_lengths_below_the_number_of_ranks(
    is_causal: bool, names: tuple[str, ...], shape: tuple[int, ...], method: str, q_len: int, kv_len: int
) -> None:
    problem = Problem(q_len, kv_len, q_heads=4, kv_heads=2, head_dim=4, is_causal=is_causal, scale=-0.3)
    check(problem, HeadTail(), names, shape, method=method)


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


@pytest.mark.parametrize(("names", "shape", "method"), MESHES, ids=lambda value: str(value).replace("'", ""))
@each_mask
def test_rows_that_travel_straight_between_their_places(
    is_causal: bool, names: tuple[str, ...], shape: tuple[int, ...], method: str
) -> None:
    """As on GPUs, where nothing is packed."""
    problem = Problem(53, 53, batch=3, q_heads=8, kv_heads=4, head_dim=4, is_causal=is_causal)
    with rows_in_place(), recorded_collectives() as collectives:
        check(problem, HeadTail(), names, shape, method=method)
    assert {collective.kind for collective in collectives} == {"AllToAll"}


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
