"""What compiled code does again or draws anew: recomputes, edges made in it, and dropout.

Code that recomputes is not told for which forward: it takes the one context whose forwards wait.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matrix.features import Case
from matrix.fronts import FRONTS
from matrix.worlds import WORLDS, compare, leaves_of, mesh_of
from support.compile_checks import check_equals_eager, compiled, nothing_outstanding, run_fresh
from support.dtensor_checks import CP, DP, TP, Placements, distributed
from support.masked_problems import MaskedProblem
from support.packed_calls import packed_attention
from support.problems import assert_close, shard
from support.processes import Processes
from support.shards import Shards
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Causal,
    Documents,
    Full,
    HeadTail,
    context_parallel,
    context_parallel_attention,
    enable_context_parallel_dispatcher,
)

FIRST, SECOND = Documents([0, 7, 15, 24], within=Causal()), Documents([0, 2, 10, 20])
SEVERAL = "there have been 2 contexts with the same options whose backward has not come"


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def contexts_of_a_recompute(_rank: int, is_reentrant: bool) -> None:
    """Refused where that could be several; forwards of reentrant checkpoints, without gradients, do not count."""
    case, mesh = Case(mask=FIRST), mesh_of(WORLDS["compiled(2)"])
    x, grad_out = leaves_of(case, mesh)
    inside, around = compiled(partial(checkpoint, sdpa, use_reentrant=False)), compiled(sdpa)
    leaves = [*x.values()]

    def check(out: torch.Tensor) -> None:
        grads = torch.autograd.grad(out, leaves, grad_out)
        compare(case, mesh, {"out": out.detach(), **dict(zip(x, grads, strict=True))}, FRONTS["context"])

    with nothing_outstanding():
        with context_parallel(mesh, mask=FIRST):
            check(inside(*leaves))
            of_inside, of_around = inside(*leaves), checkpoint(around, *leaves, use_reentrant=False)
        with context_parallel(mesh, mask=SECOND):
            check(of_inside)
            check(of_around)
        with context_parallel(mesh, mask=FIRST):
            out = inside(*leaves)
            if is_reentrant:
                checkpoint(around, *leaves, use_reentrant=True).backward(grad_out)
        grads = torch.autograd.grad(out, leaves, torch.zeros_like(grad_out), retain_graph=True)
        assert not any(grad.any() for grad in grads)
        with context_parallel(mesh, mask=SECOND):
            inside(*leaves)
            with pytest.raises(RuntimeError, match=SEVERAL):
                torch.autograd.grad(out, leaves, grad_out)


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


# Dropout

OF_KEYS = MaskedProblem(16, 16, Full(), 4, 4, 2)


def dropping(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, enable_gqa=True)


def eager_and_compiled(function: Any, leaves: Any, grad_out: Any, seed: int) -> Any:
    """Compares out and gradients of a compiled call with those of an eager one of the same seed; returns out."""

    def seeded(call: Any, *args: Any) -> Any:
        torch.manual_seed(seed)
        return call(*args)

    return check_equals_eager(partial(seeded, function), partial(seeded, compiled(function)), leaves, grad_out)[0]


def dropout_of_shards(rank: int) -> None:
    """It is drawn at every call."""
    mesh, shards = init_device_mesh("cpu", (2,)), Shards(rank, OF_KEYS)

    def by_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return context_parallel_attention(q, k, v, mesh=mesh, dropout_p=0.4, enable_gqa=True)

    leaves = shards.inputs()
    first = eager_and_compiled(by_name, leaves, shards.grad, 7)
    assert not torch.equal(compiled(by_name)(*leaves), first), "another draw"


BODIES: dict[str, Any] = {
    "recompute": partial(contexts_of_a_recompute, is_reentrant=False),
    "reentrant": partial(contexts_of_a_recompute, is_reentrant=True),
    "edges": edges_made_in_compiled_code, "dropout": dropout_of_shards,
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_two_processes(two_processes: Processes, name: str) -> None:
    two_processes.run(run_fresh, BODIES[name])


def of_dtensors(rank: int, shape: tuple[int, ...], names: tuple[str, ...], on: Placements) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    *leaves, grad_out = distributed(OF_KEYS.draw(4), mesh, (on,) * 4)
    with enable_context_parallel_dispatcher():
        # Generators of the ranks are not equal.
        return [eager_and_compiled(dropping, leaves, grad_out.detach(), seed + 100 * rank) for seed in (7, 8)]


@pytest.mark.parametrize(
    ("shape", "names", "on"),
    [
        ((4,), ("cp",), (CP,)),
        ((2, 2), ("dp", "cp"), (DP, CP)),
        ((2, 2), ("cp", "tp"), (CP, TP)),
        ((2, 2), ("ring", "ulysses"), (CP, CP)),
    ],
    ids=str,
)
def test_dropout_of_dtensors(four_processes: Processes, shape: Any, names: Any, on: Placements) -> None:
    """One pattern for all ranks."""
    by_rank = four_processes.run(run_fresh, of_dtensors, shape, names, on)
    assert not torch.equal(*by_rank[0]), "another draw"
    assert all(map(torch.equal, outs, by_rank[0]) for outs in by_rank)


def over_heads_in_a_context(rank: int) -> None:
    """Tensor parallel inside of a context: heads that a rank has are counted among all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    here = mesh.get_local_rank("cp")
    equal_heads = [shard(t[:, :1].expand(-1, 4, -1, -1), HeadTail(), here, 2).contiguous() for t in OF_KEYS.draw(4)]
    *leaves, grad_out = distributed(tuple(equal_heads), mesh["tp"], ((TP,),) * 4)
    with context_parallel(mesh["cp"]):
        dropped = eager_and_compiled(dropping, leaves, grad_out.detach(), 7 + here)
    assert all(not torch.equal(dropped[:, one], dropped[:, other]) for one in range(4) for other in range(one))


def test_dropout_over_heads_in_a_context(four_processes: Processes) -> None:
    four_processes.run(run_fresh, over_heads_in_a_context)
