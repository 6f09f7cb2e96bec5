"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from cp_dtensor.tools.bench.accuracy import NAMES
from cp_dtensor.tools.bench.cases import PASS_TITLES, Case
from cp_dtensor.tools.bench.rows import MEASURED, Results, Row
from cp_dtensor.tools.parsing import DOCUMENTS_SIGMA
from cp_dtensor.tools.report import markdown_table

_COLUMNS = (
    "length", "baseline", "ms", "20-80%", "TFLOP/s per GPU", "% of ideal", "x others", "predicted ms",
    "CPU us", "extra MiB",
)  # fmt: skip
_NOTHING = "-"
_EXPLANATION = """\
Times are medians over calls, of the slowest rank, with their 20th and 80th percentiles, after the clocks have settled.
`ideal` is one GPU's attention over the whole sequence, alone on the machine, divided by the number of ranks; of several
the fastest counts. Backward counts as 2.5 times the operations of forward; what is masked does not count. x others: how
many times faster than the fastest that is neither ours nor `ideal`. Predicted: what the cost model of
`rotate_method="auto"` expects. CPU us: the host's time to launch a call. Extra MiB: peak memory above inputs and
grad_out, results included (of a graph, when it is captured). torch's context parallel gets inputs that are contiguous
as (B, H, S, D), since its backward fails with others; the rest get (B, S, H, D) memory, as models have it. Errors are
relative (Frobenius, over the whole tensors) to float64 on the same inputs; in parentheses, over those of `ideal`."""
_EXPLANATION_OF_MASKS = f"""\
A name's second word is the layout, where it is not that of the title. `documents N`: of lognormal lengths (median N,
sigma {DOCUMENTS_SIGMA}, seed 0), causal inside, the last cut off at the end. `window N`: a query sees itself and the
N - 1 keys before it. `ideal-kernels` are our Triton kernels, `ideal-varlen` FlashAttention-2 as torch has it.
`torch-flex`: torch's context parallel of FlexAttention, compiled: all K/V are gathered, in the order of the load
balancer whose name follows. `ours-flex`: `context_parallel_flex_attention`, compiled likewise. `llama3-varlen`: K/V are
gathered in stages of heads, the next under the attention of the last, for FlashAttention-2 over the documents of each
rank's contiguous part; gradients are reduce-scattered in the inputs' dtype."""


def markdown(results: Results) -> str:
    """The whole report."""
    sections = [
        f"# Benchmark, {results.world_size} {'rank' if results.world_size == 1 else 'ranks'}",
        results.environment,
        f"`{results.command}`",
        _EXPLANATION,
    ]
    if any(not row.case.is_plain for row in results.rows):
        sections.append(_EXPLANATION_OF_MASKS)
    for title, rows in panels(results):
        sections += [f"## {title}", table(results, rows)]
    return "\n\n".join(sections) + "\n"


def panels(results: Results) -> Iterator[tuple[str, list[Row]]]:
    """Titles and rows of what belongs in one table: all that differs in length and baseline only."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in results.rows:
        groups.setdefault((*_all_but_length(row.case), row.pass_name), []).append(row)
    for rows in groups.values():
        yield title(rows[0].case, rows[0].pass_name), rows


def title(case: Case, pass_name: str) -> str:
    """What a table is about, in words."""
    words = [
        f"{case.heads.q} query and {case.heads.kv} kv heads of {case.head_dim}",
        case.mask,
        PASS_TITLES[pass_name],
    ]
    words += [f"batch {case.batch}"] if case.batch > 1 else []
    words += [case.dtype, case.layout]
    words += [case.backend] if case.backend != "auto" else []
    return ", ".join(words)


def table(results: Results, rows: list[Row]) -> str:
    """Rows of one panel as a Markdown table, with columns for those errors that some row has."""
    names = [name for name in NAMES if any(name in row.errors for row in rows)]
    header = [*_COLUMNS, *(f"error of {name}" for name in names)]
    return markdown_table(header, [[*_cells(results, row), *_error_cells(results, row, names)] for row in rows])


def _all_but_length(case: Case) -> tuple[object, ...]:
    return case.heads, case.head_dim, case.batch, case.dtype, case.mask, case.layout, case.backend


def _cells(results: Results, row: Row) -> list[str]:
    name = f"{row.baseline} ({row.note})" if row.note else row.baseline
    start = [f"{row.case.seq_len:,}", _plain(name)]
    if row.status != MEASURED:
        return [*start, _plain(f"{row.status}: {row.message}"), *[_NOTHING] * (len(_COLUMNS) - len(start) - 1)]
    low, high = row.spread_ms
    return [
        *start,
        _significant(row.median_ms),
        f"{_significant(low)}-{_significant(high)}",
        f"{row.tflops:.0f}" if row.tflops >= 10 else _significant(row.tflops),
        _formatted(results.percent_of_ideal(row), "{:.1f}"),
        _formatted(results.times_others(row), "{:.2f}"),
        _NOTHING if row.predicted_ms is None else _significant(row.predicted_ms),
        _formatted(row.cpu_us, "{:.0f}"),
        _formatted(None if row.extra_bytes is None else row.extra_bytes / 2**20, "{:.0f}"),
    ]


def _error_cells(results: Results, row: Row, names: list[str]) -> list[str]:
    ratios = results.error_ratios(row)
    cells = []
    for name in names:
        cell = _formatted(row.errors.get(name), "{:.1e}")
        cells.append(f"{cell} ({ratios[name]:.2f}x)" if name in ratios and not row.is_ideal else cell)
    return cells


def _formatted(value: float | None, pattern: str) -> str:
    return _NOTHING if value is None else pattern.format(value)


def _significant(value: float) -> str:
    """Three digits, more where they stand before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _plain(text: str) -> str:
    """Text that stays in its table cell."""
    return text.replace("|", "\\|").replace("\n", " ")
