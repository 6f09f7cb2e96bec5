"""Gradient of an additive bias, in float64, against autograd of the textbook formula and finite differences."""

from __future__ import annotations

import pytest
import torch
from support.attention_kernels import SCALE, Tensors, biases_of, masks_of
from support.dropouts import dropout_of

from cp_dtensor.attention import masked
from cp_dtensor.attention.masked import (
    RowMask,
    attention_bias_gradient,
    attention_delta,
    attention_forward,
    seen_reference,
)
from cp_dtensor.attention.triton.dropout import Dropout, kept_reference

ROWS, COLUMNS, HEADS = 23, 29, 4
SHAPES = [(2, HEADS, ROWS, COLUMNS), (HEADS, 1, COLUMNS), (2, 1, ROWS, 1), (1, HEADS, 1, 1), (ROWS, COLUMNS), (1,), ()]


def draw(shape: tuple[int, ...] = SHAPES[0]) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """q, k and v; the gradient of the output; a bias of that shape, with some -inf in it if it is large."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((HEADS, ROWS, 6), (2, COLUMNS, 6), (2, COLUMNS, 5), (HEADS, ROWS, 5))
    drawn = [torch.randn(2, *x, generator=generator, dtype=torch.float64) for x in shapes]
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    if bias.numel() > 100:
        bias[torch.rand(shape, generator=generator) > 0.9] = -float("inf")
    return tuple(drawn[:3]), drawn[3], bias


def expected_gradient(
    tensors: Tensors, grad_out: torch.Tensor, bias: torch.Tensor, mask: RowMask, dropout: Dropout | None
) -> torch.Tensor:
    q, k, v = tensors
    k, v = (x.repeat_interleave(HEADS // 2, 1) for x in (k, v))
    leaf = bias.clone().requires_grad_()
    seen = seen_reference(mask, range(ROWS), range(COLUMNS), q.device)
    seen = torch.ones(ROWS, COLUMNS, dtype=torch.bool) if seen is None else seen
    logits = (SCALE * q @ k.mT + leaf.nan_to_num(neginf=0.0)).masked_fill(~(seen & (leaf > -float("inf"))), -1e300)
    weights = logits.softmax(-1) * (logits > -1e300)
    if dropout is not None:
        kept = kept_reference(dropout, 2, HEADS, range(ROWS), range(COLUMNS))
        weights = weights * kept * dropout.scale
    ((weights @ v) * grad_out).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("p", [None, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", masks_of(ROWS, COLUMNS).values(), ids=masks_of(ROWS, COLUMNS))
def test_gradient_of_a_bias(
    mask: RowMask, shape: tuple[int, ...], p: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, grad_out, bias = draw(shape)
    dropout = None if p is None else dropout_of(ROWS, COLUMNS, p)
    monkeypatch.setattr(masked, "_MASKED_ROWS", 8)
    monkeypatch.setattr(masked, "LOGITS_BYTES", 2 * HEADS * 5 * COLUMNS * 8)
    out, lse = attention_forward(*tensors, mask, SCALE, bias=bias, dropout=dropout)
    delta = attention_delta(grad_out, out)
    got = attention_bias_gradient(grad_out, *tensors, lse, mask, SCALE, bias=bias, delta=delta, dropout=dropout)
    assert got.shape == bias.shape
    torch.testing.assert_close(got, expected_gradient(tensors, grad_out, bias, mask, dropout), rtol=1e-10, atol=1e-10)


def test_dtypes() -> None:
    """The dtype of the bias, or `grad_dtype`; that of q has no influence."""
    tensors, grad_out, bias = draw()
    q, k, v, narrow_grad = (x.bfloat16() for x in (*tensors, grad_out))
    for given in (torch.float16, torch.float32):
        out, lse = attention_forward(q, k, v, RowMask(), SCALE, bias=bias.to(given))
        options = {"bias": bias.to(given), "delta": attention_delta(narrow_grad, out)}
        got = attention_bias_gradient(narrow_grad, q, k, v, lse, RowMask(), SCALE, **options)
        assert got.dtype == given
        wide = attention_bias_gradient(narrow_grad, q, k, v, lse, RowMask(), SCALE, **options, grad_dtype=torch.float32)
        assert wide.dtype == torch.float32
        torch.testing.assert_close(got.float(), wide, rtol=1e-3, atol=1e-6)


def test_a_boolean_bias_has_none() -> None:
    tensors, grad_out, _ = draw()
    bias = biases_of(HEADS, ROWS, COLUMNS)["boolean"]
    assert bias is not None
    lse = grad_out.sum(-1)
    with pytest.raises(ValueError, match="no gradient"):
        attention_bias_gradient(grad_out, *tensors, lse, RowMask(), SCALE, bias=bias, delta=lse)
