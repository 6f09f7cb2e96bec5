"""The program that measures the host's time by part: on two CPU ranks, and parts inside of parts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.docs_scripts import FOLDER, docs_script
from support.forked_programs import launch
from support.ranks import run_ranks

from cp_dtensor.tools.cases import Heads


def test_tables_of_two_ranks(tmp_path: Path) -> None:
    text = launch(2, FOLDER / "host_time.py", "--seq-len", "64", "--json", "out.json", folder=tmp_path)
    tables = json.loads((tmp_path / "out.json").read_text())["tables"]
    assert list(tables) == ["ring", "ulysses"]
    for method, parts in (("ring", {"send K/V", "sum dQ"}), ("ulysses", {"send heads", "send rows"})):
        rows = {row["part"]: (row["forward, us"], row["backward, us"]) for row in tables[method]}
        assert parts | {"tile", "backward of tile", "the rest"} <= set(rows)
        assert list(rows)[-6:] == [
            "all, with the profiler", "all", "all, calls in a row", "the same in a context", "without the plan",
            "the same in a context, without the plan",
        ]  # fmt: skip
        assert all(float(us) > 0 for name in list(rows)[-5:] for us in rows[name])
        assert rows["tile"][1] == rows["backward of tile"][0] == "-"
        assert f"{method}, 64 tokens" in text


def test_values_have_their_own_head_dim() -> None:
    def shapes(rank: int) -> list[tuple[int, ...]]:
        forward, backward = docs_script("host_time").passes_of(Heads(4, 2, 8, 16), 32, "ring", torch.device("cpu"))
        out = forward()
        return [tuple(x.shape) for x in (out, *backward(out))]

    assert run_ranks(2, shapes) == 2 * [[(1, 4, 16, 16), (1, 4, 16, 8), (1, 2, 16, 8), (1, 2, 16, 16)]]


def block(name: str, us: float, *children: Any) -> Any:
    return SimpleNamespace(name=name, cpu_time_total=us, cpu_children=children)


def test_parts_do_not_count_parts_inside_of_them() -> None:
    program = docs_script("host_time")
    tile = block("cp_dtensor: tile (0, 4) x (0, 8), heads (0, 2)", 50.0, block("aten::empty", 5.0))
    summed = block("cp_dtensor: sum dQ", 20.0, block("aten::add", 9.0, block("cp_dtensor: merge", 4.0)))
    whole = block("backward", 100.0, block("Function", 80.0, tile, summed, tile))
    assert program.microseconds_by_part(whole) == {"tile": 100.0, "sum dQ": 16.0, "merge": 4.0}
    assert [program.part_of(f"cp_dtensor: {name}") for name in ("expand latents, heads (0, 2)", "pull K/V")] == [
        "expand latents", "pull K/V",
    ]  # fmt: skip
