"""Figures of pages: each has a line in tests/figures.txt, which computes it from measured.csv or names what makes it.

A line is `figure = source`, in the order of the page. A source is "by" a file and a name in it, "by" an address, or
arithmetic of rows: the parts of `{8xH200-packages; 8192; ours-auto; fwd > mib}` choose a row by its table, case or a
piece of its note, and a column, or a number of the note, in place of milliseconds. Several, joined by " and ", are
those of "forward / both", or agree.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from statistics import median

import pytest
from support.docs_scripts import docs_script
from support.explained import pretended

from cp_dtensor import Cluster, explain

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("figures.txt")
CASE = ("tokens", "mask", "layout", "q_heads", "kv_heads", "head_dim", "method", "pass")
NUMBER = r"(?<![\w.,])\d+(?:,\d{3})*"
FIGURE = re.compile(
    rf"(?<=\| ){NUMBER}(?:\.\d+)? / [\d.,]+(?= \|)"  # a cell: forward / both
    rf"|{NUMBER}(?:\.\d+)+|{NUMBER}(?= ?(?:ms|s|us|times|[GM]i?B|GB/s|tokens/s)\b)|{NUMBER}(?=%)"
)
NO_FIGURES = re.compile(
    r"^```.*?^```|^ {4}\S.*?$|`[^`]*`|\]\([^)]*\)|^\| table \|.*?\n\n"  # code, links, tables that test_docs compares
    r"|(?:torch|Python|Llama|Triton|fla-core|axolotl-ringmaster|flash-attn before)\s[\d.]+|within \d+%|\d\.\d+B\b",
    re.MULTILINE | re.DOTALL,
)


def figures_of(page: str) -> list[str]:
    return FIGURE.findall(NO_FIGURES.sub("", (ROOT / page).read_text()))


def sources() -> dict[str, list[tuple[str, str]]]:
    """Return the figures of each page, each with its source."""
    found: dict[str, list[tuple[str, str]]] = {}
    latest: list[tuple[str, str]] = []
    for line in filter(None, TABLE.read_text().splitlines()):
        figure, _, source = line.partition(" = ")
        if source:
            latest.append((figure, source))
        else:
            latest = found[line.removeprefix("# ")] = []
    return found


@cache
def rows() -> list[tuple[dict[str, str], set[str]]]:
    """Return each row with its table and what it measured, by which it can be chosen."""
    heads = "{q_heads}:{kv_heads}"
    return [
        (row, {row["table"], heads.format(**row), *(row[name] for name in CASE)})
        for row in docs_script("measured").read()
    ]


def value(query: str) -> float:
    """Return the number of a row. Rows of several runs count by their median."""
    names, _, column = query.partition(" > ")
    parts, column = names.split("; "), column or "median_ms"
    found = [(row, case) for row, case in rows() if all(part in case or part in row["note"] for part in parts)]
    assert len({frozenset(case) for _, case in found}) == 1, query
    texts = [row[column] if column in row else re.findall(rf"{column} ([\d.]+)", row["note"])[0] for row, _ in found]
    return median(map(float, texts))


def computed(source: str, figure: str) -> str:
    """Return what the source gives, with the digits of the figure."""
    numbers = re.sub(r"{([^}]*)}", lambda found: repr(value(found[1])), source)
    result: float = eval(numbers, {"__builtins__": {}})
    return f"{result + 1e-9:,.{len(figure.partition('.')[2])}f}"  # halves are rounded up


@pytest.mark.parametrize("page", sources())
def test_each_figure_has_its_source(page: str) -> None:
    assert [figure for figure, _ in sources()[page]] == figures_of(page)
    for figure, source in sources()[page]:
        if source.startswith("by "):
            _, origin, *words = source.split()
            if origin.startswith("https:"):
                assert origin in (ROOT / page).read_text(), source
            else:
                assert " ".join(words) in (ROOT / origin).read_text(), source
            continue
        expressions = source.split(" and ")
        said = figure.split(" / ") if " / " in figure else [figure] * len(expressions)
        assert [computed(*each) for each in zip(expressions, said, strict=True)] == said, source


def test_a_figure_that_differs_is_found() -> None:
    assert computed("{2xH200-long-context; 131072; torch} / {2xH200-long-context; 131072; ours}", "1.30") == "1.29"
    with pytest.raises(AssertionError):
        value("2xH200-long-context")  # two methods


def predicted(tokens: int, gpus: int, gpu: str, *, keep_attention: bool = True) -> tuple[float, float]:
    """Return the GiB at the peak and the seconds of a step of the page's model, by `explain`."""
    page = (ROOT / "docs" / "long_context.md").read_text()
    qwen3_8b = eval(re.findall(r"qwen3_8b = ({.*?})", page, re.DOTALL)[0])
    options = {"tile": 8192, "offload": True, "keep_attention": keep_attention}
    with pretended(gpus, names=("cp",)) as mesh:
        hardware = Cluster(gpu, packages=True).gpu
        step = str(explain(mesh, seq_len=tokens, quiet=True, model=qwen3_8b, hardware=hardware, **options).step)
    (gib,), (seconds,) = re.findall(r"at the peak ([\d.]+)", step), re.findall(r"together ([\d.]+)", step)
    return float(gib), float(seconds)


@pytest.mark.parametrize(
    ("tokens", "gpus", "gpu"),
    [(32768, 2, "H100"), (131072, 1, "H200"), (131072, 2, "H200"), (262144, 2, "H200"), (524288, 2, "H200")],
)
def test_predicted_steps_are_those_of_the_page(tokens: int, gpus: int, gpu: str) -> None:
    gib, seconds = predicted(tokens, gpus, gpu)
    cell = f"| {seconds:.{2 if seconds < 10 else 1}f}, {gib:.1f} |"
    lines = (ROOT / "docs" / "long_context.md").read_text().splitlines()
    assert any(line.startswith(f"| {tokens:,} | {gpus} {gpu} | kept |") and cell in line for line in lines), cell


def test_predicted_limits_are_those_of_the_page() -> None:
    gib, seconds = predicted(262144, 1, "H200", keep_attention=False)
    page = " ".join((ROOT / "docs" / "long_context.md").read_text().split())
    assert f"| {seconds:.1f}, {gib:.1f} |" in page
    assert f"262,144 fit on one H200 only without kept attention ({gib:.0f} GiB)" in page
