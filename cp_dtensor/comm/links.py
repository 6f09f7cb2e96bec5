"""Hosts of ranks, and measured links: the bandwidth of each tier of ranks, one number for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist

from cp_dtensor._torch import all_gather_single, installed_version, prepared
from cp_dtensor._torch.cache import GroupCache, refuse_capture
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.submeshes import groups_within
from cp_dtensor.comm.symm_mem_workspace import host_of_rank, p2p_obstacle
from cp_dtensor.plan.cluster import PACKAGE_KERNELS, Cluster, Hardware, Tier

_GATHERED_BYTES = 256 << 20
"""0.4 ms and more over NVLink 4, longer than the host takes to submit an all-gather."""
_PART = 4096
"""Bytes of which the parts of the ranks are multiples: NCCL is slow with others."""
_REPEATS = 4

_PACKAGES = ("flash-attn-4", "nvidia-cudnn-frontend")
_BY_CAPABILITY = {8: Hardware.of("A100"), 9: Hardware.of("H200"), 10: Hardware.of("B200")}
"""Hardware by the major CUDA compute capability."""

_clusters = GroupCache[Cluster]()
"""By the outer group and the names of the inner ones."""
_splits = GroupCache[SequenceRanks | None]()


def split_over_hosts(ranks: SequenceRanks, device: torch.device) -> SequenceRanks | None:
    """Return ranks along one axis as those along two: hosts, and the ranks of a host. They keep their order.

    None for ranks along several axes, of one host, that share memory over several, or that are not in ascending order,
    neighbours and equally many on each host. The first call for an axis is a collective; it makes the process groups of
    the two axes.

    Raises:
        RuntimeError: the first call is in the capture of a CUDA graph.
    """
    if ranks.inner is not None or ranks.size < 4:
        return None

    def split() -> SequenceRanks | None:
        refuse_capture('"auto" has to compare the hosts of this group', "name a method, or run one call")
        return prepared(lambda: _split(ranks, device))

    return _splits.get(ranks.outer, device.type, split)


def _split(ranks: SequenceRanks, device: torch.device) -> SequenceRanks | None:
    size = neighbours(ranks.gather_objects(host_of_rank(), device))
    members = dist.get_process_group_ranks(ranks.outer)
    # Torch sorts the ranks of new groups: those in another order would get the rows of others.
    if size is None or members != sorted(members) or p2p_obstacle(ranks.outer, device) is None:
        return None
    host, place = divmod(ranks.rank, size)
    parts = members[host * size : (host + 1) * size], members[place::size]
    inner, outer = groups_within(ranks.outer, parts, device)
    return SequenceRanks(outer, inner, members=tuple(members))


def neighbours(hosts: Sequence[object]) -> int | None:
    """Return the ranks of each host, if they are neighbours and equally many, at least 2 on at least 2 hosts.

    >>> neighbours("aabb"), neighbours("abab"), neighbours("aaab"), neighbours("aaaa"), neighbours("abcd")
    (2, None, None, None, None)
    """
    count = len(set(hosts))
    size = len(hosts) // count
    fits = 1 < count < len(hosts) and all(host == hosts[rank - rank % size] for rank, host in enumerate(hosts))
    return size if fits and size * count == len(hosts) else None


def cluster_of(ranks: SequenceRanks, device: torch.device, itemsize: int) -> Cluster:
    """Return the GPUs and the links of some ranks, each value the smallest of any rank, so equal on all of them.

    Ranks along one axis that `split_over_hosts` splits have the two tiers of that.

    The first call for some ranks is a collective, which measures the links: milliseconds over NVLink, up to a second
    over Ethernet.

    Raises:
        RuntimeError: the first call is in the capture of a CUDA graph.
    """

    def measure() -> Cluster:
        refuse_capture('"auto" has to measure the links of this group', "name a transport, or run one call")
        return prepared(lambda: _measured(split_over_hosts(ranks, device) or ranks, device))

    inner = None if ranks.inner is None else ranks.inner.names
    cluster = _clusters.get(ranks.outer, inner, measure)
    return replace(cluster, gpu=cluster.gpu.of_itemsize(itemsize))


def _measured(ranks: SequenceRanks, device: torch.device) -> Cluster:
    properties = torch.cuda.get_device_properties(device)
    has_packages = all(map(installed_version, _PACKAGES))
    mine = [float(properties.major), float(properties.multi_processor_count), float(has_packages)]
    for group in ranks.groups:
        mine += [link_speed(group, device), float(p2p_obstacle(group, device) is None)]
    # Other ranks are in other groups, which have measured other values.
    weakest = ranks.gather(torch.tensor(mine, dtype=torch.float64, device=device)).amin(0)
    capability, multiprocessors, have_packages, *links = weakest.tolist()
    gpu = _BY_CAPABILITY[min(max(int(capability), min(_BY_CAPABILITY)), max(_BY_CAPABILITY))]
    if have_packages and capability in (9, 10):
        gpu = gpu.with_kernels(PACKAGE_KERNELS)
    return Cluster(
        replace(gpu, multiprocessors=int(multiprocessors)),
        tuple(
            Tier(group.size(), speed, gpu.link_latency, bool(shares))
            for group, speed, shares in zip(ranks.groups, links[::2], links[1::2], strict=True)
        ),
    )


def link_speed(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the bytes a second into the slowest rank in an all-gather that it measures.

    All-gathers are submitted one after the other. The time of one is that from the end of the one before it to its own
    end, so that the host's time to submit it does not count. The first one, which makes connections, is left out.
    """
    if group.size() == 1:
        return float("inf")
    count = _GATHERED_BYTES // group.size() // _PART * _PART
    rows = torch.zeros(count, dtype=torch.uint8, device=device)
    gathered = torch.empty(group.size() * count, dtype=torch.uint8, device=device)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(1 + _REPEATS)]
    for end in ends:
        all_gather_single(gathered, rows, group=group)
        end.record()
    ends[-1].synchronize()
    best = min(one.elapsed_time(next_one) for one, next_one in pairwise(ends)) / 1e3
    slowest = torch.tensor((group.size() - 1) * count / best, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN, group=group)
    return float(slowest)
