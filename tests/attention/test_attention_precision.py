"""The compiled attention kernels are as precise as torch's own: errors against float64, with the default blocks."""

from __future__ import annotations

import pytest
import torch
from support.attention_kernels import RowMask, documents, prefix, to, window
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cp_dtensor.attention.masked import (
    attention_backward,
    attention_backward_reference,
    attention_forward,
    attention_forward_reference,
    seen_reference,
    uses_triton,
)

ROWS, HEADS, KV_HEADS = 1000, 4, 2
POSITION = torch.arange(ROWS)
MASKS = {
    "full": RowMask(),
    "causal": RowMask(causal_offset=0),
    "window": window(POSITION, 200, 30),
    "documents": documents(POSITION, torch.tensor([0, 30, 500, 501, ROWS]), is_causal=True),
    "prefix": prefix(POSITION, 300),
}
# Kernels are compiled for each kind of mask, head dim and dtype, which takes seconds: not all combinations.
CASES = [(name, 128, torch.bfloat16) for name in MASKS]
CASES += [("causal", 64, torch.float16), ("window", 96, torch.bfloat16), ("documents", 256, torch.bfloat16)]
CASES += [("causal", 64, torch.float32), ("documents", 128, torch.float32)]
FACTOR = {torch.float32: 3.0}
"""Limit relative to torch's error, else 1.5. Three TF32 products have up to 1.7 times the error of float32 products."""
BACKENDS = {torch.float32: [SDPBackend.MATH]}


def errors(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> list[float]:
    return [
        ((got.double() - wanted).norm() / wanted.norm()).item() for got, wanted in zip(results, expected, strict=True)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dim", "dtype"), CASES, ids=str)
def test_errors_are_those_of_torch(name: str, dim: int, dtype: torch.dtype) -> None:
    mask = to(MASKS[name], "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": dtype}
    q, grad_out = (torch.randn(1, HEADS, ROWS, dim, **options) for _ in range(2))
    k, v = (torch.randn(1, KV_HEADS, ROWS, dim, **options) for _ in range(2))
    scale = dim**-0.5
    assert uses_triton(q, v)

    out, lse = attention_forward(q, k, v, mask, scale)
    results = (out, *attention_backward(grad_out, q, k, v, out, lse, mask, scale))

    wide = [x.double() for x in (q, k, v, grad_out)]
    exact, exact_lse = torch.empty_like(wide[0]), torch.empty_like(lse, dtype=torch.float64)
    attention_forward_reference(exact, exact_lse, *wide[:3], mask, scale)
    gradients = tuple(torch.empty_like(x) for x in wide[:3])
    delta = (exact * wide[3]).sum(-1)
    attention_backward_reference(*gradients, wide[3], *wide[:3], exact_lse, delta, mask, scale)
    expected = (exact, *gradients)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    seen = seen_reference(mask, range(ROWS), range(ROWS), q.device)
    repeated = [x.repeat_interleave(HEADS // KV_HEADS, 1) for x in leaves[1:]]
    with sdpa_kernel(BACKENDS.get(dtype, [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])):
        torchs = scaled_dot_product_attention(leaves[0], *repeated, attn_mask=seen, scale=scale)
    torchs.backward(grad_out)
    assert all(leaf.grad is not None for leaf in leaves)
    of_torch = errors((torchs, *(leaf.grad for leaf in leaves)), expected)
    for got, limit in zip(errors(results, expected), of_torch, strict=True):
        assert got <= FACTOR.get(dtype, 1.5) * limit, (got, limit)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-3 if dtype != torch.float32 else 1e-5)
