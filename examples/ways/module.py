"""Context parallelism of a module: `parallelize_module` with the style `ContextParallel`.

torchrun --nproc-per-node 4 examples/ways/module.py
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from check import error, make_mesh, problem, run
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import ContextParallel, context_parallel_shard


class Attention(nn.Module):
    """Causal self-attention of (batch, tokens, 64) with 8 heads, without code for parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = (nn.Linear(64, width, dtype=torch.float64) for width in (3 * 64, 64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Attention of the hidden states, in the same shape."""
        q, k, v = (x.transpose(1, 2) for x in self.qkv(hidden).unflatten(2, (3, 8, 8)).unbind(2))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((4,), ("cp",))
    torch.manual_seed(0)
    alone = Attention().to(mesh.device_type)
    attention = parallelize_module(copy.deepcopy(alone), mesh, ContextParallel(method="ulysses", seq_len=50))

    whole = problem(mesh.device_type)[1].transpose(1, 2).flatten(2).requires_grad_()  # (2, 50, 64)
    (hidden,) = context_parallel_shard(mesh, [whole.detach()], [1])
    out = attention(hidden.requires_grad_())
    out.square().sum().backward()
    for parameter in attention.parameters():  # each rank has the gradients of its own tokens
        dist.all_reduce(parameter.grad)

    expected = alone(whole)
    expected.square().sum().backward()
    assert whole.grad is not None
    of_tokens = context_parallel_shard(mesh, [expected.detach(), whole.grad], [1, 1])
    of_parameters = [parameter.grad for parameter in alone.parameters() if parameter.grad is not None]
    got = [out.detach(), hidden.grad, *(parameter.grad for parameter in attention.parameters())]
    return error(got, [*of_tokens, *of_parameters]), mesh.device_type


if __name__ == "__main__":
    run("module", main)
