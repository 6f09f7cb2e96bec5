"""Ranks that die, raise, skip a call or are late: gloo processes. No rank waits for ever, and errors name the rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.problems import Problem, reference, shard
from support.processes import Processes
from support.ranks import RanksFailed

from cp_dtensor import HeadTail, PeerError, ring_attention, ulysses_attention
from cp_dtensor.comm import faults
from cp_dtensor.comm.collective import Exchange

RANKS, FAULTY, SECONDS = 3, 1, 1.0
PROBLEM = Problem(14, 14, q_heads=3, kv_heads=3, is_causal=True)


def _attend(rank: int, group: Any, method: str, length: int | None = 14) -> list[torch.Tensor]:
    """Returns this rank's out and gradients."""
    *qkv, grad_out = (shard(x, HeadTail(), rank, RANKS) for x in PROBLEM.draw(seed=0))
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    if method == "ulysses":
        out = ulysses_attention(q, k, v, mesh=group, is_causal=True, seq_len=length)
    else:
        out = ring_attention(q, k, v, mesh=group, is_causal=True, seq_len=length, rotate_method=method)
    return [out, *torch.autograd.grad(out, (q, k, v), grad_out)]


def _check_right(rank: int, group: Any, method: str) -> None:
    expected = reference(PROBLEM, *PROBLEM.draw(seed=0))
    for actual, whole in zip(_attend(rank, group, method), expected, strict=True):
        torch.testing.assert_close(actual, shard(whole, HeadTail(), rank, RANKS), rtol=0, atol=1e-10)


class Injected(Exception):
    pass


@contextmanager
def _raises_at_exchange(number: int) -> Iterator[None]:
    """Context in which the start or the end of an exchange raises: each counts as a step."""
    steps, init = iter(range(1000)), Exchange.__init__

    def step() -> None:
        if next(steps) == number:
            raise Injected

    def counted(exchange: Any, *args: Any) -> None:
        step()
        init(exchange, *args)
        wait = exchange.wait

        def waited() -> None:
            step()
            wait()

        exchange.wait = waited

    with mock.patch.object(Exchange, "__init__", counted):
        yield


def _skips(rank: int, group: Any, method: str) -> None:
    if rank != FAULTY:
        _attend(rank, group, method)


def _is_too_late(rank: int, group: Any, method: str) -> None:
    if rank == FAULTY:
        time.sleep(2 * SECONDS)
    _attend(rank, group, method)


def _skips_an_exchange_of_lengths(rank: int, group: Any, method: str) -> None:
    if rank != FAULTY:
        _attend(rank, group, method, length=None)


def _raises_at(number: int) -> Callable[[int, Any, str], None]:
    def raises(rank: int, group: Any, method: str) -> None:
        if rank != FAULTY:
            _attend(rank, group, method)
            return
        with pytest.raises(Injected), _raises_at_exchange(number):
            _attend(rank, group, method)

    return raises


def _faults(rank: int) -> list[str]:
    """Returns the errors of this rank, fault after fault, each in a group of its own."""
    errors = []
    cases = [*product((_skips,), ("allgather", "alltoall", "ulysses")), (_is_too_late, "alltoall")]
    cases += [(_skips_an_exchange_of_lengths, "allgather")]
    cases += [(_raises_at(step), "alltoall") for step in (1, 4, 7)]  # in forward and in backward
    for fault, method in cases:
        group = dist.new_group(timeout=timedelta(seconds=SECONDS), group_desc="cp")
        _check_right(rank, group, method)
        begin = time.monotonic()
        try:
            with mock.patch.object(faults, "ROLL_CALL_SECONDS", 0.3):
                fault(rank, group, method)
        except PeerError as error:
            assert time.monotonic() - begin < SECONDS + 10
            errors.append(str(error))
        else:
            assert rank == FAULTY, "a rank that waited for the faulty one must raise"
            errors.append("")
    _check_right(rank, dist.new_group(group_desc="cp"), "alltoall")
    return errors


def test_the_others_raise_and_name_the_rank() -> None:
    processes = Processes(RANKS, timeout=60)
    try:
        errors = processes.run(_faults)
    finally:
        processes.stop()
    for rank in set(range(RANKS)) - {FAULTY}:
        for error in errors[rank]:
            assert f"failed on rank {rank} of process group 'cp' (global ranks [0, 1, 2])" in error
        named = [
            f"rank {FAULTY} (global rank {FAULTY}), whose process ended, raised" in error for error in errors[rank]
        ]
        assert sum(named) >= len(named) - 1, "only the rank that was late may have reported the failure in time"


def _dies(rank: int) -> None:
    _check_right(rank, dist.group.WORLD, "alltoall")
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    with mock.patch.object(faults, "ROLL_CALL_SECONDS", 0.3):
        _attend(rank, dist.group.WORLD, "alltoall")


def test_a_rank_is_killed() -> None:
    processes = Processes(RANKS, timeout=30)
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        processes.run(_dies)
    assert time.monotonic() - begin < 25
    for rank, error in enumerate(failed.value.errors):
        if rank != FAULTY:
            assert isinstance(error, PeerError)
            assert f"it waited for rank {FAULTY} (global rank {FAULTY})" in str(error)


def test_a_rank_may_be_late() -> None:
    processes = Processes(RANKS, timeout=60)
    try:
        processes.run(_comes_late)
    finally:
        processes.stop()


def _comes_late(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    if rank == FAULTY:
        time.sleep(SECONDS / 2)
    _check_right(rank, group, "alltoall")
