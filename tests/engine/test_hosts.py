"""Axes over several hosts: "auto" splits them, the groups are made once, and results stay those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.masked_checks import MaskedCase, check_masked
from support.masked_problems import MaskedProblem
from support.ranks import run_ranks

from cp_dtensor import Causal, Full, HeadTail
from cp_dtensor.comm import links
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.links import split_over_hosts
from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.engine import planner
from cp_dtensor.engine.choose import estimates, fastest
from cp_dtensor.engine.ring import NestedRingPlan, RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.plan.cluster import Cluster
from cp_dtensor.plan.partition import CallSpec, LayoutPartition

CPU = torch.device("cpu")


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the host of each rank."""

    def of(names: str) -> None:
        monkeypatch.setattr(links, "host_of_rank", lambda: names[dist.get_rank()])

    return of


def plans_of(method: str, world_size: int, monkeypatch: pytest.MonkeyPatch, bias: str = "") -> set[type]:
    """Returns the kinds of plans of calls that give what one device gives."""
    made, original = [], planner.plan_call

    def recorded(*arguments: Any) -> Any:
        made.append(original(*arguments))
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr(planner, "plan_call", recorded)
        problem = MaskedProblem(53, 53, Full(), 2, 4, 2, is_causal=True, bias=bias)
        check_masked([MaskedCase(problem, HeadTail(), (("method", method),))], (world_size,), ("cp",))
    return set(map(type, made))


@pytest.mark.parametrize("names", ["aabb", "aabbcc", "aaabbb"])
def test_auto_is_a_nested_ring_over_hosts(names: str, hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts(names)
    assert plans_of("auto", len(names), monkeypatch) == {NestedRingPlan}
    assert plans_of("auto", len(names), monkeypatch, bias="additive hs") == {NestedRingPlan}
    for method, kind in (("ring", RingPlan), ("ulysses", UlyssesPlan)):
        assert plans_of(method, len(names), monkeypatch) == {kind}


@pytest.mark.parametrize("names", ["abab", "aaab", "aaaa", "abcd", "ab"])
def test_other_ranks_are_not_split(names: str, hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts(names)
    assert plans_of("auto", len(names), monkeypatch) == {RingPlan}


def test_the_groups_are_made_once_in_the_order_of_the_ranks(hosts: Any) -> None:
    hosts("aaabbb")

    def body(rank: int) -> None:
        ranks = SequenceRanks(dist.group.WORLD)
        split = split_over_hosts(ranks, CPU)
        assert split is not None
        assert split is split_over_hosts(SequenceRanks(dist.group.WORLD), CPU)
        assert (split.rank, split.size, split.sizes[-1], split.global_ranks()) == (rank, 6, 3, [*range(6)])
        assert split.is_in_order_of(ranks)
        assert dist.get_process_group_ranks(split.axes[-1]) == [*range(rank // 3 * 3, rank // 3 * 3 + 3)]
        assert dist.get_process_group_ranks(split.outer) == [rank % 3, rank % 3 + 3]
        assert split_over_hosts(split, CPU) is None

    run_ranks(6, body)


def test_ranks_in_another_order_are_not_split(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sorts the ranks of new groups, so the parts would not keep the order."""
    hosts("aabb")
    with monkeypatch.context() as patched:
        patched.setattr(dist, "get_process_group_ranks", lambda group: [1, 0, 2, 3])
        assert run_ranks(4, lambda rank: split_over_hosts(SequenceRanks(dist.group.WORLD), CPU)) == [None] * 4


def test_hosts_that_share_memory_are_not_split(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts("aabb")
    monkeypatch.setattr(links, "p2p_obstacle", lambda group, device: None)
    assert plans_of("auto", 4, monkeypatch) == {RingPlan}


def test_a_flat_axis_over_slow_links_is_predicted_to_be_slower_than_two_axes() -> None:
    """Also against the same ranks on one host; bytes between hosts are those of one rank of each node."""
    partition = LayoutPartition(HeadTail(), 131072, 131072, 1, 16)
    spec = CallSpec(partition, Causal(), 1, 32, 8, 128, 128, "bfloat16")
    slow, fast = Cluster("H100", nodes=2, internode="Ethernet 100G"), Cluster("H100", gpus_per_node=16)
    found = estimates(spec, slow, ROTATE_METHODS["auto"], one_axis=True)
    assert [*found] == ["split ring", "split hybrid", "ring", "ulysses"]
    assert fastest(found, slow.tolerance) == "split ring"
    assert found["split ring"].seconds < found["ring"].seconds / 1.4
    shard = 8192 * 8 * spec.head_bytes
    # K/V in forward, again in backward, and their gradients; a flat ring for each of the 8 ranks of the other host.
    assert found["split ring"].bytes_over(1) == pytest.approx(3 * shard, rel=0.25)
    assert found["ring"].bytes_over(1) == pytest.approx(8 * 3 * shard, rel=0.25)
    of_one_host = estimates(spec, fast, ROTATE_METHODS["auto"], one_axis=True)
    assert [*of_one_host] == ["ring", "ulysses"]
    assert of_one_host["ring"].seconds < found["split ring"].seconds
