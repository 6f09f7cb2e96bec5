"""Compiled code that recomputes is not told for which forward: it takes the one context whose forwards wait."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from matrix.features import Case
from matrix.fronts import FRONTS
from matrix.worlds import WORLDS, compare, leaves_of, mesh_of
from support.compile_checks import compiled, nothing_outstanding, run_fresh
from support.packed_calls import packed_attention
from support.problems import assert_close, shard
from support.processes import Processes
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Causal, Documents, HeadTail, context_parallel

FIRST, SECOND = Documents([0, 7, 15, 24], within=Causal()), Documents([0, 2, 10, 20])
SEVERAL = "there have been 2 contexts with the same options whose backward has not come"


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return checkpoint(sdpa, q, k, v, use_reentrant=False)


def contexts_of_a_recompute(_rank: int, is_reentrant: bool) -> None:
    """Refused where that could be several; forwards of reentrant checkpoints, without gradients, do not count."""
    case, mesh = Case(mask=FIRST), mesh_of(WORLDS["compiled(2)"])
    x, grad_out = leaves_of(case, mesh)
    leaves, function, around = [*x.values()], compiled(inside), compiled(sdpa)

    def check(out: torch.Tensor) -> None:
        grads = torch.autograd.grad(out, leaves, grad_out)
        compare(case, mesh, {"out": out.detach(), **dict(zip(x, grads, strict=True))}, FRONTS["context"])

    with nothing_outstanding():
        with context_parallel(mesh, mask=FIRST):
            check(function(*leaves))
            of_inside, of_around = function(*leaves), checkpoint(around, *leaves, use_reentrant=False)
        with context_parallel(mesh, mask=SECOND):
            check(of_inside)
            check(of_around)
        with context_parallel(mesh, mask=FIRST):
            out = function(*leaves)
            if is_reentrant:
                checkpoint(around, *leaves, use_reentrant=True).backward(grad_out)
        grads = torch.autograd.grad(out, leaves, torch.zeros_like(grad_out), retain_graph=True)
        assert not any(grad.any() for grad in grads)
        with context_parallel(mesh, mask=SECOND):
            function(*leaves)
            with pytest.raises(RuntimeError, match=SEVERAL):
                torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_contexts_of_a_recompute(two_processes: Processes, is_reentrant: bool) -> None:
    two_processes.run(run_fresh, contexts_of_a_recompute, is_reentrant)


def edges_made_in_compiled_code(rank: int) -> None:
    """Whose memory Inductor uses again for those of the next layer, and tells nobody."""
    length, starts, mesh = 14, (3, 9, 1), mesh_of(WORLDS["compiled(2)"])
    ends = torch.tensor([0, length], dtype=torch.int32).split(1)

    def layers(x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        for start in starts:
            edges = torch.cat([ends[0], offset + start, ends[1]])
            x = packed_attention(x, x, x, edges, edges, (-1, 0))[0] * 1.0
            offset = offset + (x[0, 0, 0, :1] * 0).int()  # so that the next edges are made only now
        return x

    whole = torch.randn(1, 2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with context_parallel(mesh, seq_len=length), torch.no_grad():
        got = compiled(layers, backend="inductor")(shard(whole, HeadTail(), rank, 2), torch.zeros_like(ends[0]))
    for start in starts:
        parts = whole.split([start, length - start], 2)
        whole = torch.cat([F.scaled_dot_product_attention(x, x, x, is_causal=True) for x in parts], 2)
    assert_close(got, shard(whole, HeadTail(), rank, 2), "out")


def test_edges_made_in_compiled_code(two_processes: Processes) -> None:
    two_processes.run(run_fresh, edges_made_in_compiled_code)
