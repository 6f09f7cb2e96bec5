"""Convolutions and recurrent layers on GPUs: the kernels of flash-linear-attention, and two ranks."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.gpu_checks import one_setting_of_autotuners
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
    mamba2,
    shift,
)
from cp_dtensor.layers import fla
from cp_dtensor.layers.fla import _small_error

one_setting_of_autotuners()  # before the package is imported
needs_package = pytest.mark.skipif(find_spec("fla") is None, reason="needs the extra: pip install -e '.[hybrid]'")
REFUSES = "upgrade Triton to >= 3.7.1"
"""The package's own refusal of gated kernels on Hopper GPUs. Layers then give a warning and use torch's operations."""
WIDTH, LENGTH = 128, 517
DOCUMENTS = [0, 200, 203, LENGTH]


@pytest.mark.gpu(1)
@needs_package
@pytest.mark.parametrize("decays", ["", "by head", "by channel"])
@pytest.mark.parametrize("is_delta", [True, False])
def test_kernels_of_the_package(is_delta: bool, decays: str) -> None:
    x = torch.zeros(1, 1, 2, WIDTH, device="cuda", dtype=torch.bfloat16)
    try:
        error = _small_error(x, x, decays, is_delta)
    except RuntimeError as refusal:
        if REFUSES not in str(refusal):
            raise
        pytest.skip(str(refusal))
    assert error == ""


def _recurrences(tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    q, k, v, g, beta = tensors
    by_channel, heads = g.unsqueeze(-1).expand_as(k), torch.linspace(-1, -0.1, v.size(2), device=v.device)
    results: list[Any] = [
        gated_delta_rule(q, k, v, g, beta, method="heads", **options),
        linear_attention(q, k, v, g, **options),
    ]
    options["method"] = "scan"
    results += [
        gated_delta_rule(q, k, v, g, beta, **options),
        gated_delta_rule(q, k, v, None, beta, **options),
        kda(q, k, v, by_channel, beta, **options),
        linear_attention(q, k, v, **options),
        linear_attention(q, k, v, g, **options),
        linear_attention(q, k, v, by_channel, **options),
        mamba2(v, beta, heads.to(v.dtype), k[:, :, :1], q[:, :, :1], **options),
    ]
    return results


def _others(tensors: list[torch.Tensor], weight: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    v = tensors[2]
    mixed = causal_conv1d(v.flatten(2), weight, activation="silu", **options)
    return [shift(v, -1, dim=1, **options), mixed.unflatten(-1, v.shape[2:])]


def _compare(rank: int, dtype: torch.dtype) -> None:
    """Two ranks against one, in float64, out and gradients of each layer; bfloat16 by the package's kernels."""
    warnings.filterwarnings("ignore", f".*{REFUSES}")
    mesh, alone = init_device_mesh("cuda", (2,)), init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "cp"))["cp"]
    random = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, LENGTH, 2, WIDTH, generator=random) for _ in range(3)]
    whole[1] = F.normalize(whole[1], dim=-1)
    whole += [-0.1 * torch.rand(1, LENGTH, 2, generator=random), torch.rand(1, LENGTH, 2, generator=random)]
    weight = torch.randn(2 * WIDTH, 4, generator=random)
    results = []
    with mock.patch.object(fla, "_kernel", side_effect=fla._kernel) as kernels:
        for used, kind in ((mesh, dtype), (alone, torch.float64)):
            leaves = [x.to(dtype).to("cuda", kind).requires_grad_() for x in whole]
            here = context_parallel_shard(used, leaves, [1] * 5, HeadTail())
            options: dict[str, Any] = {"cu_seqlens": DOCUMENTS, "seq_len": LENGTH, "layout": HeadTail(), "mesh": used}
            found = []
            for out in _recurrences(here, **options) + _others(here, weight.to("cuda", kind), **options):
                grads = torch.autograd.grad(
                    out.double().square().sum(), leaves, retain_graph=True, materialize_grads=True, allow_unused=True
                )  # fmt: skip
                if used is mesh:
                    for grad in grads:
                        torch.distributed.all_reduce(grad)
                    (out,) = context_parallel_unshard(mesh, [out], [1], HeadTail())
                found.append([x.detach().double() for x in (out, *grads)])
            results.append(found)
    if dtype == torch.bfloat16 and find_spec("fla") is not None:
        assert {call.args for call in kernels.call_args_list} == {(a, b) for a in (False, True) for b in (False, True)}
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-9
    for layer, (mine, wanted) in enumerate(zip(*results, strict=True)):
        for index, (got, expected) in enumerate(zip(mine, wanted, strict=True)):
            error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-2))
            assert error <= tolerance, f"layer {layer}, result {index}: {error}"


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_two_ranks(two_gpus: Processes, dtype: torch.dtype) -> None:
    two_gpus.run(_compare, dtype)
