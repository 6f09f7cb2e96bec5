"""The all-gather rotation: every rank holds all K/V once, so that a few large attention calls do the work.

Memory: all K/V in their own dtype during forward and backward, and in backward all dK/dV in float32 as well; that is
n times a rank's share. Transfers: one all-gather per part of the layout, all started before the local tile; one
reduce-scatter per part in backward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from cp_dtensor._torch_private import all_gather_single, reduce_scatter_single
from cp_dtensor.masks import Mask
from cp_dtensor.rotation.base import GradTransfer, KvTransfer, Rotation, Route
from cp_dtensor.schedule import GroupSegments, Steps, gathered_steps


class AllGather(Rotation):
    """Gather K/V once, reduce-scatter dK/dV once."""

    @property
    def name(self) -> str:
        return "allgather"

    def steps(self, groups: Iterable[GroupSegments], rank: int, mask: Mask) -> Steps:
        return gathered_steps(groups, rank, mask)

    def start_kv(self, kv_rows: torch.Tensor, route: Route) -> KvTransfer:
        return _Gather(kv_rows, route)

    def start_grads(self, width: int, dtype: torch.dtype, device: torch.device, route: Route) -> GradTransfer:
        return _ReduceScatter(width, dtype, device, route)


class _Gather(KvTransfer):
    def __init__(self, kv_rows: torch.Tensor, route: Route) -> None:
        part_starts = route.rows.part_starts
        self._buffer = kv_rows.new_empty(part_starts[-1], kv_rows.size(1))
        self._work: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        first = 0
        for part, length in enumerate(route.rows.lengths[route.rank]):
            if route.world_size == 1 or route.rows.pitch[part] == 0:
                continue  # alike on every rank
            rows = _padded(kv_rows[first : first + length], route.rows.pitch[part])
            first += length
            gathered = self._buffer[part_starts[part] : part_starts[part + 1]]
            # The input is kept beside the work: it must live until the transfer is done.
            self._work[part] = (all_gather_single(gathered, rows, group=route.group, async_op=True), rows)

    def receive(self, step: int) -> torch.Tensor | None:
        if step == 0:
            return None
        if step - 1 in self._work:
            self._work[step - 1][0].wait()
        return self._buffer


class _ReduceScatter(GradTransfer):
    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, route: Route) -> None:
        self._route = route
        self._local = torch.zeros(route.length(route.rank), width, dtype=dtype, device=device)
        self._gathered = torch.zeros(route.rows.part_starts[-1], width, dtype=dtype, device=device)

    def buffer(self, step: int) -> torch.Tensor:
        return self._local if step == 0 else self._gathered

    def send(self, step: int) -> None:
        pass  # a joined tile may touch every part, so nothing can leave before the last one

    def finish(self) -> torch.Tensor:
        rows = self._route.rows
        first = 0
        for part, length in enumerate(rows.lengths[self._route.rank]):
            if rows.world_size == 1 or rows.pitch[part] == 0:
                continue  # alike on every rank
            home = self._gathered.new_empty(rows.pitch[part], self._gathered.size(1))
            contributions = self._gathered[rows.part_starts[part] : rows.part_starts[part + 1]]
            reduce_scatter_single(home, contributions, group=self._route.group)
            self._local[first : first + length] += home[:length]
            first += length
        return self._local


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    """`rows` with rows of zeros behind; collectives want equal lengths, and nobody reads the padding."""
    missing = length - rows.size(0)
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
