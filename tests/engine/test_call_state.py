"""State of a call in its autograd node: backward after exit, in other threads, and in other contexts."""

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from cp_dtensor import (
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    context_parallel,
    context_parallel_shard,
    set_rotate_method,
)
from cp_dtensor.comm.collective import AllGather, AllToAll

T = TypeVar("T")
PROBLEM = Problem(q_len=13, kv_len=13, batch=2, is_causal=True)
WHOLE = PROBLEM.draw(0)
REFERENCE = reference(PROBLEM, *WHOLE)
TRANSPORTS = ["allgather", "alltoall"]
LAYOUTS = [Contiguous(), HeadTail(), Striped(2), MirroredBatch()]


@pytest.fixture(autouse=True)
def _rotate_method() -> Iterator[None]:
    yield
    set_rotate_method("auto")


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Shards:
    """A rank's leaves of the common problem, and what attention of them should give."""

    def __init__(self, layout: Layout, rank: int, world_size: int) -> None:
        self.q, self.k, self.v, self.grad_out = (shard(each, layout, rank, world_size) for each in WHOLE)
        self.leaves = [each.requires_grad_() for each in (self.q, self.k, self.v)]
        self.expected_out, *self.expected_grads = (shard(each, layout, rank, world_size) for each in REFERENCE)
        self.out = torch.empty(0)

    def forward(self) -> None:
        """To be called inside of a context."""
        self.out = sdpa(*self.leaves)
        assert_close(self.out, self.expected_out)

    def backward(self) -> None:
        self.out.backward(self.grad_out)
        for leaf, expected in zip(self.leaves, self.expected_grads, strict=True):
            assert_close(leaf.grad, expected)
            leaf.grad = None


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
        shards, other = Shards(layout, rank, 2), Shards(Contiguous(), rank, 2)

        def forward_of_the_other() -> None:
            with context_parallel(dist.group.WORLD, seq_len=13, layout=Contiguous()):
                other.forward()

        with context:
            shards.forward()
            in_thread(shards.backward)
            shards.forward()
        in_thread(shards.backward)
        with context:
            in_thread(forward_of_the_other)
            other.backward()  # in the region of another layout

    run_ranks(2, body)


def test_gradients_accumulate_over_forwards_with_different_settings() -> None:
    settings = [(layout, transport) for layout in LAYOUTS for transport in TRANSPORTS]

    def body(rank: int) -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in WHOLE[:3]]
        loss = torch.zeros((), dtype=torch.float64)
        for weight, (layout, transport) in enumerate(settings, start=1):
            shards = context_parallel_shard(dist.group.WORLD, leaves, [2, 2, 2], layout)
            with context_parallel(dist.group.WORLD, seq_len=13, layout=layout, rotate_method=transport):
                loss = loss + weight * (sdpa(*shards) * shard(WHOLE[3], layout, rank, 2)).sum()
        loss.backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    total_weight = len(settings) * (len(settings) + 1) / 2
    for parts, expected in zip(zip(*run_ranks(2, body), strict=True), REFERENCE[1:], strict=True):
        assert_close(sum(parts), total_weight * expected)


@pytest.mark.parametrize(("before", "after"), [TRANSPORTS, TRANSPORTS[::-1]])
def test_backward_uses_the_rotation_of_its_forward(before: str, after: str) -> None:
    other = {"allgather": AllGather, "alltoall": AllToAll}[after]

    def body(rank: int) -> None:
        shards = Shards(HeadTail(), rank, 3)
        set_rotate_method(before)
        dist.barrier()
        with context_parallel(dist.group.WORLD, seq_len=13):
            shards.forward()
            dist.barrier()
            set_rotate_method(after)
            dist.barrier()
            shards.forward()  # the context has read the default on creation
        shards.backward()

    with (
        mock.patch.object(other, "start_kv", side_effect=AssertionError),
        mock.patch.object(other, "start_grads", side_effect=AssertionError),
    ):
        run_ranks(3, body)


OUTER: dict[str, Any] = {"seq_len": 13, "layout": Striped(), "rotate_method": "alltoall"}
INNER: dict[str, Any] = {"seq_len": 13, "layout": HeadTail(), "rotate_method": "allgather"}


def test_nested_contexts_over_different_axes() -> None:
    """A buffer of both levels is a shard of a shard."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
        before, between, after = (Shards(OUTER["layout"], rank // 2, 2) for _ in range(3))
        inside = Shards(INNER["layout"], rank % 2, 2)
        tokens = torch.arange(17)
        once = shard(tokens, Striped(), rank // 2, 2, 0)
        of_tokens: Any = {"buffers": [tokens], "buffer_seq_dims": [0]}
        with context_parallel(mesh["rows"], **OUTER, **of_tokens):
            before.forward()
            with context_parallel(mesh["cols"], **INNER, **of_tokens):
                assert torch.equal(tokens, shard(once, HeadTail(), rank % 2, 2, 0))
                inside.forward()
                before.backward()  # of the outer level, within the inner one
            assert torch.equal(tokens, once)
            between.forward()
            inside.backward()
            with pytest.raises(KeyError), context_parallel(mesh["cols"], **INNER):
                raise KeyError
            after.forward()
        assert torch.equal(tokens, torch.arange(17))
        between.backward()
        after.backward()

    run_ranks(4, body)


def test_only_the_thread_that_entered_is_in_the_region() -> None:
    """Others warn once a rank; ranks that are threads do not warn of each other."""
    q, k, v = WHOLE[:3]
    plain = sdpa(q, k, v)

    def body(rank: int) -> None:
        shards = Shards(HeadTail(), rank, 2)
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


def test_the_main_thread_is_like_any_other() -> None:
    q, k, v = WHOLE[:3]

    def is_in_context() -> bool:
        try:
            F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(13, 12))  # which has 13 keys
        except ValueError:
            return True
        except RuntimeError:  # of torch
            return False
        raise AssertionError("a mask that does not fit was taken")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            with context_parallel(dist.group.WORLD):
                with context_parallel(dist.group.WORLD):
                    assert is_in_context()
                assert is_in_context()
                with ThreadPoolExecutor(1) as pool:
                    assert not pool.submit(is_in_context).result()
            assert not is_in_context()
    finally:
        dist.destroy_process_group()


def test_two_threads_of_a_rank_in_different_contexts_at_once() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
        rows, cols = mesh.get_group("rows"), mesh.get_group("cols")  # which other threads could not look up
        meet = threading.Barrier(2, timeout=30)

        def work(axis: dist.ProcessGroup, layout: Layout, transport: str) -> None:
            shards = Shards(layout, dist.get_rank(axis), 2)
            with context_parallel(axis, seq_len=13, layout=layout, rotate_method=transport):
                for _ in range(3):
                    meet.wait()
                    shards.forward()
                    meet.wait()
                    shards.backward()
                shards.forward()
            meet.wait()
            shards.backward()

        other = start_thread(lambda: work(rows, OUTER["layout"], OUTER["rotate_method"]), on_error=meet.abort)
        work(cols, INNER["layout"], INNER["rotate_method"])
        other()

    run_ranks(4, body)


def test_a_shard_that_is_changed_between_forward_and_backward_is_noticed() -> None:
    def body(rank: int) -> None:
        shards = Shards(HeadTail(), rank, 2)
        with context_parallel(dist.group.WORLD, seq_len=13):
            shards.forward()
        with torch.no_grad():
            shards.k.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            shards.out.backward(shards.grad_out)

    run_ranks(2, body)
