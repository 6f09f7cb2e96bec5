"""Activation checkpointing: recomputation runs in the context and on the shards of its forward."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from support.problems import assert_close, shard
from support.ranks import run_ranks
from torch import nn

from cp_dtensor import Contiguous, HeadTail, Layout, Striped, context_parallel, context_parallel_shard

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 11, 2, 4
WIDTH = HEADS * HEAD_DIM
WORLD = 2
REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
BACKWARD_INSIDE = pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after exit"])

Run = Callable[["Block", torch.Tensor], torch.Tensor]
"""Forward of a block, by way of some checkpointing."""


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """Causal self-attention with position-dependent factors; equal weights each time it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(3, WIDTH, WIDTH, seed=3) / WIDTH**0.5)
        self.freqs = normal(LENGTH, HEAD_DIM, seed=4)
        self.forwards = 0

    def attend(self, hidden: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        q, k, v = ((hidden @ weight).unflatten(-1, (HEADS, -1)).transpose(1, 2) for weight in self.weight)
        q, k = (each * freqs[: hidden.size(1)] for each in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return hidden + out.transpose(1, 2).flatten(2).tanh()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attend(hidden, self.freqs)


Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
"""Output, gradients of the input and of the weight, number of forwards."""


def alone(run: Run) -> Result:
    block, whole = Block(), normal(BATCH, LENGTH, WIDTH, seed=5).requires_grad_()
    out = run(block, whole)
    out.backward(normal(*out.shape, seed=6))
    assert whole.grad is not None
    assert block.weight.grad is not None
    return out.detach(), whole.grad, block.weight.grad, block.forwards


def sharded(run: Run, layout: Layout, inside: bool, **settings: Any) -> list[Result]:
    """What `alone` gives, of each rank; gradients of the input are of the whole one."""

    def body(rank: int) -> Result:
        block, whole = Block(), normal(BATCH, LENGTH, WIDTH, seed=5).requires_grad_()
        (hidden,) = context_parallel_shard(dist.group.WORLD, [whole], [1], layout)
        grad_out = shard(normal(BATCH, LENGTH, WIDTH, seed=6), layout, rank, WORLD, 1)
        with context_parallel(dist.group.WORLD, buffers=[block.freqs], buffer_seq_dims=[0], layout=layout, **settings):
            out = run(block, hidden)
            if inside:
                out.backward(grad_out)
                assert block.freqs.shape == (hidden.size(1), HEAD_DIM)
        assert torch.equal(block.freqs, Block().freqs)
        if not inside:
            out.backward(grad_out)
        assert torch.equal(block.freqs, Block().freqs)
        assert whole.grad is not None
        assert block.weight.grad is not None
        return out.detach(), whole.grad, block.weight.grad, block.forwards

    return run_ranks(WORLD, body)


def assert_as_alone(run: Run, results: list[Result], layout: Layout = HeadTail()) -> None:  # noqa: B008
    out, grad_input, grad_weight, forwards = alone(run)
    for rank, result in enumerate(results):
        assert_close(result[0], shard(out, layout, rank, len(results), 1))
        assert result[3] == forwards
    assert_close(sum(result[1] for result in results), grad_input)
    assert_close(sum(result[2] for result in results), grad_weight)


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


@BACKWARD_INSIDE
@REENTRANT
def test_buffers_that_are_arguments(use_reentrant: bool, inside: bool) -> None:
    def run(block: Block, hidden: torch.Tensor) -> torch.Tensor:
        if use_reentrant:  # which takes no keywords
            return checkpoint(block.attend, hidden, block.freqs, use_reentrant=True)
        return checkpoint(block.attend, hidden=hidden, freqs=block.freqs, use_reentrant=False)

    assert_as_alone(run, sharded(run, HeadTail(), inside))


# Torch's own warning: within a reentrant checkpoint, nothing requires grad in the first forward.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("outer", [True, False], ids=["outer reentrant", "outer non-reentrant"])
@pytest.mark.parametrize("inner", [True, False], ids=["inner reentrant", "inner non-reentrant"])
def test_nested_checkpoints(outer: bool, inner: bool) -> None:
    def run(block: Block, hidden: torch.Tensor) -> torch.Tensor:
        def twice(hidden: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(block, hidden, use_reentrant=inner)
            return checkpoint(block, hidden, use_reentrant=inner)

        return checkpoint(twice, hidden, use_reentrant=outer)

    assert_as_alone(run, sharded(run, HeadTail(), inside=False))


@REENTRANT
def test_a_recompute_inside_of_the_next_context(use_reentrant: bool) -> None:
    """It is in the layout and on the buffers of its forward, not of the context that is open around the backward."""

    def run(block: Block, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, hidden, use_reentrant=use_reentrant)

    def body(rank: int) -> Result:
        block, whole = Block(), normal(BATCH, LENGTH, WIDTH, seed=5).requires_grad_()
        (hidden,) = context_parallel_shard(dist.group.WORLD, [whole], [1], Striped())
        with context_parallel(dist.group.WORLD, buffers=[block.freqs], buffer_seq_dims=[0], layout=Striped()):
            out = run(block, hidden)
        with context_parallel(dist.group.WORLD, seq_len=LENGTH, layout=Contiguous()):
            out.backward(shard(normal(BATCH, LENGTH, WIDTH, seed=6), Striped(), rank, WORLD, 1))
        assert whole.grad is not None
        assert block.weight.grad is not None
        return out.detach(), whole.grad, block.weight.grad, block.forwards

    assert_as_alone(run, run_ranks(WORLD, body), Striped())


@REENTRANT
def test_an_exception_in_the_recompute_leaves_buffers_whole(use_reentrant: bool) -> None:
    def body(rank: int) -> None:
        block, whole = Block(), normal(BATCH, LENGTH, WIDTH, seed=5).requires_grad_()
        (hidden,) = context_parallel_shard(dist.group.WORLD, [whole], [1])

        def fails_the_second_time(hidden: torch.Tensor) -> torch.Tensor:
            if block.forwards:
                raise KeyError("recompute")
            return block(hidden)

        with context_parallel(dist.group.WORLD, buffers=[block.freqs], buffer_seq_dims=[0]):
            out = checkpoint(fails_the_second_time, hidden, use_reentrant=use_reentrant)
        with pytest.raises(KeyError, match="recompute"):
            out.sum().backward()
        assert torch.equal(block.freqs, Block().freqs)
        q = normal(1, 1, 4, 4, seed=7)
        assert_close(F.scaled_dot_product_attention(q, q, q), (q @ q.mT / 2).softmax(-1) @ q)

    run_ranks(WORLD, body)


@pytest.mark.parametrize("context_of", ["nobody", "this thread", "another thread"])
@REENTRANT
def test_a_checkpoint_made_outside_never_becomes_ring_attention(use_reentrant: bool, context_of: str) -> None:
    def run(block: Block, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, hidden, use_reentrant=use_reentrant)

    expected = alone(run)

    def body(rank: int) -> None:
        block, whole = Block(), normal(BATCH, LENGTH, WIDTH, seed=5).requires_grad_()
        in_context = rank in {"nobody": [], "this thread": [0, 1], "another thread": [1]}[context_of]
        group = dist.new_group([1]) if context_of == "another thread" else dist.group.WORLD
        runs_backward = rank == 0 or context_of != "another thread"
        out = run(block, whole)
        with context_parallel(group) if in_context else nullcontext():
            dist.barrier()
            if context_of == "this thread":  # it may or may not belong to this context: refused, never guessed
                with pytest.raises(RuntimeError, match=r"is ambiguous.*ContextParallel"):
                    out.backward(normal(*out.shape, seed=6))
            elif runs_backward:
                out.backward(normal(*out.shape, seed=6))
            dist.barrier()
        if runs_backward and context_of != "this thread":
            for actual, wanted in zip((whole.grad, block.weight.grad), expected[1:3], strict=True):
                assert_close(actual, wanted)
            assert block.forwards == expected[3]

    run_ranks(2, body)
