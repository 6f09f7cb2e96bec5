"""Command line of the training benchmark: options, methods in turns, progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

from cp_dtensor.plan.cost import GPUS
from cp_dtensor.tools.bench import end
from cp_dtensor.tools.cases import Case, Heads
from cp_dtensor.tools.info import environment, gpu_name
from cp_dtensor.tools.llama import PRESETS, Size
from cp_dtensor.tools.measure import GroupLost, status_of
from cp_dtensor.tools.parsing import (
    LAYOUTS,
    MASK_HELP,
    command_parser,
    mask_argument,
    positive,
    positive_number,
    uses_gpu,
)
from cp_dtensor.tools.ranks import Device, Failed, Ranks, start
from cp_dtensor.tools.report import ERROR, MEASURED, REFUSED
from cp_dtensor.tools.train import OPTIMIZERS, Job, TrainMethod, take_turn, train_methods
from cp_dtensor.tools.train_report import TOLERANCES, TrainResults, TrainRow, title, train_markdown

_DESCRIPTION = """\
Measures whole training steps of a Llama-shaped model with FSDP2: this library's context parallel and torch's, in turns
in the same run. Exits with status 1 if their losses differ, a method failed, or none was measured.

    torchrun --nproc-per-node 8 -m cp_dtensor train-bench --preset 8b-layers --seq-lens 32768 131072 --compile
    torchrun --nproc-per-node 8 -m cp_dtensor train-bench --preset 8b-layers --seq-lens 131072 \\
        --mask "documents 2048" --layout Balanced --methods ours-auto ours-ulysses
    torchrun --nproc-per-node 2 -m cp_dtensor train-bench --preset toy --seq-lens 256 --device cpu --dtype float32
