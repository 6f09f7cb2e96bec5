"""Two nodes of two ranks, stood for by the ranks of one host: NCCL talks over TCP sockets between them.

With fewer GPUs than ranks, ranks of different nodes share them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.nodes import WAYS, WAYS_OF_PODS, check, masks, mesh_over_nodes
from support.problems import Problem
from support.processes import Processes, started

from cp_dtensor import Mask
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.links import cluster_of
from cp_dtensor.comm.symm_mem_workspace import p2p_obstacle

LENGTH = 261
pytestmark = pytest.mark.gpu(2, nccl=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Processes]:
    yield from started(4, timeout=280, backend="nccl", nodes=2)


@pytest.mark.parametrize("mask", masks(LENGTH).values(), ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_finds_what_one_gpu_finds(nodes: Processes, way: str, mask: Mask) -> None:
    nodes.run(check, "cuda", way, mask, Problem(LENGTH, LENGTH, 1, 4, 2, 16))


@pytest.fixture(scope="module")
def four_nodes() -> Iterator[Processes]:
    yield from started(8, timeout=280, backend="nccl", nodes=4)


@pytest.mark.parametrize("mask", masks(LENGTH).values(), ids=str)
@pytest.mark.parametrize("way", WAYS_OF_PODS)
def test_two_pods_of_two_nodes(four_nodes: Processes, way: str, mask: Mask) -> None:
    four_nodes.run(check, "cuda", way, mask, Problem(LENGTH, LENGTH, 1, 4, 2, 16), 4)


def _links(rank: int) -> tuple[str | None, str | None, tuple[float, ...]]:
    device, mesh = torch.device("cuda", torch.cuda.current_device()), mesh_over_nodes(2, "cuda")
    ranks = SequenceRanks.along(mesh, (0, 1))
    speeds = tuple(tier.speed for tier in cluster_of(ranks, device, 2).tiers)
    assert dist.group.WORLD is not None
    return p2p_obstacle(dist.group.WORLD, device), p2p_obstacle(ranks.groups[0], device), speeds


def test_ranks_of_a_node_share_memory_and_nodes_do_not(nodes: Processes) -> None:
    found = nodes.run(_links)
    of_all, of_node, (inside, between) = found[0]
    assert found == [found[0]] * 4
    assert of_all is not None
    assert of_all.startswith(("some ranks share a device", "the ranks are on 2 hosts that share no memory"))
    assert of_node is None, "two GPUs with NVLink"
    assert inside > 2 * between, "sockets are slower than NVLink"
