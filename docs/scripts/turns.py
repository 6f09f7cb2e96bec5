"""Milliseconds and memory of calls that are measured in turns, for programs that compare them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from cp_dtensor.tools.ranks import Device, Ranks, leave
from cp_dtensor.tools.report import table_of, write_json

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
WARM, CALLS, ROUNDS = (5, 10, 3) if torch.cuda.is_available() else (1, 1, 1)


def in_turns(calls: Mapping[Name, Call], ranks: Ranks, device: Device) -> dict[Name, dict[str, object]]:
    """For each call, by name: the slowest rank's median of eager calls and of CUDA graphs, and the MiB of a rank.

    The MiB are the most above inputs of eager calls, without symmetric memory. Without GPUs there are no graphs.
    """
    ways: dict[tuple[Name, str], Call] = {}
    samples: dict[tuple[Name, str], list[float]] = {}
    memory: dict[Name, int] = {}

    def prepare(name: Name, call: Call) -> int | None:
        call()  # kernels are compiled, symmetric memory is mapped
        ways[name, "eager"] = call
        extra = device.extra_bytes(call)
        if torch.cuda.is_available():
            ways[name, "graph"] = device.captured(call)
        return extra

    def turn(key: tuple[Name, str]) -> None:
        for number in range(WARM + CALLS):
            device.synchronize()
            dist.barrier()
            ms = device.time_ms(ways[key])
            if number >= WARM:
                samples.setdefault(key, []).append(ms)

    for name, call in calls.items():
        memory[name] = max(extra or 0 for extra in ranks.together(partial(prepare, name, call)))
    for _ in range(ROUNDS):
        for key in ways:
            ranks.together(partial(turn, key))
    ms = {key: max(ranks.gather(statistics.median(each))) for key, each in samples.items()}
    return {
        name: {f"{kind}, ms": round(each, 3) for (of, kind), each in ms.items() if of == name}
        | {"MiB": memory[name] >> 20}
        for name in calls
    }


def finish(rows: Sequence[Mapping[str, object]], ranks: Ranks, command: str, json: Path | None) -> None:
    """Prints the table, and writes it to a file if there is one, on rank 0; ends the process group."""
    if ranks.rank == 0:
        print(table_of(rows))
        if json:
            write_json(json, ranks.world_size, command=command, rows=rows)
    leave()
