"""Ranks that die, raise, skip a call, are late or make other calls, in gloo processes: errors name the rank.

All faults but a killed process happen at the same time, each in a thread and a group of its own, since each takes as
long as the timeout of its group.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from support.problems import Problem, reference, shard
from support.processes import Processes, started
from support.ranks import RanksFailed, run_ranks
from support.settings_state import PatchedTorch, thread_state
from support.shared_memory import shared_memory
from support.steps import Injected, Steps
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor import HeadTail, PeerError, context_parallel, ring_attention, shift, ulysses_attention
from cp_dtensor.comm import calls as comm_calls
from cp_dtensor.comm import faults
from cp_dtensor.comm.calls import Calls
from cp_dtensor.comm.collective import Exchange
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.spec.cache import LRUCache

RANKS = 3
SECONDS, LONG = 2.0, 12.0
"""Timeouts of groups whose calls fail, and of groups whose calls are right on a busy machine too."""
PROBLEM = Problem(14, 14, q_heads=3, kv_heads=3, is_causal=True)
METHODS = ("allgather", "alltoall", "ulysses")
"""The transports of rings, and Ulysses."""
Case = tuple[Callable[[int, Any, str], None], str]
"""A fault and a method."""


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    yield from started(RANKS, timeout=120)


def _attend(rank: int, group: Any, method: str, length: int | None = 14, **options: Any) -> list[torch.Tensor]:
    """Returns this rank's out and gradients."""
    *qkv, grad_out = (shard(x, HeadTail(), rank, RANKS) for x in PROBLEM.draw(seed=0))
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    if method == "ulysses":
        out = ulysses_attention(q, k, v, mesh=group, is_causal=True, seq_len=length, **options)
    else:
        out = ring_attention(q, k, v, mesh=group, is_causal=True, seq_len=length, rotate_method=method, **options)
    return [out, *torch.autograd.grad(out, (q, k, v), grad_out)]


def _check_right(rank: int, group: Any, method: str) -> None:
    expected = reference(PROBLEM, *PROBLEM.draw(seed=0))
    for actual, whole in zip(_attend(rank, group, method), expected, strict=True):
        torch.testing.assert_close(actual, shard(whole, HeadTail(), rank, RANKS), rtol=0, atol=1e-10)


steps = Steps()


@contextmanager
def _counted_steps() -> Iterator[None]:
    """Steps: an exchange starts or is waited for, tiles are computed."""
    init = Exchange.__init__

    def started(exchange: Any, *args: Any) -> None:
        steps.step()
        init(exchange, *args)
        wait = exchange.wait

        def waited() -> None:
            steps.step()
            wait()

        exchange.wait = waited

    tiles = (RingPlan, "results"), (RingPlan, "gradients")
    with mock.patch.object(Exchange, "__init__", started), steps.counted(*tiles):
        yield


# Faults: what each rank does in a group


def _skips(rank: int, group: Any, method: str) -> None:
    if rank != FAULTY:
        _attend(rank, group, method)


def _skips_a_shift(rank: int, group: Any, method: str) -> None:
    if rank != FAULTY:
        shift(torch.zeros(1, 5, 2), 1, mesh=group, dim=1, seq_len=15)


def _is_too_late(rank: int, group: Any, method: str) -> None:
    time.sleep(2 * SECONDS if rank == FAULTY else 0)
    _attend(rank, group, method)


def _is_late(rank: int, group: Any, method: str) -> None:
    time.sleep(LONG / 3 if rank == FAULTY else 0)
    _check_right(rank, group, method)


def _debugs_alone(rank: int, group: Any, method: str) -> None:
    _attend(rank, group, method)
    _attend(rank, group, method, debug=rank == FAULTY)


@dataclass(frozen=True)
class _Raises:
    """The faulty rank raises an error at a step of its call."""

    step: int
    error: type[Exception] = Injected

    def __call__(self, rank: int, group: Any, method: str) -> None:
        if rank != FAULTY:
            _check_right(rank, group, method)
            return
        with pytest.raises(self.error), steps.acting_at(self.step, self.act):
            _attend(rank, group, method)

    def act(self) -> None:
        raise self.error


def _has_another_length(rank: int, group: Any, method: str) -> None:
    _check_right(rank, group, method)  # the first call of a kind would be refused on every rank
    if rank != FAULTY:
        _attend(rank, group, method)
        return
    q = torch.zeros(1, 3, 9, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="got 9 local tokens on rank 1"):
        ring_attention(q, q, q, mesh=group, is_causal=True, seq_len=14, rotate_method=method)


