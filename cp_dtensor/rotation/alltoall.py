"""The all-to-all rotation, a ring: in hop h every rank has the K/V of rank - h, the next two hops always in flight.

Rows go straight from their owner to the rank that reads them, which is as many bytes as passing them on from rank to
rank, lets each hop leave out what its reader cannot see, and depends on no hop before it. Gradients go straight home,
in the dtype of K/V and not as float32 sums.

Large shards are worked on by groups of heads, one ring after the other. Memory, whatever the number of ranks: three
such groups of K/V, this rank's own group as rows, in backward two of gradients and one of contributions as well.
Transfers: n - 1 hops of K/V in forward and again in backward, where n - 1 hops of dK/dV go beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_dtensor.division import CallShape
from cp_dtensor.plan import Plan, ring_plan
from cp_dtensor.rotation.exchange import ExchangedRotation

# More would make tiles too small to fill a GPU.
_MOST_HEAD_GROUPS = 4


@dataclass(frozen=True)
class AllToAll(ExchangedRotation):
    """One hop after the other, and the gradients after them."""

    shard_bytes: int = 32 << 20
    """K/V of a shard that are worked on at a time in forward: kernels need several times as much memory."""
    grad_shard_bytes: int = 16 << 20
    """The same in backward, where kernels and sums keep twice as much of it, in float32."""
    flops_per_hop: float = 0.3e12
    """Operations that a hop of some heads should have at least (half a millisecond on an H200): launches cost time."""
    transfers_ahead: int = 2
    """Hops in flight under a tile. One may get multiprocessors only when a tile ends, and needs those of both ranks:
    with one ahead, every delay of one rank delays its neighbours."""

    @property
    def name(self) -> str:
        return "alltoall"

    @property
    def keeps_own_gradients_wide(self) -> bool:
        return False

    def plan(self, shape: CallShape, rank: int) -> Plan:
        tiling = shape.tiling
        shard = tiling.gathered_rows(rank).longest * shape.head_bytes * shape.kv_heads
        worthwhile = int(shape.flops(tiling.groups) / tiling.world_size**2 / self.flops_per_hop)

        def head_groups(limit: int) -> int:
            return max(1, min(-(-shard // limit), worthwhile, _MOST_HEAD_GROUPS))

        groups = head_groups(self.shard_bytes), head_groups(self.grad_shard_bytes)
        return ring_plan(tiling, rank, shape.kv_heads, *groups)
