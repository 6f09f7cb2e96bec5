"""Price of packed documents that are new in every step: plans of tiles and of masks, and memory over many masks.

OMP_NUM_THREADS=1 python docs/scripts/mask_plans.py --seconds 120 --json docs/benchmarks/mask_plans.json

One GPU computes the tiles of one rank of 2 and of 8, forward and backward, for 32 layers: 65,536 tokens, 64 query and
8 kv heads of 128, `Balanced`, documents of lognormal lengths, median 2,048; no transfers. Steps, some in a row, are run
for new masks and twice again, after the GPU was idle. torchrun sets OMP_NUM_THREADS=1: threads of the host take longer
to wake than tables of masks to be computed. Without a GPU all is small: a test of this program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cp_dtensor import Balanced, Documents
from cp_dtensor.attention.backends import cudnn_flex, interval
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.select import choose_backend
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.engine import planner
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.plan import TilePlan
from cp_dtensor.plan.tiles import Tile
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.cache import estimated_bytes
from cp_dtensor.tools.parsing import lognormal_documents
from cp_dtensor.tools.report import table_of, write_json

GPU = torch.cuda.is_available()
TOKENS, LAYERS, HEADS, KV_HEADS, DIM, MEDIAN = (65_536, 32, 64, 8, 128, 2048) if GPU else (512, 2, 4, 2, 16, 40)
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
PARTS = ("layout", "plan of tiles", "tables", "cuDNN's plans")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Rank:
    """One rank's share of attention over a sequence, with the keys and values of all ranks in place."""

    def __init__(self, ranks: int) -> None:
        def normal(heads: int, rows: int) -> torch.Tensor:
            return torch.randn(1, rows, heads, DIM, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)

        self.ranks, rows = ranks, TOKENS // ranks
        self.q, self.out, self.grad = (normal(HEADS, rows) for _ in range(3))
        self.k, self.v = normal(KV_HEADS, TOKENS), normal(KV_HEADS, TOKENS)
        self.lse = torch.full((1, HEADS, rows), 8.0, device=DEVICE)

    def plan(self, mask: Documents) -> tuple[AttentionBackend, TilePlan]:
        partition = LayoutPartition(Balanced(mask, TOKENS), TOKENS, TOKENS, 1, self.ranks)
        capability = torch.cuda.get_device_capability() if GPU else None
        spec = CallSpec(
            partition, mask, 1, HEADS, KV_HEADS, DIM, DIM, "bfloat16", Masking.INTERVALS, str(DEVICE), capability
        )
        return choose_backend(spec), planner._tile_plan(SymmetricMemory(), spec, 0)  # cached, as in calls

    def inputs(self, tile: Tile) -> Inputs:
        (first, last), (start, stop) = tile.q, tile.kv
        return self.q[:, :, first:last], self.k[:, :, start:stop], self.v[:, :, start:stop]

    def steps(self, masks: Sequence[Documents], layers: int = LAYERS) -> None:
        for mask in masks:
            self._step(mask, layers)

    def _step(self, mask: Documents, layers: int) -> None:
        backend, plan = self.plan(mask)
        for tiles in layers * [[tile for step in plan.forward for tile in step.tiles]]:
            for tile in tiles:
                backend.forward(*self.inputs(tile), tile.mask, DIM**-0.5)
        for tiles in layers * [[tile for step in plan.backward for tile in step.tiles]]:
            for tile in tiles:
                grad, out, lse = (x[:, :, slice(*tile.q)] for x in (self.grad, self.out, self.lse))
                backend.backward(grad, *self.inputs(tile), out, lse, tile.mask, DIM**-0.5)


def milliseconds(work: Callable[[], Any]) -> float:
    """The time of some work, on the host and on the device."""
    _wait()
    begun = time.perf_counter()
    work()
    _wait()
    return 1e3 * (time.perf_counter() - begun)


