"""Biases that hide keys by large finite numbers, from all keys of some rows, and attention with them in float64."""

from __future__ import annotations

import torch

Tensors = tuple[torch.Tensor, ...]
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")


def row_bias(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns (1, 1, rows, columns): by turns a row that sees keys, and rows whose keys are all hidden."""
    generator = torch.Generator().manual_seed(rows)
    bias = torch.randn(rows, columns, generator=generator, dtype=dtype)
    some = torch.rand(rows, columns, generator=generator) > 0.6
    least = torch.finfo(dtype).min
    bias[1::7] = -1e9
    bias[2::7] = least
    bias[3::7] = torch.where(some, -1e9, least).to(dtype)[3::7]
    bias[4::7] = torch.where(some, -1e9, float("-inf")).to(dtype)[4::7]
    bias[5::7] = torch.where(some, bias, -1e9)[5::7]
    bias[6::14] = float("-inf")
    return bias[None, None]


def padding_bias(columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns (2, 1, 1, columns): padding on the left: under a causal mask the first rows see hidden keys only."""
    bias = torch.zeros(2, 1, 1, columns, dtype=dtype)
    bias[0, ..., : columns // 3] = torch.finfo(dtype).min
    bias[1, ..., : columns // 2] = -1e9
    return bias


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor, bias: torch.Tensor, seen: torch.Tensor
) -> Tensors:
    """Returns `NAMES` in float64, of logits q k^T / sqrt(D) + bias that are rounded to the dtype of q."""
    dtype, group, scale = q.dtype, q.size(1) // k.size(1), q.size(3) ** -0.5
    q, k, v, grad_out = (x.double() for x in (q, k, v, grad_out))
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = ((q @ keys.mT * scale).to(dtype) + bias).double().masked_fill(~seen, float("-inf"))
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest.masked_fill(largest.isinf(), 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.where(total > 0, 1.0)
    out = weights @ values
    grad_logits = weights * (grad_out @ values.mT - (grad_out * out).sum(-1, keepdim=True))
    dk, dv = (x.unflatten(1, (k.size(1), group)).sum(2) for x in (grad_logits.mT @ q * scale, weights.mT @ grad_out))
    summed = [dim for dim in range(4) if bias.size(dim) == 1]
    return out, (largest + total.log()).squeeze(-1), grad_logits @ keys * scale, dk, dv, grad_logits.sum(summed, True)


def assert_close(got: torch.Tensor, expected: torch.Tensor, what: str, float32_limit: float = 1e-5) -> None:
    """Checks against `exact`. The float64 sum -1e9 + x is rounded to 1e-7, as on one device."""
    scale = expected[expected.isfinite()].abs().clamp(min=1)
    limit = float32_limit if got.dtype == torch.float32 else 1e-6
    assert torch.equal(got.isfinite(), expected.isfinite()), what
    error = ((got.double() - expected)[expected.isfinite()].abs() / scale).max() if scale.numel() else 0.0
    assert error <= limit, f"{what}: error {error:.2e}"
