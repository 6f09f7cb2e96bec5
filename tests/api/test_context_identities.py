"""Buffers with weak references from C++: profilers that record shapes, autocast's cache of casts."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.problems import shard
from support.ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

from cp_dtensor import HeadTail, context_parallel


def context(*buffers: torch.Tensor, **options: Any) -> context_parallel:
    return context_parallel(dist.group.WORLD, buffers=buffers, buffer_seq_dims=[0] * len(buffers), **options)


def references(tensor: torch.Tensor, count: int) -> list[Any]:
    return [torch._C._WeakTensorRef(tensor) for _ in range(count)]


def expired(weak: list[Any]) -> list[bool]:
    return [each.expired() for each in weak]


@pytest.mark.parametrize("restore", [True, False])
@pytest.mark.parametrize("inside", [0, 3])
@pytest.mark.parametrize("outside", [0, 3])
def test_weak_references_stay_with_the_content_and_end_with_it(outside: int, inside: int, restore: bool) -> None:
    def body(rank: int) -> None:
        tokens = torch.arange(10)
        of_whole = references(tokens, outside)
        no_restore = [] if restore else [tokens]
        with context(tokens, no_restore_buffers=no_restore):
            assert tokens.numel() == 5
            assert expired(of_whole) == [not restore] * outside
            of_shard = references(tokens, inside)
        assert tokens.numel() == (10 if restore else 5)
        gc.collect()
        assert expired(of_whole) == [not restore] * outside
        assert expired(of_shard) == [restore] * inside
        del tokens, no_restore
        gc.collect()
        assert all(expired(of_whole + of_shard))

    run_ranks(2, body)


def test_inside_of_a_profiler_that_records_shapes() -> None:
    def body(rank: int) -> None:
        tokens, table = torch.arange(10), torch.randn(10, 4)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True):
            tokens.add_(0)
            for _ in range(2):
                with context(tokens, table):
                    torch.nn.functional.embedding(tokens, table.requires_grad_()).sum().backward()
                    torch.testing.assert_close(table.grad, torch.ones(10, 4))
        assert tokens.tolist() == list(range(10))
        assert table.grad is None

    run_ranks(1, body)


@pytest.mark.parametrize("used_before", [False, True])
def test_inside_of_autocast_which_remembers_casts_of_leaves(used_before: bool) -> None:
    whole, weight = torch.randn(12, 8), torch.eye(8)

    def body(rank: int) -> None:
        leaf = whole.clone()
        with torch.autocast("cpu", torch.bfloat16):
            if used_before:
                (leaf.requires_grad_() @ weight).sum()
                leaf.requires_grad_(False)
            with context(leaf):
                out = leaf.requires_grad_() @ weight
                assert out.dtype == torch.bfloat16
                torch.testing.assert_close(out, shard(whole, HeadTail(), rank, 2, 0).bfloat16())
                out.sum().backward()
                torch.testing.assert_close(leaf.grad, torch.ones(6, 8))
            torch.testing.assert_close(leaf.requires_grad_() @ weight, whole.bfloat16())  # no cast of the shard
        assert torch.equal(leaf.detach(), whole)

    run_ranks(2, body)
