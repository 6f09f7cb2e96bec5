"""State of the process during and after contexts: functions, tables, kernels, flags; generators and forks."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from support.dtensor_checks import torch_before_2_12
from support.ranks import run_ranks
from support.settings_state import PatchedTorch
from support.shards import Shards
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import _torch, context_parallel, disable_context_parallel_dispatcher, enable_context_parallel_dispatcher
from cp_dtensor.engine.contexts import innermost

aten = torch.ops.aten


def installed() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = PatchedTorch.now()
    assert not installed()
    yield
    assert PatchedTorch.now() == before


@contextmanager
def entered(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(context_parallel(dist.group.WORLD))
        yield


def alone(body: Callable[[], None]) -> None:
    """Runs on one rank."""
    run_ranks(1, lambda rank: body())


@pytest.mark.parametrize("depth", [1, 3])
def test_everything_is_put_back_when_the_outermost_context_exits(depth: int) -> None:
    def body() -> None:
        before = PatchedTorch.now()
        with context_parallel(dist.group.WORLD):
            inside = PatchedTorch.now()
            with entered(depth - 1):
                assert PatchedTorch.now() == inside
            assert PatchedTorch.now() == inside
        assert inside != before
        assert inside.kernels != before.kernels
        assert PatchedTorch.now() == before
        with pytest.raises(KeyError), entered(depth):
            raise KeyError
        assert PatchedTorch.now() == before
        for flag in (False, True):  # the caller's, of the fast path
            torch.backends.mha.set_fastpath_enabled(flag)
            with entered(depth):
                assert not torch.backends.mha.get_fastpath_enabled()
            assert torch.backends.mha.get_fastpath_enabled() == flag

    alone(body)


def test_threads_may_leave_in_the_order_in_which_they_came() -> None:
    first_is_out = threading.Event()
    q = torch.randn(1, 1, 4, 4)

    def body(rank: int) -> None:
        group = dist.new_group([rank], use_local_synchronization=True)
        context = context_parallel(group)
        if rank == 1:
            dist.barrier()
        context.__enter__()
        if rank == 0:
            dist.barrier()
        dist.barrier()  # both are in, rank 0 was first
        if rank == 0:
            context.__exit__(None, None, None)
            first_is_out.set()
            return
        assert first_is_out.wait(30)
        assert installed()
        with pytest.raises(ValueError, match="expected dropout_p between 0 and 1"):  # where torch has a RuntimeError
            F.scaled_dot_product_attention(q, q, q, dropout_p=1.5)
        context.__exit__(None, None, None)

    run_ranks(2, body)


def sdpa_results(mesh: Any) -> list[Any]:
    """SDPA of plain tensors and of DTensors: values and placements, twice to use the caches."""
    x = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results: list[Any] = [F.scaled_dot_product_attention(x, x, x, is_causal=True).tolist()]
    for dim in (0, 1, 2, 0, 1, 2):
        leaf = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
        out = F.scaled_dot_product_attention(leaf, leaf, leaf)
        out.sum().backward()
        results += [out.placements, out.full_tensor().tolist(), leaf.grad.placements, leaf.grad.full_tensor().tolist()]
    return results


@torch_before_2_12
def test_results_are_the_same_before_and_after() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        before = sdpa_results(mesh)
        x = distribute_tensor(torch.randn(2, 2, 8, 4, dtype=torch.float64), mesh, [Shard(2)]).requires_grad_()
        dist.barrier()
        with context_parallel(mesh), enable_context_parallel_dispatcher():
            F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
            F.scaled_dot_product_attention(*(x.to_local(),) * 3).sum().backward()
        dist.barrier()
        assert not installed()
        assert sdpa_results(mesh) == before

    # DTensor itself has no strategy for the backward of the CPU's flash op. The choice is that of the whole process.
    with sdpa_kernel(SDPBackend.MATH):
        run_ranks(2, body)


def test_buffers_contexts_and_shards_are_freed() -> None:
    def body() -> None:
        tokens = torch.arange(8)
        context = context_parallel(dist.group.WORLD, buffers=[tokens], buffer_seq_dims=[0])
        with context:
            shard_memory = StorageWeakRef(tokens.untyped_storage())
        alive = [weakref.ref(context), weakref.ref(tokens)]
        del context, tokens
        gc.collect()
        assert shard_memory.expired()
        assert [reference() for reference in alive] == [None, None]

    alone(body)


def their_handler(op: Any, args: Any, kwargs: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize("table", ["_custom_op_handlers", "op_strategy_funcs", "op_single_dim_strategy_funcs"])
def test_what_others_install_in_dtensors_tables_meanwhile_survives(table: str) -> None:
    dispatcher = DTensor._op_dispatcher
    entries = getattr(dispatcher if table == "_custom_op_handlers" else dispatcher.sharding_propagator, table)
    before = dict(entries)

    def body() -> None:
        for op in (aten.scaled_dot_product_attention.default, aten.tanh_.default):
            for _ in range(2):
                with entered(2):
                    entries[op] = their_handler
                assert entries[op] is their_handler

    try:
        alone(body)
    finally:
        entries.clear()
        entries.update(before)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(F, "multi_head_attention_forward"), (torch.utils.checkpoint, _torch.patches.NON_REENTRANT)],
    ids=["multi_head_attention_forward", "checkpoint"],
)
def test_a_patch_that_others_put_over_ours_survives_and_still_works(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def body() -> None:
        calls: list[str] = []
        with entered(1):
            ours = getattr(owner, name)
            assert ours is not original

            def theirs(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return ours(*args, **kwargs)

            setattr(owner, name, theirs)
        assert getattr(owner, name) is theirs
        x = torch.randn(3, 2, 4, requires_grad=True)
        module = nn.MultiheadAttention(4, 2)
        out, weights = torch.utils.checkpoint.checkpoint(module, x, x, x, use_reentrant=False)
        out.sum().backward()
        assert weights.shape == (2, 3, 3)
        assert calls

    try:
        alone(body)
    finally:
        setattr(owner, name, original)


def test_the_dispatcher_is_reentrant_and_disabling_it_too_often_is_harmless() -> None:
    """Inside of a context it is not taken from the context."""
    before = PatchedTorch.now()
    enable_context_parallel_dispatcher()
    inside = PatchedTorch.now()
    assert inside.handlers != before.handlers
    with pytest.raises(KeyError), enable_context_parallel_dispatcher():
        raise KeyError
    assert PatchedTorch.now() == inside
    for _ in range(3):
        disable_context_parallel_dispatcher()
        assert PatchedTorch.now() == before
    with enable_context_parallel_dispatcher():
        disable_context_parallel_dispatcher()
    assert PatchedTorch.now() == before

    def body() -> None:
        with entered(1):
            inside = PatchedTorch.now()
            disable_context_parallel_dispatcher()
            assert PatchedTorch.now() == inside
            enable_context_parallel_dispatcher()
        assert installed(), "the caller has enabled it"
        disable_context_parallel_dispatcher()

    alone(body)


def context(*buffers: torch.Tensor) -> context_parallel:
    return context_parallel(dist.group.WORLD, buffers=buffers, buffer_seq_dims=[0] * len(buffers), seq_len=11)


def assert_alone(rank: int) -> None:
    q = torch.randn(1, 1, rank + 1, 4)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, :, 0], q[:, :, 0])


def generator() -> Iterator[None]:
    yield


async def coroutine() -> None:
    pass


async def asynchronous_generator() -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("function", [generator, coroutine, asynchronous_generator, partial(generator)])
def test_functions_whose_bodies_run_later_are_not_decorated(function: Any) -> None:
    """They would have run outside of the context, where each rank attends to its own tokens, and nobody is told."""

    def body(rank: int) -> None:
        with pytest.raises(TypeError, match="decorates plain functions: got a generator"):
            context()(function)

    run_ranks(2, body)


def steps(shards: Shards, tokens: torch.Tensor) -> Iterator[None]:
    with context(tokens):
        for _ in range(2):
            shards.check()
            yield


def test_a_context_inside_of_them_is_left_when_they_are_closed() -> None:
    def body(rank: int) -> None:
        tokens, shards = torch.arange(11), Shards(rank)

        async def step() -> None:
            with context():
                shards.check()

        suspended = steps(shards, tokens)
        next(suspended)
        assert tokens.numel() < 11
        shards.check()  # its context is open as long as it is suspended, as that of `with` anywhere
        suspended.close()
        assert tokens.numel() == 11
        assert_alone(rank)
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(step())
        finally:
            loop.close()
        assert_alone(rank)

    run_ranks(2, body)


def test_one_that_is_closed_inside_of_another_context_does_not_take_that_one_away() -> None:
    def body(rank: int) -> None:
        tokens, shards = torch.arange(11), Shards(rank)
        suspended = steps(shards, tokens)
        next(suspended)
        with context():
            try:
                suspended.close()
            except RuntimeError as error:
                assert "reverse order" in str(error)  # noqa: PT017  # pytest.raises would keep the generator's frame
            else:
                pytest.fail("closed in the wrong order")
            gc.collect()
            assert tokens.numel() == 11  # nobody is left who could leave it
            shards.check()
        assert innermost() is None
        assert_alone(rank)

    run_ranks(2, body)


def in_fork(check: Callable[[], bool]) -> bool:
    """What `check` says in a fork of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside other threads
        child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


LEFT_OPEN = """
import torch.distributed as dist
from cp_dtensor import context_parallel
from cp_dtensor.engine.contexts import innermost
from test_lifecycle import in_fork
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
context = context_parallel(dist.group.WORLD)
context.__enter__()
assert in_fork(lambda: innermost() is None)
assert innermost() is not None
"""


def test_a_process_may_fork_and_end_inside_of_a_context() -> None:
    """A fork is in no context, as a DataLoader's worker: attention in it would wait for its rank's peers for ever."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here.parent), str(here)])}
    command = [sys.executable, "-c", LEFT_OPEN]
    done = subprocess.run(command, check=True, timeout=100, env=environment, capture_output=True, text=True)
    assert "Error" not in done.stderr, done.stderr
