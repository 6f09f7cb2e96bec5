"""Command line of the benchmark: options, run and progress; `python -m cp_dtensor bench`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

import torch

from cp_dtensor.tools.cases import PASSES, Case, Heads, Method, Source, grid
from cp_dtensor.tools.info import environment
from cp_dtensor.tools.measure import MOST_WARM_CALLS, Effort, GroupLost, Suite
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.parsing import (
    LAYOUTS,
    MASK_HELP,
    argument,
    command_parser,
    mask_argument,
    positive,
    positive_number,
    probability,
    uses_gpu,
)
from cp_dtensor.tools.ranks import Device, Failed, Ranks, leave, start
from cp_dtensor.tools.report import ERROR, ERRORS, MEASURED, REFUSED, Results, Row, markdown

_DESCRIPTION = """\
Measures context-parallel attention: the methods of this library, torch's own context parallel, and one GPU as the
ideal, on the same inputs in the same run. Exits with status 1 if a row ended in an error.

    torchrun --nproc-per-node 8 -m cp_dtensor bench --output outputs/8xH200
    torchrun --nproc-per-node 2 -m cp_dtensor bench --quick
    torchrun --nproc-per-node 2 -m cp_dtensor bench --errors
    torchrun --nproc-per-node 8 -m cp_dtensor bench --quick --seq-lens 32768 --trace traces
    torchrun --nproc-per-node 8 -m cp_dtensor bench --mask "documents 2048" "window 4096" \\
        --methods ideal-kernels ideal-varlen "ours-auto Balanced" "torch-flex PTRR" llama3-varlen
