"""Masks of contexts beside what the matrix has: nested contexts, backward elsewhere, buffers, leading dims."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import MaskedProblem
from support.problems import assert_close, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cp_dtensor import (
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Mask,
    SlidingWindow,
    Striped,
    context_parallel,
    context_parallel_shard,
)

RANKS, LENGTH = 3, 14
DOCUMENTS = Documents([0, 3, 3, 9, 13], within=Causal())  # one is empty, the last token is padding


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


@pytest.mark.parametrize("bias", ["boolean s", "boolean bhs", "additive hs"])
@pytest.mark.parametrize("mask", [None, DOCUMENTS])
def test_an_attn_mask_that_is_a_buffer(bias: str, mask: Mask | None) -> None:
    case = MaskedProblem(LENGTH, LENGTH, mask or Full(), 2, 4, 2, bias=bias)
    whole = case.draw(0)
    expected = case.reference(*whole)

    def body(rank: int) -> None:
        leaves = [tensor.clone() for tensor in (*whole[:3], *whole[4:])]
        with context_parallel(dist.group.WORLD, buffers=leaves, buffer_seq_dims=[2] * len(leaves), mask=mask):
            out = sdpa(*(leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves))
            out.backward(shard(whole[3], HeadTail(), rank, RANKS))
            grads = [leaf.grad for leaf in leaves if leaf.requires_grad]
        for ours, of_whole in zip((out, *grads), (*expected[:4], *expected[5:]), strict=True):
            assert_close(ours, shard(of_whole, HeadTail(), rank, RANKS))

    run_ranks(RANKS, body)


def test_nested_contexts_and_backward_elsewhere() -> None:
    """Each has its mask and layout; a backward belongs to the context of its forward, which was left or is another."""
    case, inner_case = (MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2) for mask in (DOCUMENTS, SlidingWindow(1, 0)))
    whole = case.draw(0)
    expected, (inner_expected, *_) = case.reference(*whole), inner_case.reference(*whole)

    layout = Striped(2)  # of which ranks receive rows that none of their queries reads

    def body(rank: int) -> None:
        q, k, v, grad_out = case.shard(whole, layout, rank, RANKS)
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        with context_parallel(dist.group.WORLD, mask=DOCUMENTS, layout=layout, seq_len=LENGTH):
            with context_parallel(dist.group.WORLD, mask=SlidingWindow(1, 0), layout=layout, seq_len=LENGTH):
                assert_close(sdpa(q, k, v), shard(inner_expected, layout, rank, RANKS), "inner")
            out = sdpa(*leaves)
        with context_parallel(dist.group.WORLD, mask=SlidingWindow(0, 0), layout=Contiguous()):
            out.backward(grad_out)
        for ours, of_whole in zip((out, *(leaf.grad for leaf in leaves)), expected[:4], strict=True):
            assert_close(ours, shard(of_whole, layout, rank, RANKS), "outer")

    run_ranks(RANKS, body)


@pytest.mark.parametrize("lead", [(), (2,), (2, 1, 2)], ids=str)
def test_any_number_of_leading_dims(lead: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*lead, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(*lead[-1:], LENGTH, LENGTH, generator=generator) > 0.4
    mask = mask | torch.eye(LENGTH, dtype=torch.bool)
    whole = [tensor.requires_grad_() for tensor in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, attn_mask=mask)
    grads = torch.autograd.grad(expected.square().sum(), whole)

    def body(rank: int) -> None:
        world, dims = dist.group.WORLD, [-2] * 4
        with context_parallel(world, seq_len=LENGTH):
            *parts, rows = context_parallel_shard(world, [*(tensor.detach() for tensor in whole), mask], dims)
            leaves = [part.requires_grad_() for part in parts]
            out = F.scaled_dot_product_attention(*leaves, attn_mask=rows)
            found = out.detach(), *torch.autograd.grad(out.square().sum(), leaves)
        for ours, wanted in zip(found, context_parallel_shard(world, [expected.detach(), *grads], dims), strict=True):
            assert_close(ours, wanted)

    run_ranks(RANKS, body)


def test_dtensors_over_other_dims_are_refused() -> None:
    """Other masks that do not fit: tests/engine/test_refusals.py."""

    def body(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        whole = distribute_tensor(torch.randn(1, 2, 6, 4), mesh, [Shard(1)], src_data_rank=None)
        with context_parallel(mesh, mask=DOCUMENTS):
            sdpa(whole, whole, whole)

    with pytest.raises(NotImplementedError, match="the mask of this context"):  # RanksFailed if ranks differ
        run_ranks(RANKS, body)
