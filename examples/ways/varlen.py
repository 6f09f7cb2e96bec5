"""Packed documents: attention within each document, across ranks, with balanced shards.

torchrun --nproc-per-node 4 examples/ways/varlen.py
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from check import error, make_mesh, run

from cp_dtensor import Balanced, Causal, Contiguous, Documents, context_parallel_shard, varlen_attention
from cp_dtensor.integrations.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func


def documents() -> list[int]:
    """The cumulative lengths of 20 documents; lengths are lognormal: many short, a few long."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(20, generator=generator).mul(1.2).add(2.0).exp().int() + 1
    return list(accumulate(lengths.tolist(), initial=0))


def problem(tokens: int, device: str) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, equal on every rank: 8 query heads and 2 key heads."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(tokens, heads, 16) for heads in (8, 2, 2, 8)]  # (tokens, heads, head dim), as in flash-attn
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]


def one_device(whole: list[torch.Tensor], cu_seqlens: list[int]) -> list[torch.Tensor]:
    """Out, dq, dk and dv of one document after the other."""
    *leaves, grad_out = (tensor.detach().clone() for tensor in whole)
    parts = []
    for start, stop in pairwise(cu_seqlens):
        q, k, v = (leaf.requires_grad_()[start:stop].transpose(0, 1).unsqueeze(0) for leaf in leaves)
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    out = torch.cat(parts)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((4,), ("cp",))
    cu_seqlens = documents()
    tokens = cu_seqlens[-1]
    whole = problem(tokens, mesh.device_type)
    expected = one_device(whole, cu_seqlens)

    # A layout with equal numbers of tokens and of (query, key) pairs on all ranks.
    layout = Balanced(Documents(cu_seqlens, within=Causal()), tokens)
    q, k, v, grad_out = context_parallel_shard(mesh, whole, [0] * 4, layout)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = varlen_attention(q, k, v, mesh=mesh, cu_seqlens=cu_seqlens, is_causal=True, layout=layout)
    assert isinstance(out, torch.Tensor)  # with return_lse=True the result is a pair
    out.backward(grad_out)
    largest = error([out.detach(), q.grad, k.grad, v.grad], context_parallel_shard(mesh, expected, [0] * 4, layout))

    # Calls of ring-flash-attention, with contiguous parts of the packed sequence.
    q, k, v, grad_out = context_parallel_shard(mesh, whole, [0] * 4, Contiguous())
    for tensor in (q, k, v):
        tensor.requires_grad_()
    q_edges, k_edges, max_q, max_k, keys = llama3_flash_attn_prepare_cu_seqlens(
        torch.tensor(cu_seqlens, dtype=torch.int32), causal=True, rank=mesh.get_local_rank(), world_size=4
    )
    result = llama3_flash_attn_varlen_func(
        q, k, v, q_edges, k_edges, max_q, max_k, heads_k_stride=1, local_k_slice=keys, causal=True
    )
    assert isinstance(result, torch.Tensor)
    result.backward(grad_out)
    wanted = context_parallel_shard(mesh, expected, [0] * 4, Contiguous())
    return max(largest, error([result.detach(), q.grad, k.grad, v.grad], wanted)), mesh.device_type


if __name__ == "__main__":
    run("varlen", main)
