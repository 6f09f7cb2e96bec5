"""The cost model behind rotate_method="auto": laws of the prediction, and the chosen KV transport."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_dtensor.comm import select
from cp_dtensor.comm.collective import AllGather, AllToAll, Staging
from cp_dtensor.comm.select import choose, plans_of_some_ranks, slowest_seconds
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.transport import KVTransport
from cp_dtensor.plan.cost import predicted_seconds
from cp_dtensor.plan.hardware import Hardware
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import Contiguous, HeadTail, MirroredBatch, Striped
from cp_dtensor.spec.masks import Batched, Causal, SlidingWindow, workload_of

HOPPER = Hardware(flops=620e12, memory_speed=3.5e12, multiprocessors=132, link_speed=290e9)
TRANSPORTS: list[KVTransport] = [AllGather(), AllToAll(), SymmetricMemory()]
each_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.name)


def shape(length: int, ranks: int, q_heads: int = 32, kv_heads: int = 8) -> CallSpec:
    partition = LayoutPartition(HeadTail(), length, length, 1, ranks)
    return CallSpec(partition, Causal(), 1, q_heads, kv_heads, 128, 128, "bfloat16")


def seconds(
    transport: KVTransport, length: int, ranks: int, hardware: Hardware = HOPPER, backward: bool = False
) -> float:
    return slowest_seconds(transport, shape(length, ranks), ranks, hardware, backward=backward)


@each_transport
def test_a_long_sequence_takes_the_time_of_its_operations(transport: KVTransport) -> None:
    """32 heads, 262144 causal tokens: 4 * 32 * 262144^2 * 128 / 2 operations over 8 GPUs take 0.11 s at 620 TFLOP/s."""
    ideal = 4 * 32 * 262144**2 * 128 / 2 / 8 / HOPPER.flops
    assert ideal == pytest.approx(0.1135, rel=1e-2)
    assert seconds(transport, 262144, 8) == pytest.approx(ideal, rel=0.08)


@each_transport
def test_a_short_sequence_takes_the_time_of_its_launches(transport: KVTransport) -> None:
    assert seconds(transport, 1024, 8) > 3 * HOPPER.launch
    faster = dataclasses.replace(HOPPER, launch=HOPPER.launch / 10)
    assert seconds(transport, 1024, 8, faster) < seconds(transport, 1024, 8) / 2


@each_transport
@given(st.integers(8, 17), st.integers(2, 8), st.booleans(), st.sampled_from(["flops", "memory_speed", "link_speed"]))
def test_better_hardware_is_not_predicted_to_be_slower(
    transport: KVTransport, log_length: int, ranks: int, backward: bool, what: str
) -> None:
    better = dataclasses.replace(HOPPER, **{what: 3 * getattr(HOPPER, what)})
    before = seconds(transport, 2**log_length, ranks, HOPPER, backward)
    assert seconds(transport, 2**log_length, ranks, better, backward) <= before * (1 + 1e-9)


@each_transport
def test_a_slow_link_is_what_a_call_waits_for(transport: KVTransport) -> None:
    slow = dataclasses.replace(HOPPER, link_speed=1e9)
    moved = 7 / 8 * 32768 * shape(32768, 8).head_bytes * 8
    assert seconds(transport, 32768, 8, slow) == pytest.approx(moved / 1e9, rel=0.3)


def test_backward_sends_gradients_after_the_last_tile() -> None:
    slow = dataclasses.replace(HOPPER, link_speed=1e9)
    plan = AllGather().plan(shape(32768, 8), 0)
    forward, backward = (predicted_seconds(plan, shape(32768, 8), slow, each, True) for each in (False, True))
    assert backward > 1.1 * forward


@pytest.mark.parametrize("kv_heads", [1, 8, 32])
@pytest.mark.parametrize("length", [1024, 8192, 32768, 131072, 262144])
def test_memory_that_gpus_share_is_used(length: int, kv_heads: int) -> None:
    """Without a prediction, which would say the same: its transfers take no multiprocessors."""
    call = shape(length, 8, kv_heads=kv_heads)
    assert choose(call, 8, HOPPER, shares_memory=True).name == "symm_mem"
    predicted = [slowest_seconds(transport, call, 8, HOPPER, backward=True) for transport in TRANSPORTS]
    assert predicted[2] <= 1.03 * min(predicted)


@pytest.mark.parametrize(("ranks", "length"), list(itertools.product([2, 4, 8], [8192, 32768, 131072])))
def test_many_key_heads_are_staged_so_that_stages_fill_the_gpu(ranks: int, length: int) -> None:
    """Their transfers are four times as long, and one head of a short shard leaves most multiprocessors idle."""
    many = shape(length, ranks, kv_heads=32)
    predicted = [slowest_seconds(transport, many, ranks, HOPPER, backward=True) for transport in TRANSPORTS]
    assert predicted[2] <= 1.03 * min(predicted)
    in_one = AllGather(Staging(stage_bytes=1 << 60, grad_stage_bytes=1 << 60, grad_local_bytes=1 << 60))
    assert predicted[0] <= 1.02 * slowest_seconds(in_one, many, ranks, HOPPER, backward=True)


@pytest.mark.parametrize("length", [1024, 8192, 131072])
@pytest.mark.parametrize("link_speed", [20e9, 290e9])
def test_elsewhere_the_choice_is_near_the_best(length: int, link_speed: float) -> None:
    hardware = dataclasses.replace(HOPPER, link_speed=link_speed)
    chosen = choose(shape(length, 8), 8, hardware, shares_memory=False)
    best = min(seconds(transport, length, 8, hardware, True) for transport in TRANSPORTS[:2])
    assert chosen.name in ("allgather", "alltoall")
    assert seconds(chosen, length, 8, hardware, True) <= 1.05 * best


def test_one_rank_alone_sends_nothing() -> None:
    assert seconds(AllGather(), 8192, 1) > 0


def test_links_are_not_measured_where_ranks_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "p2p_obstacle", lambda *_: None)
    monkeypatch.setattr(select, "hardware_of", lambda *_: pytest.fail("measured"))
    ranks: Any = SimpleNamespace(size=lambda: 8)
    assert select.Auto().for_call(shape(8192, 8), ranks, torch.device("cuda")) == SymmetricMemory()


def test_ranks_without_heads_choose_too() -> None:
    """As uneven DTensor shards may leave them."""
    assert choose(shape(8192, 4, q_heads=0, kv_heads=0), 4, HOPPER, shares_memory=True).name == "symm_mem"


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
    workloads = workload_of(SlidingWindow(63, 0), 64, 64)
    seen = [
        2 * workloads.of((8 * rank, 8 * rank + 8)) + workloads.of((56 - 8 * rank, 64 - 8 * rank)) for rank in range(8)
    ]
    equal = [workloads.of((8 * rank, 8 * rank + 8)) + workloads.of((56 - 8 * rank, 64 - 8 * rank)) for rank in range(8)]
    assert seen.index(max(seen)) != equal.index(max(equal))
    assert window.busiest_rank == seen.index(max(seen))


def test_no_rank_is_said_to_be_the_busiest_where_that_takes_long() -> None:
    striped = dataclasses.replace(shape(64, 8), partition=LayoutPartition(Striped(), 64, 64, 1, 8))
    assert striped.busiest_rank is None
    assert dataclasses.replace(shape(64, 8), partition=LayoutPartition(HeadTail(), 64, 32, 1, 8)).busiest_rank is None
    assert [plan.rank for plan in plans_of_some_ranks(AllGather(), striped, 8)] == [0, 4, 7]
