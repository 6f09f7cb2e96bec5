"""Measures context-parallel attention against one GPU and against torch; see `--help`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from cp_dtensor.tools.bench.devices import Device, Gpu, Host
from cp_dtensor.tools.bench.inputs import Source
from cp_dtensor.tools.bench.options import Options, parse_options
from cp_dtensor.tools.bench.progress import Progress
from cp_dtensor.tools.bench.ranks import Failed, Ranks
from cp_dtensor.tools.bench.report import markdown
from cp_dtensor.tools.bench.rows import Results, Row
from cp_dtensor.tools.bench.suite import GroupLost, Suite
from cp_dtensor.tools.report import environment


def main() -> None:
    """Runs everything; rank 0 writes and prints."""
    options = parse_options(sys.argv[1:])
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun: torchrun --nproc-per-node N -m cp_dtensor.tools.bench ...")
    ranks, device = _start(options)
    with torch.autograd.set_multithreading_enabled(not options.one_thread):
        rows, lost = _measure(options, ranks, device)
    if ranks.rank == 0:
        _write(_results(rows, ranks), options, final=True)
    if lost is not None:
        print(f"stopped: {lost}", file=sys.stderr, flush=True)
        ranks.gather(None)  # rank 0 has written
        # Leaving in order would wait for the collectives that will never finish.
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def _start(options: Options) -> tuple[Ranks, Device]:
    """Joins the other ranks."""
    store, rank, world_size = next(dist.rendezvous("env://"))
    if options.use_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device: Device = Gpu() if options.use_gpu else Host()
    dist.init_process_group(
        "nccl" if options.use_gpu else "gloo",
        store=dist.PrefixStore("process_group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=options.timeout_seconds),
        device_id=device.torch_device if options.use_gpu else None,
    )
    return Ranks(dist.PrefixStore("bench", store), rank, world_size), device


def _measure(options: Options, ranks: Ranks, device: Device) -> tuple[Sequence[Row], GroupLost | None]:
    """All rows, and what ended the run early."""
    finished: list[Row] = []
    current: list[Row] = []  # of the case that is running, without errors
    total = len(options.passes) * sum(each.suits(case) for case in options.cases for each in options.baselines)
    progress = Progress(total, visible=ranks.rank == 0)

    def report(row: Row) -> None:
        current.append(row)
        progress.row(row)
        if ranks.rank == 0:  # whatever happens next, what has been measured is kept
            _write(_results([*finished, *current], ranks), options, final=False)

    suite = Suite(ranks, device, options.effort, Source(options.seed, device.torch_device), options.check_up_to, report)
    try:
        for case in options.cases:
            finished += suite.run(case, options.passes, options.baselines)
            current.clear()
        if options.trace is not None:
            suite.trace(options.trace_case, options.trace_baseline, options.trace)
    except GroupLost as lost:
        return [*finished, *current], lost
    except Failed as failure:
        print(f"no trace: {failure}", file=sys.stderr, flush=True)
        return finished, None if failure.alike else GroupLost(str(failure))
    finally:
        progress.close()
    return finished, None


def _results(rows: Sequence[Row], ranks: Ranks) -> Results:
    nodes = ranks.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    launch = f"torchrun{f' --nnodes {nodes}' if nodes > 1 else ''} --nproc-per-node {ranks.world_size // nodes}"
    command = f"{launch} -m cp_dtensor.tools.bench {shlex.join(sys.argv[1:])}".strip()
    return Results(environment(), command, ranks.world_size, tuple(rows))


def _write(results: Results, options: Options, final: bool) -> None:
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "bench.json").write_text(results.to_json() + "\n")
        (options.output / "bench.md").write_text(markdown(results))
    if final:
        print(markdown(results), flush=True)
        if options.output is not None:
            from cp_dtensor.tools.bench.plot import draw  # matplotlib is needed for nothing else

            draw(results, options.output / "bench.png")


if __name__ == "__main__":
    main()
