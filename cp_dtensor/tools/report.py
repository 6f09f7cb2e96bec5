"""Rows of a benchmark run, the numbers that follow from them, and their reports: JSON and Markdown."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cp_dtensor.tools.cases import PASSES, Case, Heads
from cp_dtensor.tools.info import versions_of_packages
from cp_dtensor.tools.parsing import DOCUMENTS_SIGMA

IDEAL = "ideal"
"""Prefix of the methods that compute the whole sequence on one GPU."""
OURS_PREFIX, TORCH_PREFIX = "ours-", "torch-"
MEASURED, REFUSED, ERROR = "measured", "refused", "error"
ERRORS = ("out", "dq", "dk", "dv")
"""Names of the tensors whose errors are measured."""


def slowest(samples_ms: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The samples of the rank with the largest median."""
    return max(samples_ms, key=statistics.median)


def spread(samples: Sequence[float]) -> tuple[float, float]:
    """20th and 80th percentile."""
    fractions = torch.tensor([0.2, 0.8], dtype=torch.float64)
    low, high = torch.tensor(samples, dtype=torch.float64).quantile(fractions).tolist()
    return low, high


@dataclass(frozen=True)
class Row:
    """One method at one case and pass."""

    case: Case
    pass_name: str
    method: str
    status: str
    """`MEASURED`, `REFUSED` (the method does not support the case) or `ERROR`."""
    message: str = ""
    """Reason why there is no measurement."""
    note: str = ""
    """Difference of this row from others."""
    samples_ms: tuple[tuple[float, ...], ...] = ()
    """Every timed call of every rank that took part."""
    ranks: int = 1
    """Ranks that share the work; for `ideal`, the ranks that its time is divided by."""
    cpu_us: float | None = None
    """Median host time of a launch on the slowest rank."""
    extra_bytes: int | None = None
    """Peak memory above inputs and grad_out, workspaces included, on the rank that needs most."""
    kernels: tuple[str, ...] = ()
    """The kernels that took most of a GPU's time, of all ranks; empty on CPUs."""
    predicted_ms: float | None = None
    """Time that the library's cost model predicts for a method of its own."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative Frobenius error of each of `ERRORS` over the whole tensors."""

    @property
    def is_ideal(self) -> bool:
        """True if this is one GPU's time for the whole sequence, to be divided by the number of ranks."""
        return self.method.startswith(IDEAL)

    @property
    def slowest_ms(self) -> tuple[float, ...]:
        """The samples of the rank with the largest median; for `ideal`, divided by the number of ranks."""
        samples = slowest(self.samples_ms)
        return tuple(sample / self.ranks for sample in samples) if self.is_ideal else samples

    @property
    def median_ms(self) -> float:
        """The slowest rank's median time of a call."""
        return statistics.median(self.slowest_ms)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """20th and 80th percentile of the slowest rank's times."""
        return spread(self.slowest_ms)

    @property
    def tflops(self) -> float:
        """TFLOP/s per GPU."""
        return self.case.flops(self.pass_name) / self.ranks / (self.median_ms * 1e-3) / 1e12


