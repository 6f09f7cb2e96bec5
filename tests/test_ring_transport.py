"""What travels for one attention call: which collectives, how much of K and V, and what decides it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import errors_by_rank, kinds, recorded_collectives
from problems import Problem, shard
from ranks import RanksFailed, run_ranks

from cp_dtensor import Contiguous, HeadTail, Layout, ring_attention, set_rotate_method

RANKS = 4
ROTATIONS = ["allgather", "alltoall"]
each_rotation = pytest.mark.parametrize("rotate_method", ROTATIONS)


@pytest.fixture
def process_default() -> Iterator[None]:
    """Puts the default of `set_rotate_method` back to what it is at import."""
    yield
    set_rotate_method("allgather")


def attend(rank: int, problem: Problem, layout: Layout, backward: bool, options: dict[str, Any]) -> torch.Tensor:
    q, k, v, grad_out = (shard(tensor, layout, rank, RANKS) for tensor in problem.draw(seed=0))
    for tensor in (q, k, v):
        tensor.requires_grad_(backward)
    out = ring_attention(
        q, k, v, mesh=dist.group.WORLD, layout=layout, is_causal=True,
        enable_gqa=problem.q_heads != problem.kv_heads, **options,
    )  # fmt: skip
    if backward:
        out.backward(grad_out)
    return out.detach()


SMALL = Problem(24, 24)

FORWARD = {"allgather": ["AllGather"] * 2, "alltoall": ["AllToAllBase"] * (RANKS - 1)}
BACKWARD = {
    "allgather": ["AllGather"] * 2 + ["ReduceScatter"] * 2,  # one for each part of head-tail
    "alltoall": ["AllToAllBase"] * (2 * RANKS - 1),  # n - 1 hops of K/V, n of their gradients
}


@each_rotation
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_known_length_is_not_exchanged(backward: bool, rotate_method: str) -> None:
    transfers = FORWARD[rotate_method] + BACKWARD[rotate_method] * backward
    options: dict[str, Any] = {"rotate_method": rotate_method}
    with recorded_collectives() as collectives:
        known = run_ranks(RANKS, attend, SMALL, HeadTail(), backward, {"seq_len": 24, **options})
    assert [kinds(collectives, rank) for rank in range(RANKS)] == [transfers] * RANKS
    with recorded_collectives() as collectives:
        found = run_ranks(RANKS, attend, SMALL, HeadTail(), backward, options)
    assert [kinds(collectives, rank) for rank in range(RANKS)] == [["AllGather", *transfers]] * RANKS
    assert all(map(torch.equal, known, found))


@pytest.mark.parametrize("seq_len", [(13, 30), [13, 30]])
def test_queries_and_keys_may_have_lengths_of_their_own(seq_len: Any) -> None:
    problem = Problem(13, 30)
    with recorded_collectives() as collectives:
        known = run_ranks(RANKS, attend, problem, HeadTail(), False, {"seq_len": seq_len})
    assert kinds(collectives) == FORWARD["allgather"]
    assert all(map(torch.equal, known, run_ranks(RANKS, attend, problem, HeadTail(), False, {})))


def test_debug_exchanges_in_spite_of_a_known_length() -> None:
    with recorded_collectives() as collectives:
        run_ranks(RANKS, attend, SMALL, HeadTail(), False, {"seq_len": 24, "debug": True})
    assert kinds(collectives) == ["AllGather", *FORWARD["allgather"]]


@pytest.mark.parametrize(
    ("seq_len", "what", "expected"),
    [(32, "query", "8 of 32"), ((32, 24), "query", "8 of 32"), ((24, 40), "key", "10 of 40")],
)
def test_a_wrong_length_is_refused_before_anything_travels(seq_len: Any, what: str, expected: str) -> None:
    with recorded_collectives() as collectives, pytest.raises(RanksFailed) as caught:
        run_ranks(RANKS, attend, SMALL, HeadTail(), False, {"seq_len": seq_len})
    for rank, error in enumerate(caught.value.errors):
        assert isinstance(error, ValueError)
        assert f"{what} length does not fit: got 6 local tokens on rank {rank} of 4, expected {expected}" in str(error)
        assert "HeadTail()" in str(error)
    assert not collectives


def test_debug_refuses_a_wrong_length_on_all_ranks_where_it_fits_some() -> None:
    """23 tokens are 6 on three ranks and 5 on the first, so three ranks alone cannot tell 23 from 24."""
    options = {"seq_len": 23, "debug": True}
    errors = errors_by_rank(RANKS, lambda rank: attend(rank, SMALL, HeadTail(), False, options))
    assert [type(error) for error in errors] == [ValueError] * RANKS


@each_rotation
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_keys_and_values_travel_unexpanded(kv_heads: int, rotate_method: str) -> None:
    """Rows of batch x kv_heads x (D + Dv) elements in the inputs' dtype, K and V together; gradients in float32."""
    problem = Problem(24, 24, batch=2, q_heads=8, kv_heads=kv_heads, dtype=torch.bfloat16)
    options = {"rotate_method": rotate_method, "seq_len": 24}
    with recorded_collectives() as collectives:
        run_ranks(RANKS, attend, problem, HeadTail(), True, options)
    sent = [tensor for collective in collectives if collective.rank == 0 for tensor in collective.sent]
    assert {tensor.size(1) for tensor in sent} == {2 * kv_heads * (8 + 8)}
    forward = sent[: len(FORWARD[rotate_method])]
    assert {tensor.dtype for tensor in forward} == {torch.bfloat16}
    hops = 1 if rotate_method == "allgather" else RANKS - 1  # an all-gather sends one shard, a ring passes on n - 1
    assert sum(tensor.nbytes for tensor in forward) == hops * 6 * 2 * kv_heads * (8 + 8) * 2
    gradients = [tensor for tensor in sent if tensor.dtype == torch.float32]
    assert sum(tensor.size(0) for tensor in gradients) == RANKS * 6


