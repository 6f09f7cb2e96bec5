"""Checks of this machine for context parallelism; `python -m cp_dtensor doctor`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import explain
from cp_dtensor.comm.symm_mem_workspace import p2p_obstacle
from cp_dtensor.tools import exchange, machine
from cp_dtensor.tools.cases import Heads
from cp_dtensor.tools.machine import OK, PROBLEM, Finding
from cp_dtensor.tools.parsing import argument, command_parser, positive, refuse_other_ranks
from cp_dtensor.tools.ranks import Failed, Ranks, start

_DESCRIPTION = """\
Checks versions, GPUs, links and kernels, exchanges data between ranks, and compares every method and KV transport with
attention on one device, forward and backward. Ends in OK, or in problems and what to do about them (exit status 1; 3 of
rank 0 of a job).

    python -m cp_dtensor doctor                                   on the GPUs of this host; without GPUs two CPU ranks
    torchrun --nnodes 2 --nproc-per-node 8 ... -m cp_dtensor doctor                 on the ranks of a job
    python -m cp_dtensor doctor --seq-len 131072 --heads 64:8:128 --json            choice of "auto" for your shape
"""
_SECONDS_OF_A_COLLECTIVE, _SECONDS = 60, 300
_CPU_RANKS = 2
_PROBLEMS = 3
"""Exit status of a first rank that has printed problems: Python's own is 1 after an uncaught exception."""
_REMEDY = "docs/troubleshooting.md has causes by symptom; messages of torch above name the collective"


def main(arguments: Sequence[str]) -> None:
    """Runs the checks and exits with status 1 if there are problems."""
    parser = _parser()
    options = parser.parse_args(arguments)
    refuse_other_ranks(parser, options.ranks)
    if "RANK" not in os.environ:
        sys.exit(_start_ranks(arguments, options))
    report = _Report(options.json, visible=os.environ["RANK"] == "0")
    here, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    use_gpu = options.device != "cpu" and here > 0
    if use_gpu and here < local:
        text = (
            f"{local} ranks on this host for {here} GPU{'s' if here > 1 else ''}: no two ranks can share one with NCCL"
        )
        remedy = f"torchrun --nproc-per-node {here}; for {local} ranks on CPUs: --device cpu"
        report.add([Finding("devices", PROBLEM, text, remedy)])
        sys.exit(report.end())
    try:
        ranks, device, _ = start("-m cp_dtensor doctor", arguments, use_gpu, _SECONDS_OF_A_COLLECTIVE)
    except (RuntimeError, ValueError) as error:
        if os.environ["RANK"] != "0":
            raise  # this rank's report is not printed
        report.add([Finding("start", PROBLEM, f"{type(error).__name__}: {error}", _REMEDY)])
        sys.exit(report.end())
    try:
        _check(report, ranks, device.torch_device, options)
    except Failed as failure:
        report.add([Finding(report.running, PROBLEM, str(failure), _REMEDY)])
    status = report.end()
    ranks.gather(None)
    os._exit(status)  # an orderly exit would wait for collectives that failed


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("doctor", _DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--ranks", type=positive, help=f"ranks to start; default: all GPUs, or {_CPU_RANKS} on CPUs")
    shape = parser.add_argument_group('shape whose method "auto" is shown')
    shape.add_argument("--seq-len", type=positive, default=32768)
    shape.add_argument("--heads", type=argument(Heads.parse), default=Heads(32, 8), metavar="Q:KV")
    return parser


class _Report:
    """Findings so far; rank 0 prints each as it is made, or all as JSON at the end."""

    def __init__(self, as_json: bool, visible: bool) -> None:
        self.findings: list[Finding] = []
        self.running = "start"
        """Name of the check that is running."""
        self._json, self._visible, self._start = as_json, visible, time.monotonic()

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            if self._visible and not self._json:
                print(finding, flush=True)

    def end(self) -> int:
        """Prints the verdict; returns the exit status: `_PROBLEMS` if there are some, 0 of ranks that print nothing."""
        problems = [each for each in self.findings if each.status == PROBLEM]
        if self._visible and self._json:
            found = {"ok": not problems, "findings": [asdict(each) for each in self.findings]}
            print(json.dumps(found, indent=1), flush=True)
        elif self._visible:
            names = ", ".join(dict.fromkeys(each.check for each in problems))
            verdict = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}: {names}" if problems else "OK"
            print(f"{verdict} ({time.monotonic() - self._start:.1f} s)", flush=True)
        return _PROBLEMS if self._visible and problems else 0


