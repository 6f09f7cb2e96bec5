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
from support.explained import explained
from support.pages import blocks
from support.ranks import run_ranks

import cp_dtensor
from cp_dtensor import Balanced, HeadTail, SlidingWindow, imbalance
from cp_dtensor.tools.parsing import mask_by_name
from cp_dtensor.tools.report import significant

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
README = ROOT / "README.md"
MODIFIERS = ROOT / "docs" / "modifiers.md"
MASKS = ROOT / "docs" / "masks.md"
MLA = ROOT / "docs" / "mla.md"
MIGRATION = ROOT / "docs" / "migration.md"
LAYERS = ROOT / "docs" / "layers.md"
SPARSE = ROOT / "docs" / "sparse.md"
CHOOSING = ROOT / "docs" / "choosing.md"
LONG_CONTEXT = ROOT / "docs" / "long_context.md"
DECISIONS = ROOT / "docs" / "decisions.md"
BENCHMARKS = ROOT / "docs" / "benchmarks"
WORDS = {DECISIONS: 4_300, BENCHMARKS / "README.md": 2_000}
ALL_WORDS = 40_000
"""Words of all documents, at most."""
BENCHMARK_BYTES = 1_500_000
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@each_document
def test_python_blocks_compile(path: Path) -> None:
    for number, block in enumerate(blocks(path, "python", "py"), start=1):
        if ">>>" not in block:
            compile(block, f"{path.name}, Python block {number}", "exec")


PROGRAMS = [
    *blocks(MODIFIERS, "python"), *blocks(MASKS, "python"), *blocks(MLA, "python"), *blocks(MIGRATION, "python"),
    *(block for block in blocks(CHOOSING, "python") if "bottom_right" in block),
]  # fmt: skip


@pytest.mark.parametrize("block", PROGRAMS)
def test_programs_run_on_four_ranks(block: str) -> None:
    """They compare with one device themselves."""
    program = compile(block, "a program of docs", "exec")
    run_ranks(4, lambda _rank: exec(program, {}))


def test_programs_about_layers_run_on_four_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """The first and the last compare with one device themselves; the second prints tables, which follow it."""
    programs = [compile(program, LAYERS.name, "exec") for program in blocks(LAYERS, "python")]
    assert len(programs) == 3
    for program in programs:
        run_ranks(4, lambda _rank, program=program: exec(program, {}))
    assert [capsys.readouterr().out] == blocks(LAYERS, "text")


def test_the_exchanges_of_sparse_attention_are_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks(SPARSE, "python")
    run_ranks(4, lambda _rank: exec(compile(program, SPARSE.name, "exec"), {}))
    assert capsys.readouterr().out == blocks(SPARSE, "text")[1]
    assert len(SPARSE.read_text().split()) <= 700