@dataclass(frozen=True)
class Results:
    """All rows of a run, with hardware and command."""

    environment: str
    """Hardware and versions, Markdown."""
    command: str
    """Command line."""
    world_size: int
    rows: tuple[Row, ...]

    def ideal_of(self, row: Row) -> Row | None:
        """The fastest `ideal` of a row's case and pass."""
        ideals = (other for other in self._beside(row) if other.is_ideal)
        return min(ideals, key=lambda other: other.median_ms, default=None)

    def percent_of_ideal(self, row: Row) -> float | None:
        """The time of `ideal` as a percentage of the row's; more than 100 is faster than `ideal`."""
        ideal = self.ideal_of(row)
        return None if ideal is None or row.status != MEASURED else 100 * ideal.median_ms / row.median_ms

    def times_others(self, row: Row) -> float | None:
        """The speedup over the fastest method that is neither this library's nor `ideal`."""
        beside = self._beside(row)
        others = [each.median_ms for each in beside if not each.is_ideal and not each.method.startswith(OURS_PREFIX)]
        return min(others) / row.median_ms if others and row.status == MEASURED else None

    def error_ratios(self, row: Row) -> dict[str, float]:
        """The row's errors over those of `ideal`."""
        ideal = self.ideal_of(row)
        known = {} if ideal is None else ideal.errors
        return {name: error / known[name] for name, error in row.errors.items() if known.get(name)}

    def to_json(self) -> str:
        """All rows as JSON, with the derived numbers."""
        rows = [{**dataclasses.asdict(row), **self._derived(row)} for row in self.rows]
        return json.dumps({**vars(self), "rows": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Reads the JSON of `to_json`, also of older runs, which have other names for methods."""
        data = json.loads(text)
        return cls(data["environment"], data["command"], data["world_size"], tuple(map(_row_of, data["rows"])))

    def _beside(self, row: Row) -> list[Row]:
        return [
            other
            for other in self.rows
            if (other.case, other.pass_name, other.status) == (row.case, row.pass_name, MEASURED)
        ]

    def _derived(self, row: Row) -> dict[str, Any]:
        if row.status != MEASURED:
            return {}
        return {
            "median_ms": row.median_ms,
            "spread_ms": row.spread_ms,
            "tflops": row.tflops,
            "percent_of_ideal": self.percent_of_ideal(row),
            "times_others": self.times_others(row),
            "error_ratios": self.error_ratios(row),
        }


def _row_of(data: dict[str, Any]) -> Row:
    known = {each.name: data[each.name] for each in dataclasses.fields(Row) if each.name in data}
    method = next(data[key] for key in ("method", "contestant", "baseline") if key in data)
    known["method"] = method.replace("two-level", "nested")
    case = data["case"]
    known["case"] = Case(**{**case, "heads": Heads(**case["heads"])})
    known["samples_ms"] = tuple(map(tuple, data["samples_ms"]))
    known["kernels"] = tuple(data.get("kernels", ()))
    return Row(**known)


# Markdown

_COLUMNS = (
    "length", "method", "kernels", "ms", "20-80%", "TFLOP/s per GPU", "% of ideal", "x others", "predicted ms",
    "CPU us", "extra MiB",
)  # fmt: skip
NOTHING = "-"
"""Cell of a table where there is no number."""
_EXPLANATION = """\
Times are medians over calls, of the slowest rank, with their 20th and 80th percentiles, after the clocks have settled.
`ideal` is one GPU's attention over the whole sequence, alone on the machine, divided by the number of ranks, by torch;
`ideal-installed` by the kernels that this library chooses of those that are installed. The fastest of them counts.
Kernels: those that take a tenth or more of a GPU's time, of all ranks. Backward counts as 2.5 times the operations of
forward; masked pairs do not count. x others: speedup over the fastest method that is neither ours nor `ideal`.
Predicted: by the cost model of `rotate_method="auto"`. CPU us: the host's time to launch a call. Extra MiB: peak memory
above inputs and grad_out, with results and symmetric memory (of a graph, when it is captured). torch's context parallel
gets inputs that are contiguous as (B, H, S, D), since its backward fails with others; the other methods get
(B, S, H, D) memory, as in models. Errors are relative (Frobenius, over the whole tensors) to float64 on the same
inputs; in parentheses, over the errors of `ideal`. Rows with dropout have neither errors nor predictions."""
_EXPLANATION_OF_MASKS = f"""\
A name's second word is the layout, where it is not that of the title. `documents N`: of lognormal lengths (median N,
sigma {DOCUMENTS_SIGMA}, seed 0), causal inside, the last cut off at the end. `window N`: a query sees itself and the
N - 1 keys before it. `ideal-kernels` are our Triton kernels, `ideal-varlen` FlashAttention-2 as torch has it.
`torch-flex`: torch's context parallel of FlexAttention, compiled: all K/V are gathered, in the order of the load
balancer whose name follows. `ours-flex`: `context_parallel_flex_attention`, compiled likewise. `llama3-varlen`: K/V are
gathered in stages of heads, the next under the attention of the last, for FlashAttention-2 over the documents of each
rank's contiguous part; gradients are reduce-scattered in the inputs' dtype."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the caller formats numbers."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def table_of(rows: Sequence[Mapping[str, object]]) -> str:
    """A Markdown table of rows with equal names."""
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])


def write_json(path: Path, world_size: int, **found: object) -> None:
    """Writes what a program of docs/scripts has measured, with the machine."""
    device, packages = "CPU", list[str]()
    if torch.cuda.is_available():
        device, packages = torch.cuda.get_device_name(), versions_of_packages()
    machine = ", ".join((f"torch {torch.__version__}", *packages, f"{world_size} x {device}"))
    path.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")


