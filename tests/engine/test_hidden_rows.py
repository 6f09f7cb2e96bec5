"""Rows whose keys are all hidden by large finite numbers: the mean of V over these keys, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention_kernels import replace_functions_once_a_launch
from support.hidden_rows import NAMES, Tensors, assert_close, exact, padding_bias, row_bias
from support.problems import shard
from support.splits import ALONE, SPLITS, over_ranks, size_of

from cp_dtensor import HeadTail
from cp_dtensor.attention import masked
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.lse import empty_lse, rounded_lse
from cp_dtensor.attention.masked import RowMask, attention_backward, attention_forward
from cp_dtensor.attention.merge import merge_reference, with_sinks
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.plan.tiles import IntervalMask, KeyRun
from cp_dtensor.spec.intervals import IntervalBand
from cp_dtensor.spec.layouts import Segment

LENGTH = 48
TRIANGLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def draw(dtype: torch.dtype = torch.float32) -> Tensors:
    """Returns q, k, v and the gradient of out."""
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(2, heads, LENGTH, 16, generator=generator, dtype=dtype) for heads in (4, 2, 2, 4))


# The bias, and True if the mask is causal.
BIASES = {
    "rows": (row_bias(LENGTH, LENGTH), False),
    "causal rows": (row_bias(LENGTH, LENGTH), True),
    "causal padding": (padding_bias(LENGTH), True),
}
each_bias = pytest.mark.parametrize(("bias", "is_causal"), BIASES.values(), ids=BIASES)


def seen_by_all(is_causal: bool) -> torch.Tensor:
    return TRIANGLE if is_causal else torch.ones_like(TRIANGLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_bias
@pytest.mark.parametrize("split", SPLITS)
def test_over_ranks(split: str, bias: torch.Tensor, is_causal: bool, dtype: torch.dtype) -> None:
    size, tensors, bias = size_of(SPLITS[split]), draw(dtype), bias.to(dtype)
    expected = exact(*tensors, bias, seen_by_all(is_causal))
    results = over_ranks(SPLITS[split], tensors, HeadTail(), bias, is_causal=is_causal)
    of_shards = NAMES if bias.size(2) > 1 else NAMES[:5]
    for here, got in results.items():
        for name, of_rank, whole in zip(of_shards, got, expected, strict=False):
            assert_close(of_rank, shard(whole, HeadTail(), here, size), f"{name} of rank {here}")
    if bias.size(2) == 1:
        assert_close(torch.stack([got[5] for got in results.values()]).sum(0), expected[5], "dbias")


@each_bias
def test_errors_are_those_of_one_device(bias: torch.Tensor, is_causal: bool) -> None:
    q, k, v, grad_out = draw()
    seen = seen_by_all(is_causal)
    expected = exact(q, k, v, grad_out, bias, seen)
    rows = expected[1].isfinite()  # one device returns NaN for rows without keys
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    one_device = F.scaled_dot_product_attention(*leaves, bias.masked_fill(~seen, float("-inf")), enable_gqa=True)
    out, _, dq, *_ = over_ranks(ALONE, (q, k, v, grad_out), HeadTail(), bias, is_causal=is_causal)[0]
    (of_one_device,) = torch.autograd.grad(one_device, leaves[:1], grad_out * rows.unsqueeze(-1))
    for got, theirs, exactly in ((out, one_device, expected[0]), (dq, of_one_device, expected[2])):
        ours, others = ((x - exactly)[rows].abs().max().item() for x in (got, theirs))
        assert ours <= 1.5 * others + 1e-6


# Tiles, by the reference implementation and by the kernels


@pytest.fixture(params=["reference", "triton"])
def merge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "reference":
        return merge_reference
    from cp_dtensor.attention.triton.merge import launch_merge

    replace_functions_once_a_launch()
    monkeypatch.setattr(masked, "uses_triton", lambda q, v: True)
    return launch_merge


def few_heads() -> Tensors:
    q, k, v, grad_out = draw()
    return q[:, :2], k[:, :1], v[:, :1], grad_out[:, :2]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # finfo.min less a large number is -inf
@each_bias
def test_tiles(merge: Any, bias: torch.Tensor, is_causal: bool) -> None:
    """Two tiles of columns, merged, and the gradients of both."""
    q, k, v, grad_out = few_heads()
    positions, rows = Segment.contiguous(0, LENGTH), (0, LENGTH)
    band = IntervalBand(first=0, last=LENGTH, lo=0, hi=LENGTH, left=LENGTH, right=0 if is_causal else LENGTH)
    spans = ((0, 20), (20, LENGTH))
    masks = [IntervalMask((((band,),),), (positions,), rows, KeyRun((positions,)), span) for span in spans]
    backend = IntervalAttention(Modifiers(bias))
    parts = [
        backend.forward(q, k[:, :, slice(*span)], v[:, :, slice(*span)], mask, 0.25)
        for span, mask in zip(spans, masks, strict=True)
    ]
    out, lse = torch.empty_like(q), empty_lse(q, q.shape[:3], torch.float32, True)
    merge(out, lse, *parts[0], [(rows, *parts[1])])
    grads = [
        backend.backward(grad_out, q, k[:, :, slice(*span)], v[:, :, slice(*span)], out, lse, mask, 0.25)
        for span, mask in zip(spans, masks, strict=True)
    ]
    of_q, of_k, of_v = zip(*grads, strict=True)
    expected = exact(q, k, v, grad_out, bias, seen_by_all(is_causal))
    got = (out, rounded_lse(lse), sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2))
    for name, tensor, wanted in zip(NAMES, got, expected, strict=False):
        assert_close(tensor, wanted, name)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_an_lse_of_one_float_is_right_without_hidden_rows(merge: Any) -> None:
    q, k, v, grad_out = few_heads()
    bias = padding_bias(LENGTH)
    out, lse = attention_forward(q, k, v, RowMask(), 0.25, bias=bias)
    grads = attention_backward(grad_out, q, k, v, out, lse, RowMask(), 0.25, bias=bias)
    expected = exact(q, k, v, grad_out, bias, seen_by_all(False))
    for name, tensor, wanted in zip(NAMES, (out, lse, *grads), expected, strict=False):
        assert_close(tensor, wanted, name)


def test_sinks_that_are_hidden_too() -> None:
    """A sink is one more key: beside n keys of -1e9 and values of 1, the output is n / (n + 1)."""
    q, k = (torch.randn(1, 2, 5, 16) for _ in range(2))
    bias, v = torch.full((1, 1, 1, 5), -1e9), torch.ones(1, 2, 5, 16)
    out, lse = attention_forward(q, k, v, RowMask(), 0.25, bias=bias, split_lse=True)
    merged, merged_lse = with_sinks(out, lse, torch.tensor([-1e9, 0.0]))
    torch.testing.assert_close(merged[:, 0], torch.full((1, 5, 16), 5 / 6))
    assert (merged[:, 1] == 0).all()
    dv = attention_backward(out, q, k, v, merged, merged_lse, RowMask(), 0.25, bias=bias)[2]
    torch.testing.assert_close(dv[:, 0], torch.full((1, 5, 16), 5 / 6))
