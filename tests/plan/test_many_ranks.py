"""Planning takes time and memory that are linear in the ranks."""

import random
import sys
import tracemalloc
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_interval_tiling import Case, cases

from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.comm.transport import KVTransport
from cp_dtensor.engine.choose import ring_estimate, ulysses_estimate
from cp_dtensor.layers.rows import Relayout, RowMap, SequenceLayout, Shift, row_route
from cp_dtensor.plan import tiling as tilings
from cp_dtensor.plan.cluster import Cluster
from cp_dtensor.plan.partition import CallSpec, LayoutPartition, masking_of, nested_rings
from cp_dtensor.spec.balanced_layouts import Balanced
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.spec.masks import Causal, Mask, SlidingWindow

MANY, TIMES, TOKENS = 1024, 8, 16
MOST = 1.5 * TIMES
"""Growth that is allowed: searches take a step more for twice as many ranks, and larger integers more memory. The
square is 64."""


def documents(tokens: int) -> Documents:
    """Documents of 1 to 95 tokens: half of them end in the shard in which they begin."""
    draw, edges = random.Random(0), [0]
    while edges[-1] < tokens:
        edges.append(min(tokens, edges[-1] + draw.randint(1, 6 * TOKENS - 1)))
    return Documents(edges, within=Causal())


