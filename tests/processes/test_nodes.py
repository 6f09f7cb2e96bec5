"""Nodes as network namespaces of one machine, with slow links between them and gloo over TCP.

Skipped where the system does not permit namespaces.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.networks import Network, network, received_bytes
from support.nodes import WAYS, attend, check, masks, mesh_over_nodes
from support.problems import Problem
from support.processes import Processes

from cp_dtensor import Causal, Hardware, Mask, PeerError, explain
from cp_dtensor.comm.collective import AllToAll
from cp_dtensor.engine import planner
from cp_dtensor.tools.ranks import Ranks, links_of_nodes

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "multinode"
LENGTH, Q_HEADS, KV_HEADS, DIM = 384, 4, 2, 64
MASKS = masks(LENGTH)
PROBLEM = Problem(61, 61, 1, 4, 2, 8)
SHORT = masks(PROBLEM.q_len)
SPEEDS = {"100mbit": 100e6 / 8, "1gbit": 1e9 / 8}
"""Bytes a second."""
LARGEST_OVERHEAD = 1.08
"""Bytes on the link over those of K/V and their gradients: headers of Ethernet, IP and TCP are 66 of 1,514 bytes, and
each node acknowledges what comes."""


class Nodes(NamedTuple):
    net: Network
    ranks: Processes
    rate: str


def _nodes(count: int, rate: str) -> Iterator[Nodes]:
    with network(count, rate) as net:
        ranks = net.processes(2, timeout=120)
        yield Nodes(net, ranks, rate)
        ranks.stop()


@pytest.fixture(scope="module")
def two() -> Iterator[Nodes]:
    """Two nodes of two ranks at 100 Mbit/s."""
    yield from _nodes(2, "100mbit")


@pytest.fixture(scope="module", params=["2 100mbit", "2 1gbit", "4 100mbit", "4 1gbit"])
def several(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Nodes of two ranks."""
    count, rate = request.param.split()
    yield from _nodes(int(count), rate)


def _links(rank: int, nodes: int) -> str:
    flat = mesh_over_nodes(1, "cpu", nodes)
    return links_of_nodes(mesh_over_nodes(2, "cpu", nodes), Ranks(flat.get_group()))


@pytest.mark.sweep
def test_links_are_measured(several: Nodes) -> None:
    """Of the doctor: both ranks of a node share its link."""
    text = several.ranks.run(_links, len(several.net.nodes))[0]
    numbers = re.search(r"\n(\S+) GB/s into each rank from its node, (\S+) from other nodes", text)
    assert numbers is not None
    inside, between = map(float, numbers.groups())
    assert between <= 1.05 * SPEEDS[several.rate] / 2 / 1e9
    assert several.rate != "100mbit" or inside > 2 * between


class Traffic(NamedTuple):
    """What one forward and backward has taken on a rank."""

    received: int
    """Bytes that came to its node."""
    seconds: float
    busiest: int
    """By `explain`: bytes over the axis of nodes into the busiest rank."""
    predicted: float
    """By `explain`: seconds on GPUs with such links."""


def _traffic(rank: int, way: str, mask: Mask, nodes: int, rate: str, repeats: int) -> Traffic:
    (axes, options), size = WAYS[way], dist.get_world_size()
    mesh, generator = mesh_over_nodes(axes, "cpu", nodes), torch.Generator().manual_seed(rank)
    inputs = [
        torch.randn(1, heads, LENGTH // size, DIM, generator=generator, dtype=torch.float64)
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS)
    ]
    seconds, received = [], 0
    for _ in range(1 + repeats):  # the first call compares calls and makes connections
        dist.barrier()
        time.sleep(0.05)  # acknowledgements arrive
        before, began = received_bytes(), time.monotonic()
        attend(inputs, mesh, mask, LENGTH, **options)
        dist.barrier()
        seconds.append(time.monotonic() - began)
        time.sleep(0.05)
        received = received_bytes() - before
    of_node = Hardware(100e12, 1e12, 100, SPEEDS[rate] / 2, shares_memory=False)  # the ranks of a node share its link
    between, *inside = mesh.mesh_dim_names or ()
    found = explain(
        mesh, seq_len=LENGTH, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float64, mask=mask,
        rotate_method=options.get("rotate_method"), quiet=True,
        hardware={between: of_node, **dict.fromkeys(inside, "H200")},
    ).methods[options["method"]]  # fmt: skip
    return Traffic(received, min(seconds[1:]), found.outer_bytes, found.seconds)


