"""The cost model: laws of `seconds`, and the KV transport that `rotate_method="auto"` takes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_dtensor.comm import transports
from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.transport import KVTransport
from cp_dtensor.comm.transports import choose, plans_of_some_ranks, ring_works
from cp_dtensor.plan.cluster import TOLERANCE, Cluster, Hardware, Tier
from cp_dtensor.plan.cost import TRANSFER_TAX, Step, nearly_fastest, ring_work, seconds, slowest
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import Contiguous, HeadTail, MirroredBatch, Striped
from cp_dtensor.spec.masks import Batched, Causal, SlidingWindow, workload_of

GPU = Hardware(flops=620e12, memory_speed=3.5e12, multiprocessors=132, link_speed=290e9)
TRANSPORTS: list[KVTransport] = [AllGather(), AllToAll(), SymmetricMemory()]
each_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.name)


def shape(length: int, ranks: int, q_heads: int = 32, kv_heads: int = 8) -> CallSpec:
    partition = LayoutPartition(HeadTail(), length, length, 1, ranks)
    return CallSpec(partition, Causal(), 1, q_heads, kv_heads, 128, 128, "bfloat16")


def cluster(ranks: int, gpu: Hardware = GPU, *, shares_memory: bool = False) -> Cluster:
    return Cluster(gpu, (dataclasses.replace(Tier.of(gpu, ranks), shares_memory=shares_memory),))


def times(transport: KVTransport, spec: CallSpec, ranks: int, gpu: Hardware = GPU) -> tuple[float, float]:
    works = ring_works(transport, spec, ranks)
    return slowest(works, cluster(ranks, gpu, shares_memory=not transport.slows_compute))


# The three clocks

ROUND = Hardware(flops=100, memory_speed=10, multiprocessors=2, link_speed=1, link_latency=0.5, launch=0.0)


def test_a_step_waits_for_its_bytes_and_the_next_transfer_begins_with_it() -> None:
    """2.5 s for 2 bytes, then 1 s of FLOPs beside 3.5 s for 3 bytes, then 1 s of copies, then 1.5 s for a byte."""
    work = (Step(flops=100, received=(2,)), Step(moved=10, received=(3,), sent=(1,)))
    assert seconds(work, cluster(2, ROUND, shares_memory=True)) == pytest.approx(2.5 + 3.5 + 1 + 1.5)
    # Kernels of a transfer of 4 s slow down the 4 s that are computed meanwhile.
    taxed = (Step(flops=100), Step(flops=300), Step(flops=100, received=(3.5,)))
    shared, collective = (seconds(taxed, cluster(2, ROUND, shares_memory=shares)) for shares in (True, False))
    assert shared == pytest.approx(5)
    assert collective == pytest.approx(5 + 4 * TRANSFER_TAX)


def test_tiers_transfer_at_the_same_time() -> None:
    """A byte over each of two tiers: 1.5 and 3 seconds. The second tier begins when the first step does."""
    slow = Tier(2, speed=0.4, latency=0.5, shares_memory=True)
    both = Cluster(ROUND, (Tier(2, 1, 0.5, True), slow))
    assert seconds((Step(received=(1, 1)),), both) == pytest.approx(3)
    assert seconds((Step(received=(1,)), Step(received=(0, 1))), both) == pytest.approx(1.5 + 3)
    assert seconds((Step(flops=500), Step(received=(1, 1))), both) == pytest.approx(5)


def test_the_host_launches_ahead() -> None:
    """3 launches of a second: the first step starts in the middle of its launch. Nothing ends before the host does."""
    slow = dataclasses.replace(ROUND, launch=1.0)
    assert seconds((Step(flops=500, launches=1), Step(flops=100, launches=1)), cluster(2, slow)) == pytest.approx(6.5)
    assert seconds((Step(launches=3),), cluster(2, slow)) == pytest.approx(3)


def test_steps_add_up() -> None:
    first, second = Step(1, 2, (3,), (), 4, (5,), (6,)), Step(10, 20, (30, 40), (50,), 60, (70, 80), (90,))
    assert first + second == Step(11, 22, (33, 40), (50,), 64, (75, 80), (96,))


def test_nearly_equal_choices_are_the_first() -> None:
    assert nearly_fastest(["ring", "ulysses"], [1.01, 1.0]) == "ring"
    assert nearly_fastest(["ring", "ulysses"], [1.03, 1.0]) == "ulysses"
    assert nearly_fastest(["ring", "ulysses"], [1.03, 1.0], 1.05) == "ring"


# Rings


@each_transport
@given(st.integers(8, 17), st.integers(2, 8), st.sampled_from(["flops", "memory_speed", "link_speed"]))
def test_better_hardware_is_not_predicted_to_be_slower(
    transport: KVTransport, log_length: int, ranks: int, what: str
) -> None:
    better = dataclasses.replace(GPU, **{what: 3 * getattr(GPU, what)})
    before, after = (sum(times(transport, shape(2**log_length, ranks), ranks, gpu)) for gpu in (GPU, better))
    assert after <= before * (1 + 1e-9)


@pytest.mark.parametrize("kv_heads", [1, 32])
@pytest.mark.parametrize("length", [1024, 262144])
def test_memory_that_gpus_share_is_used(length: int, kv_heads: int) -> None:
    """Without a prediction, which would say the same: its transfers take no multiprocessors."""
    call = shape(length, 8, kv_heads=kv_heads)
    assert choose(call, cluster(8, shares_memory=True)).name == "symm_mem"
    predicted = [sum(times(transport, call, 8)) for transport in TRANSPORTS]
    assert predicted[2] <= TOLERANCE * min(predicted)


def test_links_are_not_measured_where_ranks_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "p2p_obstacle", lambda *_: None)
    monkeypatch.setattr(transports, "cluster_of", lambda *_: pytest.fail("measured"))
    ranks: Any = SimpleNamespace(size=lambda: 8)
    assert transports.Auto().for_call(shape(8192, 8), ranks, torch.device("cuda")) == SymmetricMemory()


def test_ranks_without_heads_and_ranks_alone() -> None:
    """No heads, as uneven DTensor shards may leave them, and nothing to send."""
    empty = shape(8192, 4, q_heads=0, kv_heads=0)
    assert choose(empty, cluster(4)).name == "allgather"
    forward, backward = ring_work(AllGather().plan(shape(8192, 1), 0), shape(8192, 1))
    assert not any(step.received or step.sent for step in (*forward, *backward))
    assert sum(times(AllGather(), shape(8192, 1), 1)) > 0


# The ranks that are asked


def test_the_busiest_rank_is_among_those_that_are_asked() -> None:
    """One long document, of which rank 5 of 8 has the end; every query sees the keys of its document before it."""
    mask = Documents([0, 8, 16, 24, 48, 56, 64], within=Causal())
    by_row = dataclasses.replace(
        shape(64, 8), partition=LayoutPartition(Contiguous(), 64, 64, 1, 8), mask=mask, masking=Masking.INTERVALS
    )
    assert by_row.busiest_rank == 5
    assert [plan.rank for plan in plans_of_some_ranks(AllGather(), by_row, 8)] == [0, 5, 7]
    of_batch_rows = dataclasses.replace(
        by_row,
        batch_size=2,
        partition=LayoutPartition(MirroredBatch(), 64, 64, 2, 8),
        mask=Batched((Documents([0, 8, 64], within=Causal()), Documents([0, 56, 64], within=Causal()))),
    )
    pairs = [workload_of(of_batch_rows.mask, 64, 64, (row, row + 1)) for row in (0, 1)]
    seen = [pairs[0].of((8 * rank, 8 * rank + 8)) + pairs[1].of((56 - 8 * rank, 64 - 8 * rank)) for rank in range(8)]
    assert of_batch_rows.busiest_rank == seen.index(max(seen))


def test_every_batch_row_counts_for_the_busiest_rank() -> None:
    """Two rows are divided forwards and one backwards, and the first queries see the fewest keys."""
    partition = LayoutPartition(MirroredBatch(), 64, 64, 3, 8)
    window = dataclasses.replace(
        shape(64, 8), batch_size=3, partition=partition, mask=SlidingWindow(63, 0), masking=Masking.INTERVALS
    )
    workload = workload_of(SlidingWindow(63, 0), 64, 64)
    ahead = [workload.of((8 * rank, 8 * rank + 8)) for rank in range(8)]
    equal, both = (
        [times * mine + mirrored for mine, mirrored in zip(ahead, reversed(ahead), strict=True)] for times in (1, 2)
    )
    assert both.index(max(both)) != equal.index(max(equal))
    assert window.busiest_rank == both.index(max(both))


def test_no_rank_is_said_to_be_the_busiest_where_that_takes_long() -> None:
    striped = dataclasses.replace(shape(64, 8), partition=LayoutPartition(Striped(), 64, 64, 1, 8))
    assert striped.busiest_rank is None
    assert dataclasses.replace(shape(64, 8), partition=LayoutPartition(HeadTail(), 64, 32, 1, 8)).busiest_rank is None
    assert [plan.rank for plan in plans_of_some_ranks(AllGather(), striped, 8)] == [0, 4, 7]
