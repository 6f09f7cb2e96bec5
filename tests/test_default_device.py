"""`torch.set_default_device`: what is made on the host or on the device of the tensors does not follow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_checks import Shards
from processes import Processes
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    Causal,
    Documents,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    context_parallel_unshard,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "known length": {"is_causal": True, "seq_len": 9},
    "lengths are exchanged": {"is_causal": True},
    "a mask by rows": {"mask": Documents((0, 9)) & Causal()},
    "bias": {"attn_mask": torch.zeros(1, 1, 1, 1, dtype=torch.float64), "is_causal": False, "mask": Causal()},
    "dropout": {"mask": Causal(), "dropout_p": 1e-12},
}


def functions(rank: int, method: str, case: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards = Shards(rank)
    inputs = shards.inputs()
    with torch.device("meta"):
        out = context_parallel_attention(
            inputs[0] * 2.0, *inputs[1:], mesh=mesh, method=method, enable_gqa=True, **OPTIONS[case]
        )
        out = out * 3.0
        grads = torch.autograd.grad(out, inputs, shards.grad)
    shards.check_results(out, *grads)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("case", OPTIONS)
def test_functions(two_processes: Processes, method: str, case: str) -> None:
    two_processes.run(functions, method, case)


def in_context(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards = Shards(rank)
    inputs = shards.inputs()
    with torch.device("meta"):
        with context_parallel(mesh, mask=Documents((0, 9))):
            out = F.scaled_dot_product_attention(inputs[0] * 2.0, *inputs[1:], is_causal=True, enable_gqa=True) * 3.0
        grads = torch.autograd.grad(out, inputs, shards.grad)
        (shard,) = context_parallel_shard(mesh, [shards.whole[0]], [2])
        (whole,) = context_parallel_unshard(mesh, [shard], [2])
    shards.check_results(out, *grads)
    assert whole.equal(shards.whole[0])


def test_contexts(two_processes: Processes) -> None:
    two_processes.run(in_context)