def _measured(nodes: Nodes, way: str, mask: Mask, repeats: int = 1) -> list[Traffic]:
    found: list[Traffic] = nodes.ranks.run(_traffic, way, mask, len(nodes.net.nodes), nodes.rate, repeats)
    return found


def _check_bytes(nodes: Nodes, way: str, mask: Mask) -> None:
    """Ranks of a node receive equally much in these cases, so a node receives as much as its ranks together."""
    found = _measured(nodes, way, mask)
    expected = 2 * found[0].busiest
    most = max(each.received for each in found)
    assert expected <= most <= LARGEST_OVERHEAD * expected, (most, expected)
    # Half of them, at least, go in one direction at a time, as fast as the link is.
    assert max(each.seconds for each in found) >= most / SPEEDS[nodes.rate] / 2, "the link is slow"


@pytest.mark.parametrize("way", ["nested ring", "hybrid"])
def test_bytes_on_the_link_are_those_of_explain(two: Nodes, way: str) -> None:
    _check_bytes(two, way, MASKS["documents"])


def test_keys_enter_a_node_once(two: Nodes) -> None:
    """In a ring over one axis, both ranks of a node receive them."""
    ways = ("ring by alltoall", "nested ring")
    flat, nested = (max(each.received for each in _measured(two, way, MASKS["causal"])) for way in ways)
    assert flat > 1.8 * nested


@pytest.mark.parametrize(("way", "mask"), [*zip(WAYS, [*MASKS, *MASKS], strict=False)])
def test_results_over_nodes_are_those_of_one_device(two: Nodes, way: str, mask: str) -> None:
    two.ranks.run(check, "cpu", way, SHORT[mask], PROBLEM)


@pytest.mark.sweep
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_over_several_nodes(several: Nodes, way: str, mask: str) -> None:
    several.ranks.run(check, "cpu", way, SHORT[mask], PROBLEM, len(several.net.nodes))
    if WAYS[way][0] == 2 and mask != "window":
        _check_bytes(several, way, MASKS[mask])


@pytest.mark.sweep
@pytest.mark.parametrize("mask", [MASKS[name] for name in ("causal", "documents")], ids=str)
def test_times_are_in_the_predicted_order(several: Nodes, mask: Mask) -> None:
    """Where predictions differ by half, and the link takes most of the time."""
    if several.rate != "100mbit":
        pytest.skip("on a faster link, CPUs take most of the time")
    ways = [way for way in WAYS if way != "ulysses"]  # over one axis, it is predicted as if all ranks were far apart
    found = {way: _measured(several, way, mask, repeats=3)[0] for way in ways}
    for way, each in found.items():
        for other in found.values():
            assert each.predicted < 1.5 * other.predicted or each.seconds > other.seconds, (way, found)


