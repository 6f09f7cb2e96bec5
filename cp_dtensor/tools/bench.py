"""Time and errors of attention, beside one GPU and torch; `python -m cp_dtensor bench`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from cp_dtensor.tools.cases import PASSES, Heads
from cp_dtensor.tools.command import cases_and_methods, measure_all, measuring_parser, parsed
from cp_dtensor.tools.methods import OURS
from cp_dtensor.tools.parsing import argument, positive, positive_number
from cp_dtensor.tools.report import ERROR, REFUSED, Row

_DESCRIPTION = """\
Measures context-parallel attention: the methods of this library, torch's own context parallel, and one GPU as the
ideal, on the same inputs in the same run. Prints a table for each case. Exits with status 1 if a row ended in an error.

    torchrun --nproc-per-node 8 -m cp_dtensor bench --output 8xH200.csv
    torchrun --nproc-per-node 2 -m cp_dtensor bench --errors
    torchrun --nproc-per-node 8 -m cp_dtensor bench --mask "documents 2048" "window 4096" \\
        --methods ideal-installed ideal-varlen "ours-auto Balanced" "torch-flex PTRR" llama3-varlen
    torchrun --nproc-per-node 4 -m cp_dtensor bench --nodes 2

Columns are those of docs/benchmarks/README.md. Masked pairs do not count in TFLOP/s. percent_of_ideal: `ideal` is one
GPU's attention over the whole sequence, alone on the machine, divided by the number of ranks, by torch;
`ideal-installed` by the kernels that this library chooses; the fastest counts. times_others: speedup over the fastest
method that is neither ours nor ideal. Errors are relative (Frobenius, over the whole tensors) to float64; error_ratio:
the largest one, over that of `ideal`. A second word of a method is its layout (default: HeadTail). With --nodes, ranks
of one host stand for those of several, with TCP sockets between them; ranks of different nodes may share a GPU. torch's
context parallel gets inputs that are contiguous as (B, H, S, D), since its backward fails with others; the other
methods get (B, S, H, D) memory, as in models.
"""
_BACKENDS = ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH"]
# Options of the command line take precedence over all of these.
_DEFAULTS: dict[str, Any] = {
    "seq_lens": [2**n for n in (13, 15, 16, 17, 18)], "heads": [Heads(32, 8), Heads(32, 32), Heads(64, 8)],
    "repeats": 20, "check_up_to": 16384,
}  # fmt: skip
# A minute at most.
_ON_CPUS = {"seq_lens": [1024, 2048], "heads": [Heads(8, 2, 64)], "repeats": 5, "check_up_to": 1024}
_LAYOUTS = [f"ours-alltoall {layout}" for layout in ("Contiguous", "Striped", "MirroredBatch")]
_ERRORS: dict[str, Any] = {
    "mask": ["causal", "full"], "heads": [Heads(8, 8), Heads(8, 2)], "batch": 2, "passes": ["fwdbwd"],
    "repeats": 1, "check_up_to": sys.maxsize >> 32, "seq_lens": [4096], "backend": _BACKENDS,
    "methods": ["ideal", "ours-allgather", "ours-alltoall", "ours-symm_mem", *_LAYOUTS],
}  # fmt: skip
_ERRORS_ON_CPUS = {
    "seq_lens": [256], "backend": _BACKENDS[2:], "methods": ["ideal", "ours-allgather", "ours-alltoall", *_LAYOUTS],
}  # fmt: skip

_NODES: dict[str, Any] = {
    "seq_lens": [32768, 131072], "heads": [Heads(32, 8)], "mask": ["causal", "documents 2048", "window 4096"],
    "methods": [
        f"ours-{split}" for split in ("alltoall", "allgather", "ulysses", "auto")
    ] + [f"ours-{split}-{size}" for size in (2, 4) for split in ("nested", "hybrid", "auto")],
}  # fmt: skip


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exit with a message if an option does not fit. Also has the cases and methods."""
    parser = measuring_parser("bench", _DESCRIPTION)
    add = parser.add_argument
    about = "numbers, and dims if not 128: 16:16:192/128"
    add("--heads", type=argument(Heads.parse), nargs="+", metavar="Q:KV", help=about)
    add("--passes", choices=PASSES, nargs="+", default=PASSES)
    add("--backend", choices=("auto", *_BACKENDS), nargs="+", default=["auto"], help="allowed by sdpa_kernel")
    add("--graph", action="store_true", help="measure ours under CUDA graph replay too")
    add("--compile", action="store_true", help="measure ours under torch.compile(fullgraph=True) too")
    errors = "every backend and KV transport once; status 1 if an error is over LIMIT (1.5) times that of `ideal`"
    add("--errors", type=positive_number, nargs="?", const=1.5, metavar="LIMIT", help=errors)
    about = "ranks stand for those of N nodes; by default the ways to use two axes, causal and under masks"
    add("--nodes", type=positive, metavar="N", help=about)
    options = parsed(parser, arguments, **_DEFAULTS)
    of_nodes = {} if options.nodes is None else _NODES
    small = {} if options.use_gpu else _ON_CPUS
    errors_only = {} if options.errors is None else _ERRORS if options.use_gpu else _ERRORS | _ERRORS_ON_CPUS
    options = parsed(parser, arguments, **of_nodes | small | errors_only)
    options.passes = [name for name in PASSES if name in options.passes]
    options.cases = cases_and_methods(parser, options, compiled=OURS, heads=options.heads, backend=options.backend)
    return options


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark of the command line; rank 0 prints a line for each row that is tried, and the results."""
    options = parse_options(arguments)
    if not options.use_gpu and os.environ.get("RANK", "0") == "0":
        print("small by default without GPUs: --seq-lens and --heads ask for more", file=sys.stderr)

    rows = measure_all(
        "-m cp_dtensor bench", arguments, options, options.cases,
        lambda case, suite, rows: suite.run(case, options.passes, options.methods, rows),
    )  # fmt: skip
    sys.exit(any(row["status"] == ERROR for row in rows) or too_large(rows, options.errors))


def too_large(rows: Sequence[Row], limit: float | None) -> bool:
    """Return whether an error is over `limit` times that of `ideal`, or unknown; False without a limit."""
    ratios = [row.get("error_ratio") for row in rows if row["status"] != REFUSED]
    return limit is not None and not all(ratio is not None and ratio <= limit for ratio in ratios)
