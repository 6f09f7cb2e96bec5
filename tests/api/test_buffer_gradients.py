"""Buffers of `context_parallel` that require grad, and tensors that autograd has saved from buffers."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import shard
from support.ranks import run_ranks

from cp_dtensor import Contiguous, HeadTail, Layout, Striped, context_parallel

WORLD = 2
LAYOUTS = [Contiguous(), HeadTail(), Striped(2)]
B, H, S, D = 2, 2, 11, 4


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def attention_loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = F.scaled_dot_product_attention(hidden.sin(), hidden, hidden.cos(), is_causal=True)
    return (out * weight).sum()


def test_a_leaf_that_requires_grad_is_refused_and_one_that_is_set_to_inside_has_the_gradient_of_its_shard() -> None:
    whole = torch.randn(1, 2, 8, 4, dtype=torch.float64)

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="buffer 0: got a tensor that requires grad"):
            context_parallel(dist.group.WORLD, buffers=[whole.clone().requires_grad_()], buffer_seq_dims=[2])
        tensors = [whole + step for step in range(3)]
        q, k, v = [each.clone() for each in tensors]
        with context_parallel(dist.group.WORLD, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
            for each in (q, k, v):
                each.requires_grad_()
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
            found = [each.grad for each in (q, k, v)]
        leaves = [each.clone().requires_grad_() for each in tensors]
        F.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
        for each, leaf, now in zip(found, leaves, (q, k, v), strict=True):
            assert not now.requires_grad
            assert leaf.grad is not None
            torch.testing.assert_close(each, shard(leaf.grad, HeadTail(), rank, 2), rtol=0, atol=1e-10)

    run_ranks(2, body)


def rotate_real(hidden: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    return hidden * freqs[: hidden.size(2)].real + hidden * freqs.imag[: hidden.size(2)]


def rotate_complex(hidden: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(hidden.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * freqs[:, :1]).flatten(-2)


@pytest.mark.parametrize("rotate", [rotate_real, rotate_complex])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_what_autograd_saved_of_a_restored_buffer_is_still_the_shard_in_a_later_backward(
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], layout: Layout
) -> None:
    hidden, freqs = normal(B, H, S, D), normal(S, D, seed=3, dtype=torch.complex128)
    weight = normal(B, H, S, D, seed=1)
    alone = hidden.clone().requires_grad_()
    attention_loss(rotate(alone, freqs) ** 2, weight).backward()

    def body(rank: int) -> None:
        mine, table, of_loss = shard(hidden, layout, rank, WORLD).requires_grad_(), freqs.clone(), weight.clone()
        with context_parallel(
            dist.group.WORLD, buffers=[table, of_loss], buffer_seq_dims=[0, 2], layout=layout, seq_len=S
        ):
            loss = attention_loss(rotate(mine, table) ** 2, of_loss)
        loss.backward()
        assert torch.equal(table, freqs)
        assert alone.grad is not None
        torch.testing.assert_close(mine.grad, shard(alone.grad, layout, rank, WORLD), rtol=1e-10, atol=1e-10)

    run_ranks(WORLD, body)
