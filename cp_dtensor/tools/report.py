"""Rows of measurements and the machine that made them, as a CSV file for programs and a Markdown table for people."""

from __future__ import annotations

import csv
import platform
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor import GPUS
from cp_dtensor.attention.backends.packages import installed_version
from cp_dtensor.attention.backends.select import PACKAGES

Row = dict[str, Any]
"""The values of a row by column, named as in docs/benchmarks/measured.csv. None where there is nothing to tell."""
MEASURED, REFUSED, ERROR = "measured", "refused", "error"
"""Values of the column "status". Refused: the method does not support the case; the column "message" has the reason."""


def versions() -> Iterator[tuple[str, str]]:
    """Yield what is installed: names and versions.

    Raises:
        RuntimeError: torch refuses another cuDNN than that it was built with.
    """
    for package in ("cp_dtensor", "torch", "triton", "sgl-flash-mla", "fla-core"):
        version = torch.__version__ if package == "torch" else installed_version(package)
        if version is not None:
            yield package, version
    yield "Python", platform.python_version()
    if torch.cuda.is_available():
        number = torch.backends.cudnn.version() or 0  # 91900 is 9.19.0
        yield "CUDA", str(torch.version.cuda)
        yield "cuDNN", f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        if dist.is_available() and dist.is_nccl_available():
            yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
        yield from ((package.distribution, package.version) for package in PACKAGES if package.version)


def machine_columns(count: int, nodes: int | None = None) -> dict[str, str]:
    """Return the columns of a row that tell of the machine: so many of its devices, such as 8xH200, and versions.

    Of ranks that stand for `nodes` also nodes x ranks of each: "2xH200 as 2x2", where two ranks share each GPU.
    """
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shown = name.removeprefix("NVIDIA ").split(" ")[0]
    stand_for = "" if nodes is None else f" as {nodes}x{count // nodes}"
    if nodes is not None and torch.cuda.is_available():
        count = min(count, torch.cuda.device_count())
    return {
        "machine": f"{count}x{shown}{stand_for}",
        "versions": ", ".join(f"{what} {version}" for what, version in versions()),
    }


def gpu_name() -> str | None:
    """Return the name in `GPUS` of the current GPU; None for others, whose peaks are not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return None if "PCIe" in name or "NVL" in name else next((each for each in GPUS if each in name.split()), None)


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