def markdown(results: Results) -> str:
    """The report of a benchmark run."""
    sections = [
        f"# Benchmark, {results.world_size} {'rank' if results.world_size == 1 else 'ranks'}",
        results.environment,
        f"`{results.command}`",
        _EXPLANATION,
    ]
    if any(not row.case.is_plain for row in results.rows):
        sections.append(_EXPLANATION_OF_MASKS)
    for title, rows in panels(results).items():
        shown = [row for row in rows if row.status != REFUSED]
        sections += [f"## {title}", table(results, shown)] if shown else [f"## {title}"]
        if len(shown) < len(rows):
            sections.append(f"Not run: {not_run(rows)}.")
    return "\n\n".join(sections) + "\n"


def not_run(rows: Sequence[Row]) -> str:
    """The methods that support none of the lengths, or some of them not, by the reason."""
    by_reason: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row.status == REFUSED:
            by_reason.setdefault(row.message, {}).setdefault(row.method, []).append(row.case.seq_len)
    lengths = {name: {row.case.seq_len for row in rows if row.method == name} for name in {row.method for row in rows}}
    return "; ".join(
        ", ".join(
            name if {*refused} == lengths[name] else f"{name} of {', '.join(f'{each:,}' for each in refused)} tokens"
            for name, refused in methods.items()
        )
        + f": {plain_text(reason).rstrip('.')}"
        for reason, methods in by_reason.items()
    )


def panels(results: Results) -> dict[str, list[Row]]:
    """The rows of each table by its title: rows that differ in length and method only."""
    tables: dict[str, list[Row]] = {}
    for row in results.rows:
        case = row.case
        dims = "/".join(map(str, dict.fromkeys(case.dims)))
        heads = f"{case.heads.q} query and {case.heads.kv} kv heads of {dims}"
        words = [heads, case.mask, PASSES[row.pass_name]]
        words += [f"batch {case.batch}"] if case.batch > 1 else []
        words += [case.dtype, case.layout]
        words += [case.backend] if case.backend != "auto" else []
        words += [f"dropout {case.dropout:g}"] if case.dropout else []
        tables.setdefault(", ".join(words), []).append(row)
    return tables


def table(results: Results, rows: list[Row]) -> str:
    """Rows as a Markdown table, with the columns that have something in some row."""
    header = [*_COLUMNS, *(f"error of {name}" for name in ERRORS)]
    cells = [[*_cells(results, row), *_error_cells(results, row)] for row in rows]
    kept = [index for index in range(len(header)) if any(each[index] != NOTHING for each in cells)]
    return markdown_table([header[index] for index in kept], [[each[index] for index in kept] for each in cells])


def _cells(results: Results, row: Row) -> list[str]:
    name = f"{row.method} ({row.note})" if row.note else row.method
    start = [f"{row.case.seq_len:,}", plain_text(name)]
    if row.status != MEASURED:
        start += [NOTHING, plain_text(f"{row.status}: {row.message}")]
        return [*start, *[NOTHING] * (len(_COLUMNS) - len(start))]
    low, high = row.spread_ms
    return [
        *start,
        ", ".join(row.kernels) or NOTHING,
        significant(row.median_ms),
        f"{significant(low)}-{significant(high)}",
        f"{row.tflops:.0f}" if row.tflops >= 10 else significant(row.tflops),
        formatted(results.percent_of_ideal(row), "{:.1f}"),
        formatted(results.times_others(row), "{:.2f}"),
        NOTHING if row.predicted_ms is None else significant(row.predicted_ms),
        formatted(row.cpu_us, "{:.0f}"),
        formatted(None if row.extra_bytes is None else row.extra_bytes / 2**20, "{:.0f}"),
    ]


def _error_cells(results: Results, row: Row) -> list[str]:
    ratios = results.error_ratios(row)
    cells = []
    for name in ERRORS:
        cell = formatted(row.errors.get(name), "{:.1e}")
        cells.append(f"{cell} ({ratios[name]:.2f}x)" if name in ratios and not row.is_ideal else cell)
    return cells


def formatted(value: float | None, pattern: str) -> str:
    """A number in a pattern such as "{:.1f}"; `NOTHING` for None."""
    return NOTHING if value is None else pattern.format(value)


def significant(value: float) -> str:
    """A number with three digits, more if they are before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def plain_text(text: str) -> str:
    """Text that fits into a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")
