"""The support matrix in docs/models.md: its cells, run again on 2 ranks. docs/scripts/models.py writes it."""

from pathlib import Path

import pytest
from support.model_cells import COLUMNS, cells_of, run_cell, table
from support.models import FAMILIES
from support.processes import Processes

pytest.importorskip("transformers", reason="needs the extra: pip install -c constraints.txt -e '.[transformers]'")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
COMPILED = ("Llama", "BART")
"""Families of which compiled models are run here: compiling takes seconds. The script runs all."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_cells_are_as_published(two_processes: Processes, family: str) -> None:
    published = cells_of(PAGE.read_text())
    for column in COLUMNS:
        if column != "compiled" or family in COMPILED:
            assert {*two_processes.run(run_cell, family, column)} == {published[family, column]}, column


def test_the_page_has_every_cell() -> None:
    published = cells_of(PAGE.read_text())
    assert {*published} == {(family, column) for family in FAMILIES for column in COLUMNS}
    assert table(published) in PAGE.read_text()
