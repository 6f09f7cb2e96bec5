"""Checks of this machine for context parallelism, with remedies; `python -m cp_dtensor doctor`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.benchmark import Timer

from cp_dtensor import (
    GPUS,
    Documents,
    Hardware,
    context_parallel_attention,
    explain,
)
from cp_dtensor.attention.backends.packages import INSTALL, has_package_kernels, installed_version
from cp_dtensor.attention.backends.select import PACKAGES
from cp_dtensor.comm.links import link_speed
from cp_dtensor.comm.symm_mem_workspace import p2p_obstacle
from cp_dtensor.tools.cases import ByLayout, Case, Heads, Source
from cp_dtensor.tools.errors import Outcome, relative_errors
from cp_dtensor.tools.info import ALL_GPUS, backends, environment, facts, gpu_name, peer_access
from cp_dtensor.tools.measure import Work
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.parsing import argument, command_parser, positive
from cp_dtensor.tools.ranks import Failed, Ranks, start
from cp_dtensor.tools.report import OURS_PREFIX

_DESCRIPTION = """\
Checks versions, GPUs, links and kernels, exchanges data between ranks, and compares every method and KV transport with
attention on one device, forward and backward. Ends in OK, or in problems and what to do about them (exit status 1; 3 of
rank 0 of a job).

    python -m cp_dtensor doctor                                   on the GPUs of this host; without GPUs two CPU ranks
    torchrun --nnodes 2 --nproc-per-node 8 ... -m cp_dtensor doctor                 on the ranks of a job
    python -m cp_dtensor doctor --seq-len 131072 --heads 64:8:128 --json            choice of "auto" for your shape
    python -m cp_dtensor doctor --info                            versions, devices and kernels, without checks
"""
OK, NOTE, PROBLEM = "ok", "note", "PROBLEM"
_SECONDS = 300
_CPU_RANKS = 2
_PROBLEMS = 3
"""Exit status of a first rank that has printed problems: Python's own is 1 after an uncaught exception."""
_REMEDY = "docs/troubleshooting.md has causes by symptom; messages of torch above name the collective"
_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 15)
"""Versions that were tried."""
_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": (PROBLEM, "every launch waits for its kernel, so transfers never overlap attention"),
    "TRITON_INTERPRET": (PROBLEM, "Triton kernels run in the interpreter, a thousand times slower"),
    "NCCL_P2P_DISABLE": (PROBLEM, "NCCL sends through host memory instead of NVLink"),
    "NCCL_IB_DISABLE": (NOTE, "NCCL sends between hosts over sockets instead of InfiniBand"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (NOTE, "with 1, transfers may queue behind attention"),
}
"""Environment variables that matter if they are 1."""
_LEAST_OF_PEAK = 0.5  # of a GPU's FLOPs, and of a link's bandwidth
_MATMUL, _SLOW_LAUNCH = 8192, 15e-6
_SMI = "clocks.current.sm,clocks.max.sm,temperature.gpu,ecc.errors.uncorrected.volatile.total"
_EXCHANGED = 4 << 20  # bytes of each rank in an all-gather
_TOKENS = 128  # of each rank, in the calls whose results are checked
_DTYPES = {"cpu": "float64", "cuda": "bfloat16"}
_TOLERANCE = {"cpu": 1e-9, "cuda": 2e-2}
"""Largest relative error: of float64 on CPUs, and of bfloat16 on GPUs, whose kernels reach 2e-3 to 8e-3."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a check."""

    check: str
    status: str
    """`OK`, `NOTE` or `PROBLEM`."""
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        lines = [*self.text.splitlines(), *([f"-> {self.remedy}"] if self.remedy else [])]
        return f"{self.status:<8} {self.check:<17} " + f"\n{'':<27}".join(lines)


class Report:
    """Findings so far; rank 0 prints each as it is made, or all as JSON at the end."""

    def __init__(self, as_json: bool, visible: bool) -> None:
        self.findings: list[Finding] = []
        self.running = "start"
        """Name of the check that is running."""
        self._json, self._visible, self._start = as_json, visible, time.monotonic()

    def add(self, *findings: Finding) -> None:
        """Adds findings, and prints them if this rank prints."""
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