def test_a_ring_of_one_rank_sends_nothing() -> None:
    def body(rank: int, rotate_method: str) -> None:
        q, k, v, grad_out = SMALL.draw(seed=0)
        q.requires_grad_()
        ring_attention(q, k, v, mesh=dist.group.WORLD, seq_len=24, rotate_method=rotate_method).backward(grad_out)

    for rotate_method in ROTATIONS:
        with recorded_collectives() as collectives:
            run_ranks(1, body, rotate_method)
        assert not collectives


def test_a_gather_pads_to_the_longest_shard_and_a_ring_does_not() -> None:
    """13 tokens on 4 ranks are 4, 3, 3, 3: an all-gather sends 4 rows from each, a ring what there is."""
    problem = Problem(13, 13)
    rows = {}
    for rotate_method in ROTATIONS:
        with recorded_collectives() as collectives:
            options = {"rotate_method": rotate_method, "seq_len": 13}
            run_ranks(RANKS, attend, problem, Contiguous(), False, options)
        rows[rotate_method] = [
            [tensor.size(0) for each in collectives if each.rank == rank for tensor in each.sent]
            for rank in range(RANKS)
        ]
    assert rows["allgather"] == [[4], [4], [4], [4]]
    assert rows["alltoall"] == [[4, 3, 3], [3, 4, 3], [3, 3, 4], [3, 3, 3]]


@pytest.mark.usefixtures("process_default")
def test_the_process_default_decides_where_a_call_says_nothing() -> None:
    def used(options: dict[str, Any]) -> list[str]:
        with recorded_collectives() as collectives:
            run_ranks(RANKS, attend, SMALL, HeadTail(), False, {"seq_len": 24, **options})
        return kinds(collectives)

    assert used({}) == FORWARD["allgather"]
    set_rotate_method("alltoall")
    assert used({}) == FORWARD["alltoall"]
    assert used({"rotate_method": "allgather"}) == FORWARD["allgather"]
    set_rotate_method("allgather")
    assert used({}) == FORWARD["allgather"]


@pytest.mark.usefixtures("process_default")
@pytest.mark.parametrize("name", ["broadcast", "ALLGATHER", "", None, 1])
def test_an_unknown_default_is_refused_and_changes_nothing(name: Any) -> None:
    set_rotate_method("alltoall")
    with pytest.raises(ValueError, match=f"got {name!r}, expected one of 'allgather', 'alltoall'"):
        set_rotate_method(name)
    with recorded_collectives() as collectives:
        run_ranks(RANKS, attend, SMALL, HeadTail(), False, {"seq_len": 24})
    assert kinds(collectives) == FORWARD["alltoall"]


@pytest.mark.usefixtures("process_default")
def test_backward_goes_the_way_that_forward_went_whatever_the_default_is_by_then() -> None:
    def body(rank: int) -> torch.Tensor:
        q, k, v, grad_out = (shard(tensor, HeadTail(), rank, RANKS) for tensor in SMALL.draw(seed=0))
        out = ring_attention(q.requires_grad_(), k, v, mesh=dist.group.WORLD, is_causal=True, seq_len=24)
        dist.barrier()
        if rank == 0:
            set_rotate_method("alltoall")
        dist.barrier()
        out.backward(grad_out)
        assert q.grad is not None
        return q.grad

    with recorded_collectives() as collectives:
        grads = run_ranks(RANKS, body)
    assert kinds(collectives) == [*FORWARD["allgather"], "AllReduce", "AllReduce", *BACKWARD["allgather"]]
    assert all(grad.isfinite().all() for grad in grads)
