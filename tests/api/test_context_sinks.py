"""Sinks and determinism of contexts and of modules with ContextParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import MaskedProblem
from support.problems import assert_close, shard
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import ContextParallel, Contiguous, Full, HeadTail, Layout, context_parallel
from cp_dtensor.engine.contexts import innermost

RANKS, LENGTH, HEADS = 3, 13, 4
Function = Callable[..., torch.Tensor]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, sinks: torch.Tensor) -> None:
        super().__init__()
        self.sinks = nn.Parameter(sinks.clone())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v)


def drawn_sinks() -> torch.Tensor:
    return torch.tensor([0.5, -1.0, float("-inf"), 2.0], dtype=torch.float64)


def check(rank: int, layout: Layout, attend: Function, sinks: torch.Tensor) -> None:
    """out, dq, dk, dv and this rank's share of dsinks, against float64 on one device."""
    problem = MaskedProblem(LENGTH, LENGTH, Full(), 2, HEADS, 2, is_causal=True, sinks=True)
    whole = problem.draw(0)
    expected = problem.reference(*whole, sinks=drawn_sinks())
    *inputs, grad = (shard(tensor, layout, rank, RANKS) for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    out = attend(*leaves)
    sinks.grad = None
    out.backward(grad)
    for name, got, each in zip(
        ("out", "dq", "dk", "dv"), (out, *(leaf.grad for leaf in leaves)), expected[:4], strict=True
    ):
        assert_close(got, shard(each, layout, rank, RANKS), name)
    assert_close(sinks.grad, shard(expected[5], layout, rank, RANKS).sum((0, 2)), "dsinks")


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_of_a_module(method: str) -> None:
    def body(rank: int) -> None:
        world, sinks = dist.group.WORLD, drawn_sinks()
        by_name = parallelize_module(
            Attention(sinks), world, ContextParallel(method=method, sinks="sinks", seq_len=LENGTH)
        )
        check(rank, HeadTail(), by_name, by_name.sinks)
        of_copy = copy.deepcopy(by_name)
        assert of_copy.sinks is not by_name.sinks
        check(rank, HeadTail(), of_copy, of_copy.sinks)
        by_name.sinks = nn.Parameter(sinks.clone())  # read at each call
        check(rank, HeadTail(), by_name, by_name.sinks)
        attention = Attention(sinks)
        style = ContextParallel(method=method, sinks=attention.sinks, seq_len=LENGTH)
        by_tensor = parallelize_module(attention, world, style)
        for each in (by_tensor, copy.deepcopy(by_tensor)):
            check(rank, HeadTail(), each, each.sinks)
        # None takes those of the context around the call
        plain = parallelize_module(Attention(sinks), world, ContextParallel(method=method, seq_len=LENGTH))
        leaf = sinks.clone().requires_grad_()

        def inside(*qkv: torch.Tensor) -> torch.Tensor:
            with context_parallel(world, sinks=leaf):
                return plain(*qkv)

        check(rank, HeadTail(), inside, leaf)
        assert plain.sinks.grad is None

    run_ranks(RANKS, body)


def test_bad_values_are_refused_at_a_call() -> None:
    q = torch.zeros(1, HEADS, 2, 4)

    def body(_rank: int) -> None:
        world, module = dist.group.WORLD, Attention(drawn_sinks())
        with pytest.raises(ValueError, match="sinks to name an attribute of Attention, got 'sink'"):
            parallelize_module(module, world, ContextParallel(sinks="sink"))
        with context_parallel(world, sinks=torch.zeros(3)), pytest.raises(ValueError, match=r"query heads, \(4,\)"):
            sdpa(q, q, q)
        parallelize_module(module, world, ContextParallel(sinks="sinks"))
        module.sinks = None
        with pytest.raises(TypeError, match=r"expected sinks to be a torch.Tensor .* got NoneType"):
            module(q, q, q)
        del module.sinks
        module.sinks = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (RANKS,)), [Shard(0)])
        with pytest.raises(TypeError, match="expected sinks to be a plain tensor, this rank's own, got a DTensor"):
            module(q, q, q)

    run_ranks(RANKS, body)


def test_deterministic() -> None:
    """The setting reaches attention: of contexts, of modules, and of what they compile."""
    found: list[tuple[bool, bool]] = []

    class Seen(nn.Module):
        def forward(self) -> None:
            context = innermost()
            assert context is not None
            found.append((context.call.deterministic, "deterministic" in context.key))

    def body(_rank: int) -> None:
        with context_parallel(dist.group.WORLD, deterministic=True):
            Seen()()
        with context_parallel(dist.group.WORLD, layout=Contiguous()):
            Seen()()
            parallelize_module(Seen(), dist.group.WORLD, ContextParallel(deterministic=True))()

    run_ranks(1, body)
    assert found == [(True, True), (False, False), (True, True)]
