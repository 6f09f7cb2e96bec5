"""State of a call in its autograd node: backward after exit, in other threads, and in other contexts."""

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import MaskedProblem
from support.ranks import run_ranks
from support.shards import Shards
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from cp_dtensor import (
    Contiguous,
    Full,
    HeadTail,
    Layout,
    Striped,
    context_parallel,
    set_rotate_method,
)
from cp_dtensor.comm.collective import AllGather, AllToAll

T = TypeVar("T")
PROBLEM = MaskedProblem(13, 13, Full(), 2, is_causal=True)
WHOLE = PROBLEM.draw(0)
TRANSPORTS = ["allgather", "alltoall"]


@pytest.fixture(autouse=True)
def _rotate_method() -> Iterator[None]:
    yield
    set_rotate_method("auto")


def shards_of(rank: int, layout: Layout | None = None, ranks: int = 2) -> Shards:
    return Shards(rank, PROBLEM, layout, ranks)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def start_thread(function: Callable[[], T], on_error: Callable[[], object] = lambda: None) -> Callable[[], T]:
    """Runs a function in a thread that belongs to the rank of the calling one; returns how to wait for its result."""
    world, results, errors = ThreadLocalWorld._world.world, [], []

    def main() -> None:
        ThreadLocalWorld._world.world = world
        try:
            results.append(function())
        except BaseException as error:  # raised again in wait
            errors.append(error)
            on_error()

    def wait() -> T:
        thread.join(30)
        assert not thread.is_alive(), "the thread hangs"
        if errors:
            raise errors[0]
        return results[0]

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    return wait


def in_thread(function: Callable[[], T]) -> T:
    return start_thread(function)()


@pytest.mark.parametrize(("layout", "transport"), [(HeadTail(), "allgather"), (Striped(2), "alltoall")], ids=str)
def test_backward_in_another_thread_than_forward(layout: Layout, transport: str) -> None:
    def body(rank: int) -> None:
        context = context_parallel(dist.group.WORLD, seq_len=13, layout=layout, rotate_method=transport)
        shards, other = shards_of(rank, layout), shards_of(rank, Contiguous())

        def forward_of_the_other() -> Callable[[], None]:
            with context_parallel(dist.group.WORLD, seq_len=13, layout=Contiguous()):
                return other.forward()

        with context:
            in_thread(shards.forward())
            backward = shards.forward()
        in_thread(backward)
        with context:
            in_thread(forward_of_the_other)()  # backward is in the region of another layout

    run_ranks(2, body)


@pytest.mark.parametrize(("before", "after"), [TRANSPORTS, TRANSPORTS[::-1]])
def test_backward_uses_the_rotation_of_its_forward(before: str, after: str) -> None:
    other = {"allgather": AllGather, "alltoall": AllToAll}[after]

    def body(rank: int) -> None:
        shards = shards_of(rank, ranks=3)
        set_rotate_method(before)
        dist.barrier()
        with context_parallel(dist.group.WORLD, seq_len=13):
            first = shards.forward()
            dist.barrier()
            set_rotate_method(after)
            dist.barrier()
            second = shards.forward()  # the context has read the default on creation
        first()
        second()

    with (
        mock.patch.object(other, "start_kv", side_effect=AssertionError),
        mock.patch.object(other, "start_grads", side_effect=AssertionError),
    ):
        run_ranks(3, body)


def test_only_the_thread_that_entered_is_in_the_region() -> None:
    """Others warn once a rank; ranks that are threads do not warn of each other."""
    q, k, v = WHOLE[:3]
    plain = sdpa(q, k, v)

    def body(rank: int) -> None:
        shards = shards_of(rank)
        with context_parallel(dist.group.WORLD, seq_len=13):
            assert torch.equal(in_thread(lambda: sdpa(q, k, v)), plain)
            shards.forward()
            assert torch.equal(in_thread(lambda: sdpa(q, k, v)), plain)

    def alone(rank: int) -> None:
        with context_parallel(dist.group.WORLD):
            if rank == 0:
                dist.barrier()
                dist.barrier()
        if rank == 1:
            dist.barrier()
            sdpa(q, k, v)  # while rank 0 is in its context
            dist.barrier()

    run_ranks(2, alone)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body)
    assert ["in a thread without a context" in str(each.message) for each in caught] == [True, True]


def test_two_threads_of_a_rank_in_different_contexts_at_once() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
        rows, cols = mesh.get_group("rows"), mesh.get_group("cols")  # which other threads could not look up
        meet = threading.Barrier(2, timeout=30)

        def work(axis: dist.ProcessGroup, layout: Layout, transport: str) -> None:
            shards = shards_of(dist.get_rank(axis), layout)
            with context_parallel(axis, seq_len=13, layout=layout, rotate_method=transport):
                for _ in range(3):
                    meet.wait()
                    backward = shards.forward()
                    meet.wait()
                    backward()
                backward = shards.forward()
            meet.wait()
            backward()

        other = start_thread(lambda: work(rows, Striped(), "alltoall"), on_error=meet.abort)
        work(cols, HeadTail(), "allgather")
        other()

    run_ranks(4, body)


def test_ranks_may_differ_in_requires_grad_where_no_gradients_are_recorded() -> None:
    """A view of a leaf requires grad there, and a copy of it does not: uneven shards are packed by one or the other."""

    def body(rank: int) -> None:
        shards = shards_of(rank)
        q, k, v = shards.inputs() if rank else (shards.q, shards.k, shards.v)
        with context_parallel(dist.group.WORLD, seq_len=13), torch.no_grad():
            shards.check_results(sdpa(q, k, v))

    run_ranks(2, body)


def test_a_shard_that_is_changed_between_forward_and_backward_is_noticed() -> None:
    def body(rank: int) -> None:
        q, k, v = shards_of(rank).inputs()
        with context_parallel(dist.group.WORLD, seq_len=13):
            out = sdpa(q, k, v)
        with torch.no_grad():
            k.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    run_ranks(2, body)
