"""`deterministic=True` of calls and drop-ins: our kernels compute plain masks, in forward and backward.

`tests/gpu/test_gpu_calls.py` checks results on GPUs; these tests treat CPUs as devices with nondeterministic sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matrix.features import Case
from matrix.worlds import WORLDS, run_threads
from support.compile_checks import Shards, compiled, fresh
from support.processes import Processes
from torch.autograd.graph import saved_tensors_hooks

from cp_dtensor import ulysses_attention
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.backends.select import Allowed
from cp_dtensor.engine import planner


@pytest.fixture
def calls_of_our_kernels() -> Iterator[list[str]]:
    """What is asked of them, on CPUs that are taken for GPUs."""
    asked: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        original = getattr(IntervalAttention, name)

        def method(self: IntervalAttention, *args: Any) -> Any:
            asked.append(name)
            return original(self, *args)

        return method

    def as_on_gpus(_q: torch.Tensor, allowed: Allowed, asked: bool) -> bool:
        return allowed.deterministic or asked

    with (
        mock.patch("cp_dtensor.engine.planner.is_deterministic", as_on_gpus),
        mock.patch.object(IntervalAttention, "forward", recorded("forward")),
        mock.patch.object(IntervalAttention, "backward", recorded("backward")),
    ):
        yield asked


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_call_that_says_so_is_computed_by_our_kernels(method: str, calls_of_our_kernels: list[str]) -> None:
    for deterministic in (False, True):
        case = Case(is_causal=True, deterministic=deterministic)
        run_threads(method, case, WORLDS["threads(2)"])
        assert set(calls_of_our_kernels) == ({"forward", "backward"} if deterministic else set())


def deterministic_or_not(rank: int) -> None:
    """What backward decides is what forward has decided, also where it cannot keep that and decides once more."""
    fresh()
    shards = Shards(rank)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ulysses_attention(q * 2.0, k, v, mesh=dist.group.WORLD, is_causal=True, enable_gqa=True) * 3.0

    function = compiled(attention)
    asked = []

    def noted(_q: torch.Tensor, allowed: Allowed, _asked: bool) -> bool:
        asked.append(allowed.deterministic)
        return False

    with mock.patch.object(planner, "is_deterministic", noted):
        copies = saved_tensors_hooks(torch.clone, torch.clone)
        for hooks, deterministic in ((nullcontext(), True), (copies, True), (copies, False)):
            inputs = shards.inputs()
            try:
                planner._plans.clear()  # a cached plan would not be made again
                torch.use_deterministic_algorithms(deterministic)
                with hooks:
                    out = function(*inputs)
                planner._plans.clear()
                torch.use_deterministic_algorithms(False)  # torch refuses the other way round
                shards.check_results(out, *torch.autograd.grad(out, inputs, shards.grad))
            finally:
                torch.use_deterministic_algorithms(False)
            assert set(asked) == {deterministic}
            asked.clear()


def test_deterministic_algorithms_are_those_of_forward(two_processes: Processes) -> None:
    two_processes.run(deterministic_or_not)
