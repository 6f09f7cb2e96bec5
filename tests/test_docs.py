"""Documents: their examples run, and the README has the commands of CI."""

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.docs_scripts import docs_script
from support.pages import blocks
from support.ranks import run_ranks

import cp_dtensor

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
README = ROOT / "README.md"
MODIFIERS = ROOT / "docs" / "modifiers.md"
PACKED = ROOT / "docs" / "packed.md"
MLA = ROOT / "docs" / "mla.md"
HYBRID = ROOT / "docs" / "hybrid.md"
CHOOSING = ROOT / "docs" / "choosing.md"
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@each_document
def test_python_blocks_compile(path: Path) -> None:
    for number, block in enumerate(blocks(path, "python", "py"), start=1):
        if ">>>" not in block:
            compile(block, f"{path.name}, Python block {number}", "exec")


@pytest.mark.parametrize("block", [*blocks(MODIFIERS, "python"), *blocks(PACKED, "python")])
def test_programs_about_masks_run_on_four_ranks(block: str) -> None:
    """They compare with one device themselves."""
    program = compile(block, "modifiers.md or packed.md", "exec")
    run_ranks(4, lambda _rank: exec(program, {}))


def test_the_program_about_latents_runs_on_four_ranks() -> None:
    """It compares with one device itself."""
    (program,) = blocks(MLA, "python")
    run_ranks(4, lambda _rank: exec(compile(program, MLA.name, "exec"), {}))


def test_programs_about_hybrid_models_run_on_four_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """The first compares with one device itself; the second prints tables, which follow it."""
    first, second = (compile(program, HYBRID.name, "exec") for program in blocks(HYBRID, "python"))
    run_ranks(4, lambda _rank: exec(first, {}))
    run_ranks(4, lambda _rank: exec(second, {}))
    assert [capsys.readouterr().out] == blocks(HYBRID, "text")


def test_predictions_run_in_one_process_and_print_what_follows_them() -> None:
    """The tables before the first program, and those after the second."""
    programs = [block for block in blocks(CHOOSING, "python") if "explain(" in block]
    tables = [block for block in blocks(CHOOSING, "text") if "chosen by method" in block]
    command = [sys.executable, "-W", "error", "-c", "".join(programs)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [line for table in tables for line in table.splitlines() if line]


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


@each_document
def test_anchors_are_headings(path: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", path.read_text()):
        target = path.parent / link if link else path
        text = re.sub(r"^```.*?^```", "", target.read_text(), flags=re.MULTILINE | re.DOTALL)
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}, link


def test_the_program_of_the_readme_equals_one_device() -> None:
    program = compile(blocks(README, "python")[0], README.name, "exec")
    namespaces: list[dict[str, Any]] = [{}, {}]
    run_ranks(2, lambda rank: exec(program, namespaces[rank]))
    whole, weight = namespaces[0]["x"], namespaces[0]["weight"].detach().requires_grad_()
    alone = F.scaled_dot_product_attention(whole @ weight, whole, whole, is_causal=True)
    alone.square().mean().backward()
    found = [each["out"] for each in namespaces]
    rows = [torch.cat([alone[:, :, :250], alone[:, :, 750:]], 2), alone[:, :, 250:750]]
    torch.testing.assert_close(found, [each.detach() for each in rows], check_stride=False)
    shares = torch.stack([each["weight"].grad for each in namespaces])
    torch.testing.assert_close(shares.mean(0), weight.grad)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 155


def test_the_speedups_of_the_readme_are_those_of_the_table() -> None:
    """3.4 times, 1.4 and 1.24, of auto over the faster rotation of torch."""
    speed = docs_script("speed")
    times = speed.eager_times(speed.table("8xH200-packages"))
    said = re.findall(r"([\d.]+)(?: times as fast as torch 2\.11's SDPA ring)? at (\d[\d,]*\d)", README.read_text())
    assert [tokens for _, tokens in said[:3]] == ["8,192", "32,768", "131,072"]
    for factor, tokens in said[:3]:
        length = int(tokens.replace(",", ""))
        ours, theirs = (times[length, "fwdbwd", name] for name in ("ours-auto", "torch"))
        assert f"{theirs / ours:.{len(factor.split('.')[1])}f}" == factor


def test_the_picture_has_one_kind_of_rows() -> None:
    """Eager rows only; rows of other heads beside them are refused."""
    speed = docs_script("speed")
    rows = speed.table("8xH200-graphs")
    assert not any(name.endswith("graph") for *_, name in speed.eager_times(rows))
    with pytest.raises(ValueError, match="got 2 kinds"):
        speed.eager_times([*rows, {**rows[0], "head_dim": "64"}])


def test_every_public_name_is_in_the_api() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in cp_dtensor.__all__ if not re.search(rf"`{name}\b", text)] == []
