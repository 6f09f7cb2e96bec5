"""The list of `tests/mutants.py` is true: each edit has one place in the package, and its tests exist."""

from __future__ import annotations

import ast
import re

import mutants
import pytest
from mutants import MUTANTS, ROOT, Mutant

PACKAGE = ROOT / "cp_dtensor"


def test_names_are_different() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_edit_has_one_place(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times"
    assert mutant.new != mutant.old
    ast.parse(text.replace(mutant.old, mutant.new))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_kill_it_exist(mutant: Mutant) -> None:
    for each in mutant.killed_by.split():
        path, _, name = each.partition("::")
        assert re.search(rf"^def {name or 'test_'}", (ROOT / path).read_text(), re.MULTILINE), each


@pytest.mark.sweep
def test_the_program_tells_what_lives(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An edit that changes nothing lives, one that changes results is killed."""
    old, test = "base_lse.to(lse, copy=True)\n", "tests/attention/test_merge.py::test_nothing_is_the_identity"
    cases = [("lives", "base_lse.to(lse, copy=True)\n\n"), ("killed", "base_lse + 1\n")]
    edits = tuple(Mutant(name, "", "attention/merge.py", old, new, test) for name, new in cases)
    monkeypatch.setattr(mutants, "MUTANTS", edits)
    monkeypatch.setattr("sys.argv", ["mutants.py"])
    assert mutants.main() == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, name] for name, _ in cases]
    assert last == "1 of 2 mutants killed"
