"""Calls of three other packages by the drop-ins ring_flash_attn, long_context and unified.

torchrun --nproc-per-node 4 examples/ways/dropins.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from check import error, make_mesh, one_device, problem, run

from cp_dtensor import Contiguous, HeadTail, Layout, context_parallel_shard
from cp_dtensor.integrations.long_context import LongContextAttention, set_seq_parallel_pg
from cp_dtensor.integrations.ring_flash_attn import zigzag_ring_flash_attn_func
from cp_dtensor.integrations.unified import UnifiedAttnMode


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((2, 2), ("ring", "ulysses"))
    *whole, grad_out = (tensor.transpose(1, 2) for tensor in problem(mesh.device_type))  # (batch, tokens, heads, dim)
    tokens = grad_out.size(1)  # declared: no multiple of the ranks
    expected = [x.transpose(1, 2) for x in one_device(*problem(mesh.device_type))]

    usp = set_seq_parallel_pg(2, 2, dist.get_rank(), 4, device_type=mesh.device_type)

    def difference(layout: Layout, attend: Callable[..., object]) -> float:
        def shard(tensor: torch.Tensor) -> torch.Tensor:
            return context_parallel_shard(usp, [tensor], [1], layout)[0]

        q, k, v = (shard(tensor).requires_grad_() for tensor in whole)
        out = attend(q, k, v)
        assert isinstance(out, torch.Tensor)
        out.backward(shard(grad_out))
        return error([out.detach(), q.grad, k.grad, v.grad], [shard(tensor) for tensor in expected])

    def unified(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with UnifiedAttnMode(mesh, seq_len=tokens):
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    layer = LongContextAttention(ring_impl_type="zigzag", mesh=usp)
    differences = (
        difference(HeadTail(), lambda q, k, v: zigzag_ring_flash_attn_func(q, k, v, causal=True, seq_len=tokens)),
        difference(layer.layout, lambda q, k, v: layer(q, k, v, causal=True, seq_len=tokens)),
        difference(Contiguous(), unified),
    )
    return max(differences), mesh.device_type


if __name__ == "__main__":
    run("dropins", main)
