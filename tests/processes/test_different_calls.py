"""One rank makes other calls than the others: the table of docs/troubleshooting.md, where it needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.different_calls import (
    FAULTS,
    FAULTY,
    WRONG_STEP,
    Found,
    check_named,
    check_right_or_nan,
    steps_until_found,
    table,
)
from support.processes import Processes
from support.ranks import run_ranks
from support.shared_memory import shared_memory

from cp_dtensor.comm import calls as comm_calls
from cp_dtensor.comm import faults
from cp_dtensor.comm.calls import Calls

RANKS, SECONDS = 3, 2.0
every_fault = pytest.mark.parametrize("fault", FAULTS)


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    processes = Processes(RANKS, timeout=60)
    yield processes
    processes.stop()


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Ranks compare passes of CPU tensors as those of CUDA tensors: at the ends of steps."""
    begin = Calls.begin

    def begun(calls: Calls, *signature: Any, on_cpu: bool = False, **options: Any) -> None:
        begin(calls, *signature, **options)

    # Ranks look at every end of a step, however long a look takes on busy cores.
    with mock.patch.object(Calls, "begin", begun), mock.patch.object(comm_calls, "_WAITS_PER_LOOK", 0):
        yield


def _all_found(rank: int) -> dict[tuple[str, str], Found]:
    """Every fault without and with `debug=True`, at the same time: each takes as long as the timeout of its group."""
    cells = [*product(FAULTS, ("gloo", "`debug=True`"))]
    groups = [dist.new_group(timeout=timedelta(seconds=SECONDS)) for _ in cells]

    def found(cell: tuple[str, str], group: Any) -> Found:
        return steps_until_found(rank, group, cell[0], debug=cell[1] != "gloo", rotate_method="allgather")

    with mock.patch.object(faults, "REPORT_SECONDS", 1.0), ThreadPoolExecutor(len(cells)) as threads:
        return dict(zip(cells, threads.map(found, cells, groups), strict=True))


@pytest.fixture(scope="module")
def by_rank(three: Processes) -> list[dict[tuple[str, str], Found]]:
    return three.run(_all_found)


@every_fault
@pytest.mark.parametrize("column", ["gloo", "`debug=True`"])
def test_gloo(by_rank: list[dict[tuple[str, str], Found]], fault: str, column: str) -> None:
    """The error is raised on every rank; on one of them before it exchanges anything."""
    assert table()[fault, column] == "at once"
    found = [of_rank[fault, column] for of_rank in by_rank]
    for rank, of_rank in enumerate(found):
        check_named(fault, of_rank)
        # The rank that skips calls may be the first to leave its context.
        assert WRONG_STEP <= of_rank.step <= WRONG_STEP + (rank == FAULTY)
    assert any("Results since then are wrong" not in str(of_rank.error) for of_rank in found)


def _found_as_on_gpus(rank: int, fault: str) -> Found:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    with mock.patch.object(faults, "REPORT_SECONDS", 1.0), as_on_gpus():
        return steps_until_found(rank, group, fault, rotate_method="allgather")


def test_the_end_of_a_step_without_shared_memory(three: Processes) -> None:
    """As NCCL, but for gloo's aborts: of ranks whose exchanges have equal sizes."""
    fault = "skips one of equal calls, then leaves the context"
    assert table()[fault, "NCCL"] == "a step later"
    found = three.run(_found_as_on_gpus, fault)
    for of_rank in found:
        check_named(fault, of_rank)
    assert WRONG_STEP <= min(of_rank.step for of_rank in found) <= WRONG_STEP + 1


@every_fault
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_shared_memory(fault: str, method: str) -> None:
    """No rank takes rows of another pass: a host that waits for its stream raises after the deadline."""
    cell = table()[fault, "shared memory"]

    def body(rank: int) -> Found:
        options = {"rotate_method": "symm_mem"} if method == "ring" else {}
        return steps_until_found(rank, dist.group.WORLD, fault, method=method, **options)

    with shared_memory(timeout=1.0), as_on_gpus():
        found = run_ranks(RANKS, body)
    for rank, of_rank in enumerate(found):
        assert WRONG_STEP <= of_rank.step <= WRONG_STEP + 2
        if cell == "a step later":
            check_named(fault, of_rank)
            continue
        assert cell == "a step later, or after T"
        check_right_or_nan(rank, RANKS, of_rank)
        text = str(of_rank.error)
        assert "make different calls" in text or "in shared memory, longer than the timeout" in text, text
