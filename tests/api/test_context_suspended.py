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
from support.problems import Problem, reference, shard
from support.ranks import run_ranks

from cp_dtensor import HeadTail, context_parallel
from cp_dtensor.engine.contexts import innermost

PROBLEM = Problem(10, 10, is_causal=True)
Q, K, V, GRAD_OUT = PROBLEM.draw(0)
OUT = reference(PROBLEM, Q, K, V, GRAD_OUT)[0]


def attend(rank: int, world_size: int = 2) -> torch.Tensor:
    """SDPA of this rank's shards, which is checked."""
    q, k, v, expected = (shard(each, HeadTail(), rank, world_size) for each in (Q, K, V, OUT))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    return out


def assert_alone(rank: int) -> None:
    q = torch.randn(1, 1, rank + 1, 4)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, :, 0], q[:, :, 0])


def generator(rank: int) -> Iterator[torch.Tensor]:
    yield attend(rank)


async def coroutine(rank: int) -> torch.Tensor:
    return attend(rank)


async def asynchronous_generator(rank: int) -> AsyncIterator[torch.Tensor]:
    yield attend(rank)


@pytest.mark.parametrize(
    "function", [generator, coroutine, asynchronous_generator, partial(generator, 0)],
    ids=["generator", "coroutine", "asynchronous generator", "bound beforehand"],
)  # fmt: skip
def test_functions_whose_bodies_run_later_are_not_decorated(function: Any) -> None:
    """They would have run outside of the context, where each rank attends to its own tokens, and nobody is told."""

    def body(rank: int) -> None:
        with pytest.raises(TypeError, match="decorates plain functions: got a generator"):
            context_parallel(dist.group.WORLD)(function)

    run_ranks(2, body)


def test_a_context_inside_of_them_is_left_when_they_are_closed() -> None:
    def body(rank: int) -> None:
        tokens = torch.arange(10)

        def steps() -> Iterator[torch.Tensor]:
            with context_parallel(dist.group.WORLD, buffers=[tokens], buffer_seq_dims=[0]):
                yield attend(rank)
                yield attend(rank)

        async def step() -> torch.Tensor:
            with context_parallel(dist.group.WORLD):
                return attend(rank)

        suspended = steps()
        next(suspended)
        assert tokens.numel() == 5
        attend(rank)  # its context is open as long as it is suspended, as that of `with` anywhere
        suspended.close()
        assert tokens.numel() == 10
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
        tokens = torch.arange(10)

        def steps() -> Iterator[torch.Tensor]:
            with context_parallel(dist.group.WORLD, buffers=[tokens], buffer_seq_dims=[0]):
                yield attend(rank)

        suspended = steps()
        next(suspended)
        with context_parallel(dist.group.WORLD):
            try:
                suspended.close()
            except RuntimeError as error:
                assert "reverse order" in str(error)  # noqa: PT017  # pytest.raises would keep the generator's frame
            else:
                pytest.fail("closed in the wrong order")
            gc.collect()
            assert tokens.numel() == 10  # nobody is left who could leave it
            attend(rank)
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


def test_a_fork_is_in_no_context() -> None:
    """As a DataLoader's worker: attention in it would wait for its rank's peers for ever."""

    def body(rank: int) -> None:
        with context_parallel(dist.group.WORLD):
            assert in_fork(lambda: innermost() is None)
            assert innermost() is not None

    run_ranks(1, body)


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


def test_a_process_may_end_inside_of_a_context() -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here.parent), str(here)])}
    command = [sys.executable, "-c", LEFT_OPEN]
    done = subprocess.run(command, check=True, timeout=100, env=environment, capture_output=True, text=True)
    assert "Error" not in done.stderr, done.stderr
