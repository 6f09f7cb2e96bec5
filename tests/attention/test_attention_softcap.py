"""Capped logits: the kernels against their reference implementation, and the gradient of a bias beside a cap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention_kernels import SCALE, SMALL, biases_of, check, draw, interpreted, masks_of
from support.dropouts import dropout_of

from cp_dtensor.attention.masked import RowMask, attention_bias_gradient, attention_forward


@interpreted
@pytest.mark.parametrize(
    ("kind", "bias", "tma"), [("full", "none", False), ("causal", "boolean", True), ("any intervals", "additive", True)]
)
def test_kernels_compute_what_the_reference_computes(device: str, kind: str, bias: str, tma: bool) -> None:
    tensors = draw(device, 20, 37, heads=(2, 1), batch=2)
    for softcap in (0.5, 30.0):
        check(tensors, masks_of(20, 37)[kind], biases_of(2, 20, 37)[bias], replace(SMALL, tma=tma), softcap=softcap)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's: the cap of large logits is 1 - 2 / inf
@interpreted
def test_beside_dropout_and_with_logits_far_beyond_the_cap(device: str) -> None:
    q, k, v = draw(device, 20, 37, heads=(2, 1), batch=2)
    check((q, k, v), RowMask(causal_offset=4), config=SMALL, dropout=dropout_of(20, 37), softcap=1.0)
    check((q * 1e4, k, v), RowMask(causal_offset=4), config=SMALL, softcap=1.0)


def test_gradient_of_a_bias() -> None:
    q, k, v = (x.double() for x in draw("cpu", 9, 11, heads=(2, 1), batch=2))
    bias = torch.randn(2, 1, 11, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()
    logits = 0.7 * torch.tanh(SCALE * q @ k.mT / 0.7) + bias
    expected = logits.softmax(-1) @ v
    (wanted,) = torch.autograd.grad(expected, bias, torch.ones_like(expected) * v[:, :, :1])
    grad_out, plain = torch.ones_like(expected) * v[:, :, :1], bias.detach()
    out, lse = attention_forward(q, k, v, RowMask(), SCALE, bias=plain, softcap=0.7)
    delta = (grad_out * out).sum(-1)
    got = attention_bias_gradient(grad_out, q, k, v, lse, RowMask(), SCALE, bias=plain, delta=delta, softcap=0.7)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
