"""Programs on ranks, started like torchrun but as forks of a process that has imported torch, which saves seconds."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import time
from pathlib import Path

import torch.distributed as dist

from support.processes import way_to_start


def launch(ranks: int, program: Path | str, *arguments: str, folder: Path, timeout: float = 120) -> str:
    """Runs a program to its end on `ranks` ranks without GPUs, with the environment that torchrun gives them.

    Args:
        ranks: number of ranks.
        program: path of a script, or name of a module.
        arguments: command line of the program.
        folder: working directory.
        timeout: seconds until the program is stopped.

    Returns:
        Output of all ranks on stdout and stderr.

    Raises:
        AssertionError: a rank did not end with status 0 in time.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    output = folder / "output.txt"
    output.write_text("")
    processes = [
        way_to_start("gloo").Process(
            target=_run, args=(rank, ranks, store.port, program, arguments, folder, output), daemon=True
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
    assert statuses == [0] * ranks, f"statuses {statuses} (None: still running)\n{output.read_text()}"
    return output.read_text()


def _run(
    rank: int, ranks: int, port: int, program: Path | str, arguments: tuple[str, ...], folder: Path, output: Path
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    gc.freeze()
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
