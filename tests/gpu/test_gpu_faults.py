"""Deadlines and different calls on two GPUs with NCCL, or on one GPU with gloo.

A rank is killed, skips a call or a replay, is late, or makes other calls: the table of docs/troubleshooting.md.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.different_calls import FAULTS, FAULTY, WRONG_STEP, check_named, steps_until_found, table
from support.gpu_checks import WAYS, attend, shards
from support.problems import Problem, assert_close, reference, shard
from support.processes import Processes, started
from support.ranks import RanksFailed

from cp_dtensor import HeadTail, PeerError, context_parallel_attention
from cp_dtensor.comm import calls as comm_calls
from cp_dtensor.comm import symm_mem_workspace as workspaces

PROBLEM = Problem(128, 128, 1, 4, 2, 64, is_causal=True)
RANKS, SECONDS = 2, 6.0
pytestmark = pytest.mark.gpu
shared_memory_ways = pytest.mark.parametrize("way", ["symm_mem", "ulysses"])
every_fault = pytest.mark.parametrize("fault", FAULTS)


@pytest.fixture
def ranks() -> Iterator[Processes]:
    """Two processes of each test, since faults end them."""
    yield from started(RANKS, timeout=90, backend="nccl")


def _group(seconds: float = SECONDS) -> Any:
    return dist.new_group(timeout=timedelta(seconds=seconds))


def _run(rank: int, group: Any, way: str, problem: Problem = PROBLEM) -> tuple[torch.Tensor, ...]:
    return attend(shards(problem, 5, HeadTail(), rank, RANKS), problem, HeadTail(), group, **WAYS[way])


def _check_right(rank: int, group: Any, way: str, problem: Problem = PROBLEM) -> None:
    expected = reference(problem, *problem.draw(5, "cuda"))
    for actual, whole in zip(_run(rank, group, way, problem), expected, strict=True):
        assert_close(actual, shard(whole, HeadTail(), rank, RANKS))


def _run_for(seconds: float, rank: int, group: Any, way: str) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _run(rank, group, way)
        torch.cuda.synchronize()


def _check_error(rank: int, group: Any, way: str, match: str | None = None, seconds: float = SECONDS + 10) -> None:
    """The stream ends, and the next call raises."""
    with pytest.raises(PeerError, match=match):
        _run_for(seconds, rank, group, way)


ENDED = rf"rank {FAULTY} \(global rank {FAULTY}\), whose process ended"


def _skips(rank: int, way: str) -> None:
    _check_right(rank, group := _group(), way)
    torch.cuda.synchronize()
    dist.barrier()
    if rank != FAULTY:
        _check_error(rank, group, way, ENDED)
    dist.barrier()
    _check_right(rank, dist.new_group(), way)


def _comes_late(rank: int, way: str, share: float) -> None:
    _check_right(rank, group := _group(), way)
    torch.cuda.synchronize()
    if rank == FAULTY:
        time.sleep(share * SECONDS)
    if share < 1:
        _check_right(rank, group, way)
    else:
        _check_error(rank, group, way, seconds=2 * SECONDS + 10)


def _dies(rank: int, way: str) -> None:
    _check_right(rank, group := _group(), way)
    torch.cuda.synchronize()
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    _check_error(rank, group, way, ENDED)


@shared_memory_ways
def test_a_rank_skips_a_call_and_a_new_group_is_right(ranks: Processes, way: str) -> None:
    ranks.run(_skips, way)


@shared_memory_ways
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_rank_is_late(ranks: Processes, way: str, share: float) -> None:
    ranks.run(_comes_late, way, share)


@shared_memory_ways
def test_a_rank_is_killed(ranks: Processes, way: str) -> None:
    with pytest.raises(RanksFailed, match="died") as failed:
        ranks.run(_dies, way)
    assert failed.value.errors[1 - FAULTY] is None


def _skips_a_replay(rank: int) -> None:
    group, inputs = _group(), shards(PROBLEM, 5, HeadTail(), rank, RANKS)

    def call() -> tuple[torch.Tensor, ...]:
        return attend(inputs, PROBLEM, HeadTail(), group, **WAYS["symm_mem"])

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
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
            call()
    dist.barrier()


def test_a_rank_skips_the_replay_of_a_graph(ranks: Processes) -> None:
    ranks.run(_skips_a_replay)


# Different calls


def _found(rank: int, fault: str, column: str, way: str) -> tuple[int, str]:
    """Nothing waits for the GPU, which may wait for ever by NCCL."""
    group = dist.new_group() if way == "allgather" else _group()
    with mock.patch.object(comm_calls, "_WAITS_PER_LOOK", 0):
        found = steps_until_found(rank, group, fault, "cuda", column == "`debug=True`", **WAYS[way])
    if way == "allgather" or table()[fault, column] == "a step later":
        check_named(fault, found)
    return found.step, str(found.error)


@every_fault
@shared_memory_ways
def test_different_calls_in_shared_memory(ranks: Processes, fault: str, way: str) -> None:
    """The first error comes in this step or in the next. Results of calls in flight are invalid then, as it says."""
    found = ranks.run(_found, fault, "shared memory", way)
    # Hosts run ahead of GPUs, so the other rank may have begun more steps when it looks.
    assert WRONG_STEP <= min(step for step, _ in found) <= WRONG_STEP + 2
    for _, text in found:
        assert "make different calls" in text or "in shared memory, longer than the timeout" in text, text


@every_fault
@pytest.mark.gpu(RANKS, nccl=True)
@pytest.mark.parametrize("column", ["NCCL", "`debug=True`"])
def test_different_calls_by_nccl(ranks: Processes, fault: str, column: str) -> None:
    at_once = table()[fault, column] == "at once"
    assert at_once == (column != "NCCL")
    steps = [step for step, _ in ranks.run(_found, fault, column, "allgather")]
    assert WRONG_STEP <= min(steps) <= WRONG_STEP + (0 if at_once else 2)
    if at_once:
        assert max(steps) <= WRONG_STEP + FAULTY


def _forward(group: Any, way: str, qkv: Sequence[torch.Tensor], length: int, is_causal: bool = True) -> torch.Tensor:
    q, k, v = qkv
    out = context_parallel_attention(
        q, k, v, mesh=group, enable_gqa=True, seq_len=length, is_causal=is_causal, **WAYS[way]
    )
    assert isinstance(out, torch.Tensor)
    return out


def _other_lengths(rank: int, way: str) -> None:
    """Both lengths were seen before, in equal calls; the ranks disagree in the last one."""
    group, problems = _group(), [Problem(length, length, 1, 4, 2, 64, is_causal=True) for length in (128, 96)]
    expected = [shard(reference(each, *each.draw(5, "cuda"))[0], HeadTail(), rank, RANKS) for each in problems]

    def forward(index: int) -> torch.Tensor:
        return _forward(group, way, shards(problems[index], 5, HeadTail(), rank, RANKS)[:3], problems[index].q_len)

    for index, wanted in enumerate(expected):
        assert_close(forward(index), wanted)
    torch.cuda.synchronize()
    dist.barrier()
    held = workspaces.memory_of(group).working()
    assert held is not None
    for area in (held.kv(torch.uint8), held.grads(torch.uint8)):
        area.fill_(0xFF)  # NaN, where a rank reads what the other has not written
    torch.cuda.synchronize()
    dist.barrier()
    out = forward(rank)
    torch.cuda.synchronize()
    assert out.isnan().any() or torch.allclose(out, expected[rank], rtol=0, atol=1e-10)
    with pytest.raises(PeerError):
        forward(0)


@shared_memory_ways
def test_ranks_that_disagree_about_lengths_get_an_error_and_no_garbage(ranks: Processes, way: str) -> None:
    ranks.run(_other_lengths, way)


def _replays(rank: int, way: str) -> None:
    """The number of a flag is a constant of the graph: replays and eager calls, of both masks, take turns."""
    group, (*qkv, _) = _group(20), shards(PROBLEM, 0, HeadTail(), rank, RANKS)

    def call(is_causal: bool) -> torch.Tensor:
        return _forward(group, way, qkv, PROBLEM.q_len, is_causal)

    wanted = [call(False), call(True)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = [call(False), call(True), call(False)]
    for _ in range(5):
        graph.replay()
        found = [*captured, call(True), call(False)]
        torch.cuda.synchronize()
        for index, each in enumerate(found):
            torch.testing.assert_close(each, wanted[index % 2], rtol=0, atol=1e-12)


@shared_memory_ways
def test_replays_and_other_calls_take_turns(ranks: Processes, way: str) -> None:
    ranks.run(_replays, way)
