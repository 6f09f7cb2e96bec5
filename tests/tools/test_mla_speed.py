"""The program that compares what travels in multi-head latent attention: on two CPU ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from support.docs_scripts import FOLDER
from support.forked_programs import launch


def test_a_row_for_each_way_and_passes(tmp_path: Path) -> None:
    arguments = ["--heads", "2", "4", "--seq-lens", "32", "--json", "out.json"]
    text = launch(2, FOLDER / "mla_speed.py", *arguments, folder=tmp_path)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    ways = [("latents", "auto"), ("latents", "ring"), ("latents", "ulysses"), ("heads", "ring"), ("heads", "ulysses")]
    expected = [(heads, *way, passes) for heads, way, passes in itertools.product((2, 4), ways, ("forward", "both"))]
    assert [(row["heads"], row["travels"], row["method"], row["passes"]) for row in rows] == expected
    assert all(row["eager, ms"] > 0 for row in rows)
    assert "| 4 | 32 | heads | ring | both |" in text
