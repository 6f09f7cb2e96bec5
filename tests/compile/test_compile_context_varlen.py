"""Compiled calls of torch's `varlen_attn` in contexts and modules: other documents need no recompilation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.compile_checks import compiled, fresh, no_compilation
from support.masked_problems import MaskedProblem
from support.packed_calls import documents, edges_of, packed_attention
from support.problems import assert_close, shard
from support.processes import Processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cp_dtensor import (
    ATTENTION_OPS,
    Balanced,
    Causal,
    ContextParallel,
    HeadTail,
    Layout,
    Mask,
    context_parallel,
)
from cp_dtensor.engine import contexts as engine_contexts

LENGTH, RANKS = 14, 2
CAUSAL = (-1, 0)
STEPS: tuple[Mask, ...] = (
    documents([0, 3, 3, 9, LENGTH], [0, 1, 13, LENGTH], within=Causal()),
    documents([0, 5, LENGTH], [0, 2, 4, LENGTH], within=Causal()),
    documents([0, LENGTH], [0, 7, LENGTH], within=Causal()),
)


class Step:
    """A rank's shards of a problem under a mask, and what must come out."""

    def __init__(self, rank: int, mask: Mask, layout: Layout | None = None, batch: int = 2) -> None:
        case = MaskedProblem(LENGTH, LENGTH, mask, batch, 4, 2)
        layout = layout or HeadTail()
        whole = case.draw(3)
        q, k, v, self.grad_out = case.shard(whole, layout, rank, RANKS)
        self.leaves = [each.clone().requires_grad_() for each in (q, k, v)]
        self.edges = edges_of(mask, batch, (LENGTH, LENGTH))
        self.expected = [shard(each, layout, rank, RANKS) for each in case.reference(*whole)[:4]]
        self.what = str(mask)

    def check(self, out: torch.Tensor) -> None:
        grads = torch.autograd.grad(out, self.leaves, self.grad_out)
        for name, got, expected in zip(("out", "dq", "dk", "dv"), (out, *grads), self.expected, strict=True):
            assert_close(got, expected, f"{name} of {self.what}")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *edges: torch.Tensor) -> torch.Tensor:
    return packed_attention(q, k, v, *edges, CAUSAL)[0] * 1.0


def modules(rank: int) -> None:
    """In a checkpoint, compiled by Inductor; documents of other lengths need no compilation."""
    fresh()
    function = compiled(
        parallelize_module(Attention(), dist.group.WORLD, ContextParallel(seq_len=LENGTH)), backend="inductor"
    )
    for index, mask in enumerate(STEPS):
        step = Step(rank, mask)
        # Dynamo takes the number of documents for a constant until it has changed.
        with no_compilation() if index == 2 else nullcontext():
            step.check(checkpoint(function, *step.leaves, *step.edges, use_reentrant=False))


class Attention(nn.Module):
    def forward(self, *args: Any) -> torch.Tensor:
        return attend(*args)


def layouts_of_one_context(rank: int) -> None:
    """A layout that is balanced for the documents of each step; backwards come in another order."""
    fresh()
    function = compiled(attend)
    steps = []
    for rows in ([0, 3, 9, LENGTH], [0, 12, LENGTH]):
        mask = documents(rows, within=Causal())
        layout = Balanced(mask, LENGTH)
        step = Step(rank, mask, layout, batch=1)
        with context_parallel(dist.group.WORLD, seq_len=LENGTH, layout=layout):
            steps.append((step, function(*step.leaves, *step.edges)))
    for step, out in steps:
        step.check(out)


def kept(rank: int) -> None:
    """By selective checkpoints; backwards come in another order, and when edges have been written to."""
    fresh()

    def inside(*args: torch.Tensor) -> torch.Tensor:
        keeping = partial(create_selective_checkpoint_contexts, list(ATTENTION_OPS))
        result: torch.Tensor = checkpoint(attend, *args, use_reentrant=False, context_fn=keeping)
        return result * 1.0

    before = dict(engine_contexts._pending)
    for function in (compiled(inside), compiled(attend)):
        steps = [Step(rank, mask) for mask in STEPS]
        outs = []
        for step in steps:
            with context_parallel(dist.group.WORLD, seq_len=LENGTH):
                outs.append(function(*step.leaves, *step.edges))
            step.edges[0].zero_()
        for step, out in reversed([*zip(steps, outs, strict=True)]):
            step.check(out)
        assert engine_contexts._pending == before


def edges_made_in_compiled_code(rank: int) -> None:
    """Whose memory Inductor uses again for those of the next layer, and tells nobody."""
    fresh()
    ends, starts = torch.tensor([0, LENGTH], dtype=torch.int32).split(1), (3, 9, 1)

    def layers(x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        for start in starts:
            edges = torch.cat([ends[0], offset + start, ends[1]])
            x = attend(x, x, x, edges, edges)
            offset = offset + (x[0, 0, 0, :1] * 0).int()  # so that the next edges are made only now
        return x

    whole = torch.randn(1, 2, LENGTH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with context_parallel(dist.group.WORLD, seq_len=LENGTH), torch.no_grad():
        got = compiled(layers, backend="inductor")(shard(whole, HeadTail(), rank, RANKS), torch.zeros_like(ends[0]))
    for start in starts:
        parts = whole.split([start, LENGTH - start], 2)
        whole = torch.cat([F.scaled_dot_product_attention(x, x, x, is_causal=True) for x in parts], 2)
    assert_close(got, shard(whole, HeadTail(), rank, RANKS), "out")


def without_lengths(rank: int) -> None:
    fresh()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    step = Step(rank, STEPS[0])
    with context_parallel(mesh), pytest.raises(Exception, match="how long the whole sequence of a batch row is"):
        compiled(attend)(*step.leaves, *step.edges)


@pytest.mark.parametrize("body", [modules, layouts_of_one_context, kept, edges_made_in_compiled_code, without_lengths])
def test_compiled(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(body)
