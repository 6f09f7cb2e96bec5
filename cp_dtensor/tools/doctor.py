"""Checks of this machine for context parallelism, with remedies; `python -m cp_dtensor doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.benchmark import Timer

from cp_dtensor import GPUS, Causal, Cluster, Contiguous, Hardware, explain
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.attention.backends.packages import INSTALL, has_package_kernels, installed_version
from cp_dtensor.attention.backends.select import (
    PACKAGES,
    allowed_backends,
    choose_backend,
    has_triton_kernels,
    masked_by_shape,
)
from cp_dtensor.comm.groups import sequence_ranks
from cp_dtensor.comm.links import cluster_of, link_speed
from cp_dtensor.comm.symm_mem_workspace import p2p_obstacle
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.tools.cases import Case, Heads
from cp_dtensor.tools.errors import ERRORS
from cp_dtensor.tools.measure import Suite
from cp_dtensor.tools.methods import OURS, methods_by_name
from cp_dtensor.tools.parsing import argument, command_parser, positive
from cp_dtensor.tools.plan import chosen, reasons, save_cluster, snippet, ways
from cp_dtensor.tools.ranks import Device, Failed, Ranks, links_of_nodes, start
from cp_dtensor.tools.report import REFUSED, Row, gpu_name, versions
from cp_dtensor.tools.torch_methods import mesh_of_ranks

_DESCRIPTION = """\
Checks versions, GPUs, links and kernels, exchanges data between ranks, and compares every method and KV transport with
attention on one device, forward and backward. Ends in OK, or in problems and what to do about them (exit status 1; 3 of
rank 0 of a job).

    python -m cp_dtensor doctor                                   on the GPUs of this host; without GPUs two CPU ranks
    torchrun --nnodes 2 --nproc-per-node 8 ... -m cp_dtensor doctor                 on the ranks of a job
    torchrun --nproc-per-node 4 -m cp_dtensor doctor --nodes 2    ranks of one host stand for those of two nodes
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
_EXCHANGED = 4 << 20  # bytes of each rank in an all-gather
_TOKENS = 128  # of each rank, in the calls whose results are checked
_DTYPES = {"cpu": "float64", "cuda": "bfloat16"}
_TOLERANCE = {"cpu": 1e-9, "cuda": 2e-2}
"""Largest relative error: of float64 on CPUs, and of bfloat16 on GPUs, whose kernels reach 2e-3 to 8e-3."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a check; `status` is `OK`, `NOTE` or `PROBLEM`."""

    check: str
    status: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        lines = [*self.text.splitlines(), *([f"-> {self.remedy}"] if self.remedy else [])]
        return f"{self.status:<8} {self.check:<17} " + f"\n{'':<27}".join(lines)


def report(findings: Iterable[Finding], *, as_json: bool, visible: bool) -> int:
    """Print each finding as it is made and the verdict, or all as JSON; return the exit status of this rank.

    It is `_PROBLEMS` if there are some, 0 of ranks that are not `visible`.
    """
    began, found = time.monotonic(), list[Finding]()
    for finding in findings:
        found.append(finding)
        if visible and not as_json:
            print(finding, flush=True)
    problems = [each.check for each in found if each.status == PROBLEM]
    if visible and as_json:
        print(json.dumps({"ok": not problems, "findings": [asdict(each) for each in found]}, indent=1), flush=True)
    elif visible:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        verdict = f"{count}: {', '.join(dict.fromkeys(problems))}" if problems else "OK"
        print(f"{verdict} ({time.monotonic() - began:.1f} s)", flush=True)
    return _PROBLEMS if visible and problems else 0


# The command


