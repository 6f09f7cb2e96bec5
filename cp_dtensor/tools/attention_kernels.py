"""How fast are the Triton attention kernels, beside what torch has, under each mask?

python -m cp_dtensor.tools.attention_kernels --output docs/benchmarks/attention_kernels.md

python -m cp_dtensor.tools.attention_kernels --dropout 0.1 --masks causal full --output attention_dropout.md

On one GPU, bfloat16, batch 1. TFLOP/s count useful work: 4 D flops for each pair of a query and a key that it sees, and
2.5 times that in backward, whatever a kernel really computes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from triton.runtime.errors import TritonError

from cp_dtensor.attention.masked import RowMask
from cp_dtensor.attention.triton.reference import attention_forward_reference
from cp_dtensor.tools.kernel_baselines import MASKS, Case, Pass, Problem, Ways, flex_ways, ready_ways, seen_pairs
from cp_dtensor.tools.report import environment, markdown_table

LENGTHS = (16384, 65536)
_WARM_UP_S, _REPEATED_S = 0.4, 0.25
_CHECKED_ROWS = 128
_MAX_ERROR = 0.02
"""Relative, of bfloat16 results: beyond that a kernel is wrong, not imprecise."""


@dataclass(frozen=True)
class Measured:
    """One row of the table; TFLOP/s of useful work."""

    case: Case
    kernel: str
    forward_ms: float
    forward_tflops: float
    backward_ms: float
    backward_tflops: float
    error: float | None
    """Of the last rows of out, against float64; None if nobody else knows what was dropped."""


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    parser.add_argument("--seq-len", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--masks", nargs="+", default=MASKS, choices=MASKS)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("Q", "KV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, whose compilation takes a minute")
    parser.add_argument("--dropout", type=float, metavar="P", help="each kernel without dropout, and with it")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("attention_kernels measures a GPU, and torch sees none")
    cases = [
        Case(mask, length, arguments.heads[0], arguments.heads[1], arguments.head_dim, dropout_p)
        for length in arguments.seq_len
        for mask in arguments.masks
        for dropout_p in ((0.0, arguments.dropout) if arguments.dropout else (0.0,))
    ]
    measured: list[Measured] = []
    # What compiles comes last, and files are written row by row: a run that is cut short keeps what it has.
    for ways in [ready_ways, flex_ways] if arguments.flex else [ready_ways]:
        for case in cases:
            torch.compiler.reset()  # or the limit of recompilations ends it
            for row in measure(case, ways):
                measured.append(row)
                print(" | ".join(_cells(row)), flush=True)
                _write(sorted(measured, key=lambda row: cases.index(row.case)), arguments.output, arguments.json)


def _write(measured: list[Measured], output: Path | None, json_output: Path | None) -> None:
    if output:
        output.write_text(_report(measured))
    if json_output:
        json_output.write_text(json.dumps([asdict(row) for row in measured], indent=1))


def measure(case: Case, ways: Callable[[Problem], Ways]) -> Iterator[Measured]:
    """A row for each kernel that can compute the case."""
    torch.cuda.empty_cache()
    problem = Problem.random(case)
    flops = 4 * case.head_dim * case.q_heads * seen_pairs(problem.mask, case.length)
    for name, make in ways(problem).items():
        try:
            forward, backward = make()
            out = forward()[0]
            error = None if case.dropout_p and name != "Triton" else _error(problem, out)
            if error is not None and not error < _MAX_ERROR:
                print(f"{case}, {name}: wrong, error {error:.1e}", flush=True)
                continue
            forward_ms, backward_ms = _median_ms(forward), _median_ms(backward)
        except (TritonError, RuntimeError) as failure:
            print(f"{case}, {name}: {type(failure).__name__}: {str(failure)[:500]}", flush=True)
            continue
        yield Measured(
            case, name, forward_ms, flops / forward_ms / 1e9, backward_ms, 2.5 * flops / backward_ms / 1e9, error
        )


def _error(problem: Problem, out: torch.Tensor) -> float:
    """Relative, of the last rows of the first head."""
    case = problem.case
    rows = slice(case.length - _CHECKED_ROWS, case.length)
    last_q, k, v = (x[:, :1].double() for x in (problem.q[:, :, rows], problem.k, problem.v))
    exact = torch.empty_like(last_q)
    mask, dropout = problem.mask, problem.dropout
    if mask.intervals is not None:
        mask = RowMask(lo=mask.intervals[0][rows], hi=mask.intervals[1][rows])
    elif mask.causal_offset is not None:
        mask = RowMask(causal_offset=mask.causal_offset + rows.start)
    if dropout is not None:
        dropout = replace(dropout, q_positions=dropout.q_positions[rows])
    lse = exact.new_empty(exact.shape[:3])
    attention_forward_reference(exact, lse, last_q, k, v, mask, problem.scale, dropout=dropout)
    return ((out[:, :1, rows].double() - exact).norm() / exact.norm()).item()


def _median_ms(call: Pass) -> float:
    """After the clocks have settled."""
    start = time.perf_counter()
    calls = 0
    while calls == 0 or time.perf_counter() - start < _WARM_UP_S:
        call()
        torch.cuda.synchronize()
        calls += 1
    calls = max(3, int(_REPEATED_S * calls / (time.perf_counter() - start)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in pairwise(events))


def _cells(row: Measured) -> list[str]:
    case = row.case
    return [
        case.mask,
        str(case.length),
        f"{row.kernel}, dropout {case.dropout_p:g}" if case.dropout_p else row.kernel,
        f"{row.forward_ms:.3f}",
        f"{row.forward_tflops:.0f}",
        f"{row.backward_ms:.3f}",
        f"{row.backward_tflops:.0f}",
        "-" if row.error is None else f"{row.error:.1e}",
    ]


def _report(measured: list[Measured]) -> str:
    case = measured[0].case
    header = ("mask", "S", "kernel", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "error")
    dropout_p = max(row.case.dropout_p for row in measured)
    if dropout_p:
        title, options = (
            "The Triton attention kernels with dropout",
            f"--dropout {dropout_p:g} --masks causal full --seq-len ",
        )
        options += " ".join(map(str, sorted({row.case.length for row in measured})))
        about = "With dropout: of tiles whose positions are in runs of 16; masks as intervals, which such calls have.\n"
    else:
        title, options, about = "The Triton attention kernels under each mask", "--flex", ""
    return f"""# {title}

Batch 1, {case.q_heads} query and {case.kv_heads} kv heads, d = {case.head_dim}, bfloat16, one GPU.

{environment()}

`python -m cp_dtensor.tools.attention_kernels {options}`

TFLOP/s of useful work: 4 d flops for each pair of a query and a key that it sees, 2.5 times that in backward.
"Documents": packed, of lognormal lengths (median 2000), causal. "Prefix": all see the first quarter, else causal.
ms: median, launches included. Error: relative, of the last {_CHECKED_ROWS} rows of out, against float64.
{about}
{markdown_table(header, [_cells(row) for row in measured])}
"""


if __name__ == "__main__":
    main()