# The command


def main(arguments: Sequence[str]) -> None:
    """Runs the checks and exits with status 1 if there are problems; with `--info`, prints a table only."""
    parser = command_parser("doctor", _DESCRIPTION)
    parser.add_argument("--info", action="store_true", help="print versions, devices and kernels, without checks")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--ranks", type=positive, help=f"ranks to start; default: all GPUs, or {_CPU_RANKS} on CPUs")
    shape = parser.add_argument_group('shape whose method "auto" is shown')
    shape.add_argument("--seq-len", type=positive, default=32768)
    shape.add_argument("--heads", type=argument(Heads.parse), default=Heads(32, 8), metavar="Q:KV")
    options = parser.parse_args(arguments)
    rank = os.environ.get("RANK")
    if options.info:
        if rank in (None, "0"):
            rows = dict(facts())
            width = max(map(len, rows))
            shown = (f"{name:<{width}}  {value}" for name, value in rows.items())
            print(json.dumps(rows, indent=1) if options.json else "\n".join(shown))
        return
    if rank is None:
        sys.exit(_start_ranks(arguments, options))
    started = os.environ["WORLD_SIZE"]
    if options.ranks is not None and str(options.ranks) != started:
        parser.error(f"--ranks {options.ranks}: torchrun has started {started}")
    report = Report(options.json, visible=rank == "0")
    here, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    use_gpu = options.device != "cpu" and here > 0
    if use_gpu and here < local:
        gpus = f"{here} GPU{'s' if here > 1 else ''}"
        text = f"{local} ranks on this host for {gpus}: no two ranks can share one with NCCL"
        remedy = f"torchrun --nproc-per-node {here}; for {local} ranks on CPUs: --device cpu"
        report.add(Finding("devices", PROBLEM, text, remedy))
        sys.exit(report.end())
    try:
        ranks, device, _ = start("-m cp_dtensor doctor", arguments, use_gpu, timeout_seconds=60)
    except (RuntimeError, ValueError) as error:
        if rank != "0":
            raise  # this rank's report is not printed
        report.add(Finding("start", PROBLEM, f"{type(error).__name__}: {error}", _REMEDY))
        sys.exit(report.end())
    try:
        check(report, ranks, device.torch_device, options.seq_len, options.heads)
    except Failed as failure:
        report.add(Finding(report.running, PROBLEM, str(failure), _REMEDY))
    status = report.end()
    ranks.gather(None)
    os._exit(status)  # an orderly exit would wait for collectives that failed


