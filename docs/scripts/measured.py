"""Rows of docs/benchmarks/measured.csv; new ones come from the CSV of `python -m cp_dtensor bench` and `train-bench`.

python docs/scripts/measured.py 8xH200-packages outputs/run.csv

Replaces the rows of that table by those of one or more runs, or adds them. docs/benchmarks/README.md says what the
columns are.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "measured.csv"
COLUMNS = (
    "table", "machine", "versions", "commit", "tokens", "mask", "layout", "q_heads", "kv_heads", "head_dim", "method",
    "pass", "median_ms", "low_ms", "high_ms", "tflops", "host_us", "mib", "kernels", "note",
)  # fmt: skip
DIGITS = {"median_ms": 4, "low_ms": 4, "high_ms": 4, "tflops": 1, "host_us": 0, "mib": 0}
"""Digits behind the point that are kept."""
MODES = ("graph", "replay", "compiled", "FA4")
"""Words of a method that are not the name of its layout, which has a column."""
NOTES = ("error_out", "error_dq", "error_dk", "error_dv", "first_loss", "last_loss", "difference")
"""Columns of a run that go into the note."""
Row = dict[str, str]
"""One measurement by column; empty where there is no such number."""


def read(path: Path = PATH) -> list[Row]:
    """Return all rows."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: Iterable[Mapping[str, str]], path: Path = PATH) -> None:
    """Write all rows, those of a table one after the other."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: row["table"]))


def row_of(run: Mapping[str, str], table: str, commit: str) -> Row:
    """Return a row of a run as one of a table."""
    row = {name: run.get(name) or "" for name in COLUMNS} | {"table": table, "commit": commit}
    row |= {name: f"{float(row[name]):.{digits}f}" for name, digits in DIGITS.items() if row[name]}
    name, *words = row["method"].split()
    row["method"] = " ".join([name, *(word for word in words if word in MODES)])
    notes = [f"{name} {run[name]}" for name in NOTES if run.get(name)]
    row["note"] = "; ".join(note for note in (row["note"], *notes) if note)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="name of the table, such as 8xH200-packages")
    parser.add_argument("runs", type=Path, nargs="+", help="CSV files written by --output")
    parser.add_argument("--commit", help="commit that was measured (default: that of this folder)")
    parser.add_argument("--csv", type=Path, default=PATH)
    given = parser.parse_args(arguments)
    here = ["git", "-C", str(PATH.parent), "rev-parse", "--short", "HEAD"]
    commit = given.commit or subprocess.run(here, check=True, capture_output=True, text=True).stdout.strip()
    rows = [row for run in given.runs for row in read(run)]
    found = [row_of(row, given.table, commit) for row in rows if row["status"] == "measured"]
    write([row for row in read(given.csv) if row["table"] != given.table] + found, given.csv)


if __name__ == "__main__":
    main()
