"""DTensors with the sequence sharded over two axes: a ring over the first, Ulysses over the second.

torchrun --nproc-per-node 4 examples/ways/dtensor.py
"""

from __future__ import annotations

import torch.nn.functional as F
from check import error, make_mesh, one_device, problem, run
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cp_dtensor import enable_context_parallel_dispatcher


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((2, 2), ("ring", "ulysses"))
    # Equal shards, since DTensor of torch 2.11 gathers the gradients of uneven shards.
    whole = [tensor[:, :, :48] for tensor in problem(mesh.device_type)]
    placements = (Shard(2), Shard(2))  # of (batch, heads, tokens, head dim); shards are contiguous
    q, k, v, grad_out = (distribute_tensor(tensor, mesh, placements) for tensor in whole)
    for tensor in (q, k, v):
        tensor.requires_grad_()

    with enable_context_parallel_dispatcher():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(grad_out)

    results = [tensor for tensor in (out.detach(), q.grad, k.grad, v.grad) if isinstance(tensor, DTensor)]
    assert [tensor.placements for tensor in results] == [placements] * 4
    expected = [distribute_tensor(tensor, mesh, placements) for tensor in one_device(*whole)]
    return error([x.to_local() for x in results], [x.to_local() for x in expected]), mesh.device_type


if __name__ == "__main__":
    run("dtensor", main)