@pytest.mark.parametrize(
    ("page", "printed_text"), [(CHOOSING, "chosen by method"), (LONG_CONTEXT, "a training step of the model")]
)
def test_predictions_run_in_one_process_and_print_what_follows_them(page: Path, printed_text: str) -> None:
    """The tables before the first program, and those after the second."""
    programs = [block for block in blocks(page, "python") if "explain(" in block]
    tables = [block for block in blocks(page, "text") if printed_text in block]
    command = [sys.executable, "-W", "error", "-c", "".join(programs)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [line for table in tables for line in table.splitlines() if line]


def test_auto_takes_what_the_page_says() -> None:
    """Ulysses for the lengths of the table, a ring for twice as many tokens."""
    lines = CHOOSING.read_text().partition('## What "auto" takes')[2].splitlines()
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")][:6]
    wrong = []
    for place, title in enumerate(header[1:], 1):
        ranks = int(title.removesuffix(" GPUs"))
        for heads, *cells in rows:
            (q_heads, kv_heads), longest = map(int, heads.split(":")), int(cells[place - 1].replace(",", ""))
            for tokens, method in ((longest, "ulysses"), (2 * longest, "ring")):
                found = explained(ranks, names=("cp",), seq_len=tokens, q_heads=q_heads, kv_heads=kv_heads)
                wrong += [(heads, ranks, tokens, found.chosen)] * (found.chosen != method)
    assert not wrong


@pytest.mark.parametrize(("ranks", "longest"), [(2, 2048), (4, 2048), (8, 4096)])
def test_auto_takes_what_the_tables_of_choice_say(ranks: int, longest: int) -> None:
    """Ulysses for shards of this length, a ring for longer ones, and for windows shorter than a shard."""
    for page in (README, CHOOSING):
        assert "2,048 tokens a rank" in page.read_text()
    options: dict[str, Any] = {"names": ("cp",), "q_heads": 32, "kv_heads": 8}
    chosen = [explained(ranks, seq_len=ranks * tokens, **options).chosen for tokens in (longest, 2 * longest)]
    assert chosen == ["ulysses", "ring"]
    assert explained(ranks, seq_len=131072, mask=SlidingWindow(4095, 0), **options).chosen == "ring"


def test_the_page_says_how_uneven_packed_documents_are() -> None:
    mask = mask_by_name("documents 2048", 131072)
    assert f"{1 + imbalance(HeadTail(), mask, 131072, 8):.2f} times the mean work" in CHOOSING.read_text()
    assert imbalance(Balanced(mask, 131072), mask, 131072, 8) < 0.001


@each_document
def test_examples_run(path: Path) -> None:
    result = doctest.testfile(str(path), module_relative=False)
    assert result.failed == 0, "see the output above"


REFERENCES = {"api", "choosing", "decisions", "design", "glossary", "troubleshooting", "versions"}
GUIDES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in REFERENCES]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_guides_open_with_what_the_reader_can_do_and_have_a_program(path: Path) -> None:
    """A program in Python, which other tests run, or a command whose file is there."""
    text = path.read_text()
    assert re.search(r"\byou (can|know|have)\b", text.split("\n\n")[1])
    found = re.findall(
        r"^```python\n|^ {4}>>> |^python -m cp_dtensor \w+|(?:examples|docs)/[\w/]+\.py", text, re.MULTILINE
    )
    assert found
    assert [each for each in found if each.endswith(".py") and not (ROOT / each).exists()] == []


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


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


