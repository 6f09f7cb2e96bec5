"""What the scripts that time training steps have in common: the command line, the start on GPUs, and rows."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor.tools.report import MEASURED, Row, machine_columns, write_csv


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script with `--output`; its help begins with the script's docstring, as it is written."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, help="CSV file, for docs/scripts/measured.py")
    return made


def start_gpus() -> None:
    """Join the ranks that torchrun started, each with its GPU; tensors on CPUs travel by gloo."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))


def step_row(ranks: int, **columns: Any) -> Row:
    """Return a measured row of steps under a causal mask in `HeadTail()`, unless the columns tell otherwise."""
    usual = {"status": MEASURED, "mask": "causal", "layout": "HeadTail", "pass": "step"}
    return machine_columns(ranks) | usual | columns


class Rows:
    """The rows of a script. Rank 0 prints each and writes all, so that a run that ends early keeps its rows."""

    def __init__(self, output: Path | None, is_first: bool) -> None:
        self._output, self._is_first, self._rows = output, is_first, list[Row]()

    def add(self, case: str, row: Row) -> None:
        """Add a row; `case` is what its line begins with."""
        self._rows.append(row)
        if self._is_first:
            figures = f"{row['median_ms']:9.1f} ms {row['mib'] / 1024:6.1f} GiB"
            print(f"{case} {figures}; {row['note']}", flush=True)
            if self._output is not None:
                write_csv(self._output, self._rows)
