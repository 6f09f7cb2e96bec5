"""Rows of docs/benchmarks/measured.csv, from the JSON of `python -m cp_dtensor bench` and `train-bench`.

python docs/scripts/measured.py 8xH200-packages outputs/bench.json

Replaces the rows of that table, or adds them. docs/benchmarks/README.md says what the columns are.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "measured.csv"
COLUMNS = (
    "table", "machine", "versions", "commit", "tokens", "mask", "layout", "q_heads", "kv_heads", "head_dim", "method",
    "pass", "median_ms", "low_ms", "high_ms", "tflops", "host_us", "mib", "kernels", "note",
)  # fmt: skip
MODES = ("graph", "replay", "compiled", "FA4")
"""Words of a method that are not the name of its layout."""
Row = dict[str, str]
"""One measurement by column; empty where there is no such number."""


def read(path: Path = PATH) -> list[Row]:
    """Return all rows."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: Iterable[Mapping[str, object]], path: Path = PATH) -> None:
    """Write all rows, those of a table one after the other."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: str(row["table"])))


def rows_of(data: Mapping[str, Any], table: str, commit: str) -> list[Row]:
    """Return the measured rows of a report of `bench` or `train-bench`; refusals and errors are left out."""
    versions, devices = data["environment"].split("  \n")
    gpu = devices.split(" x ")[-1].removesuffix(" visible").removeprefix("NVIDIA ").split(" ")[0]
    about = {"table": table, "machine": f"{data['world_size']}x{gpu}", "versions": versions, "commit": commit}
    kind = _step if "peak_tflops" in data else _call
    return [about | kind(row, data) for row in data["rows"] if row["status"] == "measured"]


def _call(row: Mapping[str, Any], _: Mapping[str, Any]) -> Row:
    memory = row["extra_bytes"]
    return {
        **_case(row["case"]),
        **_method(row),
        "pass": row["pass_name"],
        "tflops": f"{row['tflops']:.1f}",
        "host_us": "" if row["cpu_us"] is None else f"{row['cpu_us']:.0f}",
        "mib": "" if memory is None else f"{memory / 2**20:.0f}",
        # Torch's small kernels and copies have long names, which say nothing of the method.
        "kernels": " + ".join(name for name in row.get("kernels", ()) if "(" not in name and "<" not in name),
        "note": " ".join(f"{name} {error:.2e}" for name, error in row["errors"].items()),
    }


def _step(row: Mapping[str, Any], data: Mapping[str, Any]) -> Row:
    job, first = row["job"], row["turns"][0]
    size, losses = job["size"], first["losses"]
    notes = [f"{size['layers']} layers of {size['dim']} and {size['ffn']}", *["checkpointing"] * job["checkpointed"]]
    notes += [*["layer inputs in host memory"] * job.get("offloaded", False)]
    notes += [f"losses {losses[0]:.4f} to {losses[-1]:.4f}", f"gradient norm {first['gradient_norm']:.5f}"]
    return {
        **_case(job["case"]),
        **_method(row),
        "pass": "step",
        "tflops": f"{row['mfu_percent'] / 100 * data['peak_tflops']:.1f}",
        "mib": f"{row['peak_bytes'] / 2**20:.0f}",
        "note": "; ".join(notes),
    }


def _case(case: Mapping[str, Any]) -> Row:
    heads = case["heads"]
    dim = heads.get("dim") or case["head_dim"]
    v_dim = heads.get("v_dim") or dim
    dims = str(dim) if v_dim == dim else f"{dim}/{v_dim}"
    numbers = {"tokens": case["seq_len"], "q_heads": heads["q"], "kv_heads": heads["kv"]}
    return {name: str(value) for name, value in numbers.items()} | {
        "mask": case["mask"], "layout": case["layout"], "head_dim": dims
    }  # fmt: skip


def _method(row: Mapping[str, Any]) -> Row:
    """Return method and times; a layout in the method's name goes before that of the case."""
    name, *words = row["method"].split()
    low, high = row["spread_ms"]
    times = {"median_ms": row["median_ms"], "low_ms": low, "high_ms": high}
    layout = [word for word in words if word not in MODES]
    return {
        "method": " ".join([name, *(word for word in words if word in MODES)]),
        **({"layout": layout[0]} if layout else {}),
        **{column: f"{ms:.4f}" for column, ms in times.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="name of the table, such as 8xH200-packages")
    parser.add_argument("report", type=Path, help="bench.json or train.json, written by --output")
    parser.add_argument("--commit", help="commit that was measured (default: that of this folder)")
    parser.add_argument("--csv", type=Path, default=PATH)
    given = parser.parse_args(arguments)
    here = ["git", "-C", str(PATH.parent), "rev-parse", "--short", "HEAD"]
    commit = given.commit or subprocess.run(here, check=True, capture_output=True, text=True).stdout.strip()
    found = rows_of(json.loads(given.report.read_text()), given.table, commit)
    write([row for row in read(given.csv) if row["table"] != given.table] + found, given.csv)


if __name__ == "__main__":
    main()
