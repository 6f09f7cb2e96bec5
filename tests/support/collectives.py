"""Recorder of the collectives of ranks that are threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from cp_dtensor.comm import collective as exchange
from cp_dtensor.engine import agreement
from support.ranks import RanksFailed, run_ranks

_PATIENCE_SECONDS = 5


@dataclass(frozen=True)
class Collective:
    """One rank's call of a collective."""

    rank: int
    kind: str
    """The name of torch's class, such as "AllGather", "AllToAllBase" or "ReduceScatter"."""
    sent: tuple[torch.Tensor, ...]


@contextmanager
def _each(note: Callable[[Any, int, Any], None], of_first_calls: bool) -> Iterator[None]:
    """While open, `note` gets every collective of every thread: the collective, the rank and its data."""
    lock, join = threading.Lock(), threaded.Collective.join

    def noting_join(self: Any, rank: int, data: Any) -> Any:
        with lock:
            note(self, rank, data)
        return join(self, rank, data)

    is_compared = nullcontext() if of_first_calls else mock.patch.object(agreement._compared, "has", return_value=True)
    with mock.patch.object(threaded.Collective, "join", noting_join), is_compared:
        yield


@contextmanager
def recorded_collectives(*, of_first_calls: bool = False) -> Iterator[list[Collective]]:
    """Yields a list that gets every collective of every thread, in the order of the calls.

    Ranks do not compare the first call of each kind, as in every later one, unless `of_first_calls`.
    """
    collectives: list[Collective] = []

    def note(collective: Any, rank: int, data: Any) -> None:
        sent = data[1] if isinstance(data, tuple) else data  # (output, input, ...), or tensors changed in place
        collectives.append(Collective(rank, type(collective._collective).__name__, tuple(_tensors(sent))))

    with _each(note, of_first_calls):
        yield collectives


@contextmanager
def received_bytes() -> Iterator[dict[tuple[int, int], int]]:
    """Yields bytes that ranks receive from other ranks, by (rank, size of the group), after first calls.

    Meshes have axes of different sizes, so that the size names the axis. A sum over ranks counts as the blocks of all
    others.
    """
    received: dict[tuple[int, int], int] = {}

    def note(collective: Any, rank: int, data: Any) -> None:
        key = dist.get_rank(), collective._world_size
        received[key] = received.get(key, 0) + _bytes_of_others(type(collective._collective).__name__, rank, data)

    with _each(note, of_first_calls=False):
        yield received


def _bytes_of_others(kind: str, rank: int, data: Any) -> int:
    match kind:
        case "AllToAllBase":
            out, _, sizes, _ = data
            own = sizes[rank] if sizes else out.size(0) // dist.get_world_size()
            return (out.size(0) - own) * math.prod(out.shape[1:]) * out.itemsize
        case "AllToAll":
            return sum(each.nbytes for source, each in enumerate(data[0]) if source != rank)
        case "AllGather":
            return sum(each.nbytes for source, each in enumerate(data[0][0]) if source != rank)
        case "ReduceScatter":
            return sum(each.nbytes for target, each in enumerate(data[1][0]) if target != rank)
    raise AssertionError(f"how many bytes does a rank receive in {kind}?")


def kinds(collectives: list[Collective], rank: int = 0) -> list[str]:
    """Returns the kinds of one rank's collectives, in order."""
    return [collective.kind for collective in collectives if collective.rank == rank]


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    else:
        for part in nested:
            yield from _tensors(part)


def errors_by_rank(world_size: int, body: Callable[[int], object]) -> list[BaseException | None]:
    """Returns the error of `body(rank)` on each rank, None if it returned.

    Errors are raised after all ranks have ended: in `run_ranks` an error would end ranks that are about to leave a
    collective. A rank that still waits in a collective seconds later has SystemExit.
    """
    ended = threading.Barrier(world_size)

    def held_back(rank: int) -> BaseException | None:
        caught: BaseException | None = None
        try:
            body(rank)
        except Exception as error:
            caught = error
        try:
            ended.wait(_PATIENCE_SECONDS)
        except threading.BrokenBarrierError as hanging:
            raise caught or hanging from None
        return caught

    try:
        return run_ranks(world_size, held_back)
    except RanksFailed as failed:
        return failed.errors


@contextmanager
def rows_in_place() -> Iterator[None]:
    """Context in which collectives move rows without packing, as NCCL does."""
    with (
        mock.patch.object(exchange, "uses_nccl", return_value=True),
        mock.patch.object(exchange, "start_all_to_all", _all_to_all_in_place),
    ):
        yield


def _all_to_all_in_place(
    incoming: Sequence[list[torch.Tensor]], outgoing: Sequence[list[torch.Tensor]], group: dist.ProcessGroup
) -> Callable[[], object]:
    """Stand-in for `start_all_to_all`, which needs NCCL."""
    works = [
        dist.all_to_all(rows_in, rows_out, group=group, async_op=True)
        for rows_in, rows_out in zip(incoming, outgoing, strict=True)
    ]
    return lambda: [work.wait() for work in works]


def check_refused_before_any_exchange(cases: Sequence[tuple[str, Callable[[Any], object]]]) -> None:
    """Checks that calls, given the group of two ranks, end in messages on both, without a collective."""

    def body(rank: int) -> None:
        for message, call in cases:
            with pytest.raises((TypeError, ValueError), match=message):
                call(dist.group.WORLD)

    with recorded_collectives() as collectives:
        run_ranks(2, body)
    assert not collectives
