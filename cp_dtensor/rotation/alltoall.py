"""The all-to-all rotation, a ring: K/V go from rank to rank + 1, the next hop always in flight under the current tile.

Memory: two shards of K/V, and two of dK/dV in float32, whatever the number of ranks. Transfers: n - 1 hops of K/V in
forward and again in backward, where n hops of dK/dV go beside them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from cp_dtensor.masks import Mask
from cp_dtensor.rotation.base import GradTransfer, KvTransfer, Rotation, Route
from cp_dtensor.schedule import GroupSegments, Steps, ring_steps


class AllToAll(Rotation):
    """Pass K/V around a ring, and their gradients after them."""

    @property
    def name(self) -> str:
        return "alltoall"

    def steps(self, groups: Iterable[GroupSegments], rank: int, mask: Mask) -> Steps:
        return ring_steps(groups, rank, mask)

    def start_kv(self, kv_rows: torch.Tensor, route: Route) -> KvTransfer:
        return _RingKv(kv_rows, route)

    def start_grads(self, width: int, dtype: torch.dtype, device: torch.device, route: Route) -> GradTransfer:
        return _RingGrads(width, dtype, device, route)


class _Hop:
    """One shift by one rank, in flight: `rows` go to rank + 1, and as many rows as `source` owns come from rank - 1."""

    def __init__(self, rows: torch.Tensor, source: int, route: Route) -> None:
        lengths_in, lengths_out = [0] * route.world_size, [0] * route.world_size
        lengths_out[(route.rank + 1) % route.world_size] = rows.size(0)
        lengths_in[(route.rank - 1) % route.world_size] = route.length(source)
        self._sent = rows  # must live until the transfer is done
        self._received = rows.new_empty(route.length(source), rows.size(1))
        self._work = dist.all_to_all_single(
            self._received, rows, lengths_in, lengths_out, group=route.group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._received


class _RingKv(KvTransfer):
    def __init__(self, kv_rows: torch.Tensor, route: Route) -> None:
        self._route = route
        self._in_flight = self._next_hop(kv_rows, step=0)

    def _next_hop(self, rows: torch.Tensor, step: int) -> _Hop | None:
        if step + 1 == self._route.world_size:
            return None
        return _Hop(rows, (self._route.rank - step - 1) % self._route.world_size, self._route)

    def receive(self, step: int) -> torch.Tensor | None:
        if step == 0:
            return None
        assert self._in_flight is not None
        rows = self._in_flight.wait()
        self._in_flight = self._next_hop(rows, step)
        return rows


class _RingGrads(GradTransfer):
    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, route: Route) -> None:
        self._route = route
        self._options = (width, dtype, device)
        self._current = torch.empty(0)
        self._in_flight: _Hop | None = None

    def _owner(self, step: int) -> int:
        return (self._route.rank - step) % self._route.world_size

    def buffer(self, step: int) -> torch.Tensor:
        width, dtype, device = self._options
        self._current = torch.zeros(self._route.length(self._owner(step)), width, dtype=dtype, device=device)
        return self._current

    def send(self, step: int) -> None:
        if self._in_flight is not None:  # what the ranks behind us have summed up for the same owner
            self._current += self._in_flight.wait()
        if self._route.world_size > 1:
            self._in_flight = _Hop(self._current, self._owner(step + 1), self._route)

    def finish(self) -> torch.Tensor:
        return self._current if self._in_flight is None else self._in_flight.wait()
