"""Recurrent layers and convolutions, compared with transformers' own torch functions on one process."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks

from cp_dtensor import causal_conv1d, gated_delta_rule, kda, mamba2


def modeling(name: str) -> Any:
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class _Double:
    """The module torch, in which float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double(function: Any) -> Iterator[None]:
    """Makes a function that casts to float32 cast to float64: its own rounding is up to 3e-6."""
    names = inspect.unwrap(function).__globals__
    with mock.patch.dict(names, {"torch": _Double()}), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def compare(ours: Any, theirs: Any, function: Any, *tensors: torch.Tensor) -> None:
    """Compares outputs and gradients with theirs in float64: ours in float32 at 1e-6 of the largest, in float64 1e-9.

    `theirs` calls `function` of transformers.
    """

    def results(call: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
        out = call(*leaves)
        assert out.dtype == dtype
        return [out.detach(), *torch.autograd.grad(out, leaves, normal(*out.shape, seed=99).to(dtype))]

    def body(rank: int) -> None:
        with in_double(function):
            expected = results(theirs, torch.float64)
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-9)):
            for one, other in zip(results(ours, dtype), expected, strict=True):
                assert (one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))

    run_ranks(1, body)


@pytest.mark.parametrize("normed", [False, True])
def test_gated_delta_rule_of_qwen3_next(normed: bool) -> None:
    q, k, v = normal(2, 70, 1, 8), F.normalize(normal(2, 70, 1, 8, seed=1), dim=-1), normal(2, 70, 2, 4, seed=2)
    g, beta = F.logsigmoid(normal(2, 70, 2, seed=3)), normal(2, 70, 2, seed=4).sigmoid()
    theirs = modeling("qwen3_next").torch_chunk_gated_delta_rule
    compare(
        lambda *x: gated_delta_rule(*x, mesh=dist.group.WORLD, use_qk_l2norm_in_kernel=normed),
        lambda *x: theirs(*x, use_qk_l2norm_in_kernel=normed)[0],
        theirs, q, k, v, g, beta,
    )  # fmt: skip


def test_short_convolution_of_lfm2() -> None:
    theirs = modeling("lfm2").causal_conv1d_fn
    compare(
        lambda x, weight, bias: causal_conv1d(x, weight, bias, mesh=dist.group.WORLD),
        lambda x, weight, bias: theirs(x.transpose(1, 2), weight, bias).transpose(1, 2),
        theirs, normal(2, 9, 5), normal(5, 3, seed=1), normal(5, seed=2),
    )  # fmt: skip


def test_scan_of_mamba2() -> None:
    theirs = modeling("mamba2").mamba2_chunk_scan
    tensors = [normal(2, 37, 4, 3), normal(2, 37, 4, seed=1), -normal(4, seed=2).exp()]
    tensors += [normal(2, 37, 2, 5, seed=3), normal(2, 37, 2, 5, seed=4), normal(4, seed=5), normal(4, seed=6)]
    options: dict[str, Any] = {"dt_softplus": True, "dt_limit": (0.01, 2.0)}
    compare(
        lambda x, dt, a, b, c, d, bias: mamba2(x, dt, a, b, c, D=d, dt_bias=bias, mesh=dist.group.WORLD, **options),
        lambda x, dt, a, b, c, d, bias: theirs(x, dt, a, b, c, 16, D=d, dt_bias=bias, **options),
        theirs,
        *tensors,
    )


def test_delta_attention_of_kimi_linear() -> None:
    theirs = modeling("kimi_linear").chunk_kimi_delta_attention
    q, k, v = (normal(1, 40, 2, 8, seed=seed) for seed in range(3))
    g, beta = F.logsigmoid(normal(1, 40, 2, 8, seed=3)), normal(1, 40, 2, seed=4).sigmoid()
    compare(
        lambda *x: kda(*x, mesh=dist.group.WORLD, use_qk_l2norm_in_kernel=True),
        lambda *x: theirs(*x, use_qk_l2norm_in_kernel=True)[0],
        theirs, q, k, v, g, beta,
    )  # fmt: skip
