"""Masked attention without Triton, in float64, compared with autograd of the textbook formula."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.attention_kernels import SCALE, biases_of, masks_of
from support.cases import examples
from support.dropouts import dropout_of
from support.problems import dense

from cp_dtensor.attention import masked
from cp_dtensor.attention.masked import (
    Dropout,
    RowMask,
    attention_backward,
    attention_bias_gradient,
    attention_delta,
    attention_forward,
)
from cp_dtensor.attention.triton.dropout import kept_reference

ROWS, COLUMNS, HEADS = 37, 41, 4
Tensors = tuple[torch.Tensor, ...]


def seen_by(mask: RowMask, rows: int, columns: int) -> torch.Tensor:
    """(rows, columns) or (B, 1, rows, columns), by the words of `RowMask`."""
    row, column = torch.arange(rows).unsqueeze(1), torch.arange(columns)
    if mask.lo is not None and mask.hi is not None:
        seen = (mask.lo.unsqueeze(-1) <= column) & (column < mask.hi.unsqueeze(-1))
        return seen.unsqueeze(1) if seen.dim() == 3 else seen
    return row - row + column <= row + (columns if mask.causal_offset is None else mask.causal_offset)


def textbook(
    tensors: Tensors, seen: torch.Tensor, bias: torch.Tensor | None, dropout: Dropout | None, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` by a softmax over the keys, differentiable everywhere."""
    q, k, _ = tensors
    if bias is not None and bias.is_floating_point():  # logsumexp of -inf alone has no gradient
        seen, bias = seen & (bias > -float("inf")), bias.nan_to_num(neginf=0.0)
    kept = None
    if dropout is not None:
        rows, columns = range(q.size(2)), range(k.size(2))
        kept = kept_reference(dropout, q.size(0), q.size(1), rows, columns).double() * dropout.scale
    return dense(*tensors, seen, SCALE, softcap=softcap, bias=bias, kept=kept)


def check(
    tensors: Tensors, mask: RowMask, bias: torch.Tensor | None = None, dropout: Dropout | None = None,
    softcap: float = 0.0,
) -> None:  # fmt: skip
    """out, lse and all gradients, also of an additive bias; the loss looks at lse too, where there is one."""
    rows, columns = tensors[0].size(2), tensors[1].size(2)
    leaves = [x.clone().requires_grad_() for x in tensors]
    is_added = bias is not None and bias.is_floating_point()
    of_bias = bias.double().requires_grad_() if is_added else bias
    expected = textbook(tuple(leaves), seen_by(mask, rows, columns), of_bias, dropout, softcap)
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(expected[0].shape, generator=generator, dtype=torch.float64)
    grad_lse = torch.randn(expected[1].shape, generator=generator, dtype=torch.float64)
    grad_lse = torch.where(expected[1].isfinite(), grad_lse, 0.0)
    loss = (expected[0] * grad_out).sum() + (torch.where(expected[1].isfinite(), expected[1], 0.0) * grad_lse).sum()
    loss.backward()

    options: dict[str, Any] = {"bias": bias, "dropout": dropout, "softcap": softcap}
    out, lse = attention_forward(*tensors, mask, SCALE, **options)
    torch.testing.assert_close(out, expected[0].detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, expected[1].detach(), rtol=1e-10, atol=1e-10)
    options["delta"] = (grad_out * out).sum(-1) - grad_lse
    got = [*attention_backward(grad_out, *tensors, out, lse, mask, SCALE, **options)]
    if is_added:
        leaves.append(of_bias)
        wide = {"grad_dtype": torch.float64}
        got.append(attention_bias_gradient(grad_out, *tensors, lse, mask, SCALE, **options, **wide))
    for leaf, gradient in zip(leaves, got, strict=True):
        wanted = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)


