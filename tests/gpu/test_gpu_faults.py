"""Deadlines of waits in shared memory: a rank that is killed, skips a call or a replay, or is late.

Two processes on two GPUs with NCCL, or on one GPU with gloo.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpu_checks import WAYS, attend, shards
from support.problems import Problem, reference, shard
from support.processes import Processes
from support.ranks import RanksFailed

from cp_dtensor import HeadTail, PeerError

PROBLEM = Problem(128, 128, 1, 4, 2, 64, is_causal=True)
SECONDS, FAULTY = 6.0, 1
pytestmark = pytest.mark.gpu
shared_memory_ways = pytest.mark.parametrize("way", ["symm_mem", "ulysses"])


@pytest.fixture
def ranks() -> Iterator[Processes]:
    """Two processes of each test, since faults end them."""
    two = Processes(2, timeout=60, backend="nccl")
    yield two
    two.stop()


def _run(rank: int, group: Any, way: str) -> tuple[torch.Tensor, ...]:
    return attend(shards(PROBLEM, 5, HeadTail(), rank, 2), PROBLEM, HeadTail(), group, **WAYS[way])


def _check_right(rank: int, group: Any, way: str) -> None:
    expected = reference(PROBLEM, *PROBLEM.draw(5, "cuda"))
    for actual, whole in zip(_run(rank, group, way), expected, strict=True):
        torch.testing.assert_close(actual, shard(whole, HeadTail(), rank, 2), rtol=0, atol=1e-10)


def _run_for(seconds: float, rank: int, group: Any, way: str) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _run(rank, group, way)
        torch.cuda.synchronize()


def _check_error(rank: int, group: Any, way: str) -> None:
    """The stream ends, and the next call raises."""
    with pytest.raises(PeerError, match=rf"rank {FAULTY} \(global rank {FAULTY}\), whose process ended"):
        _run_for(SECONDS + 10, rank, group, way)


def _skips(rank: int, way: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    _check_right(rank, group, way)
    torch.cuda.synchronize()
    dist.barrier()
    if rank != FAULTY:
        _check_error(rank, group, way)
    dist.barrier()
    _check_right(rank, dist.new_group(), way)


def _comes_late(rank: int, way: str, share: float) -> None:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    _check_right(rank, group, way)
    torch.cuda.synchronize()
    if rank == FAULTY:
        time.sleep(share * SECONDS)
    if share < 1:
        _check_right(rank, group, way)
        return
    with pytest.raises(PeerError):
        _run_for(2 * SECONDS + 10, rank, group, way)


def _skips_a_replay(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    inputs = shards(PROBLEM, 5, HeadTail(), rank, 2)
    for _ in range(2):
        attend(inputs, PROBLEM, HeadTail(), group, **WAYS["symm_mem"])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(inputs, PROBLEM, HeadTail(), group, **WAYS["symm_mem"])
    graph.replay()
    torch.cuda.synchronize()
    assert not any(result.isnan().any() for result in results)
    dist.barrier()
    if rank != FAULTY:
        begin = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        assert time.monotonic() - begin < SECONDS + 10
        with pytest.raises(PeerError):
            _run(rank, group, "symm_mem")
    dist.barrier()


def _dies(rank: int, way: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    _check_right(rank, group, way)
    torch.cuda.synchronize()
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    _check_error(rank, group, way)


@shared_memory_ways
def test_a_rank_skips_a_call_and_a_new_group_is_right(ranks: Processes, way: str) -> None:
    ranks.run(_skips, way)


@shared_memory_ways
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_rank_is_late(ranks: Processes, way: str, share: float) -> None:
    ranks.run(_comes_late, way, share)


def test_a_rank_skips_the_replay_of_a_graph(ranks: Processes) -> None:
    ranks.run(_skips_a_replay)


@shared_memory_ways
def test_a_rank_is_killed(ranks: Processes, way: str) -> None:
    with pytest.raises(RanksFailed, match="died") as failed:
        ranks.run(_dies, way)
    assert failed.value.errors[1 - FAULTY] is None
