"""FlexAttention in a context: mask and score functions of positions in the whole sequence.

torchrun --nproc-per-node 4 examples/ways/flex.py

torch has no gradients of FlexAttention on CPUs, so they are compared on four GPUs only. On GPUs use
`torch.compile(flex_attention)`, which makes one kernel.
"""

from __future__ import annotations

import warnings

import torch
from check import error, make_mesh, problem, run
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cp_dtensor import context_parallel, context_parallel_shard

TOKENS, WINDOW = 50, 12


def in_window(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Sliding window: each token attends to itself and the eleven before it."""
    return (q >= kv) & (q - kv < WINDOW)


def by_distance(
    score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
) -> torch.Tensor:
    """ALiBi: the bias decreases linearly with distance, by a slope for each head."""
    return score + (kv - q) * 2.0 ** -(h + 1)


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    mesh = make_mesh((4,), ("cp",))
    device = mesh.device_type
    mask = create_block_mask(in_window, None, None, TOKENS, TOKENS, device=device, BLOCK_SIZE=16)
    q, k, v, grad_out = problem(device)
    leaves = [tensor.requires_grad_(device == "cuda") for tensor in (q, k, v)]

    expected = [flex_attention(q, k, v, by_distance, mask, enable_gqa=True)]
    if device == "cuda":
        expected += torch.autograd.grad(expected[0], leaves, grad_out)
    expected = context_parallel_shard(mesh, [tensor.detach() for tensor in expected], [2] * len(expected))

    q, k, v, grad_out = context_parallel_shard(mesh, [*leaves, grad_out], [2] * 4)
    with context_parallel(mesh, seq_len=TOKENS):
        got = [flex_attention(q, k, v, by_distance, mask, enable_gqa=True)]
        if device == "cuda":
            got += torch.autograd.grad(got[0], [q, k, v], grad_out)
    return error([tensor.detach() for tensor in got], expected), device


if __name__ == "__main__":
    run("flex", main)
