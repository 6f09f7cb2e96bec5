"""What the scripts that time training steps share: arguments, process groups, and rows as text and CSV."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor.tools.report import write_csv


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of `--output`, which shows the description as it is written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="CSV file, for docs/scripts/measured.py")
    return parser


def start_nccl() -> None:
    """Start the process group of CPU and GPU tensors; each rank of a node has the GPU of its number."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))


def report(label: str, rows: Sequence[dict[str, Any]], output: Path | None) -> None:
    """Print the last row, and write all of them; on the first rank only."""
    if dist.is_initialized() and dist.get_rank():
        return
    row = rows[-1]
    print(f"{label} {row['median_ms']:9.1f} ms {row['mib'] / 1024:6.1f} GiB; {row['note']}", flush=True)
    if output:
        write_csv(output, rows)