def _has_another_length_that_is_exchanged(rank: int, group: Any, method: str) -> None:
    q = torch.zeros(1, 3, 9 if rank == FAULTY else 5, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"rank 1 says \(27, 27\), the others \(15, 15\)"):
        ring_attention(q, q, q, mesh=group, is_causal=True, rotate_method=method)


def _destroys_the_group(rank: int, group: Any, method: str) -> None:
    if rank == FAULTY:
        dist.destroy_process_group(group)
    else:
        _attend(rank, group, method)


def _destroys_the_group_in_a_call(rank: int, group: Any, method: str) -> None:
    act = partial(dist.destroy_process_group, group) if rank == FAULTY else int
    with steps.acting_at(2, act):
        _check_right(rank, group, method)


def _destroys_the_group_in_a_call_that_fails(rank: int, group: Any, method: str) -> None:
    act = partial(dist.destroy_process_group, group) if rank == FAULTY else partial(time.sleep, 2 * SECONDS)
    with steps.acting_at(2, act):
        _attend(rank, group, method)


NAMED: list[Case] = [
    *((_skips, method) for method in METHODS), (_skips_a_shift, "alltoall"),
    (_has_another_length, "alltoall"),
    (_Raises(3, torch.OutOfMemoryError), "alltoall"), (_destroys_the_group, "allgather"),
]  # fmt: skip
"""The others raise, and name the faulty rank."""
UNNAMED: list[Case] = [
    (_is_too_late, "alltoall"), (_destroys_the_group_in_a_call_that_fails, "alltoall"), (_debugs_alone, "alltoall"),
]  # fmt: skip
"""All ranks raise, or the faulty rank may do so in time to be no suspect."""
RIGHT: list[Case] = [(_is_late, method) for method in METHODS]
RIGHT += [(_has_another_length_that_is_exchanged, "alltoall"), (_destroys_the_group_in_a_call, "alltoall")]


class Outcome(NamedTuple):
    """The result of a fault on one rank: the error that its calls raised, or None."""

    error: BaseException | None
    seconds: float


def _outcomes(rank: int, cases: list[Case]) -> list[Outcome]:
    """Runs all cases at the same time."""
    patience = [LONG if case in RIGHT else SECONDS for case in cases]
    groups = [dist.new_group(timeout=timedelta(seconds=seconds), group_desc="cp") for seconds in patience]

    def outcome(case: Case, group: Any) -> Outcome:
        (fault, method), begin, found = case, time.monotonic(), None
        try:
            fault(rank, group, method)
        except BaseException as error:
            found = _without_frames(error)
        return Outcome(found, time.monotonic() - begin)

    dist.barrier()
    with ThreadPoolExecutor(len(cases)) as threads:
        outcomes = [*threads.map(outcome, cases, groups)]
    dist.barrier()
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    return outcomes


def _attend_in_a_context(group: Any, raises: bool = False) -> BaseException | None:
    """Buffers are as before, also after an error, which is returned."""
    whole = [x.clone() for x in PROBLEM.draw(seed=0)[:3]]
    buffers, found = [x.clone() for x in whole], None
    mesh = DeviceMesh.from_group(group, "cpu")
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3, rotate_method="allgather"):
            if raises:
                raise Injected
            F.scaled_dot_product_attention(*buffers)
    except (PeerError, Injected) as error:
        found = _without_frames(error)
    assert all(map(torch.equal, buffers, whole))
    return found


def _without_frames(error: BaseException) -> BaseException:
    """An error that holds no tensors."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _state() -> tuple[Any, ...]:
    """Torch's patched functions and settings, and entries of caches."""
    gc.collect()
    cached = sum(len(each) for each in gc.get_objects() if type(each) is LRUCache)
    return PatchedTorch.now(), thread_state(), cached


def _tensor_bytes(most: float = math.inf) -> int:
    """Returns bytes of live tensors; waits up to 10 seconds for `most`: threads of gloo hold some for a moment."""
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        now = sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor)
        if now <= most or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def _check_arguments_keep_their_error(rank: int) -> None:
    """All ranks report them at once, and no connection is lost. Errors that come later name the rank."""
    group = dist.new_group(timeout=timedelta(seconds=SECONDS), group_desc="cp")
    with pytest.raises(RuntimeError, match=r"(?i)split sizes") as raised:
        faults.exchanged(torch.zeros(4), group, "an exchange", ([2] * RANKS, [1] * RANKS))
    assert not isinstance(raised.value, PeerError)
    _check_right(rank, group, "alltoall")
    if rank != FAULTY:
        with pytest.raises(PeerError, match=f"it waited for rank {FAULTY}"):
            _attend(rank, group, "alltoall")


