"""Local work of sharded gated delta nets and KDA on one GPU: the price of scans, and of kernels with fewer heads.

python docs/scripts/hybrid_speed.py --tokens 32768 262144 --seconds 140 --json speed.json

Needs flash-linear-attention (package fla-core). Of every way to divide a layer over n ranks, one rank's part is timed,
without exchanges:

one GPU     the package's kernel, all heads, all tokens
scan        this library's: the map of 1/n of the tokens, and their outputs by the entering state
cp_context  the package's own context parallelism of 1/n of the tokens, on a rank in the middle
heads       the package's kernel, 1/n of the heads, all tokens
torch       this library's torch operations on one GPU, 1/8 of the heads

"of ideal" is the time on one GPU, over n times that of the part. Results are compared with float64 first. Then the
kernels of the parts of 2 ranks that take most time are listed, and rows are printed and written as they are measured.
Processes compile the kernels side by side, two for each part; only `--settings` of each kernel's settings are tried
(0: all, minutes). They are chosen at the first of `--tokens`. What does not fit in memory or in `--seconds` is not
timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from cp_dtensor.layers import fla
from cp_dtensor.layers.chunked import ChunkedRecurrence
from cp_dtensor.layers.fla import FlaRecurrence

KERNELS = {
    "gated delta net": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "KDA": ("fla.ops.kda", "chunk_kda"),
}
COMPILED = {
    "gated delta net": ("one GPU, cp_context of 2", "scan of 2", "heads of 2", "heads of 4"),
    "KDA": ("one GPU, cp_context of 2", "scan of 2", "heads of 2", "heads of 4"),
}
"""Parts that together have all kernels; those of one process share kernels."""
LISTED = ("one GPU", "scan of 2", "cp_context of 2")
"""Parts whose kernels are listed."""
RANKS = (2, 4)
WIDTH = 128
CHECKED = 512
"""Tokens of the comparison with float64."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADER = ("layer", "tokens", "part", "forward ms", "both ms", "of ideal", "GiB")
Tensors = list[torch.Tensor]


