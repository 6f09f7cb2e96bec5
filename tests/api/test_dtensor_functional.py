"""Functions on DTensors: exactly the attention of full tensors, over any axes, with all modifiers; the planner."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.dtensor_checks import CP, DP, TP, Placements, R, distributed, sdpa, torch_before_2_12
from support.masked_problems import MaskedProblem, any_mask, fits
from support.method_checks import RING_ULYSSES, ULYSSES_RING
from support.problems import Problem
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cp_dtensor import HeadTail, context_parallel, context_parallel_attention, enable_context_parallel_dispatcher
from cp_dtensor.api.dtensor_attention import AttentionPlacements, local_segment, plan_placements
from cp_dtensor.engine import planner
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.plan.partition import head_stages
from cp_dtensor.spec.masks import Batched, Causal, Full

Mesh = tuple[tuple[int, ...], tuple[str, ...] | None, Placements, tuple[str, ...]]
ALL = ("auto", "ring", "ulysses")
MESHES: list[Mesh] = [  # shape, names, placements of q, k and v, methods
    ((3,), ("cp",), (CP,), ALL),
    ((2,), ("ulysses",), (CP,), ALL),
    ((2, 2), ("dp", "cp"), (DP, CP), ALL),
    ((2, 2), ("cp", "tp"), (CP, TP), ALL),
    ((2, 2), ("tp", "ulysses"), (TP, CP), ("auto",)),
    ((2, 3), RING_ULYSSES, (CP, CP), ("auto", "ring", "hybrid")),
    ((2, 3), ULYSSES_RING, (CP, CP), ("auto", "ring", "hybrid")),
    ((3, 2), None, (CP, CP), ("auto",)),
    ((4, 1), RING_ULYSSES, (CP, CP), ("auto",)),
    ((2, 2), ("replicas", "cp"), (R, CP), ("auto",)),
    ((2, 2, 2), ("ulysses", "dp", "ring"), (CP, DP, CP), ("auto",)),
    ((2, 2, 2), ("tp", "ulysses", "ring"), (TP, CP, CP), ("auto",)),
    ((2, 2, 2), ("ring", "ulysses", "more"), (CP, CP, CP), ("auto",)),  # gathered over the third
    ((2, 2, 2), None, (CP, TP, CP), ("auto",)),
]


@st.composite
def problems(draw: st.DrawFn) -> MaskedProblem:
    q_len, batch, kv_heads = (
        draw(st.integers(1, 17)),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 4])),
    )
    kv_len = draw(st.one_of(st.just(q_len), st.integers(1, 17)))
    mask = draw(any_mask(q_len, kv_len, batch).filter(lambda mask: fits(mask, q_len, kv_len, batch)))
    return MaskedProblem(
        q_len, kv_len, mask, batch, kv_heads * draw(st.sampled_from([1, 2])), kv_heads, is_causal=draw(st.booleans()),
        bias=draw(st.sampled_from(["", "", "boolean s", "additive hs"])), sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 0.7])), scale=draw(st.sampled_from([None, -0.7])),
    )  # fmt: skip


def compare(name: str, got: torch.Tensor | None, expected: torch.Tensor, context: object) -> None:
    assert isinstance(got, DTensor), (name, context)
    # Locally: to gather, DTensor looks groups up by equal meshes, of which ranks that are threads have several.
    local = distribute_tensor(expected, got.device_mesh, got.placements, src_data_rank=None).to_local()
    torch.testing.assert_close(
        got.to_local(), local, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name} {context}: {text}"
    )


def check(rank: int, where: Mesh, method: str, problem: MaskedProblem, seed: int) -> None:
    shape, names, placements, _ = where
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    whole, sinks = problem.draw(seed), problem.draw_sinks(seed)
    q, k, v = distributed(whole[:3], mesh, (placements,) * 3)
    options: dict[str, Any] = {}
    if problem.bias:
        options["attn_mask"] = distribute_tensor(whole[4], mesh, (R,) * len(shape), src_data_rank=None)
    if sinks is not None:
        options["sinks"] = distribute_tensor(sinks, mesh, (R,) * len(shape), src_data_rank=None)
    leaves = [q, k, v, *(x.requires_grad_() for x in options.values() if x.is_floating_point())]
    out, lse = context_parallel_attention(
        q, k, v, method=method, mask=problem.mask, is_causal=problem.is_causal, enable_gqa=True, return_lse=True,
        softcap=problem.softcap, scale=problem.scale, **options,
    )  # fmt: skip
    assert out.placements == placements or "more" in (names or ()) or problem.kv_heads % 2  # which are gathered
    out.backward(distribute_tensor(whole[3], mesh, out.placements, src_data_rank=None))
    expected = list(problem.reference(*whole, sinks=sinks))
    if sinks is not None:
        expected[-1] = expected[-1].sum((0, 2))
    got = [out, *(leaf.grad for leaf in leaves[:3]), lse, *(leaf.grad for leaf in leaves[3:])]
    for name, ours, wanted in zip(("out", "dq", "dk", "dv", "lse", "d", "d"), got, expected, strict=False):
        compare(name, ours, wanted, (names, method, problem, rank))


UNEVEN = MaskedProblem(19, 4, Full(), 2, 6, 3, is_causal=True)  # ranks without keys
TINY = MaskedProblem(3, 3, Full(), 1, 1, 1, is_causal=True)  # and without queries, heads and batch rows


@torch_before_2_12
@pytest.mark.parametrize("where", MESHES, ids=str)
def test_functions_equal_full_tensors(where: Mesh) -> None:
    @settings(max_examples=examples(3), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @example(UNEVEN, where[3][0], 0)
    @example(TINY, where[3][0], 0)
    @given(problems(), st.sampled_from(where[3]), st.integers(0, 99))
    def equal(problem: MaskedProblem, method: str, seed: int) -> None:
        run_ranks(torch.Size(where[0]).numel(), check, where, method, problem, seed)

    equal()


def test_stages_of_heads_over_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "head_stages", partial(head_stages, flops_per_stage=1e-3, most=2))
    problem = MaskedProblem(24, 24, Full(), 1, 8, 4, is_causal=True)
    run_ranks(4, check, ((2, 2), ULYSSES_RING, (CP, CP), ()), "auto", problem, 0)


SEQ_OF_ALL = ((CP, CP),) * 3


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
def test_which_axis_does_what(names: Any, shape: Any, inputs: Any, ulysses: set[int], rings: set[int]) -> None:
    """The sizes of the groups that exchange rows for heads, and of those around which K/V travel."""
    problem = Problem(24, 24, q_heads=4, kv_heads=4, head_dim=4)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with enable_context_parallel_dispatcher():
            sdpa(problem, *distributed(problem.draw(seed=0)[:3], mesh, inputs))

    with (
        mock.patch.object(UlyssesPlan, "forward", autospec=True, side_effect=UlyssesPlan.forward) as by_heads,
        mock.patch.object(RingPlan, "forward", autospec=True, side_effect=RingPlan.forward) as as_ring,
    ):
        run_ranks(torch.Size(shape).numel(), body)
    axes = [call.args[4].ranks for call in by_heads.call_args_list]
    assert {ranks.sizes[-1] for ranks in axes} == ulysses
    groups = [call.args[0].group(call.args[4].ranks) for call in as_ring.call_args_list]
    assert {group.size() for group in groups if group is not None} == rings


PLAIN = torch.zeros(2, 2, 12, 4, dtype=torch.float64)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layout": HeadTail()}, ValueError, "expects layout to be None or Contiguous"),
    ({"mesh": "world"}, ValueError, "expects mesh to be None or that of the DTensors"),
    ({"seq_len": 13}, ValueError, "expects seq_len to be None or that of the DTensors"),
    ({"debug": True}, NotImplementedError, "debug=True compares the shards"),
    ({"method": "hybrid"}, ValueError, 'method "hybrid" expects DTensors .* over two mesh axes or three'),
    ({"sinks": torch.zeros(2)}, ValueError, "expected sinks to be a DTensor on the mesh of q"),
    ({"attn_mask": torch.zeros(6, 12)}, ValueError, "expected attn_mask to be a DTensor on the mesh of q"),
    ({"mask": Batched([Full()] * 3)}, ValueError, "batch"),
    ({"v": PLAIN}, TypeError, "expected q to be a plain tensor"),
    ({"q": PLAIN, "k": PLAIN, "v": PLAIN}, TypeError, "DeviceMesh of one dim or a ProcessGroup"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    def body(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        q = distribute_tensor(PLAIN, mesh, (CP,), src_data_rank=None)
        given = {**options, "mesh": dist.group.WORLD} if "mesh" in options else options
        with pytest.raises(error, match=message):
            context_parallel_attention(**{"q": q, "k": q, "v": q, **given})

    run_ranks(2, body)


def test_masks_of_contexts_are_not_traced() -> None:
    """Code compiled in a context with a mask serves others, whose masks it would not read."""

    def body(_rank: int) -> None:  # of one rank: torch.fx cannot trace in two threads at once
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        q = distribute_tensor(PLAIN, mesh, (CP,), src_data_rank=None)
        with context_parallel(mesh, mask=Causal()), pytest.raises(NotImplementedError, match="in compiled code"):
            make_fx(lambda: F.scaled_dot_product_attention(q, q, q))()

    run_ranks(1, body)


# The planner, without any communication

BATCH, HEADS, SEQ, HEAD_DIM = (Shard(dim) for dim in range(4))
ANY_PLACEMENT = (Replicate(), Partial(), BATCH, HEADS, SEQ, HEAD_DIM)
ULYSSES_NAMES = ("ulysses", "ulysses_low", "ulysses2")
On = tuple[Placement, ...]
PlannerInputs = tuple[On, On, On, tuple[int, ...], int, int, tuple[str, ...] | None]
"""q, k, v, mesh shape, query heads, key heads, names of axes."""


@st.composite
def planner_inputs(draw: st.DrawFn) -> PlannerInputs:
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    of_axes = [  # often all along the sequence, which otherwise would be rare
        draw(st.one_of(st.just((SEQ,) * 3), st.tuples(*[st.sampled_from(ANY_PLACEMENT)] * 3))) for _ in mesh_shape
    ]
    q, k, v = zip(*of_axes, strict=True)
    kv_heads = draw(st.integers(1, 8))
    q_heads = kv_heads * draw(st.integers(1, 4))
    ulysses = draw(st.sampled_from([*ULYSSES_NAMES, "ulyssean"]))
    names = draw(st.one_of(st.none(), st.permutations([ulysses, "ring", "dp", "tp"])))
    return q, k, v, mesh_shape, q_heads, kv_heads, None if names is None else tuple(names[: len(mesh_shape)])


def nested_chunk(
    length: int, cut: Shard, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], at: tuple[int, ...]
) -> list[int]:
    """What is left of range(length) after torch.chunk for each axis placed as `cut`, in order of the axes."""
    rows = torch.arange(length)
    for placement, size, index in zip(placements, mesh_shape, at, strict=True):
        if placement == cut:
            chunks = rows.chunk(size)
            rows = chunks[index] if index < len(chunks) else rows[:0]
    return rows.tolist()


@given(planner_inputs())
def test_plans(inputs: PlannerInputs) -> None:
    """Keys are sharded along the sequence on the axes of the ring and of Ulysses alone.

    Ulysses is over the axis of that name, or the last that shards all three along the sequence; the ring is over
    other axes with sequence shards of keys or values, three axes in all. Gradients of keys are partial exactly where
    ranks hold the same keys but other queries. What is planned needs no other plan.
    """
    q, k, v, *_, names = inputs
    planned = plan_placements(*inputs)
    axes = [axis for axis, column in enumerate(zip(q, k, v, strict=True)) if set(column) == {SEQ}]
    last = axes[:3][-1] if len(axes) > 1 else None
    named = next((axis for axis, name in enumerate(names or ()) if name in ULYSSES_NAMES), None)
    assert planned.ulysses_axis == (named if named in axes else last)
    on_seq = [axis for axis, pair in enumerate(zip(k, v, strict=True)) if SEQ in pair]
    others = [axis for axis in on_seq if axis != planned.ulysses_axis]
    assert planned.ring_axes == tuple(others[: 3 - (planned.ulysses_axis is not None)])
    assert sorted(planned.axes) == [axis for axis, placement in enumerate(planned.kv) if placement == SEQ]
    assert planned.axes == (*planned.ring_axes, *([] if planned.ulysses_axis is None else [planned.ulysses_axis]))

    assert [on_q == SEQ for on_q in planned.q] == [SEQ in column for column in zip(q, k, v, strict=True)]
    assert {*planned.q, *planned.kv} <= {Replicate(), BATCH, HEADS, SEQ}
    for on_q, on_kv, on_grad in zip(planned.q, planned.kv, planned.grad_kv, strict=True):
        same_keys_other_queries = isinstance(on_q, Shard) and on_kv == Replicate()
        assert on_grad == (Partial() if same_keys_other_queries else on_kv)
        assert on_q == SEQ or not same_keys_other_queries
        if BATCH in (on_q, on_kv) or HEADS in (on_q, on_kv):
            assert on_q == on_kv

    # A Ulysses axis on which only then all three are sharded may have been one of the ring.
    again = plan_placements(planned.q, planned.kv, planned.kv, *inputs[3:])
    assert (again.q, again.kv, again.grad_kv) == (planned.q, planned.kv, planned.grad_kv)
    assert sorted(again.axes) == sorted(planned.axes)


@given(planner_inputs())
def test_every_rank_has_the_key_heads_of_its_query_heads(inputs: PlannerInputs) -> None:
    *_, mesh_shape, q_heads, kv_heads, _ = inputs
    planned = plan_placements(*inputs)
    for at in product(*map(range, mesh_shape)):
        local_q = {*nested_chunk(q_heads, HEADS, planned.q, mesh_shape, at)}
        local_kv = {*nested_chunk(kv_heads, HEADS, planned.kv, mesh_shape, at)}
        assert {head * kv_heads // q_heads for head in local_q} == local_kv
        # Locally, query head h reads key head h // (local heads / local key heads).
        assert not local_kv or len(local_q) / len(local_kv) == q_heads / kv_heads
    if kv_heads % math.prod(mesh_shape) == 0:
        by_heads = (HEADS,) * len(mesh_shape)
        kept = plan_placements(by_heads, by_heads, by_heads, mesh_shape, q_heads, kv_heads)
        assert kept == AttentionPlacements(by_heads, by_heads, by_heads, ())


@given(planner_inputs(), st.integers(0, 40))
def test_local_segments_nest_as_torch_chunk_and_tile_the_sequence(inputs: PlannerInputs, length: int) -> None:
    placements, _, _, mesh_shape, *_ = inputs
    for at in product(*map(range, mesh_shape)):
        segment = local_segment(length, placements, mesh_shape, at)
        assert list(segment.positions()) == nested_chunk(length, SEQ, placements, mesh_shape, at)
    axes = [range(size) if on == SEQ else range(1) for on, size in zip(placements, mesh_shape, strict=True)]
    segments = [local_segment(length, placements, mesh_shape, at) for at in product(*axes)]
    assert [position for segment in segments for position in segment.positions()] == list(range(length))
