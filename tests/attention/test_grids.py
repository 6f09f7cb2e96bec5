"""Grids of the kernels for tiles of any size: CUDA allows 2^31 - 1 programs on axis x, and 65,535 on y and z."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_dtensor.attention.masked import RowMask

launching = pytest.importorskip("cp_dtensor._torch.triton_launch")
backward = pytest.importorskip("cp_dtensor.attention.triton.backward")
forward = pytest.importorskip("cp_dtensor.attention.triton.forward")
merging = pytest.importorskip("cp_dtensor.attention.triton.merge")


@pytest.mark.parametrize(
    ("batch", "heads", "rows"), [(1, 2, 8 << 20), (70_000, 2, 40), (2, 70_000, 40)], ids=["rows", "batch", "heads"]
)
def test_grids_of_huge_tiles(monkeypatch: pytest.MonkeyPatch, batch: int, heads: int, rows: int) -> None:
    grids: dict[str, tuple[int, ...]] = {}

    def record(launch: Any, *_tensors: torch.Tensor) -> None:
        grids[launch._kernel.__name__] = launch._grid

    monkeypatch.setattr(launching.Launch, "__call__", record)
    whole = torch.empty(batch, heads, rows, 128, dtype=torch.float16, device="meta")
    lse = torch.empty(whole.shape[:3], device="meta")
    mask = RowMask(causal_offset=0)
    forward.launch_attention_forward(whole, lse, whole, whole, whole, mask, 1.0)
    backward.launch_attention_delta(lse, whole, whole)
    backward.launch_attention_backward(*[whole] * 7, lse, lse, mask, 1.0)
    merging.launch_merge(whole, lse, whole, lse, [((0, rows), whole, lse)])
    merging.launch_sum(whole, whole, [((0, rows), whole.unsqueeze(0))])
    assert len(grids) == 7, grids
    for name, (x, *others) in grids.items():
        assert x * max(others) >= batch * heads * (rows // 4096), name
        assert x < 2**31, name
        assert max(others) <= 65_535, name
