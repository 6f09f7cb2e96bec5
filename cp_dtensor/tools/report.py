"""Rows of a benchmark run, the numbers that follow from them, and their reports: JSON and Markdown."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cp_dtensor.tools.cases import PASSES, Case, Heads
from cp_dtensor.tools.info import versions_of_packages
from cp_dtensor.tools.parsing import DOCUMENTS_SIGMA

IDEAL, OURS_PREFIX, TORCH_PREFIX = "ideal", "ours-", "torch-"
"""Beginnings of the names of methods: of one GPU with the whole sequence, of this library, of torch."""
MEASURED, REFUSED, ERROR = "measured", "refused", "error"
ERRORS = ("out", "dq", "dk", "dv")
"""Names of the tensors whose errors are measured."""


def slowest(samples_ms: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the samples of the rank with the largest median."""
    return max(samples_ms, key=statistics.median)


def spread(samples: Sequence[float]) -> tuple[float, float]:
    """Return the 20th and 80th percentile."""
    twice = [*samples] * (1 + (len(samples) == 1))  # one sample has no quantiles
    low, _, _, high = statistics.quantiles(twice, n=5, method="inclusive")
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
    def tflops(self) -> float:
        """TFLOP/s per GPU."""
        return self.case.flops(self.pass_name) / self.ranks / (self.median_ms * 1e-3) / 1e12


