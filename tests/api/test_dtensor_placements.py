"""The planner of DTensor attention, without any communication."""

import math
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from cp_dtensor.api.dtensor_attention import AttentionPlacements, is_seq_sharded, local_segment, plan_placements

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

    Ulysses is over the axis of that name, or the second that shards all three along the sequence; the ring is over the
    first other axis with sequence shards of keys or values. Gradients of keys are partial exactly where ranks hold the
    same keys but other queries. What is planned needs no other plan.
    """
    q, k, v, *_, names = inputs
    planned = plan_placements(*inputs)
    axes = [axis for axis, column in enumerate(zip(q, k, v, strict=True)) if set(column) == {SEQ}]
    second = axes[1] if len(axes) > 1 else None
    named = next((axis for axis, name in enumerate(names or ()) if name in ULYSSES_NAMES), None)
    assert planned.ulysses_axis == (named if named in axes else second)
    on_seq = [axis for axis, pair in enumerate(zip(k, v, strict=True)) if SEQ in pair]
    assert planned.ring_axis == next((axis for axis in on_seq if axis != planned.ulysses_axis), None)
    assert sorted(planned.axes) == [axis for axis, placement in enumerate(planned.kv) if placement == SEQ]
    assert planned.axes == tuple(axis for axis in (planned.ring_axis, planned.ulysses_axis) if axis is not None)

    assert [on_q == SEQ for on_q in planned.q] == [SEQ in column for column in zip(q, k, v, strict=True)]
    assert {*planned.q, *planned.kv} <= {Replicate(), BATCH, HEADS, SEQ}
    for on_q, on_kv, on_grad in zip(planned.q, planned.kv, planned.grad_kv, strict=True):
        same_keys_other_queries = isinstance(on_q, Shard) and on_kv == Replicate()
        assert on_grad == (Partial() if same_keys_other_queries else on_kv)
        assert on_q == SEQ or not same_keys_other_queries
        if BATCH in (on_q, on_kv) or HEADS in (on_q, on_kv):
            assert on_q == on_kv

    # A Ulysses axis on which only then all three are sharded may have been the ring's.
    again = plan_placements(planned.q, planned.kv, planned.kv, *inputs[3:])
    assert (again.q, again.kv, again.grad_kv) == (planned.q, planned.kv, planned.grad_kv)
    assert sorted(again.axes) == sorted(planned.axes)
    assert inputs[-1] or again == planned


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
        assert kept == AttentionPlacements(by_heads, by_heads, by_heads, None)


@given(st.lists(st.sampled_from(ANY_PLACEMENT), max_size=3), st.lists(st.sampled_from(ANY_PLACEMENT), max_size=3))
def test_seq_sharded_means_dim_2_of_any_tensor(first: list[Placement], second: list[Placement]) -> None:
    assert is_seq_sharded(first, second) == (Shard(2) in [*first, *second])


@given(planner_inputs(), st.integers(0, 40))
def test_local_segments_nest_as_torch_chunk_and_tile_the_sequence(inputs: PlannerInputs, length: int) -> None:
    placements, _, _, mesh_shape, *_ = inputs
    for at in product(*map(range, mesh_shape)):
        segment = local_segment(length, placements, mesh_shape, at)
        assert list(segment.positions()) == nested_chunk(length, SEQ, placements, mesh_shape, at)
    axes = [range(size) if on == SEQ else range(1) for on, size in zip(placements, mesh_shape, strict=True)]
    segments = [local_segment(length, placements, mesh_shape, at) for at in product(*axes)]
    assert [position for segment in segments for position in segment.positions()] == list(range(length))
