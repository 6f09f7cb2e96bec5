"""Rows of measurements, and their two forms: a CSV file for programs and a Markdown table for people."""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from cp_dtensor.tools.info import versions
from cp_dtensor.tools.ranks import Device, Failed, Ranks, end, start

Row = dict[str, Any]
"""The values of a row by column, named as in docs/benchmarks/measured.csv. None where there is nothing to tell."""
MEASURED, REFUSED, ERROR = "measured", "refused", "error"
"""Values of the column "status". Refused: the method does not support the case; the column "message" has the reason."""


def place(world_size: int) -> Row:
    """Return the machine and the versions of a measurement on so many ranks, as columns."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    device = name.removeprefix("NVIDIA ").split(" ")[0]
    return {
        "machine": f"{world_size}x{device}",
        "versions": ", ".join(f"{what} {version}" for what, version in versions()),
    }


def times_of(by_rank: Sequence[Sequence[float]], ranks: int = 1) -> Row:
    """Return median, 20th and 80th percentile of the rank with the largest median, divided by a number of ranks.

    >>> times_of([[1.0, 1.0], [2.0, 4.0]], ranks=2)
    {'median_ms': 1.5, 'low_ms': 1.2, 'high_ms': 1.8}
    """
    slowest = [each / ranks for each in max(by_rank, key=statistics.median)]
    low, _, _, high = statistics.quantiles(slowest * (1 + (len(slowest) == 1)), n=5, method="inclusive")
    return {"median_ms": statistics.median(slowest), "low_ms": low, "high_ms": high}


def significant(value: float) -> str:
    """Return a number with three digits, more if they are before the point.

    >>> [significant(value) for value in (1234.5, 2.0, 0.00012)]
    ['1234', '2.00', '1.2e-04']
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:#.3g}"


def table_of(rows: Sequence[Row], without: Sequence[str]) -> str:
    """Return a Markdown table of the rows of one case that were not refused, and the methods of the others by reason.

    Columns without values are left out, and those in `without`, which all rows have alike.
    """
    told = [row for row in rows if row["status"] != REFUSED]
    columns = dict.fromkeys(name for row in told for name, value in row.items() if value is not None)
    names = [name for name in columns if name not in (*without, "status", "message")]
    names += ["message"] * ("message" in columns)
    lines = [names, ["---"] * len(names), *([_cell(row.get(name)) for name in names] for row in told)]
    refused: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["status"] == REFUSED:
            refused.setdefault(row["message"].rstrip("."), {})[row["method"]] = None
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines if told)
    return text + "".join(f"\n\nNot run: {', '.join(methods)}: {reason}." for reason, methods in refused.items())


def _cell(value: object) -> str:
    text = significant(value) if isinstance(value, float) else "-" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows under a header of all their columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def measure_all(
    program: str, arguments: Sequence[str], options: argparse.Namespace, problems: Iterable[Any],
    measure: Callable[[Any, Ranks, Device, list[Row]], None],
) -> list[Row]:  # fmt: skip
    """Start the ranks and measure problems; rank 0 prints a table of each, and writes the file of the options.

    A problem has a `title`, and `columns()` that all its rows have alike. If `measure` raises `Failed`, no more can be
    measured, and the process ends.
    """
    ranks, device, command = start(program, arguments, options.use_gpu, options.timeout)
    about, rows, lost = place(ranks.world_size), list[Row](), None
    if ranks.rank == 0:
        print(f"{about['machine']}, {about['versions']}\n\n`{command}`", flush=True)
    for problem in problems:
        first = len(rows)
        try:
            measure(problem, ranks, device, rows)
        except Failed as failure:
            lost = failure
        if ranks.rank == 0:  # now, so that a run that ends early keeps its rows
            print(f"\n## {problem.title}\n\n{table_of(rows[first:], [*problem.columns(), 'layout'])}", flush=True)
            if options.output is not None:
                write_csv(options.output, [{**about, **row} for row in rows])
        if lost is not None:
            break
    end(ranks, lost)
    return rows