def draw(rows: int, columns: int, heads: int = HEADS, kv_heads: int = 2, dims: tuple[int, int] = (6, 5)) -> Tensors:
    generator = torch.Generator().manual_seed(rows + 100 * columns)
    shapes = ((heads, rows, dims[0]), (kv_heads, columns, dims[0]), (kv_heads, columns, dims[1]))
    return tuple(torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("bias", biases_of(HEADS, ROWS, COLUMNS).values(), ids=biases_of(HEADS, ROWS, COLUMNS))
@pytest.mark.parametrize("mask", masks_of(ROWS, COLUMNS).values(), ids=masks_of(ROWS, COLUMNS))
def test_masks_and_biases(mask: RowMask, bias: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of at least one row."""
    monkeypatch.setattr(masked, "_MASKED_ROWS", 7)
    monkeypatch.setattr(masked, "LOGITS_BYTES", 2 * HEADS * COLUMNS * 8)
    check(draw(ROWS, COLUMNS), mask, bias)


SHAPES = [(2, HEADS, ROWS, COLUMNS), (HEADS, 1, COLUMNS), (2, 1, ROWS, 1), (1, HEADS, 1, 1), (ROWS, COLUMNS), (1,), ()]


@pytest.mark.parametrize("p", [None, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["full", "prefixes", "any intervals"])
def test_shapes_of_biases(kind: str, shape: tuple[int, ...], p: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several blocks, beside dropout, with some -inf."""
    monkeypatch.setattr(masked, "_MASKED_ROWS", 8)
    monkeypatch.setattr(masked, "LOGITS_BYTES", 2 * HEADS * 5 * COLUMNS * 8)
    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    if bias.numel() > 100:
        bias[torch.rand(shape, generator=generator) > 0.9] = -float("inf")
    dropout = None if p is None else dropout_of(ROWS, COLUMNS, p)
    check(draw(ROWS, COLUMNS), masks_of(ROWS, COLUMNS)[kind], bias, dropout)


def test_gradients_of_biases_have_their_dtype_or_the_one_asked_for() -> None:
    """That of q has no influence."""
    q, k, v = (x.bfloat16() for x in draw(ROWS, COLUMNS, dims=(6, 6)))
    for given_dtype in (torch.float16, torch.float32):
        bias = torch.randn(SHAPES[0], generator=torch.Generator().manual_seed(5)).to(given_dtype)
        out, lse = attention_forward(q, k, v, RowMask(), SCALE, bias=bias)
        options: dict[str, Any] = {"bias": bias, "delta": attention_delta(q, out)}
        got = attention_bias_gradient(q, q, k, v, lse, RowMask(), SCALE, **options)
        assert got.dtype == given_dtype
        wide = attention_bias_gradient(q, q, k, v, lse, RowMask(), SCALE, **options, grad_dtype=torch.float32)
        assert wide.dtype == torch.float32
        torch.testing.assert_close(got.float(), wide, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("p", [None, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("bias", ["none", "additive", "boolean"])
@pytest.mark.parametrize("kind", ["full", "causal", "any intervals"])
def test_capped_logits(kind: str, bias: str, p: float | None) -> None:
    dropout = None if p is None else dropout_of(ROWS, COLUMNS, p)
    check(draw(ROWS, COLUMNS), masks_of(ROWS, COLUMNS)[kind], biases_of(HEADS, ROWS, COLUMNS)[bias], dropout, 0.4)


@given(data=st.data())
@settings(max_examples=examples(60))
def test_any_intervals(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 20), "rows"), data.draw(st.integers(0, 20), "columns")
    edge = st.lists(st.integers(-3, columns + 3), min_size=rows, max_size=rows)
    lo, hi = (torch.tensor(data.draw(edge, name), dtype=torch.int32) for name in ("lo", "hi"))
    group = data.draw(st.integers(1, 3), "group")
    dims = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)), "dims")
    check(draw(rows, columns, 2 * group, 2, dims), RowMask(lo=lo, hi=hi))
