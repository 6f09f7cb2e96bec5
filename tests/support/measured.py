"""Rows of `docs/benchmarks/measured.csv` that `bench` made: medians on rented machines, bfloat16, batch 1."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cp_dtensor import Layout, Mask
from cp_dtensor.tools.parsing import layout_by_name, mask_by_name

MEASURED = Path(__file__).parents[2] / "docs" / "benchmarks" / "measured.csv"


class Case(NamedTuple):
    """What a method computes: names are those of `python -m cp_dtensor bench`."""

    table: str
    machine: str
    tokens: int
    mask: str
    layout: str
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def ranks(self) -> int:
        return int(self.machine.partition("x")[0])

    def values(self) -> tuple[Mask, Layout]:
        mask = mask_by_name(self.mask, self.tokens)
        return mask, layout_by_name(self.layout, mask, self.tokens)

    def __str__(self) -> str:
        return f"{self.table} {self.tokens} {self.mask} {self.layout} {self.q_heads}:{self.kv_heads}"


@cache
def measured() -> dict[Case, dict[tuple[str, str], float]]:
    """Milliseconds by case, and of a case by method and pass; passes with " host" are the host's time."""
    found: dict[Case, dict[tuple[str, str], float]] = {}
    with MEASURED.open(newline="") as file:
        for row in csv.DictReader(file):
            of_masks = "/" not in row["head_dim"] and " keys" not in row["mask"]
            if not (row["host_us"] and row["median_ms"] and of_masks) or " as " in row["machine"]:
                continue  # of another program, of latents or chosen keys, or of ranks that stand for several nodes
            numbers = (int(row[name]) for name in ("q_heads", "kv_heads", "head_dim"))
            case = Case(row["table"], row["machine"], int(row["tokens"]), row["mask"], row["layout"], *numbers)
            times = found.setdefault(case, {})
            times[row["method"], row["pass"]] = float(row["median_ms"])
            times[row["method"], row["pass"] + " host"] = float(row["host_us"]) / 1e3
    return found