def _run_faults(rank: int) -> list[tuple[str, Outcome]]:
    """All faults, with errors injected at each step too; what this rank got from each."""
    world = dist.group.WORLD
    with mock.patch.object(faults, "REPORT_SECONDS", 1.0), _counted_steps():
        _check_arguments_keep_their_error(rank)
        injected = []
        for method in METHODS:
            steps.count = 0
            _check_right(rank, world, method)
            injected += [(_Raises(number), method) for number in range(steps.count)]
        assert len(injected) > 30
        _attend(rank, world, "allgather")  # caches of all that the faults call
        shift(torch.zeros(1, 5, 2), 1, mesh=world, dim=1, seq_len=15)
        _has_another_length_that_is_exchanged(rank, world, "alltoall")
        assert _attend_in_a_context(world) is None
        before, held = _state(), _tensor_bytes()
        cases = [*NAMED, *UNNAMED, *RIGHT, *injected]
        outcomes = _outcomes(rank, cases)
        group = dist.new_group(timeout=timedelta(seconds=SECONDS), group_desc="cp")
        error = _attend_in_a_context(group, raises=rank == FAULTY)
        dist.destroy_process_group(group)
        del group
        assert _tensor_bytes(most=held) <= held
        for now, then in zip(_state(), before, strict=True):
            assert now == then, (now, then)
    _check_right(rank, dist.new_group(group_desc="cp"), "alltoall")
    names = [f"{getattr(fault, '__name__', fault)}, {method}" for fault, method in cases]
    return [*zip(names, outcomes, strict=True), ("the body", Outcome(error, 0.0))]


def test_the_others_raise_and_name_the_rank(three: Processes) -> None:
    by_rank = three.run(_run_faults)
    known = len(NAMED) + len(UNNAMED) + len(RIGHT)
    # On a busy machine a fault may come after the timeout: then the faulty rank has a PeerError, too.
    was_late = [isinstance(outcome.error, PeerError) for _, outcome in by_rank[FAULTY]]
    assert not all(was_late[known:-1])
    for rank in set(range(RANKS)) - {FAULTY}:
        for index, (name, outcome) in enumerate(by_rank[rank]):
            may_be_right = index >= len(NAMED) + len(UNNAMED) and name != "the body"
            error = outcome.error
            if error is None and may_be_right:  # of injected errors: the last steps of a rank concern it alone
                continue
            assert isinstance(error, PeerError), (name, error)
            assert outcome.seconds < SECONDS + LONG
            text = str(error)
            if name.startswith("_debugs_alone"):  # this rank names the call that differs, and need not have waited
                assert "After 1 forward passes" in text, text
                assert f"rank {FAULTY}: forward of a call that ranks compare first" in text, text
                continue
            assert f"failed on rank {rank} of process group 'cp' (global ranks [0, 1, 2])" in text
            if not was_late[index] and not len(NAMED) <= index < len(NAMED) + len(UNNAMED):
                assert f"rank {FAULTY} (global rank {FAULTY})" in text, (name, text)
        injected = [outcome.error for _, outcome in by_rank[rank][known:-1]]
        assert sum(error is None for error in injected) < 8
        assert all(outcome.error is None for _, outcome in by_rank[rank][known - len(RIGHT) : known])
    for name, outcome in by_rank[FAULTY]:
        assert outcome.error is None or isinstance(outcome.error, (PeerError, Injected)), (name, outcome.error)


# Different calls: the table of docs/troubleshooting.md, where it needs no GPU

every_fault = pytest.mark.parametrize("fault", FAULTS)


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


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        pytest.param(method, fault, marks=pytest.mark.sweep if method == "ulysses" and "skips" in fault else ())
        for method, fault in product(("ring", "ulysses"), FAULTS)
    ],
)
def test_shared_memory(method: str, fault: str) -> None:
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


# The last one, since it ends the processes


def _dies(rank: int) -> None:
    _check_right(rank, dist.group.WORLD, "alltoall")
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    with mock.patch.object(faults, "REPORT_SECONDS", 0.3):
        _attend(rank, dist.group.WORLD, "alltoall")


def test_a_rank_is_killed(three: Processes) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        three.run(_dies)
    assert time.monotonic() - begin < 25
    for rank, error in enumerate(failed.value.errors):
        if rank != FAULTY:
            assert isinstance(error, PeerError)
            assert f"it waited for rank {FAULTY} (global rank {FAULTY})" in str(error)
