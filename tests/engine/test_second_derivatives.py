"""Refusals of second derivatives and batched gradients, in every form; none is silently zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import kinds, recorded_collectives
from support.method_checks import RING_ULYSSES
from support.problems import Problem, shard
from support.ranks import run_ranks
from torch.autograd import functional
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cp_dtensor import HeadTail, context_parallel_attention, context_parallel_unshard
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.call import Call
from cp_dtensor.engine.gather_kv import GatherKV, KVGather

Function = Callable[[torch.Tensor], torch.Tensor]


def refused() -> Any:
    return pytest.raises(RuntimeError, match="differentiate twice")


def refuses_all(function: Function, x: torch.Tensor) -> None:
    """A function of one tensor, and its sum, whose own gradient is a constant."""
    for loss in (lambda x: function(x).sum(), lambda x: function(x).square().sum()):
        for way in (functional.hvp, functional.vhp):
            with refused():
                way(loss, x.detach(), torch.ones_like(x))
    with refused():
        functional.jvp(lambda x: function(x).square(), x.detach(), torch.ones_like(x))  # by two derivatives backwards
    leaf = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
    (gradient,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
    torch.testing.assert_close(gradient.detach(), first, rtol=0, atol=0)
    with refused():
        torch.autograd.grad(gradient.sum(), leaf, allow_unused=True, retain_graph=True)
    with refused():
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("names", "shape", "method"),
    [(("cp",), (4,), "ring"), (("cp",), (4,), "ulysses"), (RING_ULYSSES, (2, 2), "hybrid"),
     (RING_ULYSSES, (2, 2), "ring"), (("cp",), (1,), "auto")],
    ids=str,
)  # fmt: skip
def test_of_attention(names: tuple[str, ...], shape: tuple[int, ...], method: str) -> None:
    whole = dict(zip("qkv", Problem(16, 16, q_heads=4, kv_heads=4).draw(0)[:3], strict=True))
    size = torch.Size(shape).numel()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        shards: dict[str, Any] = {name: shard(tensor, HeadTail(), rank, size) for name, tensor in whole.items()}

        for which in "qkv":

            def attend(x: torch.Tensor, which: str = which) -> Any:
                inputs = {**shards, which: x * 1}  # of a tensor that is no leaf, too
                return context_parallel_attention(**inputs, mesh=mesh, method=method, is_causal=True)

            refuses_all(attend, shards[which])

    run_ranks(size, body)


def shards_of(rank: int) -> list[torch.Tensor]:
    q, k, v, _ = Problem(16, 16, q_heads=4, kv_heads=4).draw(0)
    return [shard(x, HeadTail(), rank, 4).requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_of_attention_in_a_checkpoint_which_unpacks_what_was_saved_only_once(method: str) -> None:
    def attend(*inputs: torch.Tensor) -> Any:
        return context_parallel_attention(*inputs, mesh=dist.group.WORLD, method=method, is_causal=True).square().sum()

    def body(rank: int) -> None:
        shards = shards_of(rank)
        expected = torch.autograd.grad(attend(*shards), shards)
        loss = checkpoint(attend, *shards, use_reentrant=False)
        grads = torch.autograd.grad(loss, shards, create_graph=True)
        torch.testing.assert_close([x.detach() for x in grads], [*expected], rtol=0, atol=0)
        with refused():
            torch.autograd.grad(grads[0].sum(), shards[1], allow_unused=True)

    run_ranks(4, body)


@pytest.mark.parametrize("grad", ["replicated", "partial"])
def test_of_unshard_which_is_linear(grad: Any) -> None:
    """That of its sum is zero; of what is not linear in its result, the other ranks' part would be lacking."""

    def body(rank: int) -> None:
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

        def penalty(x: torch.Tensor) -> torch.Tensor:
            return context_parallel_unshard(dist.group.WORLD, [x], [0], grad=grad)[0].square().sum()

        (gradient,) = torch.autograd.grad(penalty(x), x, create_graph=True)
        with refused():
            torch.autograd.grad(gradient.sum(), x, allow_unused=True)
        with refused():
            functional.hvp(penalty, x.detach(), torch.ones_like(x))

    run_ranks(4, body)


def test_of_gathered_kv_of_flex_attention() -> None:
    def body(rank: int) -> None:
        keys = KVGather(Call(SequenceRanks(dist.group.WORLD)), 8)
        k, v = (torch.randn(1, 2, 2, 4, dtype=torch.float64) for _ in range(2))
        with refused():
            functional.hvp(lambda k: GatherKV.apply(k, v, keys)[0].square().sum(), k, torch.ones_like(k))

    run_ranks(4, body)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_batches_of_gradients_are_refused_before_any_collective(method: str) -> None:
    def body(rank: int) -> None:
        shards = shards_of(rank)
        out: Any = context_parallel_attention(*shards, mesh=dist.group.WORLD, method=method, is_causal=True)
        grads = torch.ones(3, *out.shape, dtype=out.dtype)
        before = kinds(collectives, rank)
        with pytest.raises(NotImplementedError, match="one gradient at a time, got a batch of them"):
            torch.autograd.grad(out, shards, grads, is_grads_batched=True, retain_graph=True)
        assert kinds(collectives, rank) == before
        torch.autograd.grad(out, shards, grads[0])

    with recorded_collectives() as collectives:
        run_ranks(4, body)
