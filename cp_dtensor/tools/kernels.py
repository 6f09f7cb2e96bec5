"""Benchmark of the Triton attention kernels on one GPU, beside torch's kernels, under several masks.

python -m cp_dtensor.tools.kernels --flex --output docs/benchmarks/attention_kernels.md

python -m cp_dtensor.tools.kernels --dropout 0.1 --masks causal full --output docs/benchmarks/attention_dropout.md

In bfloat16, batch 1. TFLOP/s count useful work: 4 D flops for each (query, key) pair that the mask allows, and 2.5
times as many in backward, whatever a kernel really computes. Exits with status 1 if a Triton kernel is wrong or failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from cp_dtensor.attention.masked import Dropout, RowMask, attention_forward
from cp_dtensor.tools.bench.cases import Attention, Case, Heads, Inputs, Source, all_tokens
from cp_dtensor.tools.bench.errors import seen_keys
from cp_dtensor.tools.bench.flex import whole_mask
from cp_dtensor.tools.bench.methods import kernel_attention
from cp_dtensor.tools.bench.report import markdown_table
from cp_dtensor.tools.bench.torch_methods import varlen_on_one_gpu
from cp_dtensor.tools.info import environment
from cp_dtensor.tools.parsing import argument, positive, positive_number

LENGTHS = (16384, 65536)
MASKS = ("causal", "full", "window 4096", "documents 2048", "prefix")  # the prefix is a quarter of the sequence
_WARM_UP_S, _REPEATED_S = 0.4, 0.25
_CHECKED_ROWS = 128
_OURS = "Triton"
_MAX_ERROR = 0.02
"""Relative error of bfloat16 results that no rounding explains."""


@dataclass(frozen=True)
class Problem:
    """A case with its tensors."""

    case: Case
    dropout_p: float
    inputs: Inputs

    @cached_property
    def mask(self) -> RowMask:
        """The mask as the Triton kernels take it; calls with dropout have masks of intervals."""
        if self.case.is_plain and not self.dropout_p:
            return RowMask(causal_offset=0 if self.case.mask == "causal" else None)
        lo, hi = seen_keys(self.case.mask_value, self.case.seq_len).to(self.inputs.q.device, torch.int32)
        return RowMask(lo=lo, hi=hi)

    @cached_property
    def dropout(self) -> Dropout | None:
        """Dropout of a rank whose positions are in runs."""
        if not self.dropout_p:
            return None
        device = self.inputs.q.device
        position = torch.arange(self.case.seq_len, device=device, dtype=torch.int32)
        return Dropout(self.dropout_p, torch.tensor(7, device=device), position, position, in_runs=True)


@dataclass(frozen=True)
class Measured:
    """One row of the table; TFLOP/s of useful work."""

    case: Case
    dropout_p: float
    kernel: str
    forward_ms: float
    forward_tflops: float
    backward_ms: float
    backward_tflops: float
    error: float | None
    """Relative error of the last rows of out, against float64; None for torch's kernels with dropout."""


def main(arguments: list[str]) -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    parser.add_argument("--seq-len", type=positive, nargs="+", default=LENGTHS)
    parser.add_argument("--masks", nargs="+", default=MASKS, choices=MASKS)
    parser.add_argument("--heads", type=argument(Heads.parse), default=Heads(32, 8), metavar="Q:KV")
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, whose compilation takes a minute")
    parser.add_argument("--dropout", type=positive_number, metavar="P", help="each kernel without dropout, and with it")
    options = parser.parse_args(arguments)
    if options.dropout is not None and options.dropout >= 1:
        parser.error(f"--dropout: expected a probability less than 1, got {options.dropout}")
    if min(options.seq_len) < _CHECKED_ROWS:
        parser.error(f"--seq-len: expected at least {_CHECKED_ROWS}, got {min(options.seq_len)}")
    if not torch.cuda.is_available():
        parser.error("the benchmark of kernels needs a GPU, and torch sees none")
    keys = [
        (Case(length, options.heads, options.head_dim, 1, "bfloat16", name, "HeadTail", "auto"), dropout_p)
        for length in options.seq_len
        for name in (f"prefix:{length // 4}" if mask == "prefix" else mask for mask in options.masks)
        for dropout_p in ((0.0, options.dropout) if options.dropout else (0.0,))
    ]
    measured: list[Measured] = []
    # FlexAttention, which compiles, comes last. Files are written row by row: a run that is cut short keeps its rows.
    for kernels in [ready_kernels, flex_kernels] if options.flex else [ready_kernels]:
        for case, dropout_p in keys:
            torch.compiler.reset()  # or the limit of recompilations ends the run
            for row in measure(case, dropout_p, kernels):
                measured.append(row)
                print(" | ".join(_cells(row)), flush=True)
                measured.sort(key=lambda row: keys.index((row.case, row.dropout_p)))
                if options.output:
                    options.output.write_text(_report(measured, arguments))
                if options.json:
                    options.json.write_text(json.dumps([asdict(row) for row in measured], indent=1))
    sys.exit(sum(row.kernel == _OURS for row in measured) < len(keys))


