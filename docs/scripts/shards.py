"""Random shards of a rank, for programs that time attention."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cp_dtensor.tools.cases import Heads

DIM = 128
"""Of heads without one."""


def drawn(heads: Heads, seq_len: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v, which require gradients, and the gradient of out: (B, H, S, D), in (B, S, H, D) memory, bfloat16."""
    rows, (dim, v_dim) = seq_len // dist.get_world_size(), heads.dims(DIM)
    generator = torch.Generator(device).manual_seed(dist.get_rank())  # contexts refuse shards that are equal on ranks
    *qkv, grad_out = (
        torch.randn(1, rows, count, width, dtype=torch.bfloat16, device=device, generator=generator).transpose(1, 2)
        for count, width in ((heads.q, dim), (heads.kv, dim), (heads.kv, v_dim), (heads.q, v_dim))
    )
    return [x.requires_grad_() for x in qkv], grad_out