def assert_linear(plan: Callable[[int], object], many: int = MANY) -> None:
    """Compares calls of functions, and memory at the peak, of plans of many ranks and of fewer."""
    calls, peaks = [], []
    for ranks in (many // TIMES, many):
        count = 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        tracemalloc.start()
        sys.setprofile(counted)
        try:
            kept = plan(ranks)
        finally:
            sys.setprofile(None)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert kept is not None
        calls.append(count)
    for name, (few, more) in (("calls", calls), ("bytes", peaks)):
        assert more < MOST * few, f"{more / few:.1f} times as many {name} for {TIMES} times as many ranks"


def spec_of(ranks: int, layout: str, mask: str) -> CallSpec:
    tokens = TOKENS * ranks
    masks: dict[str, Callable[[], Mask]] = {
        "documents": lambda: documents(tokens), "causal": Causal, "window": lambda: SlidingWindow(3 * TOKENS, 0),
        "one document": lambda: Documents([0, tokens - 1, tokens], within=Causal()),
    }  # fmt: skip
    shown = masks[mask]()
    layouts: dict[str, Callable[[], Layout]] = {
        "HeadTail": HeadTail, "Contiguous": Contiguous, "Balanced": lambda: Balanced(shown, tokens),
        "MirroredBatch": MirroredBatch, "Striped": Striped,
    }  # fmt: skip
    partition = LayoutPartition(layouts[layout](), tokens, tokens, 2, ranks)
    partition.groups()  # what a layout computes is not counted
    return CallSpec(partition, shown, 2, 8, 8, 64, 64, "bfloat16", masking_of(partition, shown))


@pytest.mark.parametrize(
    ("layout", "mask", "transport", "many"),
    [
        ("HeadTail", "documents", AllGather(), 2 * MANY), ("HeadTail", "documents", AllToAll(), MANY),
        ("HeadTail", "causal", AllToAll(), MANY), ("Balanced", "documents", AllGather(), 512),
        ("MirroredBatch", "documents", AllGather(), 512), ("HeadTail", "one document", AllGather(), 512),
        ("Striped", "window", AllToAll(), 512),
    ],
)  # fmt: skip
def test_a_ring(layout: str, mask: str, transport: KVTransport, many: int) -> None:
    specs = {ranks: spec_of(ranks, layout, mask) for ranks in (many // TIMES, many)}

    def plan(ranks: int) -> object:
        found = transport.plan(specs[ranks], ranks // 2)
        return found, found.routes

    assert_linear(plan, many)


def test_a_nested_ring() -> None:
    """Of 8 inner ranks: each of its steps plans a ring of these."""
    specs = {ranks: spec_of(ranks, "HeadTail", "documents") for ranks in (64, 512)}

    def plan(ranks: int) -> object:
        spec = specs[ranks]
        outer, rings = nested_rings(spec, ranks // 16, 8, 3, (1, 1))
        return outer, [max(each.tiling.reading.received_rows()) for each in rings.values()]

    assert_linear(plan, 512)


@pytest.mark.parametrize("method", ["flat", "nested", "heads"])
def test_an_estimate(method: str) -> None:
    """Of rings over all ranks of many hosts, nested rings, and by heads within hosts of 2."""
    made = {
        "flat": lambda spec, over: ring_estimate(spec, over.flat, AllGather(), over.hosts),
        "nested": lambda spec, over: ring_estimate(spec, over, AllGather()),
        "heads": lambda spec, over: ulysses_estimate(spec, over, AllGather()),
    }[method]
    specs = {ranks: spec_of(ranks, "HeadTail", "causal") for ranks in (8, 64)}
    assert_linear(lambda ranks: made(specs[ranks], Cluster("H100", gpus_per_node=2, nodes=ranks // 2)), 64)


@pytest.mark.parametrize("row_map", [Shift(1), Relayout(Contiguous())], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("inner", [1, 8])
def test_an_exchange_of_rows(row_map: RowMap, inner: int) -> None:
    def made(ranks: int) -> object:
        sizes = ranks // inner, inner
        return row_route(row_map, SequenceLayout(HeadTail(), TOKENS * ranks, ranks), 5, sizes)

    assert_linear(made)


def test_a_route_is_kilobytes() -> None:
    """A table of 2,048 x 2,048 ranks is megabytes."""
    sequence = SequenceLayout(HeadTail(), TOKENS * 2 * MANY, 2 * MANY)
    tracemalloc.start()
    try:
        route = row_route(Relayout(Contiguous()), sequence, 7, (MANY // 8, 8))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert route.moves
    assert held < 1 << 20


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from([2, 64]))
def test_ranks_read_the_parts_that_they_see(case: Case, most_parts: int) -> None:
    """As found pair by pair: parts of which a segment overlaps what the reader sees, in the order of positions."""
    with mock.patch.object(tilings, "_MOST_PARTS", most_parts):  # shards of more segments are one part of several
        tiling = tilings.IntervalTiling(case.groups, case.mask, case.masking, (case.q_len, case.kv_len))
        ranks, rows = range(case.ranks), [tiling.gathered_rows(rank) for rank in range(case.ranks)]
    received, sent = [0] * case.ranks, [0] * case.ranks
    for reader in ranks:
        places = []
        for owner in ranks:
            parts = tiling.reading.parts(reader, owner)
            assert parts == (() if reader == owner else parts_seen(tiling, reader, owner))
            count = sum(rows[0].lengths[owner][part] for part in parts)
            received[reader] += count
            sent[owner] += count
            firsts = [tiling.pieces[0][owner][part][0].start for part in parts]
            starts = tiling.reading.starts(reader, owner)
            places += list(zip(firsts, starts, strict=True))
            assert starts == tuple(rows[reader].starts[owner][part] for part in parts)
        assert [row for _, row in sorted(places)] == sorted(row for _, row in places)
    assert tiling.reading.received_rows() == received == [each.total for each in rows]
    assert tiling.reading.sent_rows() == sent


def parts_seen(tiling: tilings.IntervalTiling, reader: int, owner: int) -> tuple[int, ...]:
    found = set()
    for seen, parts in zip(tiling.seen, tiling.pieces, strict=True):
        ranges = list(zip(seen[reader][::2], seen[reader][1::2], strict=True))
        for part, segments in enumerate(parts[owner]):
            if any(start <= each.last and each.start < stop for each in segments for start, stop in ranges):
                found.add(part)
    return tuple(sorted(found))
