"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cp_dtensor.tools.bench.baseline import Baseline
from cp_dtensor.tools.bench.baselines import baselines_by_name
from cp_dtensor.tools.bench.cases import PASSES, Case, Heads, grid
from cp_dtensor.tools.bench.measure import Effort
from cp_dtensor.tools.parsing import LAYOUTS, mask_by_name

_DESCRIPTION = """\
Measures context-parallel attention: every rotation of this library, torch's own context parallel, and one GPU as the
ideal, on the same inputs in the same run.

    torchrun --nproc-per-node 8 -m cp_dtensor.tools.bench --output docs/benchmarks/8xH200
    torchrun --nproc-per-node 2 -m cp_dtensor.tools.bench --quick
    torchrun --nproc-per-node 8 -m cp_dtensor.tools.bench --quick --seq-lens 32768 --trace traces
    torchrun --nproc-per-node 8 -m cp_dtensor.tools.bench --mask "documents 2048" "window 4096" \\
        --baselines ideal-kernels ideal-varlen "ours-auto Balanced" "torch-flex PTRR" llama3-varlen
"""
_BACKENDS = ("auto", "CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# A minute at most, also on a CPU. What is given on the command line wins.
_QUICK: dict[str, Any] = {
    "seq_lens": [1024, 2048],
    "heads": [Heads(8, 2)],
    "head_dim": 64,
    "repeats": 5,
    "row_seconds": 1.0,
    "check_up_to": 1024,
}


@dataclass(frozen=True)
class Options:
    """What to run and where to write."""

    cases: tuple[Case, ...]
    passes: tuple[str, ...]
    baselines: tuple[Baseline, ...]
    effort: Effort
    check_up_to: int
    """Errors are computed of cases with no more work than a causal sequence of this length."""
    seed: int
    one_thread: bool
    """Whether backward runs on the calling thread (torch.autograd.set_multithreading_enabled(False))."""
    use_gpu: bool
    timeout_seconds: float
    """Of collectives."""
    output: Path | None
    trace: Path | None
    trace_case: Case
    trace_baseline: Baseline


def parse_options(arguments: Sequence[str]) -> Options:
    """Reads the command line; exits with a message where it does not fit."""
    parser = _parser()
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**_QUICK)
    given = parser.parse_args(arguments)
    use_gpu = torch.cuda.is_available() if given.device == "auto" else given.device == "cuda"
    if use_gpu and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    try:
        baselines = baselines_by_name(given.baselines, graph=given.graph, compiled=given.compile)
    except ValueError as error:
        parser.error(str(error))
    cases = grid(
        given.seq_lens, given.heads, given.mask, given.backend,
        head_dim=given.head_dim, batch=given.batch, dtype=given.dtype, layout=given.layout,
    )  # fmt: skip
    sharing = [baseline for baseline in baselines if not baseline.alone]
    by_name = {baseline.name: baseline for baseline in sharing}
    if given.trace and given.trace_baseline not in (None, *by_name):
        parser.error(f"--trace-baseline: expected one of {', '.join(by_name)}, got {given.trace_baseline!r}")
    if given.trace and not sharing:
        parser.error("--trace: of the chosen baselines none runs on all ranks")
    return Options(
        cases=cases,
        passes=tuple(name for name in PASSES if name in given.passes),
        baselines=baselines,
        effort=Effort(given.repeats, given.row_seconds, given.warm_ms),
        check_up_to=given.check_up_to,
        seed=given.seed,
        one_thread=given.one_thread,
        use_gpu=use_gpu,
        timeout_seconds=given.timeout,
        output=given.output,
        trace=given.trace,
        trace_case=next((case for case in cases if case.seq_len == given.trace_seq_len), cases[0]),
        trace_baseline=by_name.get(given.trace_baseline, sharing[0] if sharing else baselines[0]),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cp_dtensor.tools.bench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lengths = [2**n for n in (13, 15, 16, 17, 18)]
    what = parser.add_argument_group("what is measured")
    what.add_argument("--seq-lens", type=_positive, nargs="+", default=lengths, metavar="N", help="global lengths")
    heads = [Heads(32, 8), Heads(32, 32), Heads(64, 8)]
    what.add_argument("--heads", type=_heads, nargs="+", default=heads, metavar="Q:KV", help="such as 32:8 32:32")
    what.add_argument("--head-dim", type=_positive, default=128)
    what.add_argument("--batch", type=_positive, default=1)
    what.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    masks = "causal, full, 'documents N' (of lognormal lengths, median N), 'window N'; several make several tables"
    what.add_argument("--mask", type=_mask, nargs="+", default=["causal"], help=masks)
    what.add_argument("--layout", choices=LAYOUTS, default="HeadTail", help="which rank owns which tokens")
    what.add_argument("--passes", choices=PASSES, nargs="+", default=list(PASSES))
    baselines = (
        "such as ideal ours-allgather 'ours-symm_mem Balanced' (ours with a layout of its own) 'torch-flex PTRR'"
    )
    what.add_argument("--baselines", nargs="+", metavar="NAME", help=baselines)
    what.add_argument("--backend", choices=_BACKENDS, nargs="+", default=["auto"], help="allowed by sdpa_kernel")
    what.add_argument("--one-thread", action="store_true", help="run backward on the calling thread")
    what.add_argument("--graph", action="store_true", help="measure ours under CUDA graph replay too")
    what.add_argument("--compile", action="store_true", help="measure ours under torch.compile(fullgraph=True) too")
    how = parser.add_argument_group("how")
    how.add_argument("--quick", action="store_true", help="a small run; other options still count")
    how.add_argument("--repeats", type=_positive, default=20, help="timed calls of a row")
    how.add_argument("--row-seconds", type=float, default=3.0, help="rows slower than this are repeated less often")
    how.add_argument("--warm-ms", type=float, default=400, help="work before a row is timed")
    checked = "errors are computed of cases with no more work than a causal sequence of this length"
    how.add_argument("--check-up-to", type=int, default=16384, metavar="N", help=checked)
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    how.add_argument("--timeout", type=float, default=180, metavar="SECONDS", help="of a collective")
    out = parser.add_argument_group("output")
    out.add_argument("--output", type=Path, metavar="DIR", help="for bench.json, bench.md and bench.png")
    out.add_argument("--trace", type=Path, metavar="DIR", help="for a Chrome trace of forward and backward per rank")
    out.add_argument("--trace-baseline", metavar="NAME", help="default: the first that runs on all ranks")
    out.add_argument("--trace-seq-len", type=int, metavar="N", help="one of --seq-lens; default: the shortest")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def _mask(text: str) -> str:
    try:
        mask_by_name(text, seq_len=1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _heads(text: str) -> Heads:
    try:
        return Heads.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
