"""Ring over one axis: queries stay, keys and values travel. Any number of heads.

torchrun --nproc-per-node 4 examples/ways/ring.py
"""

from __future__ import annotations

import torch
from check import error, make_mesh, one_device, problem, run

from cp_dtensor import context_parallel_shard, ring_attention


def main() -> tuple[float, str]:
    """The largest error of this rank, and the type of its device."""
    mesh = make_mesh((4,), ("cp",))
    whole = problem(mesh.device_type)
    q, k, v, grad_out = context_parallel_shard(mesh, whole, [2] * 4)  # this rank's tokens, in HeadTail()
    for tensor in (q, k, v):
        tensor.requires_grad_()

    # rotate_method="symm_mem", "allgather" or "alltoall" selects the KV transport; the default is "auto".
    out = ring_attention(q, k, v, mesh=mesh, is_causal=True, enable_gqa=True, seq_len=50)
    assert isinstance(out, torch.Tensor)  # with return_lse=True the result is a pair
    out.backward(grad_out)

    expected = context_parallel_shard(mesh, one_device(*whole), [2] * 4)
    return error([out.detach(), q.grad, k.grad, v.grad], expected), mesh.device_type


if __name__ == "__main__":
    run("ring", main)
