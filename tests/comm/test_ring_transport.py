"""Collectives of one attention call: kinds, order, and the transferred rows of K and V."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import Collective, kinds, recorded_collectives
from support.problems import Problem, shard
from support.ranks import run_ranks

from cp_dtensor import HeadTail, ring_attention
from cp_dtensor.comm.transports import ROTATE_METHODS

RANKS = 4
each_rotation = pytest.mark.parametrize("rotate_method", ["allgather", "alltoall"])


def recorded(
    problem: Problem, rotate_method: str, backward: bool = True, **options: Any
) -> tuple[list[Collective], list[torch.Tensor]]:
    """Return the collectives of a call, and out on each rank."""

    def body(rank: int) -> torch.Tensor:
        q, k, v, grad_out = (shard(tensor, HeadTail(), rank, RANKS) for tensor in problem.draw(seed=0))
        for tensor in (q, k, v):
            tensor.requires_grad_(backward)
        out: Any = ring_attention(
            q, k, v, mesh=dist.group.WORLD, is_causal=problem.is_causal, rotate_method=rotate_method,
            enable_gqa=problem.q_heads != problem.kv_heads, **options,
        )  # fmt: skip
        if backward:
            out.backward(grad_out)
        return out.detach()

    with recorded_collectives() as collectives:
        results = run_ranks(RANKS, body)
    return collectives, results


SMALL = Problem(24, 24, is_causal=True)

# Everything is an exchange of rows between all ranks. On a CPU all methods but the ring are all-gather.
GATHER, RING = ["AllToAllBase"], ["AllToAllBase"] * (RANKS - 1)
FORWARD = {"allgather": GATHER, "alltoall": RING, "symm_mem": GATHER, "auto": GATHER}
BACKWARD = {method: transfers * 2 for method, transfers in FORWARD.items()}  # K/V once more, and their gradients


@pytest.mark.parametrize("rotate_method", ROTATE_METHODS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_lengths_are_not_exchanged(backward: bool, rotate_method: str) -> None:
    """Known ones, and those that are found; with `debug` hashes of the calls are."""
    transfers = FORWARD[rotate_method] + BACKWARD[rotate_method] * backward
    results = []
    for options, first in (({"seq_len": 24}, []), ({}, []), ({"seq_len": 24, "debug": True}, ["AllGather"])):
        collectives, out = recorded(SMALL, rotate_method, backward, **options)
        assert [kinds(collectives, rank) for rank in range(RANKS)] == [first + transfers] * RANKS
        results.append(out)
    assert all(torch.equal(*of_rank) for of_rank in zip(*results[:2], strict=True))


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
    collectives, _ = recorded(problem, rotate_method)
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
