"""Tables of tiles under masks, beside the intervals of their masks row by row."""

from __future__ import annotations

import random

import pytest
import torch
from support.package_kernels import tiles_of
from support.schedules import seen_by

from cp_dtensor import Balanced, Batched, Contiguous, Documents, HeadTail, PrefixLM, SlidingWindow, Striped
from cp_dtensor.attention.backends.interval import TileRows
from cp_dtensor.plan.tiles import IntervalMask

LENGTH = 61
DOCUMENTS = Documents([0, 7, 7, 20, 48, LENGTH])
LAYOUTS = [Contiguous(), HeadTail(), Striped(1), Striped(4), Balanced(DOCUMENTS, LENGTH)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_see_what_the_mask_says(layout: object) -> None:
    draw = random.Random(1)
    masks = [DOCUMENTS, SlidingWindow(9, 3), PrefixLM(11), DOCUMENTS & SlidingWindow(draw.randint(1, 12), 0)]
    if not isinstance(layout, Balanced):
        masks.append(Batched([DOCUMENTS, Documents([0, 3, 50])]))
    for mask in masks:
        batch = 2 if isinstance(mask, Batched) else 1
        for tile in tiles_of(mask, LENGTH, batch, layout, draw.randrange(2)):  # type: ignore[arg-type]
            assert isinstance(tile.mask, IntervalMask)
            rows, columns = tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0]
            tables = TileRows(tile.mask, torch.device("cpu"))
            assert tables.masks[0].intervals is not None
            lo, hi = (torch.atleast_2d(x) for x in tables.masks[0].intervals)
            seen = torch.zeros(len(lo), columns, dtype=torch.bool)
            for batch_row in range(len(lo)):
                wanted, places = torch.from_numpy(seen_by(tile.mask, rows, columns, batch_row)), torch.arange(columns)
                spans = places >= lo[batch_row][:, None], places < hi[batch_row][:, None]
                assert torch.equal(spans[0] & spans[1], wanted)
                seen[batch_row] = wanted.any(0)
            value = torch.full((len(lo), 1, columns, 1), torch.nan)
            (kept,) = tables.without_hidden(value)
            assert torch.equal(kept[:, 0, :, 0].isnan(), seen), "0 in columns that no row sees"