def main(arguments: Sequence[str]) -> None:
    """Run the checks and exit with status 1 if there are problems; with `--info`, print a table only."""
    parser = command_parser("doctor", _DESCRIPTION)
    parser.add_argument("--info", action="store_true", help="print versions, devices and kernels, without checks")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--nodes", type=positive, metavar="N", help="ranks of this host stand for those of N nodes")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write GPUs and measured links, for plan --cluster")
    shape = parser.add_argument_group('shape whose method "auto" is shown')
    shape.add_argument("--seq-len", type=positive, default=32768)
    shape.add_argument("--heads", type=argument(Heads.parse), default=Heads(32, 8), metavar="Q:KV")
    options = parser.parse_args(arguments)
    rank, gpus = os.environ.get("RANK"), 0 if options.device == "cpu" else torch.cuda.device_count()
    if options.save is not None and not gpus:
        parser.error("--save: expected GPUs whose links can be measured, got none")
    tell = partial(report, as_json=options.json, visible=rank in (None, "0"))
    if options.info:
        if rank in (None, "0"):
            rows = dict(facts())
            lines = (f"{name:<{max(map(len, rows))}}  {value}" for name, value in rows.items())
            print(json.dumps(rows, indent=1) if options.json else "\n".join(lines))
        return
    if rank is None:
        sys.exit(_run_on_this_host(arguments, gpus or _CPU_RANKS, tell))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // (options.nodes or 1)
    if 0 < gpus < local:
        text = f"{local} ranks on this host for {gpus} GPU{'s' * (gpus > 1)}: no two ranks can share one with NCCL"
        remedy = f"torchrun --nproc-per-node {gpus}; for {local} ranks on CPUs: --device cpu"
        sys.exit(tell([Finding("devices", PROBLEM, text, remedy)]))
    try:
        ranks, device = start("-m cp_dtensor doctor", arguments, gpus > 0, timeout_seconds=60, nodes=options.nodes)
    except (RuntimeError, ValueError) as error:
        if rank != "0":
            raise  # this rank's report is not printed
        sys.exit(tell([Finding("start", PROBLEM, f"{type(error).__name__}: {error}", _REMEDY)]))
    status = tell(check(ranks, device, options.seq_len, options.heads))
    if options.save is not None:
        cluster = cluster_of(sequence_ranks(dist.group.WORLD), device.torch_device, 2)
        if rank == "0":
            save_cluster(cluster, options.save)
            print(f"wrote {options.save}", flush=True)
    ranks.gather(None)
    os._exit(status)  # an orderly exit would wait for collectives that failed


