"""Buffers of `context_parallel` that require grad, and tensors that autograd has saved from buffers."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import shard
from support.ranks import run_ranks

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped, context_parallel

WORLD = 2
LAYOUTS = [Contiguous(), HeadTail(), Striped(2), MirroredBatch()]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
B, H, S, D = 2, 2, 11, 4


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def attention_loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = F.scaled_dot_product_attention(hidden.sin(), hidden, hidden.cos(), is_causal=True)
    return (out * weight).sum()


def gradient_alone() -> torch.Tensor:
    hidden = normal(B, H, S, D).requires_grad_()
    attention_loss(hidden, normal(B, H, S, D, seed=1)).backward()
    assert hidden.grad is not None
    return hidden.grad


def assert_own_part(grad: torch.Tensor | None, layout: Layout, rank: int) -> None:
    """Full shape, zeros at the positions of other ranks."""
    assert grad is not None
    assert grad.shape == (B, H, S, D)
    others = torch.ones(B, S, dtype=torch.bool)
    others.scatter_(1, shard(torch.arange(S).expand(B, S), layout, rank, WORLD, 1), False)
    assert not grad.transpose(1, 2)[others].any()
    assert grad.abs().max() > 0.01


@pytest.mark.parametrize("backward_inside", [True, False])
@each_layout
def test_a_leafs_gradient_has_the_full_shape_and_sums_to_that_of_one_device(
    layout: Layout, backward_inside: bool
) -> None:
    def body(rank: int) -> torch.Tensor:
        leaf = normal(B, H, S, D).requires_grad_()
        weight = normal(B, H, S, D, seed=1)
        with context_parallel(dist.group.WORLD, buffers=[leaf, weight], buffer_seq_dims=[2, 2], layout=layout):
            assert leaf.is_leaf
            assert leaf.requires_grad
            loss = attention_loss(leaf, weight)
            if backward_inside:
                loss.backward()
                assert leaf.grad is not None
                assert leaf.grad.shape == leaf.shape
        if not backward_inside:
            assert leaf.grad is None
            loss.backward()
        assert leaf.is_leaf
        assert leaf.requires_grad
        assert torch.equal(leaf, normal(B, H, S, D))
        assert_own_part(leaf.grad, layout, rank)
        return leaf.grad

    torch.testing.assert_close(sum(run_ranks(WORLD, body)), gradient_alone(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backward_inside", [True, False])
def test_an_earlier_gradient_is_added_to(backward_inside: bool) -> None:
    def body(rank: int) -> torch.Tensor:
        leaf = torch.nn.Parameter(normal(B, H, S, D))
        earlier = normal(B, H, S, D, seed=2)
        leaf.grad = earlier.clone()
        weight = normal(B, H, S, D, seed=1)
        for _ in range(2):  # two contexts, two contributions
            with context_parallel(dist.group.WORLD, buffers=[leaf, weight], buffer_seq_dims=[2, 2]):
                loss = attention_loss(leaf, weight)
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
        assert type(leaf) is torch.nn.Parameter
        return leaf.grad - earlier

    torch.testing.assert_close(sum(run_ranks(WORLD, body)), 2 * gradient_alone(), rtol=1e-10, atol=1e-10)


def test_the_gradient_of_uses_before_and_inside_is_their_sum() -> None:
    def body(rank: int) -> torch.Tensor:
        leaf = normal(B, H, S, D).requires_grad_()
        weight = normal(B, H, S, D, seed=1)
        before = (leaf**2).sum() / WORLD
        with context_parallel(dist.group.WORLD, buffers=[leaf, weight], buffer_seq_dims=[2, 2]):
            inside = attention_loss(leaf, weight)
        after = (leaf**3).sum() / WORLD
        (before + inside + after).backward()
        return leaf.grad

    leaf = normal(B, H, S, D)
    expected = gradient_alone() + 2 * leaf + 3 * leaf**2
    torch.testing.assert_close(sum(run_ranks(WORLD, body)), expected, rtol=1e-10, atol=1e-10)


def test_autograd_grad_inside_gives_the_local_gradient_and_leaves_none_behind() -> None:
    def body(rank: int) -> None:
        leaf = normal(B, H, S, D).requires_grad_()
        weight = normal(B, H, S, D, seed=1)
        with context_parallel(dist.group.WORLD, buffers=[leaf, weight], buffer_seq_dims=[2, 2]):
            (grad,) = torch.autograd.grad(attention_loss(leaf, weight), leaf)
        expected = shard(gradient_alone(), HeadTail(), rank, WORLD)
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-10)
        assert leaf.grad is None

    run_ranks(WORLD, body)


def test_a_leaf_that_is_not_restored_keeps_its_local_gradient() -> None:
    def body(rank: int) -> None:
        leaf = normal(B, H, S, D).requires_grad_()
        with context_parallel(
            dist.group.WORLD, buffers=[leaf], buffer_seq_dims=[2], no_restore_buffers=[leaf], layout=Contiguous()
        ):
            weight = shard(normal(B, H, S, D, seed=1), Contiguous(), rank, WORLD)
            attention_loss(leaf, weight).backward()
        expected = shard(gradient_alone(), Contiguous(), rank, WORLD)
        assert leaf.is_leaf
        torch.testing.assert_close(leaf, shard(normal(B, H, S, D), Contiguous(), rank, WORLD))
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-10, atol=1e-10)

    run_ranks(WORLD, body)


def test_hooks_that_the_caller_put_on_a_leaf_still_fire_after_the_context() -> None:
    def body(rank: int) -> None:
        leaf = normal(4, 3).requires_grad_()
        seen: list[torch.Size] = []
        leaf.register_hook(lambda grad: seen.append(grad.shape))
        leaf.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.shape))
        with context_parallel(dist.group.WORLD, buffers=[leaf], buffer_seq_dims=[0]):
            (leaf**2).sum()
        seen.clear()
        leaf.sum().backward()
        assert seen == [torch.Size([4, 3]), torch.Size([4, 3])]
        assert torch.equal(leaf.grad, torch.ones(4, 3, dtype=torch.float64))

    run_ranks(WORLD, body)


def test_a_leaf_may_be_entered_in_inference_mode() -> None:
    def body(rank: int) -> None:
        leaf = normal(4, 3).requires_grad_()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode, context_parallel(dist.group.WORLD, buffers=[leaf], buffer_seq_dims=[0]):
                assert torch.equal(leaf, shard(normal(4, 3), HeadTail(), rank, WORLD, 0))
            assert torch.equal(leaf, normal(4, 3))
        (leaf**2).sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * normal(4, 3))

    run_ranks(WORLD, body)


def rotate_real(hidden: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    return hidden * freqs[: hidden.size(2)].real + hidden * freqs.imag[: hidden.size(2)]


def rotate_complex(hidden: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(hidden.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * freqs[:, :1]).flatten(-2)


@pytest.mark.parametrize("rotate", [rotate_real, rotate_complex])
@pytest.mark.parametrize("freqs_need_grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS[:-1], ids=repr)  # freqs have no batch dim
def test_what_autograd_saved_of_a_restored_buffer_is_still_the_shard_in_a_later_backward(
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], freqs_need_grad: bool, layout: Layout
) -> None:
    def run(hidden: torch.Tensor, freqs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return attention_loss(rotate(hidden, freqs) ** 2, weight)

    def leaves() -> tuple[torch.Tensor, torch.Tensor]:
        freqs = normal(S, D, seed=3, dtype=torch.complex128).requires_grad_(freqs_need_grad)
        return normal(B, H, S, D).requires_grad_(), freqs

    alone, alone_freqs = leaves()
    run(alone, alone_freqs, normal(B, H, S, D, seed=1)).backward()

    def body(rank: int) -> list[torch.Tensor]:
        hidden, freqs = leaves()
        weight = normal(B, H, S, D, seed=1)
        buffers, dims = [hidden, freqs, weight], [2, 0, 2]
        with context_parallel(dist.group.WORLD, buffers=buffers, buffer_seq_dims=dims, layout=layout):
            loss = run(hidden, freqs, weight)
        loss.backward()
        assert torch.equal(freqs, leaves()[1])
        return [leaf.grad for leaf in (hidden, freqs) if leaf.grad is not None]

    totals = [sum(parts) for parts in zip(*run_ranks(WORLD, body), strict=True)]
    for total, leaf in zip(totals, (alone, alone_freqs), strict=False):
        torch.testing.assert_close(total, leaf.grad, rtol=1e-10, atol=1e-10)
    assert len(totals) == 1 + freqs_need_grad