def measure(case: Case, dropout_p: float, kernels: Callable[[Problem], dict[str, Attention]]) -> Iterator[Measured]:
    """Yields a row for each kernel that can compute the case."""
    torch.cuda.empty_cache()
    problem = Problem(case, dropout_p, Source(0, torch.device("cuda")).inputs(case, all_tokens).contiguous())
    forward_flops = case.flops("fwd")
    backward_flops = case.flops("fwdbwd") - forward_flops
    for name, attention in kernels(problem).items():
        try:
            forward, backward = passes(problem, attention)
            error = None if dropout_p and name != _OURS else relative_error(problem, forward())
            if error is not None and not error < _MAX_ERROR:
                print(f"{case}, {name}: wrong, error {error:.1e}", flush=True)
                continue
            forward_ms, backward_ms = _median_ms(forward), _median_ms(backward)
        except Exception as failure:  # also those of Triton's compiler
            print(f"{case}, {name}: {type(failure).__name__}: {str(failure)[:500]}", flush=True)
            continue
        rates = forward_flops / forward_ms / 1e9, backward_flops / backward_ms / 1e9
        yield Measured(case, dropout_p, name, forward_ms, rates[0], backward_ms, rates[1], error)


# Kernels


def ready_kernels(problem: Problem) -> dict[str, Attention]:
    """The Triton kernels, and torch's kernels that have the mask."""
    kernels = {_OURS: kernel_attention(problem.mask, problem.dropout)}
    if problem.case.is_plain:
        kernels["FlashAttention-2"] = partial(_sdpa, problem, SDPBackend.FLASH_ATTENTION)
        kernels["cuDNN"] = partial(_sdpa, problem, SDPBackend.CUDNN_ATTENTION)
    elif problem.dropout is None and not problem.case.mask.startswith("prefix"):
        kernels["FlashAttention-2"] = varlen_on_one_gpu(problem.case, problem.inputs.q.device)
    return kernels


def flex_kernels(problem: Problem) -> dict[str, Attention]:
    """FlexAttention, which has no dropout."""
    if problem.dropout is not None:
        return {}
    blocks = whole_mask(problem.case, problem.inputs.q.device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return {"FlexAttention": partial(compiled, block_mask=blocks, enable_gqa=True)}


def _sdpa(problem: Problem, backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    is_causal = problem.case.mask == "causal"
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=problem.dropout_p, is_causal=is_causal, enable_gqa=True
        )


def passes(problem: Problem, attention: Attention) -> tuple[Callable[[], torch.Tensor], Callable[[], object]]:
    """Forward, which computes out, and backward."""
    q, k, v, grad_out = problem.inputs.q, problem.inputs.k, problem.inputs.v, problem.inputs.grad_out
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return (
        lambda: attention(q, k, v),
        lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True),
    )


# Measurement


def relative_error(problem: Problem, out: torch.Tensor) -> float:
    """The relative error of the last rows of the first head; float64 runs as torch operations."""
    length, inputs = problem.case.seq_len, problem.inputs
    rows = slice(length - _CHECKED_ROWS, length)
    last_q, k, v = (x[:, :1].double() for x in (inputs.q[:, :, rows], inputs.k, inputs.v))
    mask, dropout = problem.mask, problem.dropout
    if mask.intervals is not None:
        mask = RowMask(lo=mask.intervals[0][rows], hi=mask.intervals[1][rows])
    elif mask.causal_offset is not None:
        mask = RowMask(causal_offset=mask.causal_offset + rows.start)
    if dropout is not None:
        dropout = replace(dropout, q_positions=dropout.q_positions[rows])
    exact, _ = attention_forward(last_q, k, v, mask, problem.case.dims[0] ** -0.5, dropout=dropout)
    return ((out[:, :1, rows].double() - exact).norm() / exact.norm()).item()


def _median_ms(call: Callable[[], object]) -> float:
    """The median time of a call, after the clocks have settled."""
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


# Report


def _cells(row: Measured) -> list[str]:
    return [
        row.case.mask,
        str(row.case.seq_len),
        f"{row.kernel}, dropout {row.dropout_p:g}" if row.dropout_p else row.kernel,
        f"{row.forward_ms:.3f}",
        f"{row.forward_tflops:.0f}",
        f"{row.backward_ms:.3f}",
        f"{row.backward_tflops:.0f}",
        "-" if row.error is None else f"{row.error:.1e}",
    ]


def _report(measured: list[Measured], arguments: list[str]) -> str:
    case, has_dropout = measured[0].case, any(row.dropout_p for row in measured)
    header = ("mask", "S", "kernel", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "error")
    about = "Tiles with dropout have positions in runs of 16, and masks of intervals.\n" if has_dropout else ""
    return f"""# The Triton attention kernels {"with dropout" if has_dropout else "under each mask"}

Batch 1, {case.heads.q} query and {case.heads.kv} kv heads, d = {"/".join(map(str, case.dims))}, bfloat16, one GPU.

{environment()}

`python -m cp_dtensor.tools.kernels {shlex.join(arguments)}`

TFLOP/s of useful work: 4 d flops for each (query, key) pair that the mask allows, 2.5 times as many in backward.
"documents N": packed, of lognormal lengths (median N), causal. ms: median, launches included. Error: relative, of the
last {_CHECKED_ROWS} rows of out, against float64.
{about}
{markdown_table(header, [_cells(row) for row in measured])}
"""


if __name__ == "__main__":
    main(sys.argv[1:])
