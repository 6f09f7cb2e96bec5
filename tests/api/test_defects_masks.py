"""Masks and dropout that torch's experimental context parallelism drops, refuses or computes wrongly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import MaskedProblem, Tensors
from support.problems import assert_close, shard
from support.ranks import run_ranks

from cp_dtensor import Causal, Contiguous, Documents, Full, HeadTail, Striped, context_parallel
from cp_dtensor.engine import attend as engine_attend

WORLD = 4
NAMES = ("out", "dq", "dk", "dv")
each_layout = pytest.mark.parametrize("layout", [HeadTail(), Contiguous(), Striped(3)], ids=repr)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor, **options: Any) -> Tensors:
    """(out, dq, dk, dv)."""
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_len", [17, 5])
@pytest.mark.parametrize("bias", ["boolean s", "boolean bhs", "additive s", "additive bhs", "additive b"])
@each_layout
def test_attn_mask_of_this_ranks_rows_and_all_keys(layout: Any, bias: str, kv_len: int, is_causal: bool) -> None:
    problem = MaskedProblem(17, kv_len, Full(), batch=2, bias=bias, is_causal=is_causal)
    whole = problem.draw(0)
    expected = problem.reference(*whole)

    def body(rank: int) -> None:
        *tensors, attn_mask = problem.shard(whole, layout, rank, WORLD)
        with context_parallel(dist.group.WORLD, layout=layout, seq_len=(17, kv_len)):
            results = attend(*tensors, attn_mask=attn_mask, is_causal=is_causal)
        for name, actual, all_rows in zip(NAMES, results, expected[:4], strict=True):
            assert_close(actual, shard(all_rows, layout, rank, WORLD), f"{name} on rank {rank}")

    run_ranks(WORLD, body)


@each_layout
def test_a_mask_that_is_a_buffer_of_the_context(layout: Any) -> None:
    """As users write it: the whole mask goes in, and the attention inside finds its rows."""
    problem = MaskedProblem(13, 13, Full(), bias="additive s")
    *tensors, mask = problem.draw(1)
    expected = problem.reference(*tensors, mask)

    def body(rank: int) -> None:
        inside, leaf = [tensor.clone() for tensor in tensors], mask.clone()
        buffers = [*inside, leaf]
        with context_parallel(dist.group.WORLD, buffers=buffers, buffer_seq_dims=[2, 2, 2, 2, 2], layout=layout):
            out = F.scaled_dot_product_attention(*inside[:3], attn_mask=leaf.requires_grad_())
            out.backward(inside[3])
            assert_close(out.detach(), shard(expected[0], layout, rank, WORLD))
            assert_close(leaf.grad, shard(expected[5], layout, rank, WORLD))
        assert torch.equal(leaf, mask)

    run_ranks(WORLD, body)


@each_layout
def test_packed_documents(layout: Any) -> None:
    problem = MaskedProblem(19, 19, Documents([0, 5, 6, 15], within=Causal()), batch=2)
    whole = problem.draw(2)
    expected = problem.reference(*whole)

    def body(rank: int) -> None:
        tensors = problem.shard(whole, layout, rank, WORLD)
        with context_parallel(dist.group.WORLD, layout=layout, mask=problem.mask, seq_len=19):
            results = attend(*tensors)
        for name, actual, all_rows in zip(NAMES, results, expected[:4], strict=True):
            assert_close(actual, shard(all_rows, layout, rank, WORLD), f"{name} on rank {rank}")

    run_ranks(WORLD, body)


@contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Every rank draws as if its generator had just got this seed. (Ranks that are threads share one.)"""
    original, lock = engine_attend.drawn_seed, threading.Lock()

    def drawn_alone(*arguments: Any) -> Any:
        with lock, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return original(*arguments)

    with mock.patch.object(engine_attend, "drawn_seed", drawn_alone):
        yield


def dropped_out(layout: Any, world_size: int, seed: int, dropout_p: float) -> list[Tensors]:
    """What all ranks get, in rank order."""
    whole = MaskedProblem(17, 17, Full(), batch=2).draw(3)

    def body(rank: int) -> Tensors:
        tensors = [shard(tensor, layout, rank, world_size) for tensor in whole]
        with context_parallel(dist.group.WORLD, layout=layout, seq_len=17):
            return attend(*tensors, is_causal=True, dropout_p=dropout_p)

    with generators_seeded(seed):
        return run_ranks(world_size, body)


def equal(one: list[Tensors], other: list[Tensors]) -> bool:
    return all(
        torch.equal(a, b)
        for of_one, of_other in zip(one, other, strict=True)
        for a, b in zip(of_one, of_other, strict=True)
    )


@each_layout
def test_dropout_is_a_function_of_the_seed(layout: Any) -> None:
    dropped = dropped_out(layout, WORLD, seed=0, dropout_p=0.25)
    assert equal(dropped_out(layout, WORLD, seed=0, dropout_p=0.25), dropped)
    assert not equal(dropped_out(layout, WORLD, seed=1, dropout_p=0.25), dropped)
    kept = dropped_out(layout, WORLD, seed=0, dropout_p=0.0)
    assert not any(torch.equal(out, all_kept) for (out, *_), (all_kept, *_) in zip(dropped, kept, strict=True))


@each_layout
def test_dropout_is_that_of_one_rank_alone(layout: Any) -> None:
    (alone,) = dropped_out(Contiguous(), 1, seed=5, dropout_p=0.4)
    for rank, results in enumerate(dropped_out(layout, WORLD, seed=5, dropout_p=0.4)):
        for name, actual, whole in zip(NAMES, results, alone, strict=True):
            assert_close(actual, shard(whole, layout, rank, WORLD), f"{name} on rank {rank}")
