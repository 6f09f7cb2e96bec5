"""Command line of the benchmark: options, run and progress."""

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
from cp_dtensor.tools.measure import MOST_WARM_CALLS, Effort
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.parsing import (
    LAYOUTS,
    MASK_HELP,
    argument,
    command_parser,
    mask_by_name,
    positive,
    positive_number,
    uses_gpu,
)
from cp_dtensor.tools.ranks import Device, Failed, Ranks, leave, start
from cp_dtensor.tools.report import ERROR, MEASURED, REFUSED, Results, Row, markdown
from cp_dtensor.tools.suite import GroupLost, Suite

_DESCRIPTION = """\
Measures context-parallel attention: the methods of this library, torch's own context parallel, and one GPU as the
ideal, on the same inputs in the same run. Exits with status 1 if a row ended in an error.

    torchrun --nproc-per-node 8 -m cp_dtensor bench --output docs/benchmarks/8xH200
    torchrun --nproc-per-node 2 -m cp_dtensor bench --quick
    torchrun --nproc-per-node 2 -m cp_dtensor bench --errors
    torchrun --nproc-per-node 8 -m cp_dtensor bench --quick --seq-lens 32768 --trace traces
    torchrun --nproc-per-node 8 -m cp_dtensor bench --mask "documents 2048" "window 4096" \\
        --methods ideal-kernels ideal-varlen "ours-auto Balanced" "torch-flex PTRR" llama3-varlen
"""
_BACKENDS = ("auto", "CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# For the announcement of how long a run takes.
_GPU_FLOPS, _CORE_FLOPS = 4e14, 3e10
_SECONDS_OF_A_ROW = 0.5
# A minute at most, also on a CPU. Options of the command line take precedence.
_QUICK: dict[str, Any] = {
    "seq_lens": [1024, 2048],
    "heads": [Heads(8, 2)],
    "head_dim": 64,
    "repeats": 5,
    "row_seconds": 1.0,
    "check_up_to": 1024,
}
_TRANSPORTS = ["ours-allgather", "ours-alltoall"]
_LAYOUTS = [f"ours-alltoall {layout}" for layout in ("Contiguous", "Striped", "MirroredBatch")]
_BACKENDS_OF_CPUS = ["FLASH_ATTENTION", "MATH"]
_ERRORS: dict[str, Any] = {
    "mask": ["causal", "full"], "heads": [Heads(8, 8), Heads(8, 2)], "head_dim": 128, "batch": 2, "passes": ["fwdbwd"],
    "repeats": 1, "warm_ms": 0.0, "check_up_to": sys.maxsize >> 32,
}  # fmt: skip
_ERRORS_ON_GPU: dict[str, Any] = {
    "seq_lens": [4096], "backend": ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION", *_BACKENDS_OF_CPUS],
    "methods": ["ideal", *_TRANSPORTS, "ours-symm_mem", *_LAYOUTS],
}  # fmt: skip
_ERRORS_ON_CPU: dict[str, Any] = {
    "seq_lens": [256], "backend": _BACKENDS_OF_CPUS, "methods": ["ideal", *_TRANSPORTS, *_LAYOUTS],
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
        parser.set_defaults(**_ERRORS, **(_ERRORS_ON_GPU if use_gpu else _ERRORS_ON_CPU))
    parsed = parser.parse_args(arguments)
    cases = grid(
        parsed.seq_lens, parsed.heads, parsed.mask, parsed.backend, parsed.dropout,
        head_dim=parsed.head_dim, batch=parsed.batch, dtype=parsed.dtype, layout=parsed.layout,
    )  # fmt: skip
    try:
        methods = methods_by_name(parsed.methods, graph=parsed.graph, compiled=parsed.compile, replay=parsed.replay)
        refuse_masks_beyond(cases)
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
    if parsed.trace_method not in (None, *sharing):
        parser.error(f"--trace-method: expected one of {', '.join(sharing)}, got {parsed.trace_method!r}")
    if parsed.trace_seq_len not in (None, *parsed.seq_lens):
        parser.error(
            f"--trace-seq-len: expected one of {', '.join(map(str, parsed.seq_lens))}, got {parsed.trace_seq_len}"
        )
    parsed.use_gpu, parsed.cases, parsed.methods = use_gpu, cases, methods
    parsed.passes = tuple(name for name in PASSES if name in parsed.passes)
    parsed.trace_case = next((case for case in cases if case.seq_len == parsed.trace_seq_len), cases[0])
    parsed.trace_method = sharing.get(parsed.trace_method, next(iter(sharing.values()), methods[0]))
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bench", _DESCRIPTION)
    lengths = [2**n for n in (13, 15, 16, 17, 18)]
    what = parser.add_argument_group("cases and methods")
    what.add_argument("--seq-lens", type=positive, nargs="+", default=lengths, metavar="N", help="global lengths")
    heads = [Heads(32, 8), Heads(32, 32), Heads(64, 8)]
    what.add_argument("--heads", type=_heads, nargs="+", default=heads, metavar="Q:KV", help="such as 32:8 32:32")
    what.add_argument("--head-dim", type=positive, default=128)
    what.add_argument("--batch", type=positive, default=1)
    what.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    what.add_argument(
        "--mask", type=mask_argument, nargs="+", default=["causal"], help=f"each makes a table: {MASK_HELP}"
    )
    what.add_argument("--layout", choices=LAYOUTS, default="HeadTail", help="partition of the tokens over the ranks")
    dropped = "each makes a table: probabilities to drop a softmax weight; rows with dropout have no errors"
    what.add_argument("--dropout", type=_probability, nargs="+", default=[0.0], metavar="P", help=dropped)
    what.add_argument("--passes", choices=PASSES, nargs="+", default=list(PASSES))
    methods = "such as ideal ours-allgather 'ours-symm_mem Balanced' (with a layout of its own) 'torch-flex PTRR'"
    what.add_argument("--methods", nargs="+", metavar="NAME", help=methods)
    what.add_argument("--backend", choices=_BACKENDS, nargs="+", default=["auto"], help="allowed by sdpa_kernel")
    what.add_argument("--one-thread", action="store_true", help="run backward on the calling thread")
    what.add_argument("--graph", action="store_true", help="measure ours under CUDA graph replay too")
    what.add_argument("--replay", action="store_true", help="measure ours with replay=True too")
    what.add_argument("--compile", action="store_true", help="measure ours under torch.compile(fullgraph=True) too")
    how = parser.add_argument_group("measurement")
    quick = "a small run, the default without GPUs; other options take precedence"
    how.add_argument("--quick", action="store_true", help=quick)
    errors = "every backend and KV transport once; status 1 if an error is over LIMIT (1.5) times that of `ideal`"
    how.add_argument("--errors", type=positive_number, nargs="?", const=1.5, metavar="LIMIT", help=errors)
    how.add_argument("--repeats", type=positive, default=20, help="timed calls of a row")
    how.add_argument(
        "--row-seconds", type=positive_number, default=3.0, help="rows slower than this are repeated less often"
    )
    how.add_argument("--warm-ms", type=float, default=400, help="time of calls before a row is timed")
    checked = "errors are computed of cases with no more work than a causal sequence of this length"
    how.add_argument("--check-up-to", type=positive, default=16384, metavar="N", help=checked)
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    how.add_argument("--timeout", type=positive_number, default=180, metavar="SECONDS", help="timeout of a collective")
    out = parser.add_argument_group("output")
    out.add_argument("--output", type=Path, metavar="DIR", help="folder of bench.json and bench.md")
    out.add_argument("--trace", type=Path, metavar="DIR", help="folder of a Chrome trace of each rank")
    out.add_argument("--trace-method", metavar="NAME", help="default: the first that runs on all ranks")
    out.add_argument("--trace-seq-len", type=int, metavar="N", help="one of --seq-lens; default: the shortest")
    return parser


_heads = argument(Heads.parse)


@argument
def _probability(text: str) -> float:
    """The probability of a command-line argument, less than 1."""
    if not text.replace(".", "", 1).isdecimal() or float(text) >= 1:
        raise ValueError(f"expected a probability from 0 to less than 1, got {text}")
    return float(text)


@argument
def mask_argument(text: str) -> str:
    """The name of a mask of a command-line argument."""
    mask_by_name(text, seq_len=1)  # refuses other names
    return text


def refuse_masks_beyond(cases: Sequence[Case]) -> None:
    """Refuses masks that do not fit the lengths of their cases.

    Raises:
        ValueError: a mask of documents that are longer than the sequence.
    """
    for case in cases:
        _ = case.pairs


# Run


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark of the command line; rank 0 writes and prints the results."""
    options = parse_options(arguments)
    ranks, device, command = start("-m cp_dtensor bench", arguments, options.use_gpu, options.timeout)
    with torch.autograd.set_multithreading_enabled(not options.one_thread):
        rows, lost, traced = _measure(options, ranks, device, command)
    if ranks.rank == 0:
        _write(Results(environment(), command, ranks.world_size, tuple(rows)), options, final=True)
    end(ranks, lost)
    sys.exit(not traced or any(row.status == ERROR for row in rows) or too_large(rows, options.errors))


def too_large(rows: Sequence[Row], limit: float | None) -> bool:
    """True if an error is more than `limit` times that of `ideal`, or is not known of a row; False without a limit."""
    results = Results("", "", 0, tuple(rows))
    ratios = [results.error_ratios(row) for row in rows]
    return limit is not None and not all(len(each) == 4 and max(each.values()) <= limit for each in ratios)


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
    """All rows, the error that ended the run early, and False if there is no trace that was asked for."""
    finished: list[Row] = []
    current: list[Row] = []  # of the case that is running, without errors
    total = sum(1 for _ in _rows_to_run(options, ranks.world_size))
    show = progress(total, visible=ranks.rank == 0)
    if ranks.rank == 0:
        print(announcement(options, ranks.world_size), file=sys.stderr, flush=True)

    def report(row: Row) -> None:
        current.append(row)
        show(row)
        if ranks.rank == 0:  # so that a run that ends early keeps its rows
            rows = (*finished, *current)
            _write(Results(environment(), command, ranks.world_size, rows), options, final=False)

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


def _write(results: Results, options: argparse.Namespace, final: bool) -> None:
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "bench.json").write_text(results.to_json() + "\n")
        (options.output / "bench.md").write_text(markdown(results))
    if final:
        print(markdown(results), flush=True)


def _rows_to_run(options: argparse.Namespace, world_size: int) -> Iterator[tuple[Case, str, Method]]:
    """Case, pass and method of each row that is not refused before it is tried."""
    for case, name, method in product(options.cases, options.passes, options.methods):
        if method.has_row(case) and method.refusal(case, world_size) is None:
            yield case, name, method


def announcement(options: argparse.Namespace, world_size: int) -> str:
    """A line about what is going to run, and about how long that takes."""
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
    ranks = f"{world_size} {'GPUs' if options.use_gpu else 'CPU ranks'}"
    small = "" if options.use_gpu else "; small by default without GPUs, --seq-lens and --heads ask for more"
    duration = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{max(seconds, 1):.0f} seconds"
    return (
        f"bench: {len(rows)} rows of {len({method.name for *_, method in rows})} methods on {ranks}, {lengths} tokens, "
        f"about {duration}{small}"
    )


def progress(total: int, visible: bool) -> Callable[[Row], None]:
    """A function that prints a line on stderr for each finished row of `total`, if `visible`; none for refused rows."""
    numbers = count(1)
    began = time.monotonic()

    def report(row: Row) -> None:
        if visible and row.status != REFUSED:
            number = next(numbers)
            left = (time.monotonic() - began) / number * max(total - number, 0)
            outcome = f"{row.median_ms:.3g} ms" if row.status == MEASURED else f"{row.status}: {row.message}"
            case = f"{row.case.heads.q}:{row.case.heads.kv} heads, {row.case.seq_len:,}"
            text = f"[{number}/{total}, {left:.0f} s left] {case}, {row.pass_name}, {row.method}: {outcome}"
            print(text, file=sys.stderr, flush=True)

    return report
