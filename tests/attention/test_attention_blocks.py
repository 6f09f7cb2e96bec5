"""Blocks of the reference implementation: memory is bounded, work is proportional to the attended pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention_kernels import SCALE, Tensors, masks_of
from support.row_masks import documents, window
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cp_dtensor.attention import masked
from cp_dtensor.attention.masked import RowMask, attention_backward, attention_forward

ROWS, COLUMNS, HEADS = 37, 41, 4


def computed(tensors: Tensors, mask: RowMask, bias: torch.Tensor | None = None) -> Tensors:
    """out, lse and all gradients."""
    out, lse = attention_forward(*tensors, mask, SCALE, bias=bias)
    grad_out = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, lse, *attention_backward(grad_out, *tensors, out, lse, mask, SCALE, bias=bias)


def draw(rows: int, columns: int, heads: int, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((heads, rows, 16), (2, columns, 16), (2, columns, 8))
    return tuple(torch.randn(2, *shape, generator=generator, dtype=dtype) for shape in shapes)


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_logits_take_bounded_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor exceeds the limit, though there are 2 * 4 * 1000 * 1000 logits; q, k and v take 0.5 MiB."""
    limit = 2**20
    monkeypatch.setattr(masked, "LOGITS_BYTES", limit)
    tensors = draw(1000, 1000, 4, torch.float32)
    with _Largest() as largest:
        computed(tensors, masks_of(1000, 1000)[name])
    assert largest.bytes <= limit


def flops(mask: RowMask, length: int) -> int:
    with FlopCounterMode(display=False) as counter:
        computed(draw(length, length, 2, torch.float32), mask)
    total: int = counter.get_total_flops()
    return total


def test_work_is_that_of_what_is_seen() -> None:
    """Blocks have 256 rows, so a window of 128 columns costs 383 of them."""
    length = 2048
    position = torch.arange(length)
    full = flops(RowMask(), length)
    assert flops(RowMask(causal_offset=0), length) == full * (256 + length) / 2 / length
    assert flops(RowMask(causal_offset=-length), length) == 0
    assert flops(window(position, 127, 0), length) <= full * 383 / length
    edges = torch.arange(0, length + 1, 128)
    assert flops(documents(position, edges), length) == full * 256 / length
    assert flops(documents(position, edges, is_causal=True), length) == full * 256 / length
