"""Masks, biases and dropout of F.scaled_dot_product_attention inside a context."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import MaskedProblem, Tensors
from support.problems import assert_close, shard
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import (
    Batched,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    PrefixLM,
    SlidingWindow,
    Striped,
    context_parallel,
    context_parallel_shard,
)

RANKS, LENGTH = 3, 14
DOCUMENTS = Documents([0, 3, 3, 9, 13], within=Causal())  # one is empty, the last token is padding
MASKS: tuple[Mask, ...] = (
    DOCUMENTS,
    SlidingWindow(2, 1),
    PrefixLM(4) | Documents([0, 7, 14]),
    Batched([DOCUMENTS, SlidingWindow(3, 0)]),
)


def check_in_context(
    rank: int, case: MaskedProblem, layout: Layout, attend: Callable[..., torch.Tensor], in_context: dict[str, Any]
) -> None:
    """`attend(q, k, v, bias)` in a context that shards what it is given."""
    whole = case.draw(0)
    expected = case.reference(*whole)
    leaves = [tensor.clone() for tensor in (*whole[:3], *whole[4:])]
    dims = [2] * len(leaves)
    with context_parallel(dist.group.WORLD, buffers=leaves, buffer_seq_dims=dims, layout=layout, **in_context):
        out = attend(*(leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves))
        out.backward(shard(whole[3], layout, rank, RANKS))
        grads = [leaf.grad for leaf in leaves if leaf.requires_grad]
    assert_close(out.detach(), shard(expected[0], layout, rank, RANKS), f"out of {case}")
    for grad, gradient in zip(grads, (*expected[1:4], *expected[5:]), strict=True):
        assert_close(grad, shard(gradient, layout, rank, RANKS), f"gradients of {case}")


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


@pytest.mark.parametrize("layout", [HeadTail(), Contiguous(), Striped(2)], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_mask_of_a_context(mask: Mask, layout: Layout) -> None:
    case = MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2)
    run_ranks(RANKS, check_in_context, case, layout, sdpa, {"mask": mask})


def test_the_mask_of_a_context_and_that_of_a_call() -> None:
    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    mask = SlidingWindow(4, 4)
    case = MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2, is_causal=True)
    run_ranks(RANKS, check_in_context, case, HeadTail(), causal, {"mask": mask})


@pytest.mark.parametrize("bias", ["boolean s", "boolean bhs", "additive hs"])
@pytest.mark.parametrize("mask", [None, DOCUMENTS])
def test_an_attn_mask_that_is_a_buffer(bias: str, mask: Mask | None) -> None:
    case = MaskedProblem(LENGTH, LENGTH, mask or Full(), 2, 4, 2, bias=bias)
    run_ranks(RANKS, check_in_context, case, HeadTail(), sdpa, {"mask": mask})


def test_nested_contexts_have_masks_of_their_own() -> None:
    case, inner_case = (MaskedProblem(LENGTH, LENGTH, mask) for mask in (DOCUMENTS, SlidingWindow(1, 0)))
    whole = case.draw(0)
    expected, inner_expected = (shown.reference(*whole)[0] for shown in (case, inner_case))

    def body(rank: int) -> None:
        q, k, v, _ = case.shard(whole, HeadTail(), rank, RANKS)
        with context_parallel(dist.group.WORLD, mask=DOCUMENTS, seq_len=LENGTH):
            with context_parallel(dist.group.WORLD, mask=SlidingWindow(1, 0), seq_len=LENGTH):
                assert_close(sdpa(q, k, v), shard(inner_expected, HeadTail(), rank, RANKS), "inner")
            assert_close(sdpa(q, k, v), shard(expected, HeadTail(), rank, RANKS), "outer")

    run_ranks(RANKS, body)


def test_backward_after_the_context_and_inside_of_another() -> None:
    case = MaskedProblem(LENGTH, LENGTH, DOCUMENTS)
    whole = case.draw(0)
    expected = case.reference(*whole)

    def body(rank: int) -> None:
        q, k, v, grad_out = case.shard(whole, HeadTail(), rank, RANKS)
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        with context_parallel(dist.group.WORLD, mask=DOCUMENTS, seq_len=LENGTH):
            out = sdpa(*leaves)
        with context_parallel(dist.group.WORLD, mask=SlidingWindow(0, 0), layout=Contiguous()):
            out.backward(grad_out)
        for leaf, gradient in zip(leaves, expected[1:4], strict=True):
            assert_close(leaf.grad, shard(gradient, HeadTail(), rank, RANKS))

    run_ranks(RANKS, body)


def test_the_module_form() -> None:
    case = MaskedProblem(LENGTH, LENGTH, DOCUMENTS)
    whole = case.draw(0)
    expected = case.reference(*whole)[0]

    class Attend(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return sdpa(q, k, v)

    def body(rank: int) -> None:
        module = parallelize_module(
            Attend(), init_device_mesh("cpu", (RANKS,)), ContextParallel(mask=DOCUMENTS, seq_len=LENGTH)
        )
        assert_close(module(*case.shard(whole, HeadTail(), rank, RANKS)[:3]), shard(expected, HeadTail(), rank, RANKS))

    run_ranks(RANKS, body)


@pytest.mark.parametrize("lead", [(), (2,), (2, 1, 2)], ids=str)
def test_any_number_of_leading_dims(lead: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*lead, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(*lead[-1:], LENGTH, LENGTH, generator=generator) > 0.4
    mask = mask | torch.eye(LENGTH, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def body(rank: int) -> None:
        with context_parallel(dist.group.WORLD, seq_len=LENGTH):
            parts = context_parallel_shard(dist.group.WORLD, [q, k, v, mask], [-2] * 4)
            out = F.scaled_dot_product_attention(*parts[:3], attn_mask=parts[3])
        (wanted,) = context_parallel_shard(dist.group.WORLD, [expected], [-2])
        assert_close(out, wanted)

    run_ranks(RANKS, body)


def refused(body: Callable[[int], object]) -> str:
    """What every rank says alike."""
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as failed:  # RanksFailed if they differ
        run_ranks(RANKS, body)
    return f"{failed.type.__name__}: {failed.value}"


def test_masks_that_do_not_fit_are_refused_alike() -> None:
    def in_context(mask: Any, *tensors: torch.Tensor) -> Tensors:
        with context_parallel(dist.group.WORLD, mask=mask):
            return (sdpa(*[each + dist.get_rank() if each.is_floating_point() else each for each in tensors]),)

    q = torch.randn(2, 2, 4, 4)
    assert "end at 99 (queries)" in refused(lambda _: in_context(Documents([0, 99]), q, q, q))
    assert "of 3 batch rows, got a batch of 2" in refused(lambda _: in_context(Batched([Full()] * 3), q, q, q))
    assert "a Mask such as SlidingWindow" in refused(lambda _: in_context("causal", q, q, q))
    assert "the 12 keys of the whole sequence" in refused(lambda _: in_context(None, q, q, q, torch.ones(4, 4).bool()))


def test_dtensors_with_whole_sequences_are_refused_in_a_masked_context() -> None:
    def body(_: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        q = distribute_tensor(torch.randn(1, 2, 6, 4), mesh, [Shard(1)], src_data_rank=None)
        with context_parallel(mesh, mask=DOCUMENTS):
            sdpa(q, q, q)

    assert "NotImplementedError: the mask of this context" in refused(body)
