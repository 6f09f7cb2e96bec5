"""Layouts and masks that calls take over from the context around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import MaskedProblem
from support.problems import shard
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

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
    context_parallel_unshard,
    explain,
    local_positions,
    shift,
    ulysses_attention,
)
from cp_dtensor.api.extension import attention_of_shards

RANKS, LENGTH = 2, 12
MASK = Documents([0, 5, 12], within=Causal())
LAYOUTS = (Striped(1), Balanced(MASK, LENGTH))
Function = Callable[..., torch.Tensor]


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        return self.inner(*qkv)


def functional(function: Callable[..., Any]) -> Function:
    return lambda q, k, v, **options: function(
        q, k, v, mesh=options.pop("mesh", dist.group.WORLD), enable_gqa=True, **options
    )


def module(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    mesh = options.pop("mesh", dist.group.WORLD)
    return parallelize_module(Attention(), mesh, ContextParallel(**options))(q, k, v)


FORMS: dict[str, Function] = {
    "context_parallel_attention": functional(context_parallel_attention),
    "ulysses_attention": functional(ulysses_attention),
    "ContextParallel": module,
}


class Case:
    """A problem of one mask, and this rank's shards of it in one layout."""

    def __init__(self, rank: int, mask: Mask, layout: Layout, ranks: int = RANKS) -> None:
        problem = MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2)
        whole = problem.draw(0)
        self._shard = lambda tensor: shard(tensor, layout, rank, ranks)
        self._expected = problem.reference(*whole)[:4]
        self.q, self.k, self.v, self.grad = map(self._shard, whole)

    def check(self, attend: Function, around: Callable[[], Any] = nullcontext, **options: Any) -> None:
        """out, dq, dk and dv of `attend` under `around()`; backward comes after it."""
        leaves = [tensor.clone().requires_grad_() for tensor in (self.q, self.k, self.v)]
        with around():
            out = attend(*leaves, **options)
        out.backward(self.grad)
        results = (out, *(leaf.grad for leaf in leaves))
        for name, got, whole in zip(("out", "dq", "dk", "dv"), results, self._expected, strict=True):
            torch.testing.assert_close(
                got, self._shard(whole), rtol=0, atol=1e-10, msg=lambda text, n=name: f"{n} {text}"
            )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: type(layout).__name__)
@pytest.mark.parametrize("form", FORMS)
def test_attention(form: str, layout: Layout) -> None:
    attend = FORMS[form]

    def body(rank: int) -> None:
        def around() -> context_parallel:
            return context_parallel(dist.group.WORLD, layout=layout, mask=MASK)

        Case(rank, MASK, layout).check(attend, around)
        Case(rank, MASK, layout).check(attend, around, mesh=init_device_mesh("cpu", (RANKS,)))
        Case(rank, Full(), layout).check(attend, around, mask=Full())
        Case(rank, Causal(), layout).check(attend, around, mask=Causal())  # alone, without that of the context
        Case(rank, MASK, HeadTail()).check(attend, around, layout=HeadTail())
        Case(rank, Full(), HeadTail()).check(attend, around, layout=HeadTail(), mask=Full())
        Case(rank, Full(), HeadTail()).check(attend)
        if form != "ContextParallel":
            Case(rank, MASK & Causal(), layout).check(attend, around, is_causal=True)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("form", FORMS)
def test_contexts_over_other_ranks_give_nothing(form: str) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "rows"))["cp"]
        case = Case(mesh.get_local_rank(), Full(), HeadTail())
        case.check(FORMS[form], lambda: context_parallel(dist.group.WORLD, layout=Contiguous(), mask=MASK), mesh=mesh)

    run_ranks(4, body)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    def predicted(**options: Any) -> str:
        return str(explain(dist.group.WORLD, seq_len=LENGTH, q_heads=4, **options))

    def body(rank: int) -> None:
        layout = Balanced(MASK, LENGTH)
        outside, given = predicted(), predicted(layout=layout, mask=MASK)
        with context_parallel(dist.group.WORLD, layout=layout, mask=MASK):
            assert predicted() == given != outside
            assert predicted(layout=HeadTail(), mask=Causal()) == outside
        with context_parallel(dist.new_group([rank], use_local_synchronization=True), mask=MASK):
            assert predicted() == outside

    run_ranks(RANKS, body)
    capsys.readouterr()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: type(layout).__name__)
