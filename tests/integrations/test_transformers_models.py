"""The support matrix in docs/models.md: its cells, run again on 2 ranks. docs/scripts/models.py writes it."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from support.model_cells import COLUMNS, MULTIMODAL_COLUMNS, cells_of, run_cell, run_multimodal_cell, table
from support.models import FAMILIES
from support.multimodal import FROM_PROCESSORS
from support.processes import Processes

pytest.importorskip("transformers", reason="needs the extra: pip install -c constraints.txt -e '.[transformers]'")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
COMPILED = ("Llama", "BART")
"""Families of which compiled models are run here: compiling takes seconds. The script runs all."""

EVERY_TIME = ("Llama", "Gemma 3", "T5", "Qwen3-Next", "DeepSeek-V3.2", "Qwen3-VL")
"""Families that are no sweep."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in EVERY_TIME else pytest.mark.sweep)
        for each in (*FAMILIES, *FROM_PROCESSORS)
    ],
)
def test_cells_are_as_published(two_processes: Processes, family: str) -> None:
    is_multimodal = family in FROM_PROCESSORS
    titles, run = (MULTIMODAL_COLUMNS, run_multimodal_cell) if is_multimodal else (COLUMNS, run_cell)
    published = cells_of(PAGE.read_text(), titles)
    for column in titles:
        if column != "compiled" or family in COMPILED:
            assert {*two_processes.run(run, family, column)} == {published[family, column]}, column


@pytest.mark.parametrize(("families", "titles"), [(FAMILIES, COLUMNS), (FROM_PROCESSORS, MULTIMODAL_COLUMNS)])
def test_the_page_has_every_cell(families: Iterable[str], titles: dict[str, str]) -> None:
    published = cells_of(PAGE.read_text(), titles)
    assert {*published} == {(family, column) for family in families for column in titles}
    assert table(published, titles) in PAGE.read_text()
