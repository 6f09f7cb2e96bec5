"""The all-to-all rotation, a ring: in hop h every rank has the K/V of rank - h, the next hop always in flight.

Rows go straight from their owner to the rank that reads them, which is as many bytes as passing them on from rank to
rank, lets each hop leave out what its reader cannot see, and depends on no hop before it. Gradients go straight home,
in the dtype of K/V and not as float32 sums.

Memory: two shards of K/V, in backward two of gradients and one of contributions as well, whatever the number of ranks.
Transfers: n - 1 hops of K/V in forward and again in backward, where n - 1 hops of dK/dV go beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from cp_dtensor.division import CallShape
from cp_dtensor.plan import Plan, ring_plan
from cp_dtensor.rotation.base import GradTransfers, KvTransfers, Rotation
from cp_dtensor.rotation.exchange import ExchangedGrads, ExchangedKv


@dataclass(frozen=True)
class AllToAll(Rotation):
    """One hop after the other, and the gradients after them."""

    @property
    def name(self) -> str:
        return "alltoall"

    def for_call(self, shape: CallShape, group: dist.ProcessGroup, device: torch.device) -> Rotation:
        return self

    @property
    def slows_compute(self) -> bool:
        return True

    def plan(self, shape: CallShape, rank: int) -> Plan:
        return ring_plan(shape.division.groups(), rank, shape.mask, shape.kv_heads)

    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: Plan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        return ExchangedKv(k, v, plan, plan.backward if backward else plan.forward, group)

    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: dist.ProcessGroup) -> GradTransfers:
        return ExchangedGrads(k, v, plan, group)
