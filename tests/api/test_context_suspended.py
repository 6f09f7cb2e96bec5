"""Contexts around generators and coroutines, and processes that fork or end inside a context."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks
from support.shards import Shards

from cp_dtensor import context_parallel
from cp_dtensor.engine.contexts import innermost


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
from test_context_suspended import in_fork
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
