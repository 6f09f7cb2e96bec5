"""`deterministic=True` of calls and drop-ins: our kernels compute plain masks, in forward and backward.

`test_gpu_deterministic` checks results on GPUs; these tests treat CPUs as devices with nondeterministic sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.compile_checks import Shards, compiled, fresh
from support.problems import Problem, reference, shard
from support.processes import Processes
from support.ranks import run_ranks
from torch.autograd.graph import saved_tensors_hooks

from cp_dtensor import HeadTail, context_parallel_attention, ring_attention, ulysses_attention, varlen_attention
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.backends.select import Allowed
from cp_dtensor.engine import planner
from cp_dtensor.engine.call import Call
from cp_dtensor.integrations.long_context import LongContextAttentionQKVPacked, set_seq_parallel_pg
from cp_dtensor.integrations.ring_flash_attn import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_qkvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)

RANKS = 2
Options = dict[str, Any]


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


@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention], ids=["ring", "ulysses"])
def test_a_call_that_says_so_is_computed_by_our_kernels(attend: Any, calls_of_our_kernels: list[str]) -> None:
    problem = Problem(12, 12, is_causal=True)
    whole = problem.draw(0)
    expected = reference(problem, *whole)

    def body(rank: int) -> None:
        for deterministic in (False, True):
            calls_of_our_kernels.clear()
            dist.barrier()
            *qkv, grad_out = (shard(tensor, HeadTail(), rank, RANKS) for tensor in whole)
            leaves = [tensor.requires_grad_() for tensor in qkv]
            out = attend(*leaves, mesh=dist.group.WORLD, is_causal=True, deterministic=deterministic)
            results = (out, *torch.autograd.grad(out, leaves, grad_out))
            for got, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(got, shard(wanted, HeadTail(), rank, RANKS), rtol=1e-10, atol=1e-10)
            dist.barrier()
            assert set(calls_of_our_kernels) == ({"forward", "backward"} if deterministic else set())
            dist.barrier()

    run_ranks(RANKS, body)


def by_layer(rank: int, qkv: torch.Tensor, options: Options) -> None:
    mesh = set_seq_parallel_pg(RANKS, 1, rank, RANKS, device_type="cpu")
    LongContextAttentionQKVPacked(mesh=mesh)(qkv.unsqueeze(0), **options)


def by_llama3(rank: int, qkv: torch.Tensor, options: Options) -> None:
    told = llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 5, 8]), False, rank, RANKS)
    llama3_flash_attn_varlen_qkvpacked_func(qkv, *told[:4], 1, told[4], **options)


def by_functions(_rank: int, qkv: torch.Tensor, options: Options) -> None:
    dense = [tensor.transpose(0, 1).unsqueeze(0) for tensor in qkv.unbind(1)]
    context_parallel_attention(*dense, mesh=dist.group.WORLD, **options)


ENTRIES: dict[str, Callable[[int, torch.Tensor, Options], object]] = {
    "context_parallel_attention": by_functions,
    "varlen_attention": lambda _rank, qkv, options: varlen_attention(
        *qkv.unbind(1), mesh=dist.group.WORLD, cu_seqlens=[0, 8], **options
    ),
    "ring_flash_attn": lambda _rank, qkv, options: zigzag_ring_flash_attn_qkvpacked_func(qkv.unsqueeze(0), **options),
    "ring_flash_attn, documents": lambda _rank, qkv, options: zigzag_ring_flash_attn_varlen_qkvpacked_func(
        qkv, [0, 4], 4, **options
    ),
    "llama3": by_llama3,
    "long_context": by_layer,
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_every_entry_passes_it_on(entry: Callable[[int, torch.Tensor, Options], object]) -> None:
    original, said = Call.of, []

    def recording(*args: Any, **options: Any) -> Call:
        call = original(*args, **options)
        said.append(call.deterministic)
        return call

    qkv = torch.randn(4, 3, 2, 8)
    with mock.patch.object(Call, "of", recording):
        for options in ({}, {"deterministic": True}):
            run_ranks(RANKS, lambda rank, options=options: entry(rank, qkv + rank, options))
    assert said == [False] * RANKS + [True] * RANKS


def test_it_is_part_of_what_compiled_code_stands_for() -> None:
    def body(_rank: int) -> list[str]:
        return [Call.of(dist.group.WORLD, method="ring", **options).key for options in ({}, {"deterministic": True})]

    ((plain, deterministic),) = run_ranks(1, body)
    assert deterministic == f"{plain}, deterministic True"


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
        for hooks in (nullcontext(), saved_tensors_hooks(torch.clone, torch.clone)):
            for deterministic in (True, False, True):
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
