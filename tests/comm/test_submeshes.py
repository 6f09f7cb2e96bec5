"""Groups of parts of a group: equal names on ranks with different numbers of groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.ranks import run_ranks

from cp_dtensor.comm.submeshes import groups_within

CPU = torch.device("cpu")
PARTS = [[0, 1], [2, 3], [0, 2], [1, 3]]


def names(rank: int) -> list[tuple[list[int], str]]:
    """The parts of this rank and their names, where some ranks have made groups of their own before."""
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    assert dist.group.WORLD is not None
    found = groups_within(dist.group.WORLD, [part for part in PARTS if rank in part], CPU)
    return [(dist.get_process_group_ranks(group), group.group_name) for group in found]


def test_ranks_name_a_group_alike_whatever_other_groups_they_have() -> None:
    by_rank = run_ranks(4, names)
    assert [[members for members, _ in found] for found in by_rank] == [
        [part for part in PARTS if rank in part] for rank in range(4)
    ]
    of_parts = [{name for found in by_rank for members, name in found if members == part} for part in PARTS]
    assert list(map(len, of_parts)) == [1] * 4
    assert len(set.union(*of_parts)) == 4
