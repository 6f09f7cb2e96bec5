"""KV transports: stages of heads, transfers in place, fallback of symmetric memory; results equal one device."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from support.collectives import kinds, recorded_collectives
from support.labels import record_labels
from support.method_checks import check
from support.problems import Problem
from support.ranks import run_ranks
from support.ring_checks import Tensors, attend, check_against_reference
from support.staging import BY_HEAD, fine

from cp_dtensor import (
    Contiguous,
    HeadTail,
    set_rotate_method,
)
from cp_dtensor.api.extension import register_transport
from cp_dtensor.comm import collective as exchange
from cp_dtensor.comm.collective import AllGather, AllToAll, Staging
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.transport import KVTransport
from cp_dtensor.comm.transports import ROTATE_METHODS, transport_by_name
from cp_dtensor.engine import planner as planning
from cp_dtensor.engine import ring
from cp_dtensor.plan import plan as plans
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.plan import Stages
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec import logs
from cp_dtensor.spec.masks import Causal, Full, SlidingWindow


@pytest.mark.parametrize(
    ("staging", "forward", "backward"),
    [
        (fine(), Stages(1, 1), Stages(1, 1)),
        (fine(stage_bytes=4 * 3072 - 1), Stages(1, 2), Stages(1, 1)),
        (fine(stage_bytes=3072, grad_stage_bytes=2 * 3072), Stages(1, 4), Stages(1, 2)),
        (fine(stage_bytes=2 * 3072, grad_stage_bytes=1), Stages(1, 2), Stages(1, 4)),
        (fine(grad_local_bytes=3072), Stages(1, 1), Stages(2, 2)),
        (Staging(stage_bytes=1, grad_stage_bytes=1), Stages(1, 1), Stages(1, 1)),  # too little work to cut
        (BY_HEAD, Stages(1, 4), Stages(4, 4)),
    ],
    ids=str,
)
def test_the_limits_determine_the_number_of_stages(staging: Staging, forward: Stages, backward: Stages) -> None:
    """24 tokens of 4 heads of K and V, 8 elements of 8 bytes each, are 4 x 3072 bytes; a rank of 2 has half of them."""
    spec = CallSpec(LayoutPartition(HeadTail(), 24, 24, 1, 2), Full(), 1, 4, 4, 8, 8, "float64")
    assert staging.stages(spec) == (forward, backward)
    problem = Problem(24, 24, q_heads=4, kv_heads=4)
    with mock.patch.dict(ROTATE_METHODS, allgather=AllGather(staging)), recorded_collectives() as collectives:
        options = {"rotate_method": "allgather", "seq_len": 24}
        run_ranks(2, attend, 2, problem.draw(seed=0), problem, HeadTail(), options)
    assert kinds(collectives) == ["AllToAllBase"] * (forward.remote + 2 * backward.remote)


def test_stages_have_many_blocks_of_keys() -> None:
    """Backward: buffers of 128 keys, 8 query heads, 1,024 rows. By row: rank 1 of 2 attends to the last 40 of rank 0's
    keys, of 4 heads, 160 rows."""
    usual = CallSpec(LayoutPartition(HeadTail(), 128, 128, 1, 2), Causal(), 1, 8, 4, 8, 8, "float64")
    for keys_per_stage, count in ((1024, 1), (513, 1), (512, 2), (257, 2), (256, 4), (1, 4)):
        stages = replace(BY_HEAD, grad_keys_per_stage=keys_per_stage).stages(usual)
        assert stages == (Stages(1, 4), Stages(count, count))
    by_row = replace(
        usual, partition=LayoutPartition(Contiguous(), 128, 128, 1, 2), mask=SlidingWindow(40, 0), q_heads=4,
        masking=Masking.INTERVALS,
    )  # fmt: skip
    for keys_per_stage, count in ((161, 1), (81, 1), (80, 2), (41, 2), (40, 4), (1, 4)):
        stages = replace(BY_HEAD, keys_per_stage_by_row=keys_per_stage).stages(by_row)
        assert stages == (Stages(1, count), Stages(count, count))


@pytest.mark.parametrize(
    ("method", "ranks", "ahead"),
    [(AllGather(fine(1, 1)), 2, 2), (AllToAll(), 3, 2), (AllToAll(transfers_ahead=1), 3, 1)],
    ids=["by head", "ring", "one ahead"],
)
def test_transfers_are_under_way_while_tiles_are_computed(
    method: KVTransport, ranks: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two transfers each, of two heads or over two hops: K/V start a step or two ahead, gradients end a step later."""
    steps = record_labels(monkeypatch, (ring, exchange))
    monkeypatch.setitem(ROTATE_METHODS, "allgather", method)
    problem = Problem(24, 24)
    run_ranks(ranks, attend, ranks, problem.draw(seed=0), problem, Contiguous(), {"rotate_method": "allgather"})
    travels = {"send K/V", "wait for K/V", "send dK/dV", "wait for dK/dV"}
    at_first, later = ["send K/V"] * ahead, ["send K/V"] * (2 - ahead)
    assert [step for step in steps[0] if step in travels or step == "tile"] == [
        *(*at_first, "tile"),
        *("wait for K/V", *later, "tile"),
        *("wait for K/V", "tile"),
        # backward
        *(*at_first, "tile"),
        *("wait for K/V", *later, "tile", "send dK/dV"),
        *("wait for K/V", "tile", "send dK/dV", "wait for dK/dV"),
        *["tile"] * isinstance(method, AllGather),  # the own tile of the second head
        "wait for dK/dV",
    ]


