"""SDPA on DTensors whose sequence is sharded over two mesh axes, or over one called "ulysses", equals one device."""

from collections.abc import Iterator
from functools import partial
from unittest import mock

import pytest
import torch
from support.dtensor_checks import CP, DP, TP, Placements, R, distributed, sdpa, torch_before_2_12
from support.method_checks import RING_ULYSSES, ULYSSES_RING
from support.problems import Problem, reference
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from cp_dtensor import enable_context_parallel_dispatcher
from cp_dtensor.engine import planner
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.plan.partition import head_stages

Names = tuple[str, ...] | None
Shape = tuple[int, ...]

EVEN = Problem(24, 24, q_heads=4, kv_heads=4, head_dim=4)
UNEVEN = [
    Problem(13, 13, q_heads=5, kv_heads=5, head_dim=4),
    Problem(13, 13, batch=2, q_heads=4, kv_heads=1, head_dim=4, is_causal=True, scale=-0.7),
    Problem(7, 19, q_heads=1, kv_heads=1, head_dim=4, is_causal=True),
    Problem(19, 4, q_heads=6, kv_heads=3, head_dim=4, is_causal=True),  # ranks without keys
    Problem(3, 3, q_heads=2, kv_heads=2, head_dim=4, is_causal=True),  # and without queries
]


@pytest.fixture(autouse=True)
def _dispatcher() -> Iterator[None]:
    with enable_context_parallel_dispatcher():
        yield


def check_shards(
    rank: int, names: Names, shape: Shape, problems: list[Problem], inputs: tuple[Placements, ...], out: Placements
) -> None:
    """Every shard of out and of the gradients.

    DTensor takes long to make full tensors of two or three axes, and to copy gradients into leaves, which
    `check_full_tensors` has it do.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for problem in problems:
        *qkv, grad_out = problem.draw(seed=0)
        expected = reference(problem, *qkv, grad_out)
        leaves = distributed(tuple(qkv), mesh, inputs)
        result = sdpa(problem, *leaves)
        grads = torch.autograd.grad(result, leaves, distribute_tensor(grad_out, mesh, out, src_data_rank=None))
        results = (result, *grads)
        for name, actual, whole, placements in zip(
            ("out", "dq", "dk", "dv"), results, expected, (out, *inputs), strict=True
        ):
            wanted = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            message = f"{name} on rank {rank} of mesh {shape} {names}, {inputs}, {problem}"
            assert actual.placements == placements, message
            torch.testing.assert_close(
                actual.to_local(), wanted.to_local(), rtol=0, atol=1e-10, msg=lambda text, m=message: f"{m}: {text}"
            )


def check(
    names: Names, shape: Shape, problems: list[Problem], inputs: tuple[Placements, ...], out: Placements | None = None
) -> None:
    run_ranks(torch.Size(shape).numel(), check_shards, names, shape, problems, inputs, out or inputs[0])


each_mesh = pytest.mark.parametrize(
    ("names", "shape"),
    [(RING_ULYSSES, (2, 3)), (ULYSSES_RING, (2, 3)), (None, (3, 2))],
    ids=str,
)


@torch_before_2_12
@each_mesh
def test_uneven_shards_over_two_axes(names: Names, shape: Shape) -> None:
    check(names, shape, UNEVEN, ((CP, CP),) * 3)


def test_stages_of_heads_over_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "head_stages", partial(head_stages, flops_per_stage=1e-3, most=2))
    problem = Problem(24, 24, q_heads=8, kv_heads=4, head_dim=4, is_causal=True)
    check(ULYSSES_RING, (2, 2), [problem], ((CP, CP),) * 3)


@pytest.mark.parametrize(
    ("names", "shape", "placements"),
    [
        (("dp", "ring", "ulysses"), (2, 2, 2), (DP, CP, CP)),
        (("ulysses", "dp", "ring"), (2, 2, 2), (CP, DP, CP)),
        (("ring", "ulysses", "tp"), (2, 2, 2), (CP, CP, TP)),
        pytest.param(("tp", "ulysses", "ring"), (2, 2, 2), (TP, CP, CP), marks=torch_before_2_12),
        (("ring", "ulysses", "more"), (2, 2, 2), (CP, CP, CP)),  # gathered over the third
        (None, (2, 2, 2), (CP, TP, CP)),
        # An axis called "ulysses" exchanges rows for heads.
        *(
            pytest.param(*case, marks=torch_before_2_12)
            for case in (
                (("ulysses",), (4,), (CP,)),
                (("ulysses", "dp"), (2, 2), (CP, DP)),
                (("tp", "ulysses"), (2, 2), (TP, CP)),
                (("other", "ulysses"), (2, 2), (R, CP)),
                (("ring", "ulysses"), (4, 1), (CP, CP)),
                (("ring", "ulysses"), (1, 4), (CP, CP)),
            )
        ),
    ],
    ids=str,
)
def test_beside_other_axes(names: Names, shape: Shape, placements: Placements) -> None:
    """Heads and batch rows that do not divide leave ranks of other axes without any."""
    problems = [
        Problem(16, 16, batch=2, q_heads=8, kv_heads=4, head_dim=4, is_causal=True),
        Problem(8, 16, batch=2, q_heads=2, kv_heads=2, head_dim=4),
        Problem(13, 13, batch=1, q_heads=1, kv_heads=1, head_dim=4, is_causal=True),
    ]
    check(names, shape, problems, (placements,) * 3)


SEQ_OF_ALL = ((CP, CP), (CP, CP), (CP, CP))


@pytest.mark.parametrize(
    ("names", "shape", "inputs", "ulysses", "rings"),
    [
        (RING_ULYSSES, (2, 3), SEQ_OF_ALL, {3}, {2}),
        (ULYSSES_RING, (2, 3), SEQ_OF_ALL, {2}, {3}),
        (None, (2, 3), SEQ_OF_ALL, {3}, {2}),
        (("ulysses",), (4,), ((CP,),) * 3, {4}, set()),
        (("cp",), (4,), ((CP,),) * 3, set(), {4}),
        (RING_ULYSSES, (2, 3), ((CP, CP), (CP, R), (CP, R)), set(), {2}),
        (RING_ULYSSES, (2, 3), ((CP, CP), (R, CP), (R, CP)), {3}, set()),
    ],
    ids=str,
)
def test_which_axis_does_what(
    names: Names, shape: Shape, inputs: tuple[Placements, ...], ulysses: set[int], rings: set[int]
) -> None:
    """The sizes of the groups that exchange rows for heads, and of those around which K/V travel."""
    with (
        mock.patch.object(UlyssesPlan, "forward", autospec=True, side_effect=UlyssesPlan.forward) as by_heads,
        mock.patch.object(RingPlan, "forward", autospec=True, side_effect=RingPlan.forward) as as_ring,
    ):
        check(names, shape, [EVEN], inputs, (CP,) * len(shape))
    axes = [call.args[4].ranks for call in by_heads.call_args_list]
    assert {(ranks.inner or ranks.outer).size() for ranks in axes} == ulysses
    groups = [call.args[0].group(call.args[4].ranks) for call in as_ring.call_args_list]
    assert {group.size() for group in groups if group is not None} == rings
