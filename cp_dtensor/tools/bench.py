"""Command line of the benchmark: options, run and tables; `python -m cp_dtensor bench`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cp_dtensor.tools.cases import PASSES, Case, Heads, grid
from cp_dtensor.tools.measure import Suite
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.parsing import (
    MASK_HELP,
    argument,
    command_parser,
    mask_argument,
    positive,
    positive_number,
    probability,
    uses_gpu,
)
from cp_dtensor.tools.ranks import Device, Ranks
from cp_dtensor.tools.report import ERROR, REFUSED, Row, measure_all

_DESCRIPTION = """\
Measures context-parallel attention: the methods of this library, torch's own context parallel, and one GPU as the
ideal, on the same inputs in the same run. Prints a table for each case. Exits with status 1 if a row ended in an error.

    torchrun --nproc-per-node 8 -m cp_dtensor bench --output 8xH200.csv
    torchrun --nproc-per-node 2 -m cp_dtensor bench --quick
    torchrun --nproc-per-node 2 -m cp_dtensor bench --errors
    torchrun --nproc-per-node 8 -m cp_dtensor bench --seq-lens 32768 --methods ours-auto --trace traces
    torchrun --nproc-per-node 8 -m cp_dtensor bench --mask "documents 2048" "window 4096" \\
        --methods ideal-installed ideal-varlen "ours-auto Balanced" "torch-flex PTRR" llama3-varlen

