"""The program that compares what ranks send in multi-head latent attention: on two CPU ranks, and its results."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from support.docs_scripts import FOLDER, docs_script
from support.forked_programs import launch
from support.ranks import run_ranks

WAYS = [("latents", "auto"), ("latents", "ring"), ("latents", "ulysses"), ("K/V", "ring"), ("K/V", "ulysses")]


def test_a_row_for_each_way_and_passes(tmp_path: Path) -> None:
    arguments = ["--heads", "2", "4", "--seq-lens", "32", "--json", "out.json"]
    text = launch(2, FOLDER / "mla_speed.py", *arguments, folder=tmp_path)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    expected = [(heads, *way, passes) for heads, way, passes in itertools.product((2, 4), WAYS, ("forward", "both"))]
    assert [(row["heads"], row["sent"], row["method"], row["passes"]) for row in rows] == expected
    assert all(row["eager, ms"] > 0 for row in rows)
    assert "| 4 | 32 | K/V | ring | both |" in text


def test_all_ways_compute_the_same() -> None:
    program = docs_script("mla_speed")

    def results(rank: int) -> dict[tuple[str, str], Any]:
        ways = program.attention(4, 64, torch.device("cpu"))
        return {way: [x.detach().double() for x in call(program.BOTH)] for way, call in ways.items()}

    by_rank = run_ranks(2, results)
    assert list(by_rank[0]) == WAYS

    def whole(way: tuple[str, str]) -> list[torch.Tensor]:
        """Out and gradients of the ranks side by side, and the sum of their shares of the gradient of up."""
        one, other = (found[way] for found in by_rank)
        return [*(torch.cat(pair) for pair in zip(one[:-1], other[:-1], strict=True)), one[-1] + other[-1]]

    wanted = whole(("K/V", "ring"))
    for way in WAYS:
        for got, want in zip(whole(way), wanted, strict=True):
            assert float((got - want).norm() / want.norm()) < 2e-2, way