"""
_METHODS = ["torch-allgather", "torch-alltoall", "torch-allgather FA4", "ours-auto", "ours-symm_mem", "ours-ulysses"]


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; exits with a message if an option does not fit. Also has the jobs, methods and peak."""
    parser = command_parser("train-bench", _DESCRIPTION)
    what = parser.add_argument_group("model and methods")
    what.add_argument("--preset", choices=PRESETS, default="1b", help="sizes; the next options change single ones")
    for field in fields(Size):
        what.add_argument(f"--{field.name.replace('_', '-')}", type=positive)
    what.add_argument("--seq-lens", type=positive, nargs="+", default=[32768], metavar="N", help="global lengths")
    what.add_argument("--batch", type=positive, default=1)
    what.add_argument("--dtype", choices=TOLERANCES, default="bfloat16", help="of forward and backward")
    what.add_argument("--mask", type=mask_argument, nargs="+", default=["causal"], help=f"each a table: {MASK_HELP}")
    what.add_argument("--layout", choices=LAYOUTS, default="HeadTail", help="partition of the tokens over the ranks")
    what.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    what.add_argument("--checkpoint", action="store_true", help="compute each layer again in backward")
    what.add_argument("--offload", action="store_true", help="compute each layer again, from inputs in host memory")
    methods = "such as ours-auto 'ours-symm_mem Balanced' torch-allgather 'torch-allgather FA4'"
    what.add_argument("--methods", nargs="+", default=_METHODS, metavar="NAME", help=methods)
    what.add_argument("--compile", action="store_true", help="also measure every method with compiled layers")
    how = parser.add_argument_group("measurement")
    how.add_argument("--rounds", type=positive, default=2, help="turns of each method")
    how.add_argument("--steps", type=positive, default=5, help="timed steps of a turn")
    how.add_argument("--warm-steps", type=positive, default=3, help="steps before them")
    how.add_argument(
        "--peak-tflops", type=positive_number, help="peak of a GPU for MFU; default: the data sheet's, in bfloat16"
    )
    how.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    how.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    how.add_argument("--timeout", type=positive_number, default=300, metavar="SECONDS", help="timeout of a collective")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of train.json and train.md")
    options = parser.parse_args(arguments)
    options.use_gpu = uses_gpu(parser, options.device)
    if options.offload and options.compile:
        parser.error("--offload is for layers that are not compiled, got --compile too")
    changed = {field.name: getattr(options, field.name) for field in fields(Size)}
    size = replace(PRESETS[options.preset], **{name: value for name, value in changed.items() if value is not None})
    if size.dim % (2 * size.heads) or size.heads % size.kv_heads:
        parser.error(
            "expected dim to be a multiple of 2 * heads, and heads of kv heads, got "
            f"dim {size.dim}, {size.heads} heads and {size.kv_heads} kv heads"
        )
    heads = Heads(size.heads, size.kv_heads)
    cases = [
        Case(seq_len, heads, size.head_dim, options.batch, options.dtype, mask, options.layout, "auto")
        for mask in options.mask
        for seq_len in options.seq_lens
    ]
    try:
        options.methods = train_methods(options.methods, options.compile)
        _ = [case.pairs for case in cases]  # refuses documents that are longer than the sequence
    except ValueError as error:
        parser.error(str(error))
    jobs = (Job(size, case, options.optimizer, options.checkpoint, options.offload, options.seed) for case in cases)
    options.jobs = list(dict.fromkeys(jobs))
    name = gpu_name() if options.use_gpu and options.dtype in ("bfloat16", "float16") else None
    options.peak = options.peak_tflops or (None if name is None else GPUS[name].flops / 1e12)
    return options


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark of the command line; rank 0 writes and prints the results."""
    options = parse_options(arguments)
    ranks, device, command = start("-m cp_dtensor train-bench", arguments, options.use_gpu, options.timeout)
    rows: dict[tuple[Job, str], TrainRow] = {}
    lost = None

    def results() -> TrainResults:
        return TrainResults(environment(), command, ranks.world_size, options.peak, tuple(rows.values()))

    try:
        for row in _rows(options, ranks, device):
            rows[row.job, row.method] = row
            if ranks.rank == 0:  # so that a run that ends early keeps its rows
                _show(row)
                _write(results(), options.output)
    except GroupLost as error:
        lost = error
    if ranks.rank == 0:
        print(train_markdown(results()), flush=True)
    wrong = ", ".join(row.method for row in results().disagreeing())
    if wrong and ranks.rank == 0:
        print(f"losses or gradient norms differ from those of the first method: {wrong}", file=sys.stderr, flush=True)
    end(ranks, lost)
    statuses = {row.status for row in rows.values()}
    sys.exit(bool(wrong) or ERROR in statuses or MEASURED not in statuses)


def _rows(options: argparse.Namespace, ranks: Ranks, device: Device) -> Iterator[TrainRow]:
    """Each row after each turn of its method.

    Raises:
        GroupLost: no more can be measured.
    """
    for job in options.jobs:
        if ranks.rank == 0:
            text = f"{title(job)}: {len(options.methods)} methods, {options.rounds} turns each"
            print(text, file=sys.stderr, flush=True)
        rows = {method.name: TrainRow(job, method.name, MEASURED) for method in options.methods}
        for _, method in product(range(options.rounds), options.methods):
            if rows[method.name].status == MEASURED:
                row, lost = _with_a_turn(rows[method.name], method, options, ranks, device)
                rows[method.name] = row
                yield row
                if lost:
                    raise GroupLost(f"{method.name}: {row.message}")


def _with_a_turn(
    row: TrainRow, method: TrainMethod, options: argparse.Namespace, ranks: Ranks, device: Device
) -> tuple[TrainRow, bool]:
    """The row after one more turn, and whether the process group is lost."""
    refusal = method.refusal(row.job.case, ranks.world_size)
    if refusal is not None:
        return replace(row, status=REFUSED, message=refusal), False
    try:
        turn = take_turn(row.job, method, ranks, device, warm=options.warm_steps, steps=options.steps)
    except Failed as failure:
        return replace(row, status=status_of(failure), message=str(failure), turns=()), not failure.alike
    return replace(row, turns=(*row.turns, turn)), False


def _show(row: TrainRow) -> None:
    outcome = f"{row.median_ms:.4g} ms" if row.status == MEASURED else f"{row.status}: {row.message}"
    print(f"  {row.method}: {outcome}", file=sys.stderr, flush=True)


def _write(results: TrainResults, folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.json").write_text(results.to_json() + "\n")
        (folder / "train.md").write_text(train_markdown(results))
