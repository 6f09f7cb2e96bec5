"""The table "Supported features" of the README says what the matrix's fronts take, which tests/matrix runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from matrix.fronts import FRONTS, refusals_of

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = {
    "SDPA in a context": ("context", False), "SDPA of DTensors": ("dtensor_sdpa", False),
    "functions, modules": ("function", False), "in torch.compile": ("context", True),
}  # fmt: skip
"""Front, and whether it is compiled."""
ROWS = {
    "masks": "window", "attn_mask": "float_bias", "dropout": "dropout", "softcap": "softcap", "learned sinks": "sinks",
    "deterministic results": "deterministic",
}  # fmt: skip
BY_CONTEXT = {("masks", "SDPA of DTensors"), ("deterministic results", "SDPA of DTensors")}
"""Cells that are options of a context, which this front has not (tests/api/test_dtensor_sdpa.py)."""


def table() -> dict[str, list[str]]:
    """The cells of each row, and of the header, without Markdown."""
    lines = (ROOT / "README.md").read_text().splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("| | SDPA in a context"))
    rows = [line.strip("|").split("|") for line in lines[start : lines.index("", start)]]
    plain = [[re.sub(r"[\[\]`]|\(\S+?\)", "", cell).strip() for cell in row] for row in rows]
    return {cells[0]: cells for cells in plain}


@pytest.mark.parametrize(
    ("row", "column"), [(row, column) for row in ROWS for column in COLUMNS if (row, column) not in BY_CONTEXT]
)
def test_the_readme_says_what_fronts_take(row: str, column: str) -> None:
    said, (front, compiles) = table(), COLUMNS[column]
    (cells,) = (cells for name, cells in said.items() if name.startswith(row))
    in_functions = cells[said[""].index(column)] == "in functions"
    is_refused = ROWS[row] in FRONTS[front].lacks or bool(refusals_of(front, (ROWS[row],), compiles=compiles))
    assert in_functions == is_refused
