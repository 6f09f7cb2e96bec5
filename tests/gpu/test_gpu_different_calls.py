"""One rank makes other calls than the other: the table of docs/troubleshooting.md on two GPUs, in groups of NCCL alone.

Shared memory also runs on one GPU that two processes share, with gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.different_calls import (
    FAULTS,
    FAULTY,
    PROBLEM,
    WRONG_STEP,
    check_named,
    steps_until_found,
    table,
)
from support.gpu_checks import WAYS
from support.problems import Problem, reference, shard
from support.processes import Processes

from cp_dtensor import HeadTail, PeerError, context_parallel_attention
from cp_dtensor.comm import calls as comm_calls
from cp_dtensor.comm import symm_mem_workspace as workspaces

RANKS, SECONDS = 2, 6.0
pytestmark = pytest.mark.gpu
every_fault = pytest.mark.parametrize("fault", FAULTS)
shared_memory_ways = pytest.mark.parametrize("way", ["symm_mem", "ulysses"])


@pytest.fixture
def ranks() -> Iterator[Processes]:
    """Two processes of each test, since faults end them."""
    two = Processes(RANKS, timeout=90, backend="nccl")
    yield two
    two.stop()


def _in_shared_memory(rank: int, fault: str, way: str) -> tuple[int, str]:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    with mock.patch.object(comm_calls, "_WAITS_PER_LOOK", 0):
        found = steps_until_found(rank, group, fault, "cuda", **WAYS[way])
    if table()[fault, "shared memory"] == "a step later":
        check_named(fault, found)
    return found.step, str(found.error)


@every_fault
@shared_memory_ways
def test_shared_memory(ranks: Processes, fault: str, way: str) -> None:
    """The first error comes in this step or in the next. Results of calls in flight are invalid then, as it says."""
    found = ranks.run(_in_shared_memory, fault, way)
    # Hosts run ahead of GPUs, so the other rank may have begun more steps when it looks.
    assert WRONG_STEP <= min(step for step, _ in found) <= WRONG_STEP + 2
    for _, text in found:
        assert "make different calls" in text or "in shared memory, longer than the timeout" in text, text


def _by_nccl(rank: int, fault: str, debug: bool) -> int:
    """Nothing waits for the GPU, which may wait for ever."""
    with mock.patch.object(comm_calls, "_WAITS_PER_LOOK", 0):
        found = steps_until_found(rank, dist.new_group(), fault, "cuda", debug, **WAYS["allgather"])
    check_named(fault, found)
    return found.step


@every_fault
@pytest.mark.gpu(RANKS, nccl=True)
@pytest.mark.parametrize("column", ["NCCL", "`debug=True`"])
def test_nccl(ranks: Processes, fault: str, column: str) -> None:
    at_once = table()[fault, column] == "at once"
    assert at_once == (column != "NCCL")
    steps = ranks.run(_by_nccl, fault, at_once)
    assert WRONG_STEP <= min(steps) <= WRONG_STEP + (0 if at_once else 2)
    if at_once:
        assert max(steps) <= WRONG_STEP + FAULTY


def _other_lengths(rank: int, way: str) -> None:
    """Both lengths were seen before, in equal calls; the ranks disagree in the last one."""
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    problems = [Problem(length, length, 1, 4, 2, 64, is_causal=True) for length in (128, 96)]

    def attend(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        *qkv, _ = (shard(x, HeadTail(), rank, RANKS) for x in problem.draw(5, "cuda"))
        out = context_parallel_attention(
            *qkv, mesh=group, is_causal=True, enable_gqa=True, seq_len=problem.q_len, **WAYS[way]
        )
        assert isinstance(out, torch.Tensor)
        expected = reference(problem, *problem.draw(5, "cuda"))[0]
        return out, shard(expected, HeadTail(), rank, RANKS)

    for problem in problems:
        torch.testing.assert_close(*attend(problem), rtol=0, atol=1e-10)
    torch.cuda.synchronize()
    dist.barrier()
    held = workspaces.memory_of(group).working()
    assert held is not None
    for area in (held.kv(torch.uint8), held.grads(torch.uint8)):
        area.fill_(0xFF)  # NaN, where a rank reads what the other has not written
    torch.cuda.synchronize()
    dist.barrier()
    out, expected = attend(problems[rank])
    torch.cuda.synchronize()
    assert out.isnan().any() or torch.allclose(out, expected, rtol=0, atol=1e-10)
    with pytest.raises(PeerError):
        attend(problems[0])


@shared_memory_ways
def test_ranks_that_disagree_about_lengths_get_an_error_and_no_garbage(ranks: Processes, way: str) -> None:
    ranks.run(_other_lengths, way)


def _replays(rank: int, way: str) -> None:
    """The number of a flag is a constant of the graph: replays and eager calls, of both lengths, take turns."""
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    *qkv, _ = (shard(x, HeadTail(), rank, RANKS) for x in PROBLEM.draw(0, "cuda"))
    options: dict[str, Any] = {"mesh": group, "seq_len": PROBLEM.q_len, **WAYS[way]}

    def attend(is_causal: bool) -> torch.Tensor:
        out = context_parallel_attention(*qkv, is_causal=is_causal, **options)
        assert isinstance(out, torch.Tensor)
        return out

    wanted = [attend(False), attend(True)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = [attend(False), attend(True), attend(False)]
    for _ in range(5):
        graph.replay()
        found = [*captured, attend(True), attend(False)]
        torch.cuda.synchronize()
        for index, each in enumerate(found):
            torch.testing.assert_close(each, wanted[index % 2 if index < 3 else 4 - index], rtol=0, atol=1e-12)


@shared_memory_ways
def test_replays_and_other_calls_take_turns(ranks: Processes, way: str) -> None:
    ranks.run(_replays, way)