@dataclass(frozen=True)
class Results:
    """All rows of a run, with hardware and versions (Markdown) and command line."""

    environment: str
    command: str
    world_size: int
    rows: tuple[Row, ...]

    def _beside(self, row: Row) -> list[Row]:
        key = row.case, row.pass_name, MEASURED
        return [other for other in self.rows if (other.case, other.pass_name, other.status) == key]

    def ideal_of(self, row: Row) -> Row | None:
        """Return the fastest `ideal` of a row's case and pass."""
        ideals = (other for other in self._beside(row) if other.is_ideal)
        return min(ideals, key=lambda other: other.median_ms, default=None)

    def percent_of_ideal(self, row: Row) -> float | None:
        """Return the time of `ideal` as a percentage of the row's; more than 100 is faster than `ideal`."""
        ideal = self.ideal_of(row)
        return None if ideal is None or row.status != MEASURED else 100 * ideal.median_ms / row.median_ms

    def times_others(self, row: Row) -> float | None:
        """Return the speedup over the fastest method that is neither this library's nor `ideal`."""
        others = [each.median_ms for each in self._beside(row) if not each.method.startswith((IDEAL, OURS_PREFIX))]
        return min(others) / row.median_ms if others and row.status == MEASURED else None

    def error_ratios(self, row: Row) -> dict[str, float]:
        """Return the row's errors over those of `ideal`."""
        ideal = self.ideal_of(row)
        known = {} if ideal is None else ideal.errors
        return {name: error / known[name] for name, error in row.errors.items() if known.get(name)}

    def to_json(self) -> str:
        """Return all rows as JSON, with the derived numbers."""
        rows = []
        for row in self.rows:
            rows.append(dataclasses.asdict(row))
            if row.status == MEASURED:
                rows[-1] |= {"median_ms": row.median_ms, "spread_ms": spread(row.slowest_ms), "tflops": row.tflops}
                rows[-1] |= {"percent_of_ideal": self.percent_of_ideal(row), "times_others": self.times_others(row)}
                rows[-1] |= {"error_ratios": self.error_ratios(row)}
        return json.dumps({**vars(self), "rows": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Reads the JSON of `to_json`, also of older runs, which have other names for methods."""
        data, rows = json.loads(text), []
        for each in data["rows"]:
            known = {name: each[name] for name in (field.name for field in dataclasses.fields(Row)) if name in each}
            method = next(each[key] for key in ("method", "contestant", "baseline") if key in each)
            case = Case(**{**each["case"], "heads": Heads(**each["case"]["heads"])})
            known |= {"method": method.replace("two-level", "nested"), "case": case}
            known |= {"samples_ms": tuple(map(tuple, each["samples_ms"])), "kernels": tuple(each.get("kernels", ()))}
            rows.append(Row(**known))
        return cls(data["environment"], data["command"], data["world_size"], tuple(rows))


# Markdown

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
    """Return a Markdown table; the caller formats numbers."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    # A cell has no line breaks, and no bars of its own.
    cells = ([str(each).replace("|", "\\|").replace("\n", " ") for each in row] for row in rows)
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


def table_of(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a Markdown table of rows with equal names."""
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])


def write_json(path: Path, world_size: int, **found: object) -> None:
    """Writes what a program of docs/scripts has measured, with the machine."""
    on_gpu = torch.cuda.is_available()
    device, packages = (torch.cuda.get_device_name(), versions_of_packages()) if on_gpu else ("CPU", [])
    machine = ", ".join((f"torch {torch.__version__}", *packages, f"{world_size} x {device}"))
    path.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")


def markdown(results: Results) -> str:
    """Return the report of a benchmark run."""
    title = f"# Benchmark, {results.world_size} {'rank' if results.world_size == 1 else 'ranks'}"
    sections = [title, results.environment, f"`{results.command}`", _EXPLANATION]
    if any(not row.case.is_plain for row in results.rows):
        sections.append(_EXPLANATION_OF_MASKS)
    for title, rows in panels(results).items():
        sections.append(f"## {title}")
        if shown := [_cells(results, row) for row in rows if row.status != REFUSED]:
            columns = [name for name in shown[0] if any(row[name] != NOTHING for row in shown)]
            sections.append(markdown_table(columns, [[row[name] for name in columns] for row in shown]))
        if len(shown) < len(rows):
            sections.append(f"Not run: {_not_run(rows)}.")
    return "\n\n".join(sections) + "\n"


def _not_run(rows: Sequence[Row]) -> str:
    """Lists the methods that support none of the lengths, or some of them not, by the reason."""
    reasons: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row.status == REFUSED:
            reasons.setdefault(row.message, {}).setdefault(row.method, []).append(row.case.seq_len)
    shown = []
    for reason, refused in reasons.items():
        names = []
        for name, lengths in refused.items():
            is_all = len(lengths) == sum(row.method == name for row in rows)
            names.append(name if is_all else f"{name} of {', '.join(f'{each:,}' for each in lengths)} tokens")
        shown.append(f"{', '.join(names)}: {reason.rstrip('.')}")
    return "; ".join(shown).replace("\n", " ")


def panels(results: Results) -> dict[str, list[Row]]:
    """Return the rows of each table by its title: rows that differ in length and method only."""
    tables: dict[str, list[Row]] = {}
    for row in results.rows:
        case = row.case
        dims = "/".join(map(str, dict.fromkeys(case.dims)))
        words = [f"{case.heads.q} query and {case.heads.kv} kv heads of {dims}", case.mask, PASSES[row.pass_name]]
        words += [f"batch {case.batch}"] * (case.batch > 1) + [case.dtype, case.layout]
        words += [case.backend] * (case.backend != "auto") + [f"dropout {case.dropout:g}"] * (case.dropout > 0)
        tables.setdefault(", ".join(words), []).append(row)
    return tables


def _cells(results: Results, row: Row) -> dict[str, str]:
    """Return the cells of a row by column; `NOTHING` where there is no number."""
    cells = {"length": f"{row.case.seq_len:,}", "method": f"{row.method} ({row.note})" if row.note else row.method}
    cells |= {"kernels": ", ".join(row.kernels) or NOTHING}
    numbers: dict[str, tuple[float | None, str]] = {}
    if row.status == MEASURED:
        low, high = map(significant, spread(row.slowest_ms))
        tflops = f"{row.tflops:.0f}" if row.tflops >= 10 else significant(row.tflops)
        cells |= {"ms": significant(row.median_ms), "20-80%": f"{low}-{high}", "TFLOP/s per GPU": tflops}
        numbers["% of ideal"] = results.percent_of_ideal(row), "{:.1f}"
        numbers["x others"] = results.times_others(row), "{:.2f}"
    else:
        cells |= {"ms": f"{row.status}: {row.message}", "20-80%": NOTHING, "TFLOP/s per GPU": NOTHING}
        numbers |= dict.fromkeys(("% of ideal", "x others"), (None, ""))
    predicted = NOTHING if row.predicted_ms is None else significant(row.predicted_ms)
    cells |= {name: formatted(*number) for name, number in numbers.items()} | {"predicted ms": predicted}
    cells["CPU us"] = formatted(row.cpu_us, "{:.0f}")
    cells["extra MiB"] = formatted(None if row.extra_bytes is None else row.extra_bytes / 2**20, "{:.0f}")
    ratios = {} if row.is_ideal else results.error_ratios(row)
    for name in ERRORS:
        ratio = f" ({ratios[name]:.2f}x)" if name in ratios else ""
        cells[f"error of {name}"] = formatted(row.errors.get(name), "{:.1e}") + ratio
    return cells


def formatted(value: float | None, pattern: str) -> str:
    """Return a number in a pattern such as "{:.1f}"; `NOTHING` for None."""
    return NOTHING if value is None else pattern.format(value)


def significant(value: float) -> str:
    """Return a number with three digits, more if they are before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