"""
_BACKENDS = ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH"]
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# For the announcement of how long a run takes.
_GPU_FLOPS, _CORE_FLOPS, _SECONDS_OF_A_ROW = 4e14, 3e10, 0.5
# A minute at most, also on a CPU. Options of the command line take precedence over these and the next.
_QUICK: dict[str, Any] = {
    "seq_lens": [1024, 2048], "heads": [Heads(8, 2)], "head_dim": 64, "repeats": 5, "row_seconds": 1.0,
    "check_up_to": 1024,
}  # fmt: skip
_LAYOUTS = [f"ours-alltoall {layout}" for layout in ("Contiguous", "Striped", "MirroredBatch")]
_ERRORS: dict[str, Any] = {
    "mask": ["causal", "full"], "heads": [Heads(8, 8), Heads(8, 2)], "head_dim": 128, "batch": 2, "passes": ["fwdbwd"],
    "repeats": 1, "warm_ms": 0.0, "check_up_to": sys.maxsize >> 32, "seq_lens": [4096], "backend": _BACKENDS,
    "methods": ["ideal", "ours-allgather", "ours-alltoall", "ours-symm_mem", *_LAYOUTS],
}  # fmt: skip
_ERRORS_ON_CPUS = {
    "seq_lens": [256], "backend": _BACKENDS[2:], "methods": ["ideal", "ours-allgather", "ours-alltoall", *_LAYOUTS],
}  # fmt: skip


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; exits with a message if an option does not fit.

    Returns:
        the options; also the cases and methods that they name, and the case and method of the trace.
    """
    parser = _parser()
    parsed = parser.parse_known_args(arguments)[0]
    use_gpu = uses_gpu(parser, parsed.device)
    if parsed.quick or not use_gpu:
        parser.set_defaults(**_QUICK)
    if parsed.errors is not None:
        parser.set_defaults(**{**_ERRORS, **({} if use_gpu else _ERRORS_ON_CPUS)})
    parsed = parser.parse_args(arguments)
    cases = grid(
        parsed.seq_lens, parsed.heads, parsed.mask, parsed.backend, parsed.dropout,
        head_dim=parsed.head_dim, batch=parsed.batch, dtype=parsed.dtype, layout=parsed.layout,
    )  # fmt: skip
    try:
        methods = methods_by_name(parsed.methods, graph=parsed.graph, compiled=parsed.compile, replay=parsed.replay)
        _ = [case.pairs for case in cases]  # refuses documents that are longer than the sequence
    except ValueError as error:
        parser.error(str(error))
    without_rows = [method.name for method in methods if not any(map(method.has_row, cases))]
    if parsed.methods and without_rows:
        parser.error(f"--methods: {', '.join(without_rows)} cannot compute any of these masks and dropouts")
    sharing = {method.name: method for method in methods if not method.alone}
    if not parsed.trace and (parsed.trace_method or parsed.trace_seq_len):
        parser.error("--trace-method and --trace-seq-len need --trace")
    if parsed.trace and not sharing:
        parser.error("--trace: none of the chosen methods runs on all ranks")
    for name, allowed in (("trace_method", [*sharing]), ("trace_seq_len", parsed.seq_lens)):
        value = getattr(parsed, name)
        if value not in (None, *allowed):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option}: expected one of {', '.join(map(str, allowed))}, got {value!r}")
    parsed.use_gpu, parsed.cases, parsed.methods = use_gpu, cases, methods
    parsed.passes = tuple(name for name in PASSES if name in parsed.passes)
    parsed.trace_case = next((case for case in cases if case.seq_len == parsed.trace_seq_len), cases[0])
    parsed.trace_method = sharing.get(parsed.trace_method, next(iter(sharing.values()), methods[0]))
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bench", _DESCRIPTION)
    what = parser.add_argument_group("cases and methods").add_argument
    lengths, heads = [2**n for n in (13, 15, 16, 17, 18)], [Heads(32, 8), Heads(32, 32), Heads(64, 8)]
    what("--seq-lens", type=positive, nargs="+", default=lengths, metavar="N", help="global lengths")
    what("--heads", type=argument(Heads.parse), nargs="+", default=heads, metavar="Q:KV", help="such as 32:8 32:32")
    what("--head-dim", type=positive, default=128)
    what("--batch", type=positive, default=1)
    what("--dtype", choices=_DTYPES, default="bfloat16")
    what("--mask", type=mask_argument, nargs="+", default=["causal"], help=f"each makes a table: {MASK_HELP}")
    what("--layout", choices=LAYOUTS, default="HeadTail", help="partition of the tokens over the ranks")
    dropped = "each makes a table: probabilities to drop a softmax weight; rows with dropout have no errors"
    what("--dropout", type=probability, nargs="+", default=[0.0], metavar="P", help=dropped)
    what("--passes", choices=PASSES, nargs="+", default=list(PASSES))
    methods = "such as ideal ours-allgather 'ours-symm_mem Balanced' (with a layout of its own) 'torch-flex PTRR'"
    what("--methods", nargs="+", metavar="NAME", help=methods)
    what("--backend", choices=("auto", *_BACKENDS), nargs="+", default=["auto"], help="allowed by sdpa_kernel")
    what("--one-thread", action="store_true", help="run backward on the calling thread")
    what("--graph", action="store_true", help="measure ours under CUDA graph replay too")
    what("--replay", action="store_true", help="measure ours with replay=True too")
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
    how("--seed", type=int, default=0)
    how("--device", choices=("auto", "cuda", "cpu"), default="auto")
    how("--timeout", type=positive_number, default=180, metavar="SECONDS", help="timeout of a collective")
    out = parser.add_argument_group("output").add_argument
    out("--output", type=Path, metavar="DIR", help="folder of bench.json and bench.md")
    out("--trace", type=Path, metavar="DIR", help="folder of a Chrome trace of each rank")
    out("--trace-method", metavar="NAME", help="default: the first that runs on all ranks")
    out("--trace-seq-len", type=int, metavar="N", help="one of --seq-lens; default: the shortest")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark of the command line; rank 0 writes and prints the results."""
    options = parse_options(arguments)
    ranks, device, command = start("-m cp_dtensor bench", arguments, options.use_gpu, options.timeout)
    with torch.autograd.set_multithreading_enabled(not options.one_thread):
        rows, lost, traced = _measure(options, ranks, device, command)
    if ranks.rank == 0:
        print(_write(Results(environment(), command, ranks.world_size, tuple(rows)), options.output), flush=True)
    end(ranks, lost)
    sys.exit(not traced or any(row.status == ERROR for row in rows) or too_large(rows, options.errors))


def too_large(rows: Sequence[Row], limit: float | None) -> bool:
    """True if an error is more than `limit` times that of `ideal`, or is not known of a row; False without a limit."""
    results = Results("", "", 0, tuple(rows))
    ratios = [results.error_ratios(row) for row in rows]
    return limit is not None and not all({*each} == {*ERRORS} and max(each.values()) <= limit for each in ratios)


def end(ranks: Ranks, lost: GroupLost | None) -> None:
    """Leaves the process group after rank 0 has written; ends the process if the group is lost."""
    if lost is not None:
        print(f"stopped: {lost}", file=sys.stderr, flush=True)
        ranks.gather(None)  # rank 0 has written
        # An orderly exit would wait for collectives that never finish.
        os.kill(os.getpid(), signal.SIGKILL)
    leave()


def _measure(
    options: argparse.Namespace, ranks: Ranks, device: Device, command: str
) -> tuple[Sequence[Row], GroupLost | None, bool]:
    """Measure all rows; returns also the error that ended the run early, and False if a trace is missing."""
    finished: list[Row] = []
    current: list[Row] = []  # of the case that is running, without errors
    show = progress(sum(1 for _ in _rows_to_run(options, ranks.world_size)), visible=ranks.rank == 0)
    if ranks.rank == 0:
        print(announcement(options, ranks.world_size), file=sys.stderr, flush=True)

    def report(row: Row) -> None:
        current.append(row)
        show(row)
        if ranks.rank == 0:  # so that a run that ends early keeps its rows
            _write(Results(environment(), command, ranks.world_size, (*finished, *current)), options.output)

    effort = Effort(options.repeats, options.row_seconds, options.warm_ms)
    suite = Suite(ranks, device, effort, Source(options.seed, device.torch_device), options.check_up_to, report)
    try:
        for case in options.cases:
            finished += suite.run(case, options.passes, options.methods)
            current.clear()
        if options.trace is not None:
            suite.trace(options.trace_case, options.trace_method, options.trace)
    except GroupLost as lost:
        return [*finished, *current], lost, False
    except Failed as failure:
        print(f"no trace: {failure}", file=sys.stderr, flush=True)
        return finished, None if failure.alike else GroupLost(str(failure)), False
    return finished, None, True


def _write(results: Results, folder: Path | None) -> str:
    """Returns the report, and writes it and the rows if there is a folder."""
    if folder is None:
        return markdown(results)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(results.to_json() + "\n")
    (folder / "bench.md").write_text(markdown(results))
    return markdown(results)


def _rows_to_run(options: argparse.Namespace, world_size: int) -> Iterator[tuple[Case, str, Method]]:
    """Yields case, pass and method of each row that is not refused before it is tried."""
    for case, name, method in product(options.cases, options.passes, options.methods):
        if method.has_row(case) and method.refusal(case, world_size) is None:
            yield case, name, method


def announcement(options: argparse.Namespace, world_size: int) -> str:
    """Return a line about what is going to run, and about how long that takes."""
    effort = Effort(options.repeats, options.row_seconds, options.warm_ms)
    speed = _GPU_FLOPS if options.use_gpu else _CORE_FLOPS * (os.cpu_count() or 1)
    rows = list(_rows_to_run(options, world_size))
    seconds = _SECONDS_OF_A_ROW * len(rows)
    for case, name, method in rows:
        shares = world_size if options.use_gpu and not method.alone else 1  # ranks on CPUs share the cores
        call_ms = 1e3 * case.flops(name) / speed / shares
        calls = 3 + min(options.warm_ms / call_ms, MOST_WARM_CALLS) + effort.repeats_of(call_ms)
        seconds += calls * call_ms / 1e3
    lengths = " to ".join(f"{each:,}" for each in sorted({options.cases[0].seq_len, options.cases[-1].seq_len}))
    what = f"{len(rows)} rows of {len({method.name for *_, method in rows})} methods on {world_size}"
    ranks = "GPUs" if options.use_gpu else "CPU ranks"
    small = "" if options.use_gpu else "; small by default without GPUs, --seq-lens and --heads ask for more"
    duration = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{max(seconds, 1):.0f} seconds"
    return f"bench: {what} {ranks}, {lengths} tokens, about {duration}{small}"


def progress(total: int, visible: bool) -> Callable[[Row], None]:
    """Return what prints a line on stderr for each finished row of `total`, if `visible`; none for refused rows."""
    numbers, began = count(1), time.monotonic()

    def report(row: Row) -> None:
        if visible and row.status != REFUSED:
            number = next(numbers)
            left = (time.monotonic() - began) / number * max(total - number, 0)
            outcome = f"{row.median_ms:.3g} ms" if row.status == MEASURED else f"{row.status}: {row.message}"
            case = f"{row.case.heads.q}:{row.case.heads.kv} heads, {row.case.seq_len:,}"
            text = f"[{number}/{total}, {left:.0f} s left] {case}, {row.pass_name}, {row.method}: {outcome}"
            print(text, file=sys.stderr, flush=True)

    return report