Columns: median, 20th and 80th percentile (low, high) of the calls of the slowest rank, after the clocks have settled.
TFLOP/s of a GPU: masked pairs do not count, backward counts as 2.5 times the operations of forward. percent_of_ideal:
`ideal` is one GPU's attention over the whole sequence, alone on the machine, divided by the number of ranks, by torch;
`ideal-installed` by the kernels that this library chooses; the fastest counts. times_others: speedup over the fastest
method that is neither ours nor ideal. predicted_ms: by the cost model of method="auto". host_us: the host's time to
launch a call. mib: peak memory above inputs and grad_out, with results and symmetric memory (of a graph, when it is
captured). kernels: those that take a tenth or more of a GPU's time. Errors are relative (Frobenius, over the whole
tensors) to float64; error_ratio: the largest one, over that of `ideal`. A second word of a method is its layout
(default: HeadTail). torch's context parallel gets inputs that are contiguous as (B, H, S, D), since its backward fails
with others; the other methods get (B, S, H, D) memory, as in models.
"""
_BACKENDS = ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH"]
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# A minute at most, also on a CPU. Options of the command line take precedence over these and the next.
_QUICK: dict[str, Any] = {
    "seq_lens": [1024, 2048], "heads": [Heads(8, 2, 64)], "repeats": 5, "row_seconds": 1.0, "check_up_to": 1024,
}  # fmt: skip
_LAYOUTS = [f"ours-alltoall {layout}" for layout in ("Contiguous", "Striped", "MirroredBatch")]
_ERRORS: dict[str, Any] = {
    "mask": ["causal", "full"], "heads": [Heads(8, 8), Heads(8, 2)], "batch": 2, "passes": ["fwdbwd"],
    "repeats": 1, "warm_ms": 0.0, "check_up_to": sys.maxsize >> 32, "seq_lens": [4096], "backend": _BACKENDS,
    "methods": ["ideal", "ours-allgather", "ours-alltoall", "ours-symm_mem", *_LAYOUTS],
}  # fmt: skip
_ERRORS_ON_CPUS = {
    "seq_lens": [256], "backend": _BACKENDS[2:], "methods": ["ideal", "ours-allgather", "ours-alltoall", *_LAYOUTS],
}  # fmt: skip


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exit with a message if an option does not fit. Also has the cases and methods."""
    parser = _parser()
    parsed = parser.parse_known_args(arguments)[0]
    use_gpu = uses_gpu(parser, parsed.device)
    if parsed.quick or not use_gpu:
        parser.set_defaults(**_QUICK)
    if parsed.errors is not None:
        parser.set_defaults(**{**_ERRORS, **({} if use_gpu else _ERRORS_ON_CPUS)})
    options = parser.parse_args(arguments)
    options.use_gpu, options.passes = use_gpu, [name for name in PASSES if name in options.passes]
    options.cases = grid(
        heads=options.heads, mask=options.mask, backend=options.backend, dropout=options.dropout,
        seq_len=options.seq_lens, batch=[options.batch], dtype=[options.dtype],
    )  # fmt: skip
    try:
        options.methods = methods_by_name(options.methods, graph=options.graph, compiled=options.compile)
        _ = [case.pairs for case in options.cases]  # refuses documents that are longer than the sequence
    except ValueError as error:
        parser.error(str(error))
    return options


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bench", _DESCRIPTION)
    what = parser.add_argument_group("cases and methods").add_argument
    lengths, heads = [2**n for n in (13, 15, 16, 17, 18)], [Heads(32, 8), Heads(32, 32), Heads(64, 8)]
    what("--seq-lens", type=positive, nargs="+", default=lengths, metavar="N", help="global lengths")
    about = "numbers, and dims if not 128: 16:16:192/128"
    what("--heads", type=argument(Heads.parse), nargs="+", default=heads, metavar="Q:KV", help=about)
    what("--batch", type=positive, default=1)
    what("--dtype", choices=_DTYPES, default="bfloat16")
    what("--mask", type=mask_argument, nargs="+", default=["causal"], metavar="MASK", help=MASK_HELP)
    what("--dropout", type=probability, nargs="+", default=[0.0], metavar="P", help="each a table; results are random")
    what("--passes", choices=PASSES, nargs="+", default=PASSES)
    methods = "such as ideal ours-auto 'ours-auto Balanced' torch-allgather 'torch-flex PTRR'"
    what("--methods", nargs="+", metavar="NAME", help=methods)
    what("--backend", choices=("auto", *_BACKENDS), nargs="+", default=["auto"], help="allowed by sdpa_kernel")
    what("--one-thread", action="store_true", help="run backward on the calling thread")
    what("--graph", action="store_true", help="measure ours under CUDA graph replay too")
    what("--compile", action="store_true", help="measure ours under torch.compile(fullgraph=True) too")
    how = parser.add_argument_group("measurement").add_argument
    how("--quick", action="store_true", help="a small run, the default without GPUs; other options take precedence")
    errors = "every backend and KV transport once; status 1 if an error is over LIMIT (1.5) times that of `ideal`"
    how("--errors", type=positive_number, nargs="?", const=1.5, metavar="LIMIT", help=errors)
    how("--repeats", type=positive, default=20, help="timed calls of a row")
    how("--row-seconds", type=positive_number, default=3.0, help="rows slower than this are repeated less often")
    how("--warm-ms", type=float, default=400, help="time of calls before a row is timed")
    checked = "errors are computed of cases with no more work than a causal sequence of this length"
    how("--check-up-to", type=positive, default=16384, metavar="N", help=checked)
    how("--device", choices=("auto", "cuda", "cpu"), default="auto")
    how("--timeout", type=positive_number, default=180, metavar="SECONDS", help="timeout of a collective")
    out = parser.add_argument_group("output").add_argument
    out("--output", type=Path, metavar="FILE", help="CSV file of all rows")
    out("--trace", type=Path, metavar="DIR", help="folder of Chrome traces, of each method that runs on all ranks")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark of the command line; rank 0 prints a line for each row that is tried, and the results."""
    options = parse_options(arguments)
    if not options.use_gpu and os.environ.get("RANK", "0") == "0":
        print("small by default without GPUs: --seq-lens and --heads ask for more", file=sys.stderr)

    def measure(case: Case, ranks: Ranks, device: Device, rows: list[Row]) -> None:
        def report(row: Row) -> None:
            if ranks.rank == 0:
                outcome = f"{row['status']}: {row['message']}" if row["message"] else f"{row['median_ms']:.4g} ms"
                print(f"{case.title}, {row['pass']}, {row['method']}: {outcome}", file=sys.stderr, flush=True)

        effort = options.repeats, options.row_seconds, options.warm_ms, options.check_up_to
        Suite(ranks, device, *effort, options.trace, report).run(case, options.passes, options.methods, rows)

    with torch.autograd.set_multithreading_enabled(not options.one_thread):
        rows = measure_all("-m cp_dtensor bench", arguments, options, options.cases, measure)
    sys.exit(any(row["status"] == ERROR for row in rows) or too_large(rows, options.errors))


def too_large(rows: Sequence[Row], limit: float | None) -> bool:
    """Return whether an error is over `limit` times that of `ideal`, or unknown; False without a limit."""
    ratios = [row.get("error_ratio") for row in rows if row["status"] != REFUSED]
    return limit is not None and not all(ratio is not None and ratio <= limit for ratio in ratios)
