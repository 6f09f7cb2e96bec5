"""Documents: their examples run, and the README has the commands of CI."""

import doctest
import re
import subprocess
from pathlib import Path

import pytest
from support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MASKS = ROOT / "docs" / "masks.md"
MLA = ROOT / "docs" / "mla.md"
HYBRID = ROOT / "docs" / "hybrid.md"
CHOOSING = ROOT / "docs" / "choosing.md"
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(path: Path, *languages: str) -> list[str]:
    """Contents of the fenced blocks of these languages."""
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


@each_document
def test_python_blocks_compile(path: Path) -> None:
    for number, block in enumerate(blocks(path, "python", "py"), start=1):
        if ">>>" not in block:
            compile(block, f"{path.name}, Python block {number}", "exec")


@pytest.mark.parametrize("number", range(len(blocks(MASKS, "python"))))
def test_programs_about_masks_run_on_four_ranks(number: int) -> None:
    """They compare with one device themselves."""
    program = compile(blocks(MASKS, "python")[number], MASKS.name, "exec")
    run_ranks(4, lambda _rank: exec(program, {}))


def test_the_program_about_latents_runs_on_four_ranks() -> None:
    """It compares with one device itself."""
    (program,) = blocks(MLA, "python")
    run_ranks(4, lambda _rank: exec(compile(program, MLA.name, "exec"), {}))


def test_the_program_about_hybrid_models_runs_on_four_ranks() -> None:
    """It compares with one device itself."""
    (program,) = blocks(HYBRID, "python")
    run_ranks(4, lambda _rank: exec(compile(program, HYBRID.name, "exec"), {}))


def test_the_program_about_decoding_runs_on_four_ranks() -> None:
    (program,) = (block for block in blocks(CHOOSING, "python") if "bottom_right" in block)
    run_ranks(4, lambda _rank: exec(compile(program, CHOOSING.name, "exec"), {}))


@each_document
def test_examples_run(path: Path) -> None:
    result = doctest.testfile(str(path), module_relative=False)
    assert result.failed == 0, "see the output above"


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    local = [link for link in links if not link.startswith(("http:", "https:", "mailto:"))]
    assert not [link for link in local if not (path.parent / link).exists()]


def test_both_commands_start_from_a_clean_clone() -> None:
    example, tests = blocks(ROOT / "README.md", "sh", "bash")[:2]
    for command in (example, tests):
        assert command.startswith("python -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt -e ")
    assert "torchrun --nproc-per-node 2 examples/train.py" in example
    for part in ("ruff check", "ruff format --check", "mypy", "pytest -q"):
        assert f"&& {part}" in tests


def test_ci_runs_the_second_command() -> None:
    printed = subprocess.run([ROOT / ".ci" / "run", "--print"], capture_output=True, text=True, check=True).stdout
    assert printed == blocks(ROOT / "README.md", "sh", "bash")[1]


def every_name() -> set[str]:
    return {path.name for folder in ("cp_dtensor", "examples") for path in (ROOT / folder).rglob("*.py")}
