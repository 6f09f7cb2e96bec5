"""What the commands `bench` and `train-bench` have in common: options, and the run over all problems."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from cp_dtensor.tools.cases import Case, grid
from cp_dtensor.tools.measure import Suite
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.parsing import MASK_HELP, command_parser, mask_argument, positive
from cp_dtensor.tools.ranks import Failed, end, start
from cp_dtensor.tools.report import Row, machine_columns, table_of, write_csv


def measuring_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command that measures, with the options that both of them have."""
    parser = command_parser(command, description)
    add = parser.add_argument
    add("--seq-lens", type=positive, nargs="+", metavar="N", help="global lengths")
    add("--batch", type=positive, default=1)
    add("--dtype", choices=("bfloat16", "float16", "float32", "float64"), default="bfloat16")
    add("--mask", type=mask_argument, nargs="+", default=["causal"], metavar="MASK", help=f"each a table: {MASK_HELP}")
    methods = "such as ideal ours-auto 'ours-auto Balanced' torch-allgather 'torch-allgather FA4' 'torch-flex PTRR'"
    add("--methods", nargs="+", metavar="NAME", help=methods)
    add(
        "--repeats", type=positive, help="timed calls of a row; slow ones are repeated less often, three times at least"
    )
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--timeout", type=positive, default=300, metavar="SECONDS", help="timeout of a collective")
    add("--output", type=Path, metavar="FILE", help="CSV file of all rows")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str], **defaults: Any) -> argparse.Namespace:
    """Read the command line, with other defaults than those of the parser; exit with a message if it does not fit."""
    parser.set_defaults(**defaults)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    options.use_gpu = options.device != "cpu" and torch.cuda.is_available()
    return options


def cases_and_methods(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *, compiled: str, **fields: Sequence[Any]
) -> list[Case]:
    """Return the cases of the options, with other fields; put methods in place of their names, or exit.

    `compiled` is the beginning of the names of methods that --compile adds under torch.compile.
    """
    cases = grid(
        **fields, seq_len=options.seq_lens, mask=options.mask, batch=[options.batch], dtype=[options.dtype]
    )  # fmt: skip
    try:
        options.methods = methods_by_name(
            options.methods, graph=getattr(options, "graph", False), compiled=compiled if options.compile else None
        )
        _ = [case.pairs for case in cases]  # refuses documents that are longer than the sequence
    except ValueError as error:
        parser.error(str(error))
    return cases


def measure_all(
    program: str, arguments: Sequence[str], options: argparse.Namespace, problems: Iterable[Any],
    measure: Callable[[Any, Suite, list[Row]], None],
) -> list[Row]:  # fmt: skip
    """Start the ranks and measure problems; rank 0 prints a table of each, and writes the file of the options.

    A problem has a `title`, and `columns()` that all its rows have alike. If `measure` raises `Failed`, no more can be
    measured, and the process ends.
    """
    processes = os.environ.get("LOCAL_WORLD_SIZE")  # of torchrun on this host, whatever they will stand for
    stand_for = getattr(options, "nodes", None)
    ranks, device = start(program, arguments, options.use_gpu, options.timeout, stand_for)
    suite = Suite(ranks, device, options.repeats, options.check_up_to)
    about = machine_columns(ranks.world_size, stand_for)
    rows, lost = list[Row](), None
    if ranks.rank == 0:
        local = int(processes or ranks.world_size)
        nodes = f"--nnodes {ranks.world_size // local} " if ranks.world_size > local else ""
        launch = f"torchrun {nodes}--nproc-per-node {local} {program} {shlex.join(arguments)}"
        print(f"{about['machine']}, {about['versions']}\n\n`{launch}`", flush=True)
    for problem in problems:
        first = len(rows)
        try:
            measure(problem, suite, rows)
        except Failed as failure:
            lost = failure
        if ranks.rank == 0:  # now, so that a run that ends early keeps its rows
            print(f"\n## {problem.title}\n\n{table_of(rows[first:], [*problem.columns(), 'layout'])}", flush=True)
            if options.output is not None:
                write_csv(options.output, [{**about, **row} for row in rows])
        if lost is not None:
            break
    end(ranks, lost)
    return rows