def _start_ranks(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Starts the ranks of this host, waits for them, and returns the exit status.

    Ranks are processes of their own, so that a crash or a hang is a finding as well.
    """
    gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
    count = options.ranks or gpus or _CPU_RANKS
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_PORT": store.port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    common = {**os.environ, **{name: str(value) for name, value in place.items()}}
    common.update(MASTER_ADDR="localhost", TORCHELASTIC_USE_AGENT_STORE="True")  # the store of this process
    command = [sys.executable, "-m", "cp_dtensor", "doctor", *arguments]
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)
    ]
    deadline = time.monotonic() + _SECONDS
    while any(each.poll() is None for each in processes) and not _failed(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    hanging = [rank for rank, each in enumerate(processes) if each.poll() is None]
    failed = _failed(processes)
    for process in processes:
        process.kill()
        process.wait()
    if not failed and not hanging:
        return int(processes[0].returncode == _PROBLEMS)
    crashed = "; ".join(f"rank {rank} ended with status {code}" for rank, code in failed.items())
    text = crashed or f"ranks {hanging} did not end within {_SECONDS} s"
    report = _Report(options.json, visible=True)
    report.add([Finding("ranks", PROBLEM, text, _REMEDY)])
    report.end()
    return 1


def _failed(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """The exit statuses of ranks that crashed."""
    codes = {rank: process.poll() for rank, process in enumerate(processes)}
    return {rank: code for rank, code in codes.items() if code and (rank, code) != (0, _PROBLEMS)}


def _check(report: _Report, ranks: Ranks, device: torch.device, options: argparse.Namespace) -> None:
    """All checks, in the order in which one needs another.

    Raises:
        Failed: on every rank, if a check of several ranks raised an error on any of them.
    """

    def alone(name: str, check: Callable[[], Iterable[Finding]]) -> None:
        report.running = name
        try:
            report.add(ranks.on_each(lambda: list(check()), ranks.rank == 0) or [])
        except Failed as failure:  # of rank 0 alone, for which no other rank waits
            report.add([Finding(name, PROBLEM, str(failure), _REMEDY)])

    def together(name: str, check: Callable[[], Iterable[Finding]]) -> None:
        report.running = name
        first, *others = ranks.together(lambda: list(check()))
        report.add([*first, *(each for found in others for each in found if each.status != OK)])

    use_gpu = device.type == "cuda"
    hosts = ranks.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    alone("versions", machine.versions)
    alone("settings", machine.settings)
    if use_gpu:
        together("GPU memory", machine.memory)
        report.running = "GPU speed"
        timed = ranks.together(lambda: (machine.matmul_flops(), machine.launch_seconds()))
        alone("clocks", machine.clocks)
        alone("peer access", machine.peers)
        report.add(machine.speed(timed))
    alone("SDPA backends", lambda: machine.kernels(use_gpu))
    together("masks", lambda: exchange.first_kernels(device))
    together("gloo", lambda: exchange.bandwidth(dist.new_group(backend="gloo"), torch.device("cpu"), hosts))
    obstacle: str | None = "no GPUs"
    if use_gpu:
        world = init_device_mesh("cuda", (ranks.world_size,)).get_group()
        together("NCCL", lambda: exchange.bandwidth(world, device, hosts))
        report.running = "symmetric memory"
        obstacle = ranks.together(lambda: p2p_obstacle(world, device))[0]
        report.add([exchange.symmetric_memory(obstacle, ranks.world_size, hosts)])
    _check_methods(report, ranks, device, shares_memory=obstacle is None)
    if not use_gpu:
        text = "none are used, so their memory, speed, clocks, NVLink, NCCL and shared memory were not checked"
        report.add([Finding("GPUs", OK, text)])
    report.running = "auto"
    report.add([ranks.together(lambda: _auto(ranks.world_size, device.type, options))[0]])


def _check_methods(report: _Report, ranks: Ranks, device: torch.device, shares_memory: bool) -> None:
    """Compares out and gradients of every method and KV transport with one device."""
    began = time.monotonic()
    methods = exchange.methods(ranks.world_size, device, shares_memory)
    wrong = set()
    for mask in exchange.MASKS:
        report.running = f"inputs, {mask}"
        problem = ranks.on_each(partial(exchange.Problem, mask, ranks.world_size, device))
        assert problem is not None
        for name, mesh, method, transport in methods:
            report.running = f"{name}, {mask}"
            try:
                errors = ranks.together(partial(problem.error, mesh, method, transport))
                text = f"error {max(errors):.3g} times the limit" if max(errors) > 1 else ""
            except Failed as failure:
                if not failure.alike:
                    raise
                text = str(failure)
            if text:
                wrong.add(name)
                remedy = "choose another method or rotate_method, and report this with all lines above"
                report.add([Finding(report.running, PROBLEM, text, remedy)])
    right = ", ".join(name for name, *_ in methods if name not in wrong) or "no method"
    dtype = "float64" if device.type == "cpu" else "bfloat16"
    text = (
        f"{right}: forward and backward in {dtype} agree with one device in float64 ({time.monotonic() - began:.1f} s)"
    )
    report.add([Finding("correctness", PROBLEM if wrong else OK, text)])


def _auto(world_size: int, device_type: str, options: argparse.Namespace) -> Finding:
    """Predictions for the shape of the command line, with the method that "auto" takes; a collective."""
    mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("cp",))
    heads: Heads = options.heads
    found = explain(
        mesh, seq_len=options.seq_len, q_heads=heads.q, kv_heads=heads.kv, head_dim=heads.dim or 128,
        v_head_dim=heads.v_dim, quiet=True,
    )  # fmt: skip
    on_cpu = ["CPUs take the ring; predictions for GPUs:"] if device_type == "cpu" else []
    return Finding("auto", OK, "\n".join([*on_cpu, str(found)]))
