"""Layouts and masks that compiled calls inherit from the context."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.compile_checks import compiled, fresh, no_compilation
from support.masked_problems import MaskedProblem
from support.problems import assert_close, shard
from support.processes import Processes
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    Striped,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    local_positions,
)
from cp_dtensor.api.extension import attention_of_shards

RANKS, LENGTH = 2, 12
FIRST, SECOND = Documents([0, 5, 12], within=Causal()), Documents([0, 2, 9, 12])
Function = Callable[..., torch.Tensor]


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * 1.0, k, v, enable_gqa=True) * 1.0


def function(**options: Any) -> Function:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = context_parallel_attention(q * 1.0, k, v, mesh=dist.group.WORLD, enable_gqa=True, **options)
        assert isinstance(out, torch.Tensor)
        return out * 1.0

    return compiled(attend)


def module(**options: Any) -> Function:
    return compiled(parallelize_module(Attention(), dist.group.WORLD, ContextParallel(**options)))


def check(attend: Function, mask: Mask, layout: Layout, context: context_parallel | None = None) -> None:
    """out, dq, dk and dv on this rank; backward comes after the context."""
    problem, rank = MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2), dist.get_rank()
    whole = problem.draw(0)
    *inputs, grad = (shard(tensor, layout, rank, RANKS) for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    if context is None:
        out = attend(*leaves)
    else:
        with context:
            out = attend(*leaves)
    results = (out, *torch.autograd.grad(out, leaves, grad))
    for name, got, expected in zip(("out", "dq", "dk", "dv"), results, problem.reference(*whole), strict=False):
        assert_close(got, shard(expected, layout, rank, RANKS), f"{name} of {mask} in {layout}")


def context(**options: Any) -> context_parallel:
    return context_parallel(dist.group.WORLD, **options)


def refused(attend: Function, around: context_parallel) -> None:
    with around, pytest.raises(Exception, match="in compiled code inside of a context whose mask or layout may differ"):
        attend(*torch.ones(3, 1, 2, 6, 4))


def calls(_rank: int) -> None:
    for form in (function, module):
        fresh()
        attend, masked = form(), form(mask=Full())
        check(attend, Full(), HeadTail())
        for layout in (Striped(1), Contiguous()):
            check(attend, Full(), layout, context(layout=layout))
            check(masked, Full(), layout, context(layout=layout))
        check(attend, FIRST, Striped(1), context(mask=FIRST, layout=Striped(1)))
        check(masked, Full(), Striped(1), context(mask=FIRST, layout=Striped(1)))
        with no_compilation():
            check(attend, Full(), HeadTail())
            check(attend, SECOND, Striped(1), context(mask=SECOND, layout=Striped(1)))
            check(masked, Full(), Striped(1), context(mask=SECOND, layout=Striped(1)))
        fresh()  # one key for all layouts of one length
        for each in (FIRST, SECOND):
            layout = Balanced(each, LENGTH)
            with nullcontext() if each is FIRST else no_compilation():
                check(attend, each, layout, context(mask=each, layout=layout))
                check(attend, Full(), layout, context(layout=layout))


def refusals(_rank: int) -> None:
    for form in (function, module):
        for options in ({"layout": Striped(1)}, {"layout": Contiguous()}):
            fresh()
            refused(form(**options), context(mask=FIRST, layout=Contiguous()))
        fresh()
        refused(form(mask=Full()), context(mask=FIRST, layout=Balanced(FIRST, LENGTH)))
        fresh()
        check(form(mask=Full()), Full(), Contiguous(), context(mask=FIRST, layout=Contiguous()))
        fresh()
        by_heads, around = form(method="ulysses"), context(mask=FIRST, layout=Contiguous())
        if form is function:
            check(by_heads, FIRST, Contiguous(), around)
        else:
            refused(by_heads, around)
        fresh()
        attend = form(layout=Contiguous(), mask=Full(), method="ulysses")
        check(attend, Full(), Contiguous(), context(mask=FIRST, layout=Balanced(FIRST, LENGTH)))


def modules_in_modules(_rank: int) -> None:
    fresh()

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = compiled(inner)

        def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
            return self.inner(*qkv)

    world = dist.group.WORLD
    inner = parallelize_module(Attention(), world, ContextParallel())
    for mask in (FIRST, SECOND):
        style = ContextParallel(layout=Contiguous(), mask=mask)
        check(parallelize_module(Outer(inner), world, style), mask, Contiguous())


class ProviderAttention(nn.Module):
    """Attention by the function that models of transformers call with attn_implementation="cp_dtensor"."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = attention_of_shards(q * 1.0, k, v)
        assert out is not None
        return out * 1.0


def providers(_rank: int) -> None:
    """The mask of the module holds in the attention of providers, as in SDPA."""
    for mask in (FIRST, SECOND):
        for around in (None, context(), context(mask=Causal())):
            fresh()
            style = ContextParallel(layout=Contiguous(), mask=mask)
            check(
                compiled(parallelize_module(ProviderAttention(), dist.group.WORLD, style)), mask, Contiguous(), around
            )
    fresh()
    attend = compiled(parallelize_module(ProviderAttention(), dist.group.WORLD, ContextParallel()))
    check(attend, Full(), HeadTail())
    for mask in (FIRST, SECOND):
        check(attend, mask, Striped(1), context(mask=mask, layout=Striped(1)))


def positions(rank: int) -> None:
    """Between graphs; each run has those of its context."""
    fresh()
    warnings.filterwarnings("ignore", "Dynamo (detected|does not know)")  # of the code of Balanced
    world, whole = dist.group.WORLD, torch.arange(LENGTH)

    def shard_and_positions(x: torch.Tensor) -> torch.Tensor:
        return context_parallel_shard(world, [x * 2], [0])[0] + local_positions(world, LENGTH)

    attend = torch.compile(shard_and_positions, backend="aot_eager")
    assert_close(attend(whole), 3 * shard(whole, HeadTail(), rank, RANKS, seq_dim=0), "outside")
    for layout in (Balanced(FIRST, LENGTH), Balanced(SECOND, LENGTH), Contiguous()):
        with context(layout=layout):
            assert_close(attend(whole), 3 * shard(whole, layout, rank, RANKS, seq_dim=0), layout)


@pytest.mark.parametrize("check_on_rank", [calls, refusals, modules_in_modules, providers, positions])
def test_inherited(two_processes: Processes, check_on_rank: Callable[[int], None]) -> None:
    two_processes.run(check_on_rank)
