"""FlexAttention in compiled modules with `ContextParallel`, on two processes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.compile_checks import compiled, fresh, no_compilation
from support.flex_checks import SCALE, block_mask, distance, documents, draw, one_device, traceable
from support.problems import assert_close, shard
from support.processes import Processes
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Causal, ContextParallel, HeadTail, Layout, PerDocument, _torch, context_parallel

LENGTH = 62
Code = Callable[..., torch.Tensor]


class Attention(nn.Module):
    """FlexAttention, between other operations."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> torch.Tensor:
        return flex_attention(q * 2.0, k, v, score, mask, SCALE, True) * 3.0  # type: ignore[return-value]


class Breaking(Attention):
    """One that Dynamo captures in two graphs."""

    def forward(self, q: torch.Tensor, *others: Any) -> torch.Tensor:
        q = q + 0.0
        torch._dynamo.graph_break()
        return super().forward(q, *others)


class Model(nn.Module):
    """A model with context-parallel attention, and with FlexAttention of local tensors before and after it."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> torch.Tensor:
        before = flex_attention(q, q, q)
        out = self.attention(q, k, v, mask, score)
        after = flex_attention(q, q, q)
        assert q.size(2) == before.size(2)  # type: ignore[union-attr]
        return out + (before - after)  # type: ignore[operator,no-any-return]


def parallel(module: nn.Module, **options: Any) -> nn.Module:
    return parallelize_module(module, dist.group.WORLD, ContextParallel(**options))  # type: ignore[arg-type]


def compiled_before(layout: Layout, backend: str) -> Code:
    module = Attention()
    module.compile(backend=backend, fullgraph=True)
    return parallel(module, layout=layout)


def checkpointed(layout: Layout, backend: str) -> Code:
    module = parallel(Attention(), layout=layout)
    return compiled(lambda *args: checkpoint(module, *args, use_reentrant=False), backend=backend)


WAYS: dict[str, Callable[[Layout, str], Code]] = {
    "module": lambda layout, backend: compiled(parallel(Attention(), layout=layout), backend=backend),
    "compiled before": compiled_before,
    "model": lambda layout, backend: compiled(Model(parallel(Attention(), layout=layout)), backend=backend),
    "checkpoint": checkpointed,
    "graph break": lambda layout, backend: torch.compile(parallel(Breaking(), layout=layout), backend=backend),
}


def results(rank: int, way: str, layout: Layout, backend: str, in_context: bool) -> None:
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # between graphs
    warnings.filterwarnings("ignore", "Dynamo does not know how to trace")  # torch 2.11, at a graph break
    whole, mask = draw(LENGTH), block_mask(documents, LENGTH)
    out, dq, dk, dv, _ = one_device([whole[0] * 2.0, *whole[1:3], whole[3] * 3.0], documents, distance)
    *local, grad = (shard(tensor, layout, rank, 2) for tensor in whole)
    for gradients in (False, True):  # FlexAttention has none on CPUs
        fresh()
        stand_in = mock.patch.object(_torch, "original_flex_attention", traceable_without_scale)
        with torch.set_grad_enabled(gradients), stand_in if gradients else nullcontext():
            code = WAYS[way](layout, backend)
            for again in range(2):
                inputs = [tensor.clone().requires_grad_(gradients) for tensor in local]
                around = context_parallel(dist.group.WORLD, layout=layout) if in_context else nullcontext()
                with no_compilation() if again and way != "graph break" else nullcontext(), around:
                    found = [code(*inputs, mask, distance)]
                found += torch.autograd.grad(found[0], inputs, grad) if gradients else []
                for got, expected in zip(found, (out * 3.0, dq * 2.0, dk, dv), strict=False):
                    assert_close(got, shard(expected, layout, rank, 2), (way, gradients))


def traceable_without_scale(*args: Any, scale: float | None = None, **others: Any) -> torch.Tensor:
    """`traceable`, with FlexAttention's default of the scale."""
    return traceable(*args, scale=args[0].size(3) ** -0.5 if scale is None else scale, **others)


@pytest.mark.parametrize(
    ("way", "layout", "backend", "in_context"),
    [
        *((way, HeadTail(), "aot_eager", False) for way in WAYS), ("model", HeadTail(), "eager", False),
        ("module", PerDocument([0, 13, 40, LENGTH]), "aot_eager", False), ("module", HeadTail(), "aot_eager", True),
    ],
)  # fmt: skip
def test_compiled_modules_attend_to_the_whole_sequence(
    two_processes: Processes, way: str, layout: Layout, backend: str, in_context: bool
) -> None:
    two_processes.run(results, way, layout, backend, in_context)


def refusals(rank: int) -> None:
    fresh()
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    masked = compiled(parallel(Attention(), mask=Causal()), backend="eager")
    with torch.no_grad(), pytest.raises(Exception, match="does not take the mask of its context"):
        masked(q, q, q, None, None)
    code = flex_attention.__code__
    module = parallel(Attention())
    flex_attention.__code__ = _torch.original_flex_attention.__code__  # type: ignore[attr-defined]
    try:
        for backend in ("eager", "aot_eager"):
            with torch.no_grad(), pytest.raises(Exception, match="whose code another package has replaced"):
                compiled(module, backend=backend)(q, q, q, None, None)
    finally:
        flex_attention.__code__ = code
    del module


def redirected_as_long_as_there_are_modules(rank: int) -> None:
    fresh()
    gc.collect()
    code = flex_attention.__code__
    first, second = parallel(Attention()), parallel(Attention())
    assert flex_attention.__code__ is not code
    with context_parallel(dist.group.WORLD):
        del first
        gc.collect()
    assert flex_attention.__code__ is not code
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    assert flex_attention(q, q, q).shape == q.shape  # type: ignore[union-attr]
    del second
    gc.collect()
    assert flex_attention.__code__ is code


@pytest.mark.parametrize("body", [refusals, redirected_as_long_as_there_are_modules])
def test_redirection(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(body)
