"""A small attention module and its result on one device, for tests of modules with ContextParallel."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from cp_dtensor import Layout
from support.problems import assert_close, shard

BATCH, LENGTH, HEADS, WIDTH = 2, 12, 2, 8
WORLD = 2


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


WHOLE, GRAD_OUT = normal(BATCH, LENGTH, WIDTH, seed=0), normal(BATCH, LENGTH, WIDTH, seed=1)


class Attention(nn.Module):
    """Causal self-attention, with equal weights in each instance."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(3, WIDTH, WIDTH, seed=2) / WIDTH**0.5)
        self.is_causal = is_causal

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = ((hidden @ weight).unflatten(-1, (HEADS, -1)).transpose(1, 2) for weight in self.weight)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return out.transpose(1, 2).flatten(2)


@functools.cache
def alone(is_causal: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the output and the gradients of input and weight on one device."""
    module, whole = Attention(is_causal), WHOLE.clone().requires_grad_()
    out = module(whole)
    out.backward(GRAD_OUT)
    assert whole.grad is not None
    assert module.weight.grad is not None
    return out.detach(), whole.grad, module.weight.grad


def check_forward(module: nn.Module, layout: Layout, rank: int, world_size: int = WORLD) -> None:
    with torch.no_grad():
        out = module(shard(WHOLE, layout, rank, world_size, 1))
    assert_close(out, shard(alone()[0], layout, rank, world_size, 1))
