"""Programs on ranks, started like torchrun but as forks of a process that has imported torch, which saves seconds."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from support.processes import way_to_start


def launch(
    ranks: int, program: Path | str, *arguments: str, folder: Path, timeout: float = 120, imports: Sequence[str] = ()
) -> str:
    """Runs a program to its end on `ranks` ranks without GPUs, with the environment that torchrun gives them.

    Args:
        ranks: number of ranks.
        program: path of a script, or name of a module.
        arguments: command line of the program.
        folder: working directory.
        timeout: seconds until the program is stopped.
        imports: modules that take long to import, and are imported once for all ranks.

    Returns:
        Output of all ranks on stdout and stderr.

    Raises:
        AssertionError: a rank did not end with status 0 in time.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    output = folder / "output.txt"
    output.write_text("")
    arguments_of_ranks = (ranks, store.port, program, arguments, folder, output)
    process = way_to_start("gloo").Process(target=_run_all, args=(timeout, imports, *arguments_of_ranks))
    process.start()
    process.join(timeout + 60)
    process.kill()
    process.join()
    assert process.exitcode == 0, output.read_text()
    return output.read_text()


def _run_all(
    timeout: float, imports: Sequence[str], ranks: int, port: int, program: Path | str, arguments: tuple[str, ...],
    folder: Path, output: Path,
) -> None:  # fmt: skip
    """Starts the ranks, and ends with status 0 if all of them did in time."""
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # imported modules, which each garbage collection would visit
    processes = [
        multiprocessing.get_context("fork").Process(
            target=_run, args=(rank, ranks, port, program, arguments, folder, output), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    if any(statuses) or None in statuses:
        with output.open("a") as file:
            file.write(f"\nstatuses {statuses} (None: still running)\n")
        sys.exit(1)


def _run(
    rank: int, ranks: int, port: int, program: Path | str, arguments: tuple[str, ...], folder: Path, output: Path
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="localhost", TORCHELASTIC_USE_AGENT_STORE="True", CUDA_VISIBLE_DEVICES="")
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