@each_document
def test_anchors_are_headings(path: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", path.read_text()):
        assert anchor in anchors(path.parent / link if link else path), link


def test_code_refers_to_decisions_that_are_there() -> None:
    paths = [path for folder in ("cp_dtensor", "docs/scripts", "examples") for path in (ROOT / folder).rglob("*.py")]
    said = [each for path in paths for each in re.findall(r"docs/decisions\.md#([\w-]+)", path.read_text())]
    assert said
    assert [each for each in said if each not in anchors(DECISIONS)] == []


def test_documents_are_short() -> None:
    words = {path: len(path.read_text().split()) for path in DOCUMENTS}
    assert {path.name: words[path] for path, most in WORDS.items() if words[path] > most} == {}
    assert sum(words.values()) <= ALL_WORDS
    assert sum(path.stat().st_size for path in BENCHMARKS.rglob("*")) <= BENCHMARK_BYTES


def test_decisions_have_four_lines_and_name_tables_that_are_there() -> None:
    known = {row["table"] for row in docs_script("measured").read()}
    entries = re.split(r"^### .+\n\n", DECISIONS.read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) >= 40
    for entry in entries:
        lines = [line for line in entry.splitlines() if line.startswith("- ")]
        assert [line.split(":*")[0] for line in lines] == ["- *Decided", "- *Because", "- *Rejected", "- *Measured by"]
        named = re.findall(r"\b(?:\d+xH\d00|kernels|layers|new)(?:-\w+)+\b", lines[3])
        assert [each for each in named if each not in known] == []


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
    for each in namespaces:  # the sum of the gradients of two means, each of half of the rows
        torch.testing.assert_close(each["weight"].grad, 2 * weight.grad)
    assert f"print a norm of {2 * weight.grad.norm():.3f}:" in README.read_text()


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 130


def test_the_picture_has_one_kind_of_rows() -> None:
    """Eager rows only; rows of other heads beside them are refused."""
    speed = docs_script("speed")
    rows = speed.table("8xH200-graphs")
    assert not any(name.endswith("graph") for *_, name in speed.eager_times(rows))
    with pytest.raises(ValueError, match="got 2 kinds"):
        speed.eager_times([*rows, {**rows[0], "head_dim": "64"}])


def test_tables_of_benchmarks_are_those_of_measured() -> None:
    """The first columns of a table choose rows of measured.csv; the others are methods, some with a layout."""
    measured, compared = docs_script("measured").read(), 0
    pages = (BENCHMARKS / "README.md").read_text() + (BENCHMARKS.parent / "nodes.md").read_text()
    for table in re.findall(r"^\| table \|.*\n(?:\|.*\n)+", pages, re.MULTILINE):
        names, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        for line in lines:
            wanted = {name: cell for name, cell in zip(names, line, strict=True) if not name.startswith("`")}
            wanted["tokens"] = wanted["tokens"].replace(",", "")
            if heads := wanted.pop("heads", ""):
                wanted |= zip(("q_heads", "kv_heads", "head_dim"), re.split(":| of ", heads), strict=True)
            of_case = [row for row in measured if wanted.items() <= row.items()]
            for name, cell in zip(names, line, strict=True):
                if name.startswith("`") and cell:
                    method, _, layout = name.replace("`", "").partition(", ")
                    rows = [row for row in of_case if row["method"] == method and layout in ("", row["layout"])]
                    by_pass = {row["pass"]: row for row in rows}
                    assert len(by_pass) == len(rows), (line[:3], name)
                    times = {each: float(row["median_ms"]) for each, row in by_pass.items()}
                    if "step" in times:
                        found = f"{times['step']:,.0f} ({float(by_pass['step']['tflops']) / 9.89:.1f}%)"
                    else:
                        found = f"{significant(times['fwd'])} / {significant(times['fwdbwd'])}"
                    assert cell == found, (line[:3], name)
                    compared += 1
    assert compared > 100


def test_tables_of_kernels_are_those_of_measured() -> None:
    """TFLOP/s of captured tiles, forward / backward; in the last column microseconds of eager calls, cuDNN / ours."""
    kernels = {"cuDNN through torch": "cuDNN", "ours, in Triton": "ours"}
    measured: dict[tuple[str, ...], str] = {}
    for row in docs_script("measured").read():
        if row["table"] == "kernels-tiles":
            heads = ":".join(row[name] for name in ("q_heads", "kv_heads", "head_dim"))
            mask = row["mask"].partition(", tile")[0].replace(",", "").replace(":", " ")
            case = (heads, row["tokens"], mask, row["method"], row["pass"])
            measured[case] = f"{float(row['tflops'] or 1000 * float(row['median_ms'])):,.0f}"
    text, compared = (ROOT / "docs" / "kernels.md").read_text().partition("## Measured")[2], 0
    for table in re.findall(r"^\| heads.*\n(?:\|.*\n)+", text, re.MULTILINE):
        names, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        for line in lines:
            first = 3 if "tokens" in names else 2
            heads, *tokens, mask = (cell.replace(",", "") for cell in line[:first])
            case = (heads, tokens[0] if tokens else mask.split()[1], mask)
            for name, cell in list(zip(names, line, strict=True))[first:]:
                each = [(f"{kernels.get(name, name)} graph", direction) for direction in ("fwd", "bwd")]
                if name.startswith("eager"):
                    each = [(method, "fwd") for method in ("cuDNN's FlexAttention", "ours")]
                if cell != "-":
                    assert cell == " / ".join(measured[(*case, *one)] for one in each), (line, name)
                    compared += 1
    assert compared > 50


def test_every_public_name_is_in_the_api() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in cp_dtensor.__all__ if not re.search(rf"`{name}\b", text)] == []


def test_the_reports_of_versions_are_those_of_measured() -> None:
    measured = docs_script("measured").read()
    table = (ROOT / "docs" / "versions.md").read_text().partition("| first report |")[2]
    lines = re.findall(
        r"^\| (\d) (H\d00)( as two nodes)?[^|]*\| (\w+), [^|]*\| (\w+), [^|]*\| (.*) \|$", table, re.MULTILINE
    )
    assert len(lines) == 7
    for count, gpu, nodes, first, last, tables in lines:
        rows = [row for row in measured if row["machine"] == f"{count}x{gpu}" + " as 2x2" * bool(nodes)]
        assert {first, last} <= {row["commit"] for row in rows}
        named = tuple(re.findall(r"`([\w-]+)`", tables))
        assert {row["table"] for row in rows if not row["table"].startswith(named)} <= {f"{count}x{gpu}"}
