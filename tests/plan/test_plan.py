"""Plans: steps compute every pair once, wait for the rows that they read, and transfer alike on every rank."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedules import Call, calls, count_covered, gathered_rows, positions

from cp_dtensor.plan.plan import Stages, Step, Steps, TilePlan, Transfer, gathered_plan, head_spans, ring_plan
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE, Tile
from cp_dtensor.plan.tiling import GatheredRows, ShapeTiling
from cp_dtensor.spec.layouts import HeadTail, Span, joined_spans
from cp_dtensor.spec.masks import Causal, Full

Plans = list[TilePlan]
PASSES: dict[str, Callable[[TilePlan], Steps]] = {
    "forward": lambda plan: plan.forward,
    "backward": lambda plan: plan.backward,
}
each_pass = pytest.mark.parametrize("steps_of", PASSES.values(), ids=PASSES)


any_stages = st.builds(Stages, local=st.integers(1, 4), remote=st.integers(1, 7))


@st.composite
def planned(draw: st.DrawFn) -> tuple[Call, int, Plans]:
    """(call, key/value heads, the plans of all ranks)."""
    call, kv_heads = draw(calls(longest=30)), draw(st.integers(1, 5))
    tiling, ranks = ShapeTiling(call.groups, call.mask), range(call.ranks)
    if draw(st.booleans()):
        groups = draw(st.integers(1, 6)), draw(st.integers(1, 6))
        return call, kv_heads, [ring_plan(tiling, rank, kv_heads, *groups) for rank in ranks]
    stages = draw(any_stages), draw(any_stages), draw(st.booleans())
    return call, kv_heads, [gathered_plan(tiling, rank, kv_heads, *stages) for rank in ranks]


def brought(plan: TilePlan, transfer: Transfer) -> list[tuple[int, int, Span]]:
    """(source, part, rows in the transfer's buffer) of all rows that this rank receives by it."""
    if transfer.hop is None:
        return [
            (source, part, plan.rows.span(source, part))
            for source, parts in enumerate(plan.recv_parts)
            for part in parts
        ]
    source = (plan.rank - transfer.hop) % plan.world_size
    return [(source, part, plan.rows.local_span(source, part)) for part in plan.recv_parts[source]]


@each_pass
@settings(max_examples=150)
@given(case=planned())
def test_steps_cover_every_allowed_pair_of_every_head_once(
    steps_of: Callable[[TilePlan], Steps], case: tuple[Call, int, Plans]
) -> None:
    call, kv_heads, plans = case
    count = np.zeros((call.batch, kv_heads, call.q_len, call.kv_len), dtype=np.int64)
    for plan in plans:
        for step in steps_of(plan):
            count_covered(count, call.groups, plan.rank, step.heads, step.tiles, call.mask)
    np.testing.assert_array_equal(count, np.broadcast_to(call.allowed(), count.shape))


@given(planned())
def test_steps_wait_for_what_they_read(case: tuple[Call, int, Plans]) -> None:
    """Of each head the own shard comes first and waits for nothing; ranks have equal transfers in one order.

    In backward that of the last of several groups may come last. Sums of some heads begin with all of these heads.
    """
    call, kv_heads, plans = case
    for plan in plans:
        assert plan.rows == gathered_rows(call.groups, plan.rank, call.mask)
        assert plan.recv_parts[plan.rank] == plan.send_parts[plan.rank] == ()
        assert [plans[source].send_parts[plan.rank] for source in range(call.ranks)] == list(plan.recv_parts)
    for steps_of in PASSES.values():
        assert len({tuple(step.transfer for step in steps_of(plan)) for plan in plans}) == 1
        for plan in plans:
            for head in range(kv_heads):
                local, *remote = of_head = [step for step in steps_of(plan) if head in range(*step.heads)]
                if local.transfer is not None:
                    *remote, local = of_head
                    assert (steps_of, local) == (PASSES["backward"], plan.backward[-1])
                    assert plan.backward[0].transfer is None
                assert [of_head[0].heads] == joined_spans(step.heads for step in of_head)
                assert (local.transfer, local.has_gaps) == (None, False)
                assert {tile.source for tile in local.tiles} <= {plan.rank}
                assert all(step.transfer is not None and step.transfer.heads == step.heads for step in remote)
                assert [step.is_last for step in of_head] == [False] * len(remote) + [True]
            for step in (step for step in steps_of(plan) if step.transfer is not None):
                rows = {row for _, _, span in brought(plan, step.transfer) for row in range(*span)}
                assert all(rows >= set(range(*tile.kv)) for tile in step.tiles)


@given(planned())
def test_gradients_are_pulled_from_where_rows_were_pulled_to(case: tuple[Call, int, Plans]) -> None:
    """The owner of each pulled row pulls its gradient from the same place, from the next rank first."""
    plans = case[2]
    routes = [(plan, plan.routes[None]) for plan in plans if None in plan.routes]
    pulled = [
        (piece.rank, reader.rank, row, *piece.rows)
        for reader, route in routes
        for piece, row in zip(route.recv, route.recv_from, strict=True)
    ]
    grads = [
        (owner.rank, piece.rank, piece.rows[0], row, row + piece.rows[1] - piece.rows[0])
        for owner, route in routes
        for pieces, firsts in zip(route.grads, route.grads_from, strict=True)
        for piece, row in zip(pieces, firsts, strict=True)
    ]
    assert sorted(grads) == sorted(pulled)
    for owner, route in routes:
        for pieces in route.grads:
            hops = [(piece.rank - owner.rank) % owner.world_size for piece in pieces]
            assert hops == sorted(hops)


@each_pass
@settings(max_examples=200)
@given(case=planned())
def test_gaps_are_rows_that_come_and_that_no_query_of_some_batch_row_sees(
    steps_of: Callable[[TilePlan], Steps], case: tuple[Call, int, Plans]
) -> None:
    call, _, plans = case
    for plan in plans:
        for step in steps_of(plan):
            if step.transfer is None:
                continue
            unseen = False
            for group in call.groups:
                last_query = positions(group.q_by_rank[plan.rank]).max(initial=-1)
                if last_query >= 0 and call.mask == Full():
                    last_query = call.kv_len
                for source, part, _ in brought(plan, step.transfer):
                    unseen |= any(key > last_query for key in group.kv_by_rank[source][part].positions())
            assert step.has_gaps == unseen


@given(calls())
def test_hop_by_hop_a_ring_brings_the_shard_of_the_rank_that_many_before(call: Call) -> None:
    for rank in range(call.ranks):
        plan = ring_plan(ShapeTiling(call.groups, call.mask), rank, kv_heads=3)
        assert plan.forward == plan.backward
        assert [step.transfer for step in plan.forward] == [None, *(Transfer((0, 3), h) for h in range(1, call.ranks))]
        for hop, step in enumerate(plan.forward):
            assert {tile.source for tile in step.tiles} <= {(rank - hop) % call.ranks}


@given(calls(), st.integers(1, 5), any_stages, any_stages)
def test_a_gather_brings_the_heads_group_by_group(
    call: Call, kv_heads: int, stages: Stages, grad_stages: Stages
) -> None:
    for rank in range(call.ranks):
        plan = gathered_plan(ShapeTiling(call.groups, call.mask), rank, kv_heads, stages, grad_stages)
        for steps, counts in ((plan.forward, stages), (plan.backward, grad_stages)):
            local = [step.heads for step in steps if step.transfer is None]
            remote = [step.heads for step in steps if step.transfer is not None]
            if call.ranks == 1:
                assert (local, remote) == ([(0, kv_heads)], [])
                continue
            assert local == list(head_spans(kv_heads, counts.local))
            assert [head for span in remote for head in range(*span)] == list(range(kv_heads))
            assert min(kv_heads, counts.remote) <= len(remote) <= counts.remote + counts.local
            assert {tile.source for step in steps if step.transfer for tile in step.tiles} <= {None}
            # A group of the own shard is followed by what is remote of its heads.
            assert [step.heads[0] for step in steps] == sorted(step.heads[0] for step in steps)


@given(st.integers(1, 200), st.integers(0, 250))
def test_head_spans_are_all_heads_in_order_and_in_groups_of_nearly_equal_size(kv_heads: int, count: int) -> None:
    spans = head_spans(kv_heads, count)
    assert [head for span in spans for head in range(*span)] == list(range(kv_heads))
    assert len(spans) == max(1, min(count, kv_heads))
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) - min(sizes) <= 1


