"""Host time of a call by part: the library's labelled blocks in forward and in backward, and the rest.

torchrun --nproc-per-node 2 docs/scripts/host_time.py --seq-len 8192 --json host_time.json

Microseconds of rank 0, causal, bfloat16, medians over calls, each of which begins when the GPU has nothing left to do.
Backward runs on the calling thread. The parts are measured under torch's profiler, which makes calls longer. A part
does not include the parts inside of it. The next rows have the times without the profiler: of such calls, and of calls
in a row, before which nothing waits for the GPU. The last rows are of calls in a row, too: in a context, which
intercepts SDPA, and of a plan that computes nothing, which leaves checks, look-ups and the autograd node. Without GPUs
it runs a small case, which tests this program.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shards import drawn
from torch.profiler import ProfilerActivity, profile, record_function

from cp_dtensor import context_parallel, context_parallel_attention
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.tools.cases import Heads
from cp_dtensor.tools.parsing import positive
from cp_dtensor.tools.ranks import Device, leave, start
from cp_dtensor.tools.report import table_of, write_json

GPU = torch.cuda.is_available()
HEADS, TOKENS = ("32:8:128", 8192) if GPU else ("4:2:16", 256)
LABEL = "cp_dtensor: "
FORWARD, BACKWARD = "forward", "backward"
WARM_CALLS, CALLS = (20, 50) if GPU else (2, 3)
Passes = tuple[Callable[[], Any], Callable[[Any], object]]


def passes_of(heads: Heads, seq_len: int, method: str, device: torch.device) -> Passes:
    """Forward, and backward of its result."""
    leaves, grad_out = drawn(heads, seq_len, device)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "seq_len": seq_len, "method": method}
    forward = partial(context_parallel_attention, *leaves, mesh=dist.group.WORLD, **options)
    return forward, lambda out: torch.autograd.grad(out, leaves, grad_out)


@contextmanager
def in_context(heads: Heads, seq_len: int, method: str, device: torch.device) -> Iterator[Passes]:
    """The same in a context, which is open meanwhile and intercepts SDPA."""
    leaves, grad_out = drawn(heads, seq_len, device)
    (q, k, v), group = leaves, dist.group.WORLD
    assert group is not None
    with context_parallel(group, seq_len=seq_len, method=method):
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        yield forward, lambda out: torch.autograd.grad(out, leaves, grad_out)


@contextmanager
def plans_that_compute_nothing(passes: Passes) -> Iterator[None]:
    """While open, plans return the results of one call, which is made before."""
    found: dict[str, Any] = {}

    def noted(plan: type, name: str) -> Callable[..., Any]:
        compute = getattr(plan, name)

        def call(*arguments: Any) -> Any:
            found[name] = compute(*arguments)
            return found[name]

        return call

    def forward(*arguments: Any) -> Any:
        out, lse, saved = found[FORWARD]
        return out.detach(), lse.detach(), saved

    with ExitStack() as stack:
        for plan in (RingPlan, UlyssesPlan):
            for name in (FORWARD, BACKWARD):
                stack.enter_context(mock.patch.object(plan, name, noted(plan, name)))
        passes[1](passes[0]())
        for plan in (RingPlan, UlyssesPlan):
            stack.enter_context(mock.patch.object(plan, FORWARD, forward))
            stack.enter_context(mock.patch.object(plan, BACKWARD, return_value=found[BACKWARD]))
        yield


def seconds_of_calls(passes: Passes, device: Device, calls: int, in_a_row: bool = False) -> list[tuple[float, float]]:
    """The host's seconds of forward and of backward of each call."""
    found = []
    for number in range(calls):
        if number == 0 or not in_a_row:
            device.synchronize()
            dist.barrier()
            device.synchronize()
        begin = time.perf_counter()
        with record_function(FORWARD):
            out = passes[0]()
        middle = time.perf_counter()
        with record_function(BACKWARD), torch.autograd.set_multithreading_enabled(False):
            passes[1](out)
        found.append((middle - begin, time.perf_counter() - middle))
    return found


def part_of(name: str) -> str:
    """The part of a label of the library.

    >>> part_of("cp_dtensor: tile (0, 4) x (0, 4), heads (0, 2)"), part_of("cp_dtensor: sum dQ")
    ('tile', 'sum dQ')
    """
    return name.removeprefix(LABEL).partition(" (")[0].partition(", heads")[0]


def microseconds_by_part(event: Any) -> Counter[str]:
    """The microseconds of the labelled blocks inside of a profiled block, without those inside of them."""
    found: Counter[str] = Counter()
    for child in event.cpu_children:
        inside = microseconds_by_part(child)
        if child.name.startswith(LABEL):
            inside[part_of(child.name)] += child.cpu_time_total - inside.total()
        found += inside
    return found


def rows_of(heads: Heads, seq_len: int, method: str, device: Device) -> list[dict[str, object]]:
    """A row for each part."""
    case = heads, seq_len, method, device.torch_device
    passes = passes_of(*case)

    def times(passes: Passes, in_a_row: bool = True) -> list[tuple[float, ...]]:
        seconds_of_calls(passes, device, WARM_CALLS)
        return list(zip(*seconds_of_calls(passes, device, CALLS, in_a_row), strict=True))

    whole = {"all": times(passes, in_a_row=False), "all, calls in a row": times(passes)}
    with in_context(*case) as same:
        whole["the same in a context"] = times(same)
    with plans_that_compute_nothing(passes):
        whole["without the plan"] = times(passes)
        with in_context(*case) as same:
            whole["the same in a context, without the plan"] = times(same)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        seconds_of_calls(passes, device, CALLS)
    parts: dict[str, dict[str, list[float]]] = {FORWARD: {}, BACKWARD: {}}
    for event in profiler.events() or ():
        if event.name in parts and event.cpu_parent is None:
            found = microseconds_by_part(event)
            rest = event.cpu_time_total - found.total()
            for name, value in (*found.items(), ("the rest", rest), ("all, with the profiler", event.cpu_time_total)):
                parts[event.name].setdefault(name, []).append(value)

    def median(pass_name: str, part: str) -> str:
        values = parts[pass_name].get(part)
        return f"{statistics.median(values):.0f}" if values else "-"

    names = list(dict.fromkeys([*parts[FORWARD], *parts[BACKWARD]]))
    names.sort(key=lambda name: (name.startswith("all"), name == "the rest"))
    table: list[tuple[str, ...]] = [(name, median(FORWARD, name), median(BACKWARD, name)) for name in names]
    table += [(name, *(f"{1e6 * statistics.median(each):.0f}" for each in both)) for name, both in whole.items()]
    return [dict(zip(("part", f"{FORWARD}, us", f"{BACKWARD}, us"), row, strict=True)) for row in table]


def main(arguments: Sequence[str]) -> None:
    """Measures each method; rank 0 prints and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Heads.parse, default=Heads.parse(HEADS), metavar="Q:KV:DIM")
    parser.add_argument("--seq-len", type=positive, default=TOKENS)
    parser.add_argument("--methods", nargs="+", default=["ring", "ulysses"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    ranks, device, command = start("docs/scripts/host_time.py", arguments, GPU, 300)
    tables = {}
    for method in options.methods:
        measure = partial(rows_of, options.heads, options.seq_len, method, device)
        tables[method] = ranks.on_each(measure) or []
    if ranks.rank == 0:
        for method, rows in tables.items():
            print(f"{method}, {options.seq_len:,} tokens\n\n{table_of(rows)}\n")
        if options.json:
            write_json(options.json, ranks.world_size, command=command, tables=tables)
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