def _run_on_this_host(arguments: Sequence[str], count: int, tell: Callable[[list[Finding]], int]) -> bool:
    """Run the command on ranks of this host; return True if there are problems.

    Ranks are processes of their own, so that a crash or a hang is a finding as well, which is told here.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes = mp.spawn(_run_rank, (arguments, count, store.port), nprocs=count, join=False)
    deadline = time.monotonic() + _SECONDS
    try:
        while not processes.join(timeout=max(deadline - time.monotonic(), 0)):
            if time.monotonic() > deadline:
                hanging = [rank for rank, each in enumerate(processes.processes) if each.is_alive()]
                raise TimeoutError(f"ranks {hanging} did not end within {_SECONDS} s")
        return False
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as ended:
        if ended.error_index == 0 and getattr(ended, "exit_code", 0) == _PROBLEMS:
            return True
        text = f"rank {ended.error_index} ended: {str(ended).strip().splitlines()[-1]}"
    except TimeoutError as late:
        text = str(late)
        for each in processes.processes:
            each.kill()
    tell([Finding("ranks", PROBLEM, text, _REMEDY)])
    return True


def _run_rank(rank: int, arguments: Sequence[str], count: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="localhost")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store of the process that started this one
    main(arguments)


def check(ranks: Ranks, device: Device, seq_len: int, heads: Heads) -> Iterator[Finding]:
    """Yield the findings of all checks, in the order in which one needs another; stop where ranks fail differently."""
    size = ranks.world_size
    hosts = size // int(os.environ.get("LOCAL_WORLD_SIZE", size))
    gloo = dist.new_group(backend="gloo")
    mesh = init_device_mesh(device.torch_device.type, (size,), mesh_dim_names=("cp",))
    over_nodes = mesh_of_ranks(device.torch_device.type, size // hosts) if 1 < hosts < size else None

    def each(findings: Callable[[], Iterable[Finding]]) -> Iterable[Finding]:
        """Make a check on every rank; of ranks other than 0 return what is not well, what several found once."""
        own, *others = ranks.together(lambda: list(findings()))
        return dict.fromkeys([*own, *(found for of_rank in others for found in of_rank if found.status != OK)])

    of_gpus: dict[str, Callable[[], Iterable[Finding]]] = {
        "GPU speed": lambda: speed(ranks.together(timings)),
        "NCCL": lambda: each(lambda: exchange(mesh.get_group(), device.torch_device, hosts)),
        "symmetric memory": lambda: symmetric_memory(
            ranks.together(lambda: p2p_obstacle(mesh.get_group(), device.torch_device))[0], size, hosts
        ),
    }
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": lambda: each(packages),
        "environment": lambda: each(environment),
        "gloo": lambda: each(lambda: exchange(gloo, torch.device("cpu"), hosts)),
        **(of_gpus if device.is_gpu else {}),
        "correctness": lambda: results(ranks, device),
        "auto": lambda: each(lambda: choice(mesh, seq_len, heads)),
        "nodes": lambda: () if over_nodes is None else each(lambda: nodes(over_nodes, mesh, ranks, seq_len, heads)),
    }
    for name, findings in checks.items():
        try:
            yield from list(findings())
        except Failed as failure:
            yield Finding(name, PROBLEM, str(failure), _REMEDY)
            if not failure.alike:
                return
    if not device.is_gpu:
        yield Finding("GPUs", OK, f"none are used; not checked: {', '.join(of_gpus)}")


# Checks of one process


def packages() -> Iterator[Finding]:
    """Yield findings about Python, torch, cuDNN, Triton and the optional packages."""
    try:
        yield Finding("versions", OK, "; ".join(f"{name} {version}" for name, version in versions()))
    except RuntimeError as error:  # torch refuses another cuDNN than that it was built with
        remedy = "take other versions of cuDNN off LD_LIBRARY_PATH, or reinstall torch with its own"
        yield Finding("cuDNN", PROBLEM, str(error).splitlines()[0], remedy)
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    tried = f"{'.'.join(map(str, _OLDEST_TORCH))} to {'.'.join(map(str, _NEWEST_TORCH))}"
    if found < _OLDEST_TORCH:
        yield Finding("torch", PROBLEM, f"{torch.__version__} is too old; {tried} were tried", "pip install -U torch")
    elif found > _NEWEST_TORCH:
        yield Finding("torch", NOTE, f"{torch.__version__} is newer than those that were tried, {tried}")
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("torch") or ():
            pinned = re.match(r"(triton|nvidia-(?:cudnn|nccl)[\w-]*)\s*==\s*([\w.]+)", requirement)
            if pinned and (version := installed_version(pinned[1])) not in (None, pinned[2]):
                text = f"{pinned[1]} {version} is installed, this torch was built with {pinned[2]}"
                yield Finding("versions", NOTE, text, f"if kernels fail: pip install {pinned[1]}=={pinned[2]}")
    if torch.cuda.is_available():
        if installed_version("triton") is None:
            text = "not installed: masks, dropout and other calls run as torch operations, many times slower"
            yield Finding("Triton", PROBLEM, text, "pip install triton")
        missing = [each.distribution for each in PACKAGES if installed_version(each.distribution) is None]
        if missing and has_package_kernels(torch.cuda.get_device_capability()):
            text = f"{' and '.join(missing)} not installed: other kernels serve, slower in some calls"
            yield Finding("packages", NOTE, text, INSTALL)


def environment() -> Iterator[Finding]:
    """Yield findings about environment variables and GPUs that torch does not see."""
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


# Checks of all ranks


def timings() -> tuple[float, float]:
    """Measure the FLOPs per second of matrix products in bfloat16, and the host's seconds to launch a small kernel."""
    a = torch.randn(_MATMUL, _MATMUL, device="cuda", dtype=torch.bfloat16)
    seconds = Timer("a @ a", globals={"a": a}).timeit(100).mean
    # A timer that does not wait for the GPU: launches alone.
    launch = Timer("a.add_(1)", globals={"a": a[0, :1]}, timer=time.perf_counter).timeit(1000).mean
    torch.cuda.synchronize()
    return 2 * _MATMUL**3 / seconds, launch