def test_sums_over_ranks_and_stages_are_rounded_once() -> None:
    """In bfloat16, stages and a single transfer add equal contributions in float32 in the same order."""
    problem = Problem(64, 64, q_heads=4, kv_heads=4, head_dim=16, is_causal=True, dtype=torch.bfloat16)

    def results(staging: Staging) -> list[Tensors]:
        with mock.patch.dict(ROTATE_METHODS, allgather=AllGather(staging)):
            options = {"rotate_method": "allgather"}
            return run_ranks(4, attend, 4, problem.draw(seed=0), problem, HeadTail(), options)

    for at_once, by_head in zip(results(fine()), results(BY_HEAD), strict=True):
        assert all(map(torch.equal, at_once, by_head))


def test_large_shards_go_around_by_groups_of_heads() -> None:
    """64 tokens a rank of 8 heads of K and V, 8 elements of 8 bytes each: 8 KiB a head."""
    spec = CallSpec(LayoutPartition(Contiguous(), 128, 128, 1, 2), Full(), 1, 8, 8, 8, 8, "float64")
    for limits, groups in (((1 << 20, 1 << 20), (1, 1)), ((32 << 10, 16 << 10), (2, 4)), ((1, 1), (4, 4))):
        plan = AllToAll(*limits, flops_per_hop=1.0).plan(spec, 0)
        assert tuple(len({step.heads for step in steps}) for steps in (plan.forward, plan.backward)) == groups
    few_operations = AllToAll(1, 1, flops_per_hop=spec.flops(spec.partition.groups()) / 4 / 3)
    assert len({step.heads for step in few_operations.plan(spec, 0).backward}) == 3


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_long_triangles_are_computed_in_parts(ranks: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in causal attention to very long shards. Triangles have up to 8 parts; some are merged, some only placed."""
    monkeypatch.setattr(plans, "LONGEST_TRIANGLE", 5)
    monkeypatch.setattr(planning, "_tile_plan", planning._tile_plan.__wrapped__)  # plans are cached
    problem = Problem(31, 31, batch=2, q_heads=4, kv_heads=2, is_causal=True)
    check(problem, HeadTail(), ("cp",), (ranks,), method=method)


@pytest.mark.parametrize("staging", [fine(), BY_HEAD], ids=["at once", "by head"])
def test_symmetric_memory_falls_back_to_all_gather_where_there_is_none(staging: Staging) -> None:
    problem = Problem(37, 37, batch=2, q_heads=4, kv_heads=2, is_causal=True)
    methods = {"symm_mem": SymmetricMemory(staging), "allgather": AllGather(staging)}
    found = {}
    for name in methods:
        with mock.patch.dict(ROTATE_METHODS, methods), recorded_collectives() as collectives:
            results = run_ranks(4, attend, 4, problem.draw(seed=0), problem, HeadTail(), {"rotate_method": name})
        found[name] = results, kinds(collectives)
    assert found["symm_mem"][1] == found["allgather"][1]
    for symm_mem, allgather in zip(found["symm_mem"][0], found["allgather"][0], strict=True):
        assert all(map(torch.equal, symm_mem, allgather))


def test_the_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks, and several calls, forward and backward."""
    problem = Problem(8, 8)

    def body(rank: int) -> None:
        for _ in range(2):
            attend(rank, 2, problem.draw(seed=0), problem, HeadTail(), {"rotate_method": "symm_mem"})

    logs._log.cache_clear()
    with caplog.at_level(logging.WARNING, "cp_dtensor.comm"):
        run_ranks(2, body)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "it needs CUDA devices, the tensors are on cpu" in line
    assert "using all-gather" in line


@dataclass(frozen=True)
class ManyHops(AllToAll):
    """A ring with a name of its own."""

    name = "many_hops"


def test_a_registered_transport_moves_rows_until_its_lease_ends() -> None:
    problem, planned = Problem(20, 20, q_heads=2, kv_heads=2), []

    def plan(self: ManyHops, spec: CallSpec, rank: int) -> plans.TilePlan:
        planned.append(rank)
        return AllToAll.plan(self, spec, rank)

    with mock.patch.object(ManyHops, "plan", plan), register_transport(ManyHops()):
        check_against_reference(problem, 2, HeadTail(), 0, rotate_method="many_hops")
        set_rotate_method("many_hops")
        assert transport_by_name(None).name == "many_hops"
        set_rotate_method("auto")
        with pytest.raises(ValueError, match="expected a transport with a new name, got 'many_hops', one of 'all"):
            register_transport(ManyHops())
    assert {*planned} == {0, 1}
    with pytest.raises(ValueError, match=r"unknown rotate method: got 'many_hops', expected .*, 'auto'$"):
        set_rotate_method("many_hops")


class Unnamed(AllToAll):
    name = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("transport", "error", "message"),
    [
        (AllGather(), ValueError, "expected a transport with a new name, got 'allgather'"),
        (Unnamed(), TypeError, "expected the name of a transport to be a str, got None"),
        (AllToAll, TypeError, "expected a transport, a TransportMethod, got ABCMeta"),
        ("ring", TypeError, "expected a transport, a TransportMethod, got str"),
    ],
    ids=["existing name", "no name", "class", "text"],
)
def test_other_transports_are_not_registered(transport: Any, error: type[Exception], message: str) -> None:
    before = dict(ROTATE_METHODS)
    with pytest.raises(error, match=message):
        register_transport(transport)
    assert before == ROTATE_METHODS
