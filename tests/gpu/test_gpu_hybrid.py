"""Convolutions and recurrent layers on GPUs: the kernels of flash-linear-attention, and two ranks with NCCL."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    HeadTail,
    causal_conv1d,
    context_parallel_shard,
    context_parallel_unshard,
    gated_delta_rule,
    kda,
    linear_attention,
    shift,
)
from cp_dtensor.attention.fla_recurrence import _small_error


@pytest.mark.gpu(1)
@pytest.mark.skipif(find_spec("fla") is None, reason="needs the extra: pip install -e '.[hybrid]'")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("is_delta", "by_channel"), [(True, False), (True, True), (False, False), (False, True)])
def test_kernels_of_the_package(is_delta: bool, by_channel: bool, width: int) -> None:
    x = torch.zeros(1, 1, 1, width, device="cuda", dtype=torch.bfloat16)
    assert _small_error(x, x, by_channel, is_delta) == ""


def _layers(mesh: Any, tensors: list[torch.Tensor], weight: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    q, k, v, g, beta = tensors
    options = {"mesh": mesh, **options}
    k = F.normalize(k, dim=-1)
    results: list[Any] = [
        gated_delta_rule(q, k, v, g, beta, **options),
        kda(q, k, v, g.unsqueeze(-1).expand_as(k), beta, **options),
        linear_attention(q, k, v, g, **options),
        shift(v, -1, dim=1, **options),
    ]
    mixed = causal_conv1d(v.flatten(2), weight, activation="silu", **options)
    return [*results, mixed.unflatten(-1, v.shape[2:])]


def _compare(rank: int, dtype: torch.dtype) -> None:
    """Two ranks against one, in float64, out and gradients."""
    mesh, alone = init_device_mesh("cuda", (2,)), init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "cp"))["cp"]
    random = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 517, 2, 64, generator=random) for _ in range(3)]
    whole += [-torch.rand(1, 517, 2, generator=random), torch.rand(1, 517, 2, generator=random)]
    weight = torch.randn(128, 4, generator=random)
    results = []
    for used, kind in ((mesh, dtype), (alone, torch.float64)):
        leaves = [x.to("cuda", kind).requires_grad_() for x in whole]
        here, documents = context_parallel_shard(used, leaves, [1] * 5, HeadTail()), [0, 200, 203, 517]
        outs = _layers(used, here, weight.to("cuda", kind), layout=HeadTail(), cu_seqlens=documents, seq_len=517)
        total = torch.stack([out.double().square().sum() for out in outs]).sum()
        grads = list(torch.autograd.grad(total, leaves))
        if used is mesh:
            for grad in grads:
                torch.distributed.all_reduce(grad)
            outs = context_parallel_unshard(mesh, outs, [1] * 5, HeadTail())
        results.append([x.detach().double() for x in (*outs, *grads)])
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-9
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_two_ranks(gpus: Processes, dtype: torch.dtype) -> None:
    gpus.run(_compare, dtype)