def speed(by_rank: Sequence[tuple[float, float]]) -> Iterator[Finding]:
    """Yield findings about the matrix products and launches that each rank has timed."""
    flops, launches = zip(*by_rank, strict=True)
    gpu, slowest = gpu_name(), flops.index(min(flops))
    peak = f" of {GPUS[gpu].flops / 1e12:.0f}" if gpu else ""
    text = f"{min(flops) / 1e12:.0f} to {max(flops) / 1e12:.0f}{peak} TFLOP/s in matrix products"
    if min(flops) < max(0.85 * max(flops), _LEAST_OF_PEAK * GPUS[gpu].flops if gpu else 0):
        look = "look for throttling and other processes: nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER,ECC"
        yield Finding("GPU speed", PROBLEM, f"{text}; all ranks wait for the slowest, rank {slowest}", look)
    else:
        yield Finding("GPU speed", OK, text)
    text = f"{1e6 * min(launches):.1f} to {1e6 * max(launches):.1f} us of host time for a small kernel"
    slow = max(launches) > _SLOW_LAUNCH
    remedy = "short sequences: bind ranks to cores near their GPU, or capture CUDA graphs" if slow else ""
    yield Finding("launches", NOTE if slow else OK, text, remedy)


def exchange(group: dist.ProcessGroup, device: torch.device, hosts: int) -> Iterator[Finding]:
    """All-gather bytes, check them, and on GPUs compare the bandwidth with that of the link; a collective."""
    world_size, rank, name = group.size(), group.rank(), "NCCL" if device.type == "cuda" else "gloo"
    gathered = [torch.empty(_EXCHANGED, dtype=torch.uint8, device=device) for _ in range(world_size)]
    dist.all_gather(gathered, torch.full_like(gathered[0], rank + 1), group=group)
    # Before the check: a rank that finds a problem leaves, and others must not wait for it.
    per_second = link_speed(group, device) if device.type == "cuda" and world_size > 1 else None
    if any((each != sent).any() for sent, each in enumerate(gathered, 1)):
        yield Finding(name, PROBLEM, f"an all-gather gave rank {rank} other bytes than were sent", "check the links")
    elif per_second is None:
        yield Finding(name, OK, f"works over {world_size} rank{'s' if world_size > 1 else ''}")
    else:
        yield link(gpu_name(), world_size, hosts, per_second)


def link(gpu: str | None, world_size: int, hosts: int, per_second: float) -> Finding:
    """Compare the measured bytes per second into a rank with those of the link."""
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    text = f"all-gather over {world_size} ranks on {where}: {per_second / 1e9:.3g} GB/s into a rank"
    if gpu is None:
        return Finding("NCCL", OK, text)
    expected = Hardware.of(gpu if hosts == 1 else f"{gpu}, InfiniBand NDR").link_speed
    if hosts > 1:
        return Finding("NCCL", OK, f"{text}; with InfiniBand NDR for each GPU expect about {expected / 1e9:.3g}")
    text += f"; NVLink of {gpu}s gives about {expected / 1e9:.3g}"
    if per_second >= _LEAST_OF_PEAK * expected:
        return Finding("NCCL", OK, text)
    look = "look for links that are down: nvidia-smi topo -m, nvidia-smi nvlink --status"
    return Finding("NCCL", PROBLEM, text, look)


