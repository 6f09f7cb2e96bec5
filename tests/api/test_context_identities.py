"""Buffers with weak references from C++ (profilers that record shapes, autocast's cache of casts), and buffers that
share data with other tensors."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.problems import shard
from support.ranks import run_ranks
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor

from cp_dtensor import HeadTail, context_parallel, context_parallel_shard


def references(tensor: torch.Tensor, count: int = 3) -> list[Any]:
    return [torch._C._WeakTensorRef(tensor) for _ in range(count)]


def expired(weak: list[Any]) -> list[bool]:
    return [each.expired() for each in weak]


@pytest.mark.parametrize("restore", [True, False])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_weak_references_stay_with_the_content_and_end_with_it(outside: bool, inside: bool, restore: bool) -> None:
    def body(rank: int) -> None:
        tokens = torch.arange(10)
        of_whole = references(tokens) if outside else []
        no_restore = [] if restore else [tokens]
        with context_parallel(
            dist.group.WORLD, buffers=[tokens], buffer_seq_dims=[0], no_restore_buffers=no_restore
        ):  # fmt: skip
            assert tokens.numel() == 5
            assert expired(of_whole) == [not restore] * len(of_whole)
            of_shard = references(tokens) if inside else []
        assert tokens.numel() == (10 if restore else 5)
        gc.collect()
        assert expired(of_whole) == [not restore] * len(of_whole)
        assert expired(of_shard) == [restore] * len(of_shard)
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
                with context_parallel(dist.group.WORLD, buffers=[tokens, table], buffer_seq_dims=[0, 0]):
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
            with context_parallel(dist.group.WORLD, buffers=[leaf], buffer_seq_dims=[0]):
                out = leaf.requires_grad_() @ weight
                assert out.dtype == torch.bfloat16
                mine = shard(whole[None, None], HeadTail(), rank, 2)[0, 0]
                torch.testing.assert_close(out, mine.bfloat16())
                out.sum().backward()
                torch.testing.assert_close(leaf.grad, torch.ones(6, 8))
            torch.testing.assert_close(leaf.requires_grad_() @ weight, whole.bfloat16())  # no cast of the shard
        assert torch.equal(leaf.detach(), whole)

    run_ranks(2, body)


def test_tensors_that_keep_their_data_in_others_are_refused() -> None:
    """They would say that they are shards, and compute with the whole."""

    def body(rank: int) -> None:
        wrapper = TwoTensor(torch.arange(8), torch.arange(8))
        with pytest.raises(TypeError, match="buffer 0: got a TwoTensor, which keeps its data in other tensors"):
            context_parallel(dist.group.WORLD, buffers=[wrapper], buffer_seq_dims=[0])
        (mine,) = context_parallel_shard(dist.group.WORLD, [wrapper], [0])
        assert (mine.a.tolist(), mine.b.tolist()) == ([[0, 1, 6, 7], [2, 3, 4, 5]][rank],) * 2

    run_ranks(2, body)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    def body(rank: int) -> None:
        nested = torch.nested.nested_tensor([torch.randn(3, 2), torch.randn(5, 2)], layout=layout)
        for make in (
            lambda: context_parallel(dist.group.WORLD, buffers=[nested], buffer_seq_dims=[1]),
            lambda: context_parallel_shard(dist.group.WORLD, [nested], [1]),
        ):
            with pytest.raises(TypeError, match=r"buffer 0: expected .* got a nested tensor"):
                make()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of nested tensors
        run_ranks(2, body)


@pytest.mark.filterwarnings("ignore")  # torch's, of sparse and of quantized tensors
def test_tensors_that_are_not_dense_are_refused() -> None:
    """Their contents cannot be compared; a view of a quantized one ended the process."""
    x = torch.ones(8, 2)
    tensors = {"torch.sparse_coo": x.to_sparse(), "torch.sparse_csr": x.to_sparse_csr()}
    if hasattr(torch, "quantize_per_tensor"):  # deprecated in torch 2.13
        tensors["torch.qint8"] = torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)

    def body(rank: int) -> None:
        for kind, tensor in tensors.items():
            with pytest.raises(TypeError, match=f"buffer 0: expected a dense tensor, got one of {kind}"):
                context_parallel(dist.group.WORLD, buffers=[tensor], buffer_seq_dims=[0])

    run_ranks(2, body)
