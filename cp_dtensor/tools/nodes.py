"""Several nodes: ranks of one host that stand for them, the links between them, and the mesh to choose."""

from __future__ import annotations

import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor import Causal, Cluster
from cp_dtensor.comm.groups import sequence_ranks
from cp_dtensor.comm.links import cluster_of, link_speed
from cp_dtensor.tools.cases import Heads
from cp_dtensor.tools.plan import chosen, reasons, snippet, ways

_GATHERED = 4 << 20
"""Bytes of each CPU rank in a timed all-gather."""


def stand_for_nodes(nodes: int) -> None:
    """Make NCCL take the ranks of this host for those of so many nodes, with TCP sockets between them.

    Ranks of different nodes may share a GPU, which NCCL refuses to ranks of one node. Exit with a message if the nodes
    would have different numbers of ranks.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks % nodes:
        sys.exit(f"--nodes: expected a divisor of the number of ranks, {ranks}, got {nodes}")
    os.environ |= {  # NCCL takes ranks with different NCCL_HOSTID for ranks of different hosts
        "NCCL_HOSTID": f"node {rank // (ranks // nodes)}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0", "LOCAL_WORLD_SIZE": f"{ranks // nodes}",
    }  # fmt: skip


def links_of_nodes(mesh: DeviceMesh, flat: DeviceMesh) -> str:
    """Name the nodes and measure the links inside of them and between them; a collective.

    `mesh` has an axis across nodes and one inside of them, `flat` one axis of all ranks.
    """
    count, size = mesh.shape
    hosts = [""] * flat.size()
    dist.all_gather_object(hosts, socket.gethostname(), flat.get_group())
    listed = "; ".join(
        f"{', '.join(dict.fromkeys(hosts[first : first + size]))}: ranks {first} to {first + size - 1}"
        for first in range(0, flat.size(), size)
    )
    between, inside = (_speed(mesh.get_group(axis), mesh.device_type) / 1e9 for axis in range(2))
    speeds = f"{inside:.3g} GB/s into each rank from its node, {between:.3g} from other nodes, all ranks at once"
    return f"{count} nodes of {size} ({listed})\n{speeds}"


def mesh_to_choose(mesh: DeviceMesh, flat: DeviceMesh, seq_len: int, heads: Heads) -> str:
    """Say what "auto" takes over both meshes of `links_of_nodes`, and why; a collective. On CPUs, H200s are assumed."""
    if mesh.device_type == "cuda":
        cluster = cluster_of(sequence_ranks(flat), torch.device("cuda", torch.cuda.current_device()), 2)
    else:
        cluster = Cluster("H200", gpus_per_node=mesh.size(1), nodes=mesh.size(0))
    found = ways(cluster, Causal(), seq_len, heads, ["HeadTail"])
    best = chosen(found, cluster)
    return "\n".join([*reasons(best, found, cluster), snippet(best, flat.size())])


def _speed(group: dist.ProcessGroup, device_type: str) -> float:
    """Return the bytes a second into the slowest rank of a group in an all-gather; a collective."""
    if device_type == "cuda":
        return link_speed(group, torch.device("cuda", torch.cuda.current_device()))
    rows, seconds = torch.zeros(_GATHERED, dtype=torch.uint8), list[float]()
    gathered = [torch.empty_like(rows) for _ in range(group.size())]
    for _ in range(3):
        began = time.perf_counter()
        dist.all_gather(gathered, rows, group=group)
        seconds.append(time.perf_counter() - began)
    slowest = torch.tensor((group.size() - 1) * _GATHERED / min(seconds))
    dist.all_reduce(slowest, dist.ReduceOp.MIN, group=group)
    return float(slowest)