def test_sharding(layout: Layout) -> None:
    def body(rank: int) -> None:
        world, whole = dist.group.WORLD, torch.arange(LENGTH)
        with context_parallel(world, layout=layout):
            (mine,) = context_parallel_shard(world, [whole], [0])
            positions = local_positions(world, LENGTH)
            (again,) = context_parallel_unshard(world, [mine], [0])
            (other,) = context_parallel_shard(world, [whole], [0], HeadTail())
        assert torch.equal(mine, shard(whole, layout, rank, RANKS, seq_dim=0))
        assert torch.equal(positions, mine)
        assert torch.equal(again, whole)
        assert torch.equal(other, shard(whole, HeadTail(), rank, RANKS, seq_dim=0))
        assert torch.equal(local_positions(world, LENGTH), other)

    run_ranks(RANKS, body)


def test_modules_inside_of_modules() -> None:
    def body(rank: int) -> None:
        world = dist.group.WORLD
        inner = parallelize_module(Attention(), world, ContextParallel())
        outer = parallelize_module(Outer(inner), world, ContextParallel(layout=Contiguous(), mask=MASK))
        for each in (outer, copy.deepcopy(outer)):
            Case(rank, MASK, Contiguous()).check(each)
        Case(rank, Full(), HeadTail()).check(inner)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_recomputation(form: str, use_reentrant: bool) -> None:
    """Of a checkpoint made in a context, after that; one made outside is refused in another, where it may belong."""
    attend = FORMS[form]

    def checkpointed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return checkpoint(attend, q, k, v, use_reentrant=use_reentrant, **options)

    def body(rank: int) -> None:
        def context() -> context_parallel:
            return context_parallel(dist.group.WORLD, layout=Contiguous(), mask=MASK)

        Case(rank, MASK, Contiguous()).check(
            lambda *qkv: checkpoint(attend, *qkv, use_reentrant=use_reentrant), context
        )
        outside = Case(rank, Full(), HeadTail())
        leaf = outside.q.clone().requires_grad_()
        out = checkpoint(lambda q: attend(q, outside.k, outside.v), leaf, use_reentrant=use_reentrant)
        with context(), pytest.raises(RuntimeError, match=r"was called in a backward inside of a context .* pass"):
            out.sum().backward()
        told = {"layout": HeadTail(), "mask": Full()}
        out = checkpoint(lambda q: attend(q, outside.k, outside.v, **told), leaf, use_reentrant=use_reentrant)
        with context():
            out.sum().backward()

    run_ranks(RANKS, body)


def test_dtensors_over_two_axes() -> None:
    """The mask of the context, and the documents in it, for calls of DTensors sharded along both axes."""
    q = torch.randn(1, 2, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).tril().bool()
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=seen)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
        query = distribute_tensor(q, mesh, [Shard(2), Shard(2)], src_data_rank=None)
        x = distribute_tensor(torch.arange(12.0), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        with context_parallel(mesh, mask=MASK, layout=Contiguous(), seq_len=LENGTH):
            out: Any = context_parallel_attention(query, query, query)
            unmasked: Any = context_parallel_attention(query, query, query, mask=Full())
            shifted: Any = shift(x, 1, dim=0)
        torch.testing.assert_close(out.full_tensor(), expected, rtol=0, atol=1e-12)
        whole = F.scaled_dot_product_attention(q, q, q)
        torch.testing.assert_close(unmasked.full_tensor(), whole, rtol=0, atol=1e-12)
        assert shifted.full_tensor().tolist() == [0, 0, 1, 2, 3, 0, 5, 6, 7, 8, 9, 10]

    run_ranks(4, body)


def test_the_ranks_of_the_context_in_another_order_are_refused() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
        with context_parallel(mesh, layout=Contiguous()):
            assert local_positions(mesh, 4).tolist() == [[0, 2, 1, 3][rank]]
            with pytest.raises(ValueError, match=r"another order, \[0, 1, 2, 3\] \(the context's: \[0, 2, 1, 3\]\)"):
                local_positions(dist.group.WORLD, 4)
            assert local_positions(dist.group.WORLD, 4, Contiguous()).tolist() == [rank]

    run_ranks(4, body)


def test_the_mask_of_a_provider_in_traced_code() -> None:
    def attend(q: torch.Tensor) -> Any:
        return attention_of_shards(q, q, q, mask=Documents([0, 1, 2, 3, 4]))

    def body(rank: int) -> None:
        q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
        with context_parallel(dist.group.WORLD, layout=Contiguous(), seq_len=4):  # type: ignore[arg-type]
            torch.testing.assert_close(attend(q), q)
            torch.testing.assert_close(make_fx(attend)(q)(q), q)

    run_ranks(1, body)
