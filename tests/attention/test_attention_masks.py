"""Tables that kernels derive from row masks: computed once, correct, and freed with the mask."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from support.attention_kernels import SCALE, SMALL, backward_kernel, configs, draw, launch, masks_of
from support.devices import no_gpu
from support.row_masks import window
from torch.utils._python_dispatch import TorchDispatchMode

from cp_dtensor.attention.masked import RowMask, attention_backward, attention_forward

ROWS, COLUMNS = 37, 53


# Allocations (which tests fill with NaN), and how Triton's interpreter reads and writes the memory of tensors.
_NO_LAUNCHES = {"empty", "empty_like", "new_empty", "fill_", "set_", "copy_"}


class _Operations(TorchDispatchMode):
    """Names of all that is called, but for what launches nothing on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _NO_LAUNCHES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> list[str]:
    with _Operations() as recorded:
        call()
    return recorded.names


@no_gpu
@pytest.mark.parametrize("kind", ["window", "any intervals"])
def test_a_second_call_launches_kernels_alone(kind: str) -> None:
    q, k, v = draw("cpu", ROWS, COLUMNS, heads=(1, 1), batch=2)
    mask = masks_of(ROWS, COLUMNS)[kind]
    lse, delta = torch.zeros(2, *q.shape[:3])
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    cut = replace(SMALL, block_columns=32)
    config = configs.BackwardConfig(dq=SMALL, dkv=cut)

    def backward() -> None:
        backward_kernel.launch_attention_backward(*gradients, q, q, k, v, lse, delta, mask, SCALE, config=config)

    def forward() -> None:
        launch(gradients[0], lse, q, k, v, mask, SCALE, config=SMALL)

    assert "searchsorted" in operations(backward)
    assert operations(backward) == []
    assert operations(forward) == []


def test_other_blocks_and_lengths_are_derived_anew() -> None:
    mask = window(torch.arange(ROWS), 9, 4)
    assert mask.intervals is not None
    for columns, block in ((53, 16), (53, 32), (40, 16), (53, 16)):
        expected = replace(mask).rows_of_columns(columns, block)
        assert torch.equal(mask.rows_of_columns(columns, block), expected)
    for length in (40, 64, 40):
        lo, hi = mask.padded_intervals(length)
        assert lo.shape == hi.shape == (1, length)
        assert (lo[0, ROWS:] == 0).all()
        assert (hi[0, ROWS:] == 0).all()


def test_what_is_derived_dies_with_the_mask() -> None:
    mask = window(torch.arange(ROWS), 9, 4)
    q, k, v = (x.double() for x in draw("cpu", ROWS, COLUMNS))
    attention_backward(q, q, k, v, *attention_forward(q, k, v, mask, SCALE), mask, SCALE)
    ranges = mask.rows_of_columns(COLUMNS, 16)
    alive = [weakref.ref(x) for x in (mask, ranges)]
    gc.disable()  # no cycles, so that memory is free at once
    try:
        del mask, ranges
        assert [x() for x in alive] == [None] * 2
    finally:
        gc.enable()


@given(data=st.data())
def test_columns_of_rows_are_all_of_them_and_tight(data: st.DataObject) -> None:
    batch, rows = data.draw(st.integers(1, 2), "batch"), data.draw(st.integers(0, 12), "rows")
    columns, block = data.draw(st.integers(0, 12), "columns"), data.draw(st.integers(1, 8), "block")
    edge = st.lists(st.integers(-3, columns + 3), min_size=batch * rows, max_size=batch * rows)
    lo, hi = (torch.tensor(data.draw(edge, name), dtype=torch.int32).view(batch, rows) for name in ("lo", "hi"))
    column = torch.arange(columns)
    seen = ((lo.unsqueeze(-1) <= column) & (column < hi.unsqueeze(-1))).any(0)
    ranges = RowMask(lo=lo, hi=hi).columns_of_rows(columns, block)
    parts = seen.split(block) if rows else ()
    assert len(ranges) == len(parts)
    for part, (first, last) in zip(parts, ranges, strict=True):
        some = part.any(0).nonzero().flatten().tolist()
        assert (first, last) == ((some[0], some[-1] + 1) if some else (0, 0))