def _times_by_groups(rank: int, groups: tuple[int, ...]) -> list[float]:
    """Returns the seconds of forward and backward of a nested ring, its outer ring in so many groups of heads."""
    length, heads = 2048, 8
    inputs = [torch.randn(1, heads, length // 4, 64) for _ in range(4)]
    best = dict.fromkeys(groups, math.inf)
    for count in 3 * groups:  # in turns
        ring = AllToAll(shard_bytes=1, grad_shard_bytes=1, flops_per_hop=1.0, most_head_groups=count)
        with mock.patch.object(planner, "OUTER_TRANSPORT", ring):
            mesh = mesh_over_nodes(2, "cpu")  # new, as are the plans of its groups
            for _ in range(2):
                dist.barrier()
                began = time.monotonic()
                attend(inputs, mesh, Causal(), length, method="ring", rotate_method="allgather")
                dist.barrier()
                best[count] = min(best[count], time.monotonic() - began)
    return [*best.values()]


@pytest.mark.sweep
def test_transfers_hide_in_groups_of_heads(two: Nodes) -> None:
    """K/V and gradients take about as long as attention here, and the latter waits for all of the former otherwise."""
    at_once, in_groups = map(max, zip(*two.ranks.run(_times_by_groups, (1, 8)), strict=True))
    print(f"\nforward and backward: {at_once:.2f} s at once, {in_groups:.2f} s in groups of heads")
    assert in_groups < 0.9 * at_once


# The example: its training step, and its scripts as they are


def _step(rank: int, nodes: int) -> float:
    sys.path.insert(0, str(EXAMPLE))
    size = dist.get_world_size()
    os.environ |= {"LOCAL_WORLD_SIZE": str(size // nodes), "WORLD_SIZE": str(size), "CUDA_VISIBLE_DEVICES": ""}
    error: float = importlib.import_module("train_step").main()
    return error


def test_a_training_step_over_nodes(two: Nodes) -> None:
    assert max(two.ranks.run(_step, 2)) < 1e-10


SRUN = """#!/usr/bin/env python
import os, subprocess, sys
nodes = os.environ["NODES_OF_TEST"].split()
commands = [["ip", "netns", "exec", name, *sys.argv[1:]] for name in nodes]
started = [subprocess.Popen(each, env={**os.environ, "SLURM_NODEID": str(i)}) for i, each in enumerate(commands)]
sys.exit(max(each.wait() for each in started))
"""
"""Stand-in for Slurm's: one task on each node."""


@pytest.mark.sweep
def test_the_scripts_of_the_example(tmp_path: Path) -> None:
    """That of Slurm calls that of torchrun on each node."""
    with network(2, "1gbit") as net:
        for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho 10.77.0.1\necho 10.77.0.2\n")):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "NODES_OF_TEST": " ".join(net.nodes),
            "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_NODELIST": "10.77.0.[1-2]",
            "GLOO_SOCKET_IFNAME": "net0", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = ["bash", "examples/multinode/slurm.sbatch"]
        ended = subprocess.run(
            command, cwd=EXAMPLE.parents[1], env=environment, capture_output=True, text=True, timeout=150, check=False
        )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"4 ranks: largest error of a gradient \d\.\de-1\d", ended.stdout)


# Faults, which end the ranks


def _calls(rank: int, seconds: float, timeout: float) -> str:
    """Makes calls for so long; returns the error of one that failed."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    try:
        for _ in range(int(10 * seconds)):  # equally many on every rank
            check(rank, "cpu", "ring by alltoall", SHORT["causal"], PROBLEM, mesh=group)
            time.sleep(0.1)
    except PeerError as error:
        return str(error)
    return ""


@pytest.mark.sweep
@pytest.mark.parametrize(("down", "timeout", "error"), [(2.0, 60.0, ""), (9.0, 3.0, "an exchange of rows failed")])
def test_a_link_that_is_down(two: Nodes, down: float, timeout: float, error: str) -> None:
    """TCP sends again what was lost in two seconds. After the timeout of the group, ranks get errors with names."""
    begins = threading.Timer(0.5, two.net.set_link, (1, "down"))
    ends = threading.Timer(0.5 + down, two.net.set_link, (1, "up"))
    begins.start()
    ends.start()
    try:
        found = two.ranks.run(_calls, 1.5, timeout)
    finally:
        ends.cancel()
        begins.join()
        two.net.set_link(1, "up")
    assert all(error in each and bool(each) == bool(error) for each in found), found


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_packets_that_are_late_or_lost(two: Nodes, way: str) -> None:
    """A short queue before a slow link, which delays a packet by up to 30 ms and loses what does not fit."""
    two.net.shape("20mbit", queue="75kb")
    try:
        _measured(two, way, MASKS["causal"])
        two.ranks.run(check, "cpu", way, SHORT["causal"], PROBLEM)
        assert two.net.lost() > 0
    finally:
        two.net.shape(two.rate)
