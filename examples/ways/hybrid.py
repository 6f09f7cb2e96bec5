"""Hybrid: Ulysses over the axis "ulysses", and a ring over the axis "ring".

torchrun --nproc-per-node 4 examples/ways/hybrid.py
"""

from __future__ import annotations

import torch
from check import error, make_mesh, one_device, problem, run

from cp_dtensor import context_parallel_attention, context_parallel_shard


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((2, 2), ("ring", "ulysses"))
    whole = problem(mesh.device_type)
    q, k, v, grad_out = context_parallel_shard(mesh, whole, [2] * 4)  # over both axes
    for tensor in (q, k, v):
        tensor.requires_grad_()

    out = context_parallel_attention(
        q, k, v, mesh=mesh, method="hybrid", is_causal=True, enable_gqa=True, seq_len=50
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)  # with return_lse=True the result is a pair
    out.backward(grad_out)

    expected = context_parallel_shard(mesh, one_device(*whole), [2] * 4)
    return error([out.detach(), q.grad, k.grad, v.grad], expected), mesh.device_type


if __name__ == "__main__":
    run("hybrid", main)