def price(rank: Rank, draw: Callable[[], Documents], rounds: int, masks: int) -> dict[str, Any]:
    """Times of steps with new masks over those of the same steps again, and host times of what a mask needs."""
    rank.steps([draw()], layers=1)  # compiles
    new, again = [], []
    for _ in range(rounds):
        drawn = [draw() for _ in range(masks)]
        times = [milliseconds(partial(rank.steps, drawn)) / masks for _ in range(3)]
        new.append(times[0])
        again.append(statistics.mean(times[1:]))
    ratios = [one / other for one, other in zip(new, again, strict=True)]
    parts = [_parts(rank, draw()) for _ in range(8)]
    return {
        "tiles of": f"1 of {rank.ranks} ranks",
        "in a row": masks,
        "again, ms": round(statistics.median(again), 1),
        "new / again": round(statistics.median(ratios), 3),
        "slowest": round(max(ratios), 3),
        **{name: round(statistics.median(part[name] for part in parts), 1) for name in parts[0]},
    }


def _parts(rank: Rank, mask: Documents) -> dict[str, float]:
    """Host milliseconds of what a new mask needs, one after the other, and the MiB of cuDNN's plans."""
    layout = milliseconds(lambda: LayoutPartition(Balanced(mask, TOKENS), TOKENS, TOKENS, 1, rank.ranks).groups())
    plan = milliseconds(lambda: rank.plan(mask))
    backend, made = rank.plan(mask)
    tiles = [tile for step in made.forward for tile in step.tiles]
    tables = milliseconds(lambda: [interval.tile_rows(tile.mask, DEVICE) for tile in tiles])
    flex, nbytes = 0.0, 0
    if isinstance(backend, cudnn_flex.CudnnFlexAttention):
        geometries = [(tile.mask, cudnn_flex.Geometry.of(*rank.inputs(tile))) for tile in tiles]
        flex = milliseconds(lambda: [cudnn_flex.planned_tile(*each) for each in geometries])
        nbytes = estimated_bytes(*(cudnn_flex.planned_tile(*each) for each in geometries))
    return {**dict(zip(PARTS, (layout, plan, tables, flex), strict=True)), "MiB of plans": nbytes / 2**20}


def memory(rank: Rank, draw: Callable[[], Documents], masks: int, until: float) -> list[dict[str, int]]:
    """MiB of the process and of the GPU after every 100 masks; ends at time `until`."""
    rows = []
    for index in range(masks + 1):
        if index % 100 == 0:
            _wait()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found = {
                "process": pages * os.sysconf("SC_PAGE_SIZE"),
                "GPU, allocated": torch.cuda.memory_allocated() if GPU else 0,
                "cuDNN's plans": cudnn_flex._planned.nbytes,
                "tables": interval._cached_rows.nbytes,
            }
            rows.append({"masks": index, **{name: round(value / 2**20) for name, value in found.items()}})
            if time.perf_counter() > until:
                break
        rank.steps([draw()], layers=1)
    return rows


def _wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def report(found: dict[str, Any]) -> str:
    """The tables in Markdown."""
    return f"{table_of(found['price'])}\n\nMiB after masks:\n\n{table_of(found['memory'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", type=int, default=1000, help="masks of the rows of memory")
    parser.add_argument("--seconds", type=float, default=120, help="no mask is drawn later")
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    until, seeds = time.perf_counter() + arguments.seconds, iter(range(10**9))

    def draw() -> Documents:
        return lognormal_documents(TOKENS, median=MEDIAN, sigma=1.0, seed=next(seeds))

    with torch.no_grad():
        prices = [price(Rank(ranks), draw, 4, masks) for ranks in (2, 8) for masks in (3, 1)]
        rows = memory(Rank(8), draw, arguments.masks, until)
    found = {"price": prices, "memory": rows}
    print(report(found))
    if arguments.json:
        write_json(arguments.json, 1, **found)


if __name__ == "__main__":
    main()