def main() -> None:
    """Prints the tables; ends with status 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 262144])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--settings", type=int, default=4, help="settings that are tried of each kernel, 0 for all")
    parser.add_argument("--seconds", type=float, default=140, help="rows that would begin later are left out")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--compile", nargs=3, metavar=("KIND", "PARTS", "SHARE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    if arguments.compile:
        kind, part, share = arguments.compile
        _limit_settings(arguments.settings, int(share))
        for each in part.split(", "):
            _passes(_parts(kind)[each], *_problem(kind, CHECKED, _heads(each, arguments.heads)))
        return
    _limit_settings(arguments.settings)
    versions = f"torch {torch.__version__}, {_device_name()}, {arguments.heads} heads of {WIDTH}"
    print(versions, flush=True)
    report: dict[str, Any] = {"device": _device_name(), "versions": versions, "errors": [], "kernels": {}, "rows": []}
    compiled = _compiled_side_by_side(arguments, begun + 0.7 * arguments.seconds)
    print(f"kernels compiled after {time.perf_counter() - begun:.0f} s", *compiled, sep="\n", flush=True)
    for tokens in arguments.tokens:
        for kind in KERNELS:
            if tokens == arguments.tokens[0]:
                _first_kernels(kind, arguments, report)
                _compare(kind, arguments.heads, report)
            _measured(kind, tokens, [part for part in _parts(kind) if part != "torch"], arguments, begun, report)
    for kind in KERNELS:
        _measured(kind, arguments.tokens[0], ["torch"], arguments, begun, report)
    print(f"{time.perf_counter() - begun:.0f} s in all")
    sys.exit(any("WRONG" in line for line in report["errors"]))


def _compare(kind: str, heads: int, report: dict[str, Any]) -> None:
    try:
        for line in _checked(kind, heads):
            report["errors"].append(line)
            print(line, flush=True)
    except Exception as error:  # rows are worth having
        report["errors"].append(f"{kind}: WRONG, {type(error).__name__}: {error}")
        print(report["errors"][-1][:300], flush=True)


def _first_kernels(kind: str, arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Runs the parts at the first of `--tokens`, where kernels choose their settings, and lists kernels of some."""
    for part in _parts(kind):
        if part == "torch":
            continue
        try:
            problem = _problem(kind, _local(part, arguments.tokens[0]), _heads(part, arguments.heads))
            _passes(_parts(kind)[part], *problem)
            found = _slowest_kernels(_parts(kind)[part], *problem) if part in LISTED else []
        except Exception as error:  # out of memory, or a kernel that does not compile here
            found = [("", f"{type(error).__name__}: {error}".splitlines()[0][:80])]
        report["kernels"][f"{kind}, {part}"] = found
        print(*[f"{kind}, {part}: {ms} ms {name}" for ms, name in found], sep="\n", end="\n" * bool(found), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def _slowest_kernels(part: Callable[..., Tensors], *leaves: torch.Tensor) -> list[tuple[str, str]]:
    """Milliseconds and names of the 8 kernels of both passes that take most time, and of all kernels."""
    if DEVICE.type != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        _passes(part, *leaves)
        torch.cuda.synchronize()
    kernels = [event for event in recorded.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    found = [
        (f"{event.self_device_time_total / 1e3:.2f}", f"{event.count} x {event.key[:60]}") for event in kernels[:8]
    ]
    return [*found, (f"{sum(event.self_device_time_total for event in kernels) / 1e3:.2f}", "all kernels")]


def _measured(
    kind: str, tokens: int, parts: list[str], arguments: argparse.Namespace, begun: float, report: dict[str, Any]
) -> None:
    """Prints and writes the rows of parts."""
    alone: tuple[float, float] | None = None
    print(f"| {' | '.join(HEADER)} |\n{'|---' * len(HEADER)}|")
    for part in parts:
        row = [kind, f"{tokens}", part, "no time", "", "", ""]
        problem: tuple[torch.Tensor, ...] = ()
        try:
            if time.perf_counter() - begun < arguments.seconds:
                problem = _problem(kind, _local(part, tokens), _heads(part, arguments.heads))
                forward, both, memory = _timed(_parts(kind)[part], *problem)
                alone = (forward, both) if part == "one GPU" else alone
                row[3:] = [f"{1e3 * forward:.2f}", f"{1e3 * both:.2f}", "", f"{memory:.1f}"]
                if alone is not None:
                    pair = zip(alone, (forward, both), strict=True)
                    row[5] = " ".join(f"{100 * one / (_ranks(part) * mine):.0f}%" for one, mine in pair)
        except Exception as error:  # out of memory, or a kernel that does not compile here
            row[3] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
        problem = ()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        report["rows"].append(dict(zip(HEADER, row, strict=True)))
        print(f"| {' | '.join(row)} |", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1))


def _parts(kind: str) -> dict[str, Callable[..., Tensors]]:
    """By name: the results of a part, of q, k, v, g, beta and an entering state."""
    parts: dict[str, Callable[..., Tensors]] = {"one GPU": lambda *x: _alone(kind, *x)}
    for ranks in RANKS:
        parts[f"scan of {ranks}"] = lambda *x: _scan(FlaRecurrence, *x)
        parts[f"cp_context of {ranks}"] = lambda *x: _cp_context(kind, _Group(1, 3), *x[:5])
        parts[f"heads of {ranks}"] = lambda *x: _alone(kind, *x)
    parts["torch"] = lambda *x: [_recurrence(ChunkedRecurrence, *x[:5]).outputs([x[5]])[0]]
    return parts


def _ranks(part: str) -> int:
    return int(part.partition(" of ")[2] or 1)


def _heads(part: str, heads: int) -> int:
    if part == "torch":
        return max(heads // 8, 1)
    return heads // _ranks(part) if part.startswith("heads") else heads


def _local(part: str, tokens: int) -> int:
    return tokens if part.startswith("heads") else tokens // _ranks(part)


def _alone(kind: str, *tensors: torch.Tensor) -> Tensors:
    q, k, v, g, beta, _ = tensors
    module, name = KERNELS[kind]
    edges = fla._edges((q.size(1),), q.device)  # as this library calls it
    return [getattr(import_module(module), name)(q, k, v, g=g, beta=beta, scale=WIDTH**-0.5, cu_seqlens=edges)[0]]


def _recurrence(
    recurrence: type[ChunkedRecurrence | FlaRecurrence], *layer: torch.Tensor
) -> ChunkedRecurrence | FlaRecurrence:
    q, k, v, g, beta = layer
    return recurrence.of(q, k, v, g, beta, WIDTH**-0.5, [q.size(1)])


def _scan(recurrence: type[ChunkedRecurrence | FlaRecurrence], *tensors: torch.Tensor) -> Tensors:
    """The outputs of a run, and the state that leaves it."""
    *layer, entering = tensors
    prepared = _recurrence(recurrence, *layer)
    transition, state = prepared.maps([0])
    return [prepared.outputs([entering])[0], transition[0] @ entering.to(transition.dtype) + state[0]]


@dataclass
class _Group:
    """Stands for a process group: all-gathers find what other ranks have sent before, and zeros else."""

    rank: int
    size: int
    sent: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """By index of the all-gather and rank; ranks of a group share it."""
    gathers: int = 0

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        self.sent[self.gathers, self.rank] = mine
        found = [self.sent.get((self.gathers, rank), torch.zeros_like(mine)) for rank in range(self.size)]
        self.gathers += 1
        return torch.stack(found)


def _cp_context(kind: str, group: _Group, *layer: torch.Tensor) -> Tensors:
    q, k, v, g, beta = layer
    module, name = KERNELS[kind]
    kernel, context = getattr(import_module(module), name), import_module("fla.ops.cp.context")
    edges = fla._edges((q.size(1),), q.device)
    around = context.FLACPContext(
        group=group, cu_seqlens=edges, cu_seqlens_cpu=edges.cpu(), is_first_rank=group.rank == 0,
        is_last_rank=group.rank == group.size - 1, pre_num_ranks=group.rank,
        post_num_ranks=group.size - 1 - group.rank,
    )  # fmt: skip
    exchange: Any = import_module("fla.ops.cp.chunk_delta_h")
    exchange.all_gather_into_tensor = lambda mine, group: (group.gather(mine), None)
    exchange.dist = SimpleNamespace(get_rank=lambda group: group.rank, get_world_size=lambda group: group.size)
    return [kernel(q, k, v, g=g, beta=beta, scale=WIDTH**-0.5, cu_seqlens=edges, cp_context=around)[0]]


def _problem(kind: str, tokens: int, heads: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta and an entering state that have gradients."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, *shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

    q, k, v = normal(WIDTH), F.normalize(normal(WIDTH), dim=-1), normal(WIDTH)
    g = 0.02 * F.logsigmoid(normal(WIDTH) if kind == "KDA" else normal()).float()  # so that states pass through
    entering = torch.randn(1, heads, WIDTH, WIDTH, generator=generator, device=DEVICE)
    return tuple(x.requires_grad_() for x in (q, k, v, g, normal().sigmoid(), entering))


def _passes(part: Callable[..., Tensors], *leaves: torch.Tensor) -> None:
    _backward(part(*leaves), leaves)


def _backward(results: Tensors, leaves: tuple[torch.Tensor, ...]) -> None:
    torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results], allow_unused=True)


def _timed(part: Callable[..., Tensors], *leaves: torch.Tensor) -> tuple[float, float, float]:
    """Seconds of forward and of both passes, medians, and the most memory in GiB."""
    _passes(part, *leaves)  # kernels choose their settings
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    forward, both = [], []
    for _ in range(3):
        started = _now()
        results = part(*leaves)
        middle = _now()
        _backward(results, leaves)
        del results
        both.append(_now() - started)
        forward.append(middle - started)
    memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
    return statistics.median(forward), statistics.median(both), memory


def _now() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# Comparison with float64


def _checked(kind: str, heads: int) -> Iterator[str]:
    """Yields a line for each part with its largest error, relative to the largest element."""
    leaves = _problem(kind, CHECKED, heads)
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    grad = torch.randn(leaves[2].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    truth = _scan(ChunkedRecurrence, *wide)
    grads = [grad, torch.randn(truth[1].shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)]
    yield _line(kind, "scan", _scan(FlaRecurrence, *leaves), leaves, truth, wide, grads)
    truth = [_recurrence(ChunkedRecurrence, *wide[:5]).outputs([None])[0]]
    yield _line(kind, "one GPU", _alone(kind, *leaves), leaves[:5], truth, wide[:5], [grad])
    # Two ranks, one after the other: backward of the second one first.
    truth = [_recurrence(ChunkedRecurrence, *wide[:5]).outputs([None])[0]]
    halves = [[x.detach().chunk(2, 1)[rank].contiguous().requires_grad_() for x in leaves[:5]] for rank in range(2)]
    first = _Group(0, 2)
    second = _Group(1, 2, first.sent)
    outs = [_cp_context(kind, group, *half)[0] for group, half in zip((first, second), halves, strict=True)]
    found = [
        torch.autograd.grad(outs[rank], halves[rank], grad.chunk(2, 1)[rank].to(outs[rank].dtype)) for rank in (1, 0)
    ]
    together = [torch.cat([one, other], 1) for other, one in zip(*found, strict=True)]
    expected = torch.autograd.grad(truth, wide[:5], grad.double())
    yield _compared(kind, "cp_context", [torch.cat(outs, 1), *together], [*truth, *expected])


def _line(
    kind: str, part: str, results: Tensors, leaves: tuple[torch.Tensor, ...], truth: Tensors,
    wide: tuple[torch.Tensor, ...], grads: Tensors,
) -> str:  # fmt: skip
    got = torch.autograd.grad(results, leaves, [x.to(y.dtype) for x, y in zip(grads, results, strict=True)])
    expected = torch.autograd.grad(truth, wide, [x.double() for x in grads], retain_graph=True)
    return _compared(kind, part, [*results, *got], [*truth, *expected])


def _compared(kind: str, part: str, got: Tensors, expected: Tensors) -> str:
    errors = [
        float((x.detach() - y.detach()).abs().max() / y.detach().abs().max())
        for x, y in zip(got, expected, strict=True)
    ]
    verdict = "right" if all(error <= 3e-2 for error in errors) else "WRONG"
    return f"{kind}, {part}: {verdict}, errors {', '.join(f'{error:.1e}' for error in errors)}"


# Kernels of the package


def _limit_settings(count: int, share: int | None = None) -> None:
    """Makes kernels try some settings only, each three times: all of them take minutes to compile.

    Of these, one of two processes tries the first half (`share` 0), which has fewer warps, and one the second.
    """
    os.environ["FLA_CACHE_RESULTS"] = "0"  # timings of processes side by side
    if DEVICE.type != "cuda":
        return
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def few(self: Any, fn: Any, names: Any, configs: Any, *arguments: Any, **options: Any) -> None:
        places = range(len(configs)) if not count else {int((i + 0.5) * len(configs) / count) for i in range(count)}
        some = [configs[place] for place in sorted(places)]
        half = len(some) // 2
        if share is not None and half:
            some = some[half:] if share else some[:half]
        original(self, fn, names, some, *arguments, **{**options, "do_bench": _quick})

    mock.patch.object(Autotuner, "__init__", few).start()


def _quick(call: Callable[[], object], quantiles: list[float] | None = None, **options: Any) -> list[float]:
    """Milliseconds of a call, as `triton.testing.do_bench` returns them."""
    call()
    times = []
    for _repeat in range(3):
        started = _now()
        call()
        times.append(1e3 * (_now() - started))
    return [statistics.median(times)] * len(quantiles or [0.5])


def _compiled_side_by_side(arguments: argparse.Namespace, until: float) -> list[str]:
    """Fills the cache of compiled kernels by processes side by side, at most until a time; returns errors."""
    if DEVICE.type != "cuda":
        return []
    options = [f"--heads={arguments.heads}", f"--settings={arguments.settings}"]
    started = [
        (f"{kind}, {part}", subprocess.Popen(
            [sys.executable, __file__, *options, "--compile", kind, part, share], stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        ))
        for kind in KERNELS for part in COMPILED[kind] for share in "01"
    ]  # fmt: skip
    errors = []
    for name, process in started:
        try:
            text = process.communicate(timeout=max(until - time.perf_counter(), 0.1))[1].strip().splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            text = ["not compiled in time"]
        if process.returncode != 0:
            errors.append(f"{name}: {text[-1][:200] if text else 'failed'}")
    return errors


def _device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"


if __name__ == "__main__":
    main()
