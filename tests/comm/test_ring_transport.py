"""Collectives of one attention call: kinds, order, and the transferred rows of K and V."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import Collective, kinds, recorded_collectives
from support.problems import Problem, shard
from support.ranks import run_ranks

from cp_dtensor import HeadTail, Layout, ring_attention, set_rotate_method
from cp_dtensor.comm.transports import ROTATE_METHODS

RANKS = 4
each_method = pytest.mark.parametrize("rotate_method", ROTATE_METHODS)
each_rotation = pytest.mark.parametrize("rotate_method", ["allgather", "alltoall"])


@pytest.fixture
def process_default() -> Iterator[None]:
    """Restores the default of `set_rotate_method` after the test."""
    yield
    set_rotate_method("auto")


def attend(rank: int, problem: Problem, layout: Layout, backward: bool, options: dict[str, Any]) -> torch.Tensor:
    q, k, v, grad_out = (shard(tensor, layout, rank, RANKS) for tensor in problem.draw(seed=0))
    for tensor in (q, k, v):
        tensor.requires_grad_(backward)
    out = ring_attention(
        q, k, v, mesh=dist.group.WORLD, layout=layout, is_causal=problem.is_causal,
        enable_gqa=problem.q_heads != problem.kv_heads, **options,
    )  # fmt: skip
    if backward:
        out.backward(grad_out)
    return out.detach()


SMALL = Problem(24, 24, is_causal=True)

# Everything is an exchange of rows between all ranks. On a CPU all methods but the ring are all-gather.
GATHER, RING = ["AllToAllBase"], ["AllToAllBase"] * (RANKS - 1)
FORWARD = {"allgather": GATHER, "alltoall": RING, "symm_mem": GATHER, "auto": GATHER}
BACKWARD = {method: transfers * 2 for method, transfers in FORWARD.items()}  # K/V once more, and their gradients


@each_method
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_lengths_are_not_exchanged(backward: bool, rotate_method: str) -> None:
    transfers = FORWARD[rotate_method] + BACKWARD[rotate_method] * backward
    options: dict[str, Any] = {"rotate_method": rotate_method}
    with recorded_collectives() as collectives:
        known = run_ranks(RANKS, attend, SMALL, HeadTail(), backward, {"seq_len": 24, **options})
    assert [kinds(collectives, rank) for rank in range(RANKS)] == [transfers] * RANKS
    with recorded_collectives() as collectives:
        found = run_ranks(RANKS, attend, SMALL, HeadTail(), backward, options)
    assert [kinds(collectives, rank) for rank in range(RANKS)] == [transfers] * RANKS
    assert all(map(torch.equal, known, found))


def test_debug_exchanges_in_spite_of_a_known_length() -> None:
    with recorded_collectives() as collectives:
        run_ranks(RANKS, attend, SMALL, HeadTail(), False, {"seq_len": 24, "debug": True})
    assert kinds(collectives) == ["AllGather", *FORWARD["auto"]]


def sent_by(collectives: list[Collective], rank: int) -> list[torch.Tensor]:
    """Returns what one rank sent in each collective, with the rows in the order of receivers."""
    return [tensor for collective in collectives if collective.rank == rank for tensor in collective.sent]


@each_rotation
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_keys_and_values_travel_unexpanded(kv_heads: int, rotate_method: str) -> None:
    """Rows of batch x kv_heads x (D + Dv) elements, K and V together, and their gradients too, in the inputs' dtype.

    Head-tail causal with 3 tokens a chunk: the head chunk of rank r goes to all other ranks, its tail chunk only to the
    r ranks before it; gradients return on the same ways.
    """
    problem = Problem(24, 24, batch=2, q_heads=8, kv_heads=kv_heads, is_causal=True, dtype=torch.bfloat16)
    with recorded_collectives() as collectives:
        run_ranks(RANKS, attend, problem, HeadTail(), True, {"rotate_method": rotate_method, "seq_len": 24})
    count = len(FORWARD[rotate_method])
    for rank in range(RANKS):
        sent = sent_by(collectives, rank)
        assert {(tensor.size(1), tensor.dtype) for tensor in sent} == {(2 * kv_heads * (8 + 8), torch.bfloat16)}
        forward, backward = sent[:count], sent[count:]
        sent_rows, received = 3 * (RANKS - 1) + 3 * rank, 3 * (RANKS - 1) + 3 * (RANKS - 1 - rank)
        assert sum(tensor.nbytes for tensor in forward) == sent_rows * 2 * kv_heads * (8 + 8) * 2
        assert sum(tensor.size(0) for tensor in backward) == sent_rows + received


@each_rotation
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seq_len", [24, 13])
def test_a_rank_receives_only_rows_that_it_attends_to(seq_len: int, is_causal: bool, rotate_method: str) -> None:
    """Under head-tail causal: the head chunks of the ranks before it, and both chunks of the ranks after it."""
    marks = torch.arange(seq_len, dtype=torch.float64).view(1, 1, -1, 1)  # every key is its position

    def positions(rank: int, part: slice) -> list[int]:
        segments = HeadTail().segments(seq_len, rank, RANKS)[part]
        return [position for segment in segments for position in segment.positions()]

    def body(rank: int) -> None:
        q, k, v = (shard(marks, HeadTail(), rank, RANKS) for _ in "qkv")
        ring_attention(
            q, k, v, mesh=dist.group.WORLD, is_causal=is_causal, seq_len=seq_len, rotate_method=rotate_method
        )  # fmt: skip

    with recorded_collectives() as collectives:
        run_ranks(RANKS, body)
    for rank in range(RANKS):
        readers = [(rank + hop) % RANKS for hop in range(1, RANKS)]  # in the order of the hops
        sent_rows = {reader: positions(rank, slice(0, 1 if is_causal and rank < reader else 2)) for reader in readers}
        found = [tensor[:, 0].int().tolist() for tensor in sent_by(collectives, rank)]
        if rotate_method == "alltoall":
            assert found == list(sent_rows.values())
        else:
            assert found == [[position for reader in sorted(sent_rows) for position in sent_rows[reader]]]


@pytest.mark.usefixtures("process_default")
def test_backward_uses_the_transport_of_forward_after_the_default_has_changed() -> None:
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

    set_rotate_method("allgather")
    with recorded_collectives() as collectives:
        grads = run_ranks(RANKS, body)
    assert kinds(collectives) == [*FORWARD["allgather"], "AllReduce", "AllReduce", *BACKWARD["allgather"]]
    assert all(grad.isfinite().all() for grad in grads)
