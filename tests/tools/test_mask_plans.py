"""The program that times new masks, with small tiles on CPUs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.docs_scripts import docs_script

from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.tools.parsing import lognormal_documents

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes a minute on a GPU")


def test_every_tile_is_computed_in_every_layer_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    program = docs_script("mask_plans")
    masks = iter(
        [lognormal_documents(program.TOKENS, median=program.MEDIAN, sigma=1.0, seed=seed) for seed in range(10)]
    )
    calls: Counter[tuple[str, Any]] = Counter()
    for name in ("forward", "backward"):
        compute = getattr(IntervalAttention, name)

        def counted(self: Any, *arguments: Any, name: str = name, compute: Any = compute) -> Any:
            calls[name, arguments[-2]] += 1
            return compute(self, *arguments)

        monkeypatch.setattr(IntervalAttention, name, counted)
    rank = program.Rank(2)
    with torch.no_grad():
        row = program.price(rank, lambda: next(masks), rounds=1, masks=1)
        timed = {each: count for each, count in calls.items() if count > 1}
        assert set(timed.values()) == {3 * program.LAYERS}, "again: the same tables and plans"
        assert {name for name, _ in timed} == {"forward", "backward"}
        assert row["slowest"] == row["new / again"] > 0
        rows = program.memory(rank, lambda: next(masks), 1, until=0)
    assert [each["masks"] for each in rows] == [0]
    assert rows[0]["process"] > 0
    text = program.report({"machine": "here", "price": [row], "memory": rows})
    assert "| 1 of 2 ranks |" in text
    assert "| masks | process |" in text