def test_head_tail_causal_by_hand() -> None:
    """Rank 0 of 2 owns positions 0 1 6 7 and gathers 2 3 | 4 5; rank 1 owns 2 3 4 5 and gathers 0 1."""
    call = Call(HeadTail(), 8, 8, 1, 2, Causal())
    local = (Tile(1, (0, 1), (0, 4), (0, 4), CAUSAL_TILE),)
    remote = (Tile(None, (0, 1), (0, 4), (0, 2), FULL_TILE),)
    expected = TilePlan(
        rank=1,
        rows=GatheredRows(lengths=((2, 2), (2, 2)), starts=((0, -1), (-1, -1))),
        most_rows=4,
        recv_parts=((0,), ()),
        send_parts=((0, 1), ()),
        send_starts=((0, 2), ()),
        forward=(
            Step((0, 3), None, local),
            Step((0, 2), Transfer((0, 2), None), remote, is_last=True),
            Step((2, 3), Transfer((2, 3), None), remote, is_last=True),
        ),
        backward=(
            Step((0, 2), None, local),
            Step((0, 2), Transfer((0, 2), None), remote, is_last=True),
            Step((2, 3), None, local),
            Step((2, 3), Transfer((2, 3), None), remote, is_last=True),
        ),
    )
    tiling = ShapeTiling(call.groups, Causal())
    assert gathered_plan(tiling, 1, 3, stages=Stages(1, 2), grad_stages=Stages(2, 2)) == expected