def _start_ranks(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Starts the ranks of this host, waits for them, and returns the exit status.

    Ranks are processes of their own, so that a crash or a hang is a finding as well.
    """
    count = options.ranks or (0 if options.device == "cpu" else torch.cuda.device_count()) or _CPU_RANKS
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_PORT": store.port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    common = {**os.environ, **{name: str(value) for name, value in place.items()}}
    common.update(MASTER_ADDR="localhost", TORCHELASTIC_USE_AGENT_STORE="True")  # the store of this process
    command = [sys.executable, "-m", "cp_dtensor", "doctor", *arguments]
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)
    ]

    def failed() -> dict[int, int]:
        codes = {rank: process.poll() for rank, process in enumerate(processes)}
        return {rank: code for rank, code in codes.items() if code and (rank, code) != (0, _PROBLEMS)}

    deadline = time.monotonic() + _SECONDS
    while any(each.poll() is None for each in processes) and not failed() and time.monotonic() < deadline:
        time.sleep(0.05)
    hanging = [rank for rank, each in enumerate(processes) if each.poll() is None]
    crashed = "; ".join(f"rank {rank} ended with status {code}" for rank, code in failed().items())
    for process in processes:
        process.kill()
        process.wait()
    if not crashed and not hanging:
        return int(processes[0].returncode == _PROBLEMS)
    report = Report(options.json, visible=True)
    report.add(Finding("ranks", PROBLEM, crashed or f"ranks {hanging} did not end within {_SECONDS} s", _REMEDY))
    report.end()
    return 1


def check(report: Report, ranks: Ranks, device: torch.device, seq_len: int, heads: Heads) -> None:
    """Makes all checks, in the order in which one needs another.

    Raises:
        Failed: on every rank, if a check of several ranks raised an error on any of them.
    """

    def alone(name: str, findings: Callable[[], Iterable[Finding]]) -> None:
        report.running = name
        try:
            report.add(*(ranks.on_each(lambda: list(findings()), ranks.rank == 0) or ()))
        except Failed as failure:  # of rank 0 alone, for which no other rank waits
            report.add(Finding(name, PROBLEM, str(failure), _REMEDY))

    def together(name: str, findings: Callable[[], Iterable[Finding]]) -> None:
        report.running = name
        first, *others = ranks.together(lambda: list(findings()))
        report.add(*first, *(each for found in others for each in found if each.status != OK))

    use_gpu = device.type == "cuda"
    hosts = ranks.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    alone("versions", versions)
    alone("settings", settings)
    if use_gpu:
        together("GPU memory", memory)
        report.running = "GPU speed"
        timed = ranks.together(timings)
        alone("clocks", clocks)
        alone("peer access", peers)
        report.add(*speed(timed))
    alone("SDPA backends", lambda: kernels(use_gpu))
    together("masks", lambda: first_kernels(device))
    together("gloo", lambda: bandwidth(dist.new_group(backend="gloo"), torch.device("cpu"), hosts))
    obstacle: str | None = "no GPUs"
    if use_gpu:
        world = init_device_mesh("cuda", (ranks.world_size,)).get_group()
        together("NCCL", lambda: bandwidth(world, device, hosts))
        report.running = "symmetric memory"
        obstacle = ranks.together(lambda: p2p_obstacle(world, device))[0]
        report.add(symmetric_memory(obstacle, ranks.world_size, hosts))
    check_methods(report, ranks, device, shares_memory=obstacle is None)
    if not use_gpu:
        report.add(Finding("GPUs", OK, "none are used: memory, speed, clocks, NVLink, NCCL, shared memory not checked"))
    report.running = "auto"
    report.add(ranks.together(lambda: _auto(ranks.world_size, device.type, seq_len, heads))[0])


def _auto(world_size: int, device_type: str, seq_len: int, heads: Heads) -> Finding:
    """Predicts the times of a shape, with the method that "auto" takes; a collective."""
    mesh, (dim, v_dim) = init_device_mesh(device_type, (world_size,), mesh_dim_names=("cp",)), heads.dims(128)
    sizes = {"seq_len": seq_len, "q_heads": heads.q, "kv_heads": heads.kv, "head_dim": dim, "v_head_dim": v_dim}
    found = explain(mesh, **sizes, quiet=True)  # type: ignore[arg-type]
    on_cpu = ["CPUs take the ring; predictions for GPUs:"] if device_type == "cpu" else []
    return Finding("auto", OK, "\n".join([*on_cpu, str(found)]))


# Checks of one process


def versions() -> Iterator[Finding]:
    """Yields findings about Python, torch, cuDNN, Triton and the optional packages."""
    try:
        lines = environment().splitlines()
    except RuntimeError as error:  # torch refuses another cuDNN than that it was built with
        lines = [f"torch {torch.__version__}"]
        remedy = "take other versions of cuDNN off LD_LIBRARY_PATH, or reinstall torch with its own"
        yield Finding("cuDNN", PROBLEM, str(error).splitlines()[0], remedy)
    yield Finding("versions", OK, "; ".join(line.strip() for line in lines))
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    tried = f"{'.'.join(map(str, _OLDEST_TORCH))} to {'.'.join(map(str, _NEWEST_TORCH))}"
    if (major, minor) < _OLDEST_TORCH:
        yield Finding("torch", PROBLEM, f"{torch.__version__} is too old; {tried} were tried", "pip install -U torch")
    elif (major, minor) > _NEWEST_TORCH:
        yield Finding("torch", NOTE, f"{torch.__version__} is newer than those that were tried, {tried}")
    if sys.version_info >= (3, 14):
        yield Finding("Python", NOTE, f"{sys.version.split()[0]} is newer than those that were tried, 3.10 to 3.13")
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("torch") or ():
            pinned = re.match(r"(triton|nvidia-(?:cudnn|nccl)[\w-]*)\s*==\s*([\w.]+)", requirement)
            if pinned and (found := installed_version(pinned[1])) not in (None, pinned[2]):
                text = f"{pinned[1]} {found} is installed, this torch was built with {pinned[2]}"
                yield Finding("versions", NOTE, text, f"if kernels fail: pip install {pinned[1]}=={pinned[2]}")
    if torch.cuda.is_available():
        if installed_version("triton") is None:
            text = "not installed: masks, dropout and deterministic calls run as torch operations, many times slower"
            yield Finding("Triton", PROBLEM, text, "pip install triton")
        missing = [each.distribution for each in PACKAGES if installed_version(each.distribution) is None]
        if missing and has_package_kernels(torch.cuda.get_device_capability()):
            text = f"{' and '.join(missing)} not installed: other kernels serve, slower in some calls"
            yield Finding("packages", NOTE, text, INSTALL)


def settings() -> Iterator[Finding]:
    """Yields findings about environment variables and GPUs that torch does not see."""
    if torch.cuda.is_available():
        for name, (status, text) in _SETTINGS.items():
            if os.environ.get(name) == "1":
                yield Finding("environment", status, f"{name}=1: {text}", f"unset {name}")
    elif os.environ.get("CUDA_VISIBLE_DEVICES") != "" and list(Path("/dev").glob("nvidia[0-9]*")):
        if torch.version.cuda is None:
            remedy = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
            yield Finding("GPUs", PROBLEM, f"this host has GPUs, but torch {torch.__version__} is for CPUs", remedy)
        else:
            text = f"this host has GPUs, but torch cannot use them with CUDA {torch.version.cuda}"
            yield Finding("GPUs", PROBLEM, text, "update the driver: nvidia-smi names the CUDA that it supports")


def kernels(on_gpu: bool) -> Iterator[Finding]:
    """Yields findings about the backends of SDPA by head dim, in bfloat16 on a GPU and float32 on a CPU."""
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    by_dim = {dim: backends(device, dtype, dim) for dim in (64, 128, 256)}
    text = "; ".join(f"head dim {dim}: {', '.join(names) or 'none'}" for dim, names in by_dim.items())
    yield Finding("SDPA backends", OK, text)
    if on_gpu and torch.cuda.get_device_capability() >= (9, 0) and "cuDNN" not in by_dim[128]:
        text = "cuDNN does not serve head dim 128, the fastest kernel that torch has on this GPU"
        yield Finding("cuDNN", PROBLEM, text, "pip install -U the nvidia-cudnn package of torch's CUDA version")


def peers() -> Iterator[Finding]:
    """Yields a finding about peer access between this host's GPUs."""
    if torch.cuda.device_count() > 1:
        text = peer_access()
        expected = text == ALL_GPUS or gpu_name() is None  # other GPUs need not have NVLink
        remedy = "" if expected else "look for GPUs without NVLink or hidden from this process: nvidia-smi topo -p2p r"
        yield Finding("peer access", OK if expected else PROBLEM, text, remedy)


def timings() -> tuple[float, float]:
    """Measure the FLOPs per second of matrix products in bfloat16, and the host's seconds to launch a small kernel."""
    a = torch.randn(_MATMUL, _MATMUL, device="cuda", dtype=torch.bfloat16)
    seconds = Timer("a @ a", globals={"a": a}).timeit(100).mean
    # A timer that does not wait for the GPU: launches alone.
    launch = Timer("a.add_(1)", globals={"a": a[0, :1]}, timer=time.perf_counter).timeit(1000).mean
    torch.cuda.synchronize()
    return 2 * _MATMUL**3 / seconds, launch


def speed(by_rank: list[tuple[float, float]]) -> Iterator[Finding]:
    """Yields findings about the matrix products and launches that each rank has timed."""
    flops, launches = zip(*by_rank, strict=True)
    gpu, slowest = gpu_name(), flops.index(min(flops))
    peak = f" of {GPUS[gpu].flops / 1e12:.0f}" if gpu else ""
    text = f"{min(flops) / 1e12:.0f} to {max(flops) / 1e12:.0f}{peak} TFLOP/s in matrix products"
    look = "look for throttling and other processes: nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER"
    if gpu and min(flops) < _LEAST_OF_PEAK * GPUS[gpu].flops:
        yield Finding("GPU speed", PROBLEM, f"{text}; slowest: rank {slowest}", look)
    elif min(flops) < 0.85 * max(flops):
        yield Finding("GPU speed", PROBLEM, f"{text}; all ranks wait for rank {slowest}", look)
    else:
        yield Finding("GPU speed", OK, text)
    text = f"{1e6 * min(launches):.1f} to {1e6 * max(launches):.1f} us of host time for a small kernel"
    slow = max(launches) > _SLOW_LAUNCH
    remedy = "short sequences: bind ranks to cores near their GPU, or capture CUDA graphs" if slow else ""
    yield Finding("launches", NOTE if slow else OK, text, remedy)


def clocks() -> Iterator[Finding]:
    """Yields findings about clocks, temperatures and memory errors of this host's GPUs, if nvidia-smi is there."""
    if shutil.which("nvidia-smi") is None:
        yield Finding("clocks", NOTE, "unknown without nvidia-smi")
        return
    command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    if done.returncode or not all(len(row) == 4 for row in rows):
        yield Finding("clocks", NOTE, f"nvidia-smi does not tell: {done.stdout.strip() or done.stderr.strip()}"[:200])
        return
    text = "; ".join(f"{now} of {most} MHz, {degrees} C" for now, most, degrees, _ in rows)
    yield Finding("clocks", OK, text)
    broken = ", ".join(str(index) for index, row in enumerate(rows) if row[3].isdecimal() and int(row[3]))
    if broken:
        text = f"uncorrected memory errors on GPU {broken}: results may be wrong"
        yield Finding("memory errors", PROBLEM, text, "reset or replace the GPU")


def memory() -> Iterator[Finding]:
    """Yields a finding about memory that other processes hold on the current GPU."""
    free, total = torch.cuda.mem_get_info()
    held = total - free - torch.cuda.memory_reserved()
    if held > 0.1 * total:
        text = f"{held / 2**30:.0f} of {total / 2**30:.0f} GiB of GPU {torch.cuda.current_device()} are in use"
        yield Finding("GPU memory", NOTE, text, "end other processes on this GPU: nvidia-smi lists them")


# Checks of all ranks


def first_kernels(device: torch.device) -> Iterator[Finding]:
    """Compiles and runs the kernels of masks, on each rank alone; a collective."""
    began, on_gpu = time.monotonic(), device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float64
    q = torch.randn(1, 2, 256, 64, device=device, dtype=dtype, requires_grad=True)
    alone, _ = dist.new_subgroups(1)
    out = context_parallel_attention(q, q, q, mesh=alone, mask=Documents([0, 100, 256]))
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    if on_gpu:
        torch.cuda.synchronize()
    what = "kernels compiled and ran" if on_gpu else "torch operations on CPUs"
    yield Finding("masks", OK, f"{what}, {time.monotonic() - began:.1f} s")


def bandwidth(group: dist.ProcessGroup, device: torch.device, hosts: int) -> Iterator[Finding]:
    """All-gathers bytes, checks them, and compares the bandwidth with that of the link; a collective."""
    world_size, rank, on_gpu = group.size(), group.rank(), device.type == "cuda"
    name = "NCCL" if on_gpu else "gloo"
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the former since torch 2.13
    rows = torch.full((_EXCHANGED,), rank + 1, dtype=torch.uint8, device=device)
    gathered = torch.zeros(world_size * _EXCHANGED, dtype=torch.uint8, device=device)
    gather(gathered, rows, group=group)
    # Before the check: a rank that finds a problem leaves, and others must not wait for it.
    if on_gpu and world_size > 1:
        per_second = link_speed(group, device)
    else:
        dist.barrier(group)
        began = time.perf_counter()
        gather(gathered, rows, group=group)
        per_second = (world_size - 1) * _EXCHANGED / (time.perf_counter() - began)
    sent = torch.arange(1, world_size + 1, dtype=torch.uint8).repeat_interleave(_EXCHANGED)
    if not torch.equal(gathered.cpu(), sent):
        yield Finding(name, PROBLEM, f"an all-gather gave rank {rank} other bytes than were sent", "check the links")
    elif world_size == 1:
        yield Finding(name, OK, "works; one rank has nothing to exchange")
    else:
        yield link(name, gpu_name() if on_gpu else None, world_size, hosts, per_second)


def link(name: str, gpu: str | None, world_size: int, hosts: int, per_second: float) -> Finding:
    """Compare the measured bytes per second into a rank with those of the link."""
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    text = f"all-gather over {world_size} ranks on {where}: {per_second / 1e9:.3g} GB/s into a rank"
    if gpu is None:
        return Finding(name, OK, text)
    expected = Hardware.of(gpu if hosts == 1 else f"{gpu}, InfiniBand NDR").link_speed
    if hosts > 1:
        return Finding(name, OK, f"{text}; with InfiniBand NDR for each GPU expect about {expected / 1e9:.3g}")
    slow = per_second < _LEAST_OF_PEAK * expected
    remedy = "look for links that are down: nvidia-smi topo -m, nvidia-smi nvlink --status" if slow else ""
    text += f"; NVLink of {gpu}s gives about {expected / 1e9:.3g}"
    return Finding(name, PROBLEM if slow else OK, text, remedy)


def symmetric_memory(obstacle: str | None, world_size: int, hosts: int) -> Finding:
    """Return the finding about memory that ranks share; `obstacle` is the reason why they share none."""
    name = "symmetric memory"
    if world_size == 1:
        return Finding(name, NOTE, "not tried: it needs two ranks")
    if obstacle is None:
        return Finding(name, OK, "ranks read each other's memory")
    if hosts > 1:
        return Finding(name, NOTE, f"not over all ranks: {obstacle}; ranks of one host may share memory")
    remedy = "K/V travel by NCCL instead; containers need --ipc=host and all GPUs of the host"
    return Finding(name, PROBLEM if gpu_name() else NOTE, obstacle, remedy)  # other GPUs need not have NVLink


def check_methods(report: Report, ranks: Ranks, device: torch.device, shares_memory: bool) -> None:
    """Compares out and gradients of every method and KV transport with one device."""
    began, size, wrong = time.monotonic(), ranks.world_size, set()
    dtype, source = _DTYPES[device.type], Source(0, device)
    for mask in ("causal", f"documents {_TOKENS // 2}"):
        case = Case(_TOKENS * size, Heads(max(4, size), max(4, size) // 2), 64, 1, dtype, mask, "HeadTail", "auto")
        methods = {
            each.name.removeprefix(OURS_PREFIX): each
            for each in methods_by_name(None)
            if each.name.startswith(OURS_PREFIX) and each.refusal(case, size) is None
        }
        for name in ("auto", *(() if shares_memory else ("symm_mem",))):
            methods.pop(name, None)
        select = ByLayout().select(case, ranks.rank, size, device)
        inputs = source.inputs(case, select)
        for name, method in methods.items():
            report.running = f"{name}, {mask}"
            try:
                work = Work(method.attention(case, device), inputs, "fwdbwd", case.heads.kv)
                ranks.together(work)
                outcome = Outcome(work.results(), select)
                errors = relative_errors(case, source, {name: outcome}, ranks)[name]
                over = {each: error for each, error in errors.items() if not error <= _TOLERANCE[device.type]}
                text = ", ".join(f"relative error of {each}: {error:.2g}" for each, error in over.items())
            except Failed as failure:
                if not failure.alike:
                    raise
                text = str(failure)
            if text:
                wrong.add(name)
                remedy = "choose another method or rotate_method, and report this with all lines above"
                report.add(Finding(report.running, PROBLEM, text, remedy))
    right = ", ".join(name for name in methods if name not in wrong) or "no method"
    text = f"{right}: forward and backward in {dtype} agree with one device in float64"
    report.add(Finding("correctness", PROBLEM if wrong else OK, f"{text} ({time.monotonic() - began:.1f} s)"))
