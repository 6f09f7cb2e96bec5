"""Random cases at all fronts in one process group, with memory watched: `pytest test_soak.py --minutes 30`.

Out and all gradients are compared with dense attention. New cases take memory for libraries and caches of bounded
bytes; the last third of the time repeats cases, which needs no more.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from cp_dtensor import Balanced, Batched, Causal, Documents, Full, Layout, Mask, PerDocument, PrefixLM, SlidingWindow
from matrix.features import FEATURES, Case
from matrix.fronts import FRONTS, METHODS, case_of, layouts_of, refusals_of
from matrix.worlds import World, check

SOAKED = [World((2,), "two_processes"), World((4,), "four_processes"), World((2, 2), "four_processes")]
OF_A_BATCH, AT_LEAST = 25, 8
"""Cases; the latter without `--minutes`."""
NEW_CASES = 2 / 3
"""Share of the time for new cases; the rest repeats them."""
GROWTH_MIB = 64
NOT_DRAWN = {"cross", "uneven", "short", "undeclared", "dropout", "gqa", "mqa"}
"""Features of what is drawn here, and dropout, whose expected pattern needs ranks that are threads."""


def draw_mask(r: random.Random, length: int, batch: int) -> Mask:
    """Draws a mask, of all batch rows or by row."""
    edges = sorted(r.randint(0, length) for _ in range(r.randint(0, 5)))
    simple = [Full(), Causal(), SlidingWindow(r.choice((None, r.randint(0, length))), r.randint(0, length)),
              PrefixLM(r.randint(0, length))]  # fmt: skip
    documents = Documents([0, *edges, length], within=r.choice(simple))
    masks = [*simple, documents, documents, r.choice(simple) & documents, r.choice(simple) | documents]
    if batch > 1 and r.random() < 0.2:
        return Batched([draw_mask(r, length, 1) for _ in range(batch)])
    return r.choice(masks)


def draw_layout(r: random.Random, case: Case) -> Layout:
    """Draws a layout, some of which are made for the mask."""
    layouts = list(layouts_of(case))
    if not isinstance(case.mask, Batched):
        layouts.append(Balanced(case.mask, case.lengths[0]))
    if isinstance(case.mask, Documents):
        layouts.append(PerDocument(case.mask.cu_seqlens, seq_len=case.lengths[0]))
    return r.choice(layouts)


def draw(number: int, seed: int, world: World) -> tuple[str, Case]:
    """Draws a front and its case."""
    r, axes = random.Random(f"{seed} {number}"), len(world.shape)
    while True:
        name = r.choice([name for name in FRONTS if not refusals_of(name, (), axes)])
        front = FRONTS[name]
        if name == "usp" and world.shape == (4,):
            continue  # its layout of four ranks is for 2 x 2
        allowed = [each for each in FEATURES if each not in {*NOT_DRAWN, *front.lacks, *front.refuses}]
        length, kv_heads = r.randint(1, r.choice((8, 60))), r.randint(1, 3)
        if "uneven" in front.lacks:
            length = -(-length // world.size) * world.size
        base = Case(
            lengths=(length, length), batch=r.randint(1, 3), head_dim=r.choice((8, 16)), seed=r.randrange(1 << 30),
            transport=r.choice(("auto", "allgather", "alltoall")), method=r.choice(METHODS[axes]),
        )  # fmt: skip
        base = front.settle(base, world.size)
        heads = kv_heads if "gqa" in front.lacks else kv_heads * r.randint(1, 3), kv_heads
        base = replace(base, heads=heads, enable_gqa=heads[0] != heads[1])
        if "union" not in front.lacks:
            base = replace(base, mask=draw_mask(r, length, base.batch))
        if "padding" not in front.lacks:
            base = replace(base, layout=draw_layout(r, base))
        if base.mask != Full():
            allowed = [each for each in allowed if FEATURES[each](base).mask == base.mask]
        features = tuple(r.sample(allowed, r.randint(0, 3)))
        case = case_of(name, features, world.size, base)
        if case is not None:
            return name, case


def run_batch(rank: int, numbers: range, seed: int, world: World) -> float:
    """Runs cases on this rank; returns the MiB that its process has."""
    for number in numbers:
        name, case = draw(number, seed, world)
        try:
            with FRONTS[name].patch(False):
                check(rank, name, case, world)
        except BaseException as error:
            raise AssertionError(f"case {number} of seed {seed}: {name}, {case}: {error!r}") from error
    gc.collect()
    # Tensors of many sizes leave gaps in the heap of the C library, which are no leak.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20 if statm.exists() else 0.0


@pytest.mark.parametrize("world", SOAKED, ids=lambda world: f"gloo{world.shape}")
@pytest.mark.timeout(0)
def test_soak(world: World, request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> None:
    processes = request.getfixturevalue(world.fixture)
    minutes = (pytestconfig.getoption("--minutes") or 0) / len(SOAKED)
    seed = random.randrange(1 << 30) if minutes else 0
    begun, different, before = time.monotonic(), 0, [0.0]
    for batch in count():
        done = (time.monotonic() - begun) / (60 * minutes) if minutes else batch
        if done >= 1:
            break
        first = (batch % different if different else batch) * OF_A_BATCH
        cases = range(first, first + (OF_A_BATCH if minutes else AT_LEAST))
        memory = processes.run(run_batch, cases, seed, world)
        if minutes and not different and done >= NEW_CASES:
            different, before = batch + 1, memory
    if different:
        grown = [now - then for now, then in zip(memory, before, strict=True)]
        assert max(grown) <= GROWTH_MIB, f"MiB by which ranks grew while they repeated cases: {grown}"
