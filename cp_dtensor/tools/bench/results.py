"""Rows of a benchmark run, the numbers that follow from them, and their JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cp_dtensor.tools.bench.cases import Case, Heads

IDEAL = "ideal"
"""Prefix of the methods that compute the whole sequence on one GPU."""
OURS_PREFIX, TORCH_PREFIX = "ours-", "torch-"
MEASURED, REFUSED, ERROR = "measured", "refused", "error"


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
    predicted_ms: float | None = None
    """Time that the library's cost model predicts for a method of its own."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative Frobenius error of "out", "dq", "dk", "dv" over the whole tensors."""

    @property
    def is_ideal(self) -> bool:
        """True if this is one GPU's time for the whole sequence, to be divided by the number of ranks."""
        return self.method.startswith(IDEAL)

    @property
    def slowest_ms(self) -> tuple[float, ...]:
        """The samples of the rank with the largest median; for `ideal`, divided by the number of ranks."""
        slowest = max(self.samples_ms, key=statistics.median)
        return tuple(sample / self.ranks for sample in slowest) if self.is_ideal else slowest

    @property
    def median_ms(self) -> float:
        """The slowest rank's median time of a call."""
        return statistics.median(self.slowest_ms)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """20th and 80th percentile of the slowest rank's times."""
        return quantile(self.slowest_ms, 0.2), quantile(self.slowest_ms, 0.8)

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
        """Returns the fastest `ideal` of a row's case and pass."""
        ideals = (other for other in self._beside(row) if other.is_ideal)
        return min(ideals, key=lambda other: other.median_ms, default=None)

    def percent_of_ideal(self, row: Row) -> float | None:
        """Returns the time of `ideal` as a percentage of the row's; more than 100 is faster than `ideal`."""
        ideal = self.ideal_of(row)
        return None if ideal is None or row.status != MEASURED else 100 * ideal.median_ms / row.median_ms

    def times_others(self, row: Row) -> float | None:
        """Returns the speedup over the fastest method that is neither this library's nor `ideal`."""
        beside = self._beside(row)
        others = [each.median_ms for each in beside if not each.is_ideal and not each.method.startswith(OURS_PREFIX)]
        return min(others) / row.median_ms if others and row.status == MEASURED else None

    def error_ratios(self, row: Row) -> dict[str, float]:
        """Returns the row's errors over those of `ideal`."""
        ideal = self.ideal_of(row)
        known = {} if ideal is None else ideal.errors
        return {name: error / known[name] for name, error in row.errors.items() if known.get(name)}

    def to_json(self) -> str:
        """Returns all rows as JSON, with the derived numbers."""
        rows = [{**dataclasses.asdict(row), **self._derived(row)} for row in self.rows]
        return json.dumps({**{name: getattr(self, name) for name in _HEADER}, "rows": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Reads the JSON of `to_json`, also of runs from when methods were called contestants or baselines."""
        data = json.loads(text)
        return cls(**{name: data[name] for name in _HEADER}, rows=tuple(map(_row_of, data["rows"])))

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


_HEADER = ("environment", "command", "world_size")


def quantile(values: Sequence[float], fraction: float) -> float:
    """Returns the value below which a fraction of the values lie, interpolated linearly.

    >>> [quantile([4.0, 1.0, 2.0, 3.0], fraction) for fraction in (0, 0.5, 0.9, 1)]
    [1.0, 2.5, 3.7, 4.0]
    """
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _row_of(data: dict[str, Any]) -> Row:
    known = {each.name: data[each.name] for each in dataclasses.fields(Row) if each.name in data}
    known["method"] = next(data[key] for key in ("method", "contestant", "baseline") if key in data)
    case = data["case"]
    known["case"] = Case(**{**case, "heads": Heads(**case["heads"])})
    known["samples_ms"] = tuple(map(tuple, data["samples_ms"]))
    return Row(**known)