def symmetric_memory(obstacle: str | None, world_size: int, hosts: int) -> Iterator[Finding]:
    """Yield the finding about memory that ranks share; `obstacle` is the reason why they share none."""
    if world_size == 1:
        found = NOTE, "not tried: it needs two ranks", ""
    elif obstacle is None:
        found = OK, "ranks read each other's memory", ""
    elif hosts > 1:
        found = NOTE, f"not over all ranks: {obstacle}; ranks of one host may share memory", ""
    else:  # GPUs that are not known need not have NVLink
        remedy = "K/V travel by NCCL; containers need --ipc=host and all GPUs of the host: nvidia-smi topo -p2p r"
        found = PROBLEM if gpu_name() else NOTE, obstacle, remedy
    yield Finding("symmetric memory", *found)


def results(ranks: Ranks, device: Device) -> Iterator[Finding]:
    """Yield findings about out and gradients of every method and KV transport, beside one device in float64."""
    began, kind, size, rows = time.monotonic(), device.torch_device.type, ranks.world_size, list[Row]()
    suite = Suite(ranks, device, repeats=1, check_up_to=_TOKENS * size, tells=False)
    ours = [
        each for each in methods_by_name() if each.name.startswith(OURS) and not each.name.startswith(f"{OURS}auto")
    ]
    heads = Heads(max(4, size), max(4, size) // 2, 64)
    for mask in ("causal", f"documents {_TOKENS // 2}"):
        suite.run(Case(_TOKENS * size, heads, mask, dtype=_DTYPES[kind]), ["fwdbwd"], ours, rows)
    tried = [row for row in rows if row["status"] != REFUSED]
    right = dict.fromkeys(row["method"] for row in tried)
    for row in tried:
        errors = {name: row.get(f"error_{name}") for name in ERRORS}
        over = [f"{name}: {error}" for name, error in errors.items() if error is None or not error <= _TOLERANCE[kind]]
        if over:
            right.pop(row["method"], None)
            text = row["message"] or f"relative error of {', '.join(over)}"
            remedy = "choose another method or rotate_method, and report this with all lines above"
            yield Finding(f"{row['method'].removeprefix(OURS)}, {row['mask']}", PROBLEM, text, remedy)
    names = ", ".join(name.removeprefix(OURS) for name in right) or "no method"
    text = f"{names}: forward and backward in {_DTYPES[kind]} agree with one device in float64"
    wrong = any(row["method"] not in right for row in tried)
    yield Finding("correctness", PROBLEM if wrong else OK, f"{text} ({time.monotonic() - began:.1f} s)")


def choice(mesh: DeviceMesh, seq_len: int, heads: Heads) -> Iterator[Finding]:
    """Yield the predicted times of a shape, with the method that "auto" takes; a collective."""
    on_cpu = ["CPUs take the ring; predictions for GPUs:"] if mesh.device_type == "cpu" else []
    dim, v_dim = heads.dims
    predicted = explain(
        mesh, seq_len=seq_len, q_heads=heads.q, kv_heads=heads.kv, head_dim=dim, v_head_dim=v_dim, quiet=True
    )
    yield Finding("auto", OK, "\n".join([*on_cpu, str(predicted)]))


def nodes(mesh: DeviceMesh, flat: DeviceMesh, ranks: Ranks, seq_len: int, heads: Heads) -> Iterator[Finding]:
    """Yield the findings about several nodes, and what "auto" takes; a collective. On CPUs, H200s are assumed for that.

    `mesh` has an axis across nodes and one inside of them, `flat` one axis of all ranks.
    """
    yield Finding("nodes", OK, links_of_nodes(mesh, ranks))
    if mesh.device_type == "cuda":
        cluster = cluster_of(sequence_ranks(flat), torch.device("cuda", torch.cuda.current_device()), 2)
    else:
        cluster = Cluster("H200", gpus_per_node=mesh.size(1), nodes=mesh.size(0))
    found = ways(cluster, Case(seq_len, heads), ["HeadTail"])
    best = chosen(found, cluster)
    yield Finding("mesh", OK, "\n".join([*reasons(best, found, cluster), snippet(best, flat.size())]))


# Facts without checks

_SHAPES = ((1, 64, 64), (1, 128, 128), (4, 192, 128), (1, 192, 128), (1, 256, 256), (1, 512, 512))
"""Key heads for four query heads, head dims of q and of v. Groups change the kernel only where the dims differ."""
_KERNELS = {
    "FLASH_ATTENTION_4": "FlashAttention-4", "CUDNN_FLEX_ATTENTION": "cuDNN's FlexAttention",
    "CUDNN_ATTENTION": "cuDNN", "FLASH_ATTENTION": "torch's flash", "EFFICIENT_ATTENTION": "torch's efficient",
    "MATH": "torch's math",
}  # fmt: skip


def facts() -> Iterator[tuple[str, str]]:
    """Yield name and value of each row of the table."""
    yield from versions()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield "Triton runs in its", "interpreter (TRITON_INTERPRET)"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = Counter(
        f"{each.name} ({each.total_memory / 2**30:.0f} GiB, capability {each.major}.{each.minor})"
        for each in map(torch.cuda.get_device_properties, range(count))
    )
    yield "devices", "; ".join(f"{n} x {name}" for name, n in gpus.items()) or f"CPU, {os.cpu_count()} cores"
    for package in PACKAGES:
        yield package.title, package.version or f"not installed: {INSTALL}"
    yield from kernels()


def kernels() -> Iterator[tuple[str, str]]:
    """Yield which kernel computes what on the first device, by dtype, head dims of q and v, and key heads.

    FlashAttention-4 and cuDNN's FlexAttention step back where their first results in a process are wrong.
    """
    has_gpu, allowed = torch.cuda.is_available(), allowed_backends()
    device, capability = ("cuda:0", torch.cuda.get_device_capability(0)) if has_gpu else ("cpu", None)
    partition = LayoutPartition(Contiguous(), 8, 8, 1, 1)
    for dtype, shapes in (("bfloat16", _SHAPES), ("float32", _SHAPES[1:2])):
        for kv_heads, dim, v_dim in shapes:
            spec = CallSpec(
                partition, Causal(), 1, 4, kv_heads, dim, v_dim, dtype, device=device, capability=capability
            )  # fmt: skip
            by_row = replace(spec, masking=Masking.INTERVALS)
            specs = {
                "causal, full": spec, "masks": by_row,
                "bias, dropout": replace(spec, masking=Masking.INTERVALS_UNBROKEN),
            }  # fmt: skip
            if has_gpu:  # on CPUs all are deterministic
                specs["deterministic"] = masked_by_shape(replace(by_row, deterministic=True), allowed)
            shape = str(dim) if dim == v_dim else f"{dim}/{v_dim}{', grouped' if kv_heads < 4 else ''}"
            text = "; ".join(f"{what}: {_kernel(choose_backend(each, allowed), spec)}" for what, each in specs.items())
            yield f"kernels, {dtype}, {shape}", text


def _kernel(backend: AttentionBackend, spec: CallSpec) -> str:
    if backend.name == "INTERVALS":
        return "ours in Triton" if has_triton_kernels(spec) else "torch operations"
    name = _KERNELS[backend.name]
    if not isinstance(backend, Flash4Attention) or not backend.left:
        return name
    other = _kernel(backend.instead, spec)
    left = (f"{'causal' if causal else 'full'} {direction}: {other}" for direction, causal in sorted(backend.left))
    return f"{name} ({', '.join(left)})"
