"""Error of ring attention, over that of one device, by backend and KV transport; `python -m cp_dtensor accuracy`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from cp_dtensor.tools.bench import progress
from cp_dtensor.tools.cases import Case, Heads, Source
from cp_dtensor.tools.info import environment
from cp_dtensor.tools.measure import Effort
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.parsing import command_parser, positive, positive_number, uses_gpu
from cp_dtensor.tools.ranks import leave, start
from cp_dtensor.tools.report import ERRORS, IDEAL, MEASURED, OURS_PREFIX, Results, Row, markdown_table
from cp_dtensor.tools.suite import Suite

_TRANSPORTS = ("allgather", "alltoall", "symm_mem")
_CUDNN, _FLASH, _EFFICIENT = (f"{name}_ATTENTION" for name in ("CUDNN", "FLASH", "EFFICIENT"))
_MATH = "MATH"
_CPU_TOKENS = 256  # a quarter of a minute on two idle cores; 1,024 take six times as long
_DESCRIPTION = """\
Computes attention, forward and backward, by every backend and KV transport, and compares out, dq, dk and dv with
float64 attention of the same inputs. Exits with status 1 if an error is more than --limit times that of one device.

    torchrun --nproc-per-node 4 -m cp_dtensor accuracy --output docs/benchmarks/accuracy-4-ranks.md
"""


def main(arguments: Sequence[str]) -> None:
    """Measures, prints and writes the table of the command line."""
    parser = command_parser("accuracy", _DESCRIPTION)
    parser.add_argument("--output", type=Path, metavar="FILE", help="Markdown file to write")
    tokens = "global number of tokens; default: 4096, 256 without GPUs"
    parser.add_argument("--seq-len", type=positive, help=tokens)
    parser.add_argument(
        "--limit", type=positive_number, default=1.5, help="largest ratio to one device's error; default: 1.5"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--quick", action="store_true", help="one case of each backend")
    options = parser.parse_args(arguments)
    use_gpu = uses_gpu(parser, options.device)
    ranks, device, command = start("-m cp_dtensor accuracy", arguments, use_gpu, 300)
    measured = cases(options.seq_len or (4096 if use_gpu else _CPU_TOKENS), use_gpu, options.quick)
    show = progress(sum(1 + len(transports) for _, transports in measured), visible=ranks.rank == 0)
    suite = Suite(ranks, device, Effort(1, 0.0, 0.0), Source(0, device.torch_device), sys.maxsize >> 32, show)
    rows: list[Row] = []
    for case, transports in measured:
        methods = methods_by_name([IDEAL, *(OURS_PREFIX + name for name in transports)])
        rows += suite.run(case, ("fwdbwd",), methods)
    text, failed = report(Results(environment(), command, ranks.world_size, tuple(rows)), options.limit)
    if ranks.rank == 0:
        print(text)
        if options.output:
            options.output.write_text(text)
    leave()
    sys.exit(failed)


def cases(seq_len: int, use_gpu: bool, quick: bool) -> list[tuple[Case, tuple[str, ...]]]:
    """The cases, each with its KV transports."""

    def case(
        backend: str, layout: str, *, mask: str = "causal", kv: int = 2, dim: int = 128, dtype: str = "bfloat16"
    ) -> Case:
        return Case(seq_len, Heads(8, kv), dim, 2, dtype, mask, layout, backend)

    backends = (_CUDNN, _FLASH, _EFFICIENT, _MATH) if use_gpu else (_FLASH, _MATH)
    transports: tuple[str, ...] = _TRANSPORTS if use_gpu else _TRANSPORTS[:2]
    if quick:
        return [(case(backend, "HeadTail"), transports) for backend in backends]
    found = [
        (case(backend, "HeadTail", mask=mask, kv=kv), transports)
        for backend, mask, kv in itertools.product(backends, ("causal", "full"), (8, 2))
    ]
    for layout, backend in itertools.product(("Contiguous", "Striped", "MirroredBatch"), backends[:2]):
        found.append((case(backend, layout), ("alltoall",)))
    if use_gpu:
        found.append((case(_EFFICIENT, "Striped(64)"), transports))
        found.append((case(_EFFICIENT, "HeadTail", dtype="float32"), transports))
        found += [(case(_FLASH, "HeadTail", dim=dim, dtype="float16"), transports) for dim in (64, 256)]
    return found


def report(results: Results, limit: float) -> tuple[str, bool]:
    """The table as Markdown, and True if a row failed or has an error of more than `limit` times `ideal`'s."""
    cells, worst, failed = [], 0.0, False
    for row in results.rows:
        if row.is_ideal:
            failed |= row.status != MEASURED
            continue
        case, ratios = row.case, results.error_ratios(row)
        backend, transport = case.backend.removesuffix("_ATTENTION").lower(), row.method.removeprefix(OURS_PREFIX)
        problem = f"{case.mask}, {case.heads.kv} kv heads, d={case.head_dim}, {case.dtype}"
        if set(ratios) == set(ERRORS):
            worst = max(worst, *ratios.values())
            errors = [f"{row.errors[name]:.1e} ({ratios[name]:.2f}x)" for name in ERRORS]
        else:
            failed, errors = True, [f"{row.status}: {row.message or row.note}", "-", "-", "-"]
        cells.append((backend, transport, case.layout, problem, *errors))
    case = results.rows[0].case
    text = (
        f"# Error of ring attention, {results.world_size} ranks\n\n"
        "Relative error (Frobenius, over the whole tensors) against float64 on the same inputs; in parentheses, over "
        "the error of `F.scaled_dot_product_attention` with the same backend on one device. Global length "
        f"{case.seq_len}, batch {case.batch}, {case.heads.q} query heads. Largest ratio: {worst:.2f}.\n\n"
        f"{results.environment}\n\n`{results.command}`\n\n"
        f"{markdown_table(('backend', 'KV transport', 'layout', 'problem', *ERRORS), cells)}\n"
    )
    return text, failed or worst > limit
