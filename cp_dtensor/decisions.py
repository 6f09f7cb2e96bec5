"""What has been decided of a call: everything but its process groups and its scale.

Values, so that they can be looked up: a cache by group may not hold the group, and scales are too many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from cp_dtensor.attention_call import AttentionCall
from cp_dtensor.division import CallShape
from cp_dtensor.head_division import HeadDivision
from cp_dtensor.local_attention.base import LocalAttention
from cp_dtensor.plan import Plan
from cp_dtensor.ring import RingCall
from cp_dtensor.rotation.base import Rotation
from cp_dtensor.rotation.head_exchange import HeadExchange
from cp_dtensor.rotation.heads import HeadRows
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.two_level import TwoLevelCall
from cp_dtensor.ulysses import UlyssesCall


class Decision(ABC):
    """How a call's work is spread over ranks."""

    @abstractmethod
    def call(self, ranks: SequenceRanks | None, scale: float) -> AttentionCall:
        """The call on the ranks that share the sequence; None if this one is alone."""


@dataclass(frozen=True)
class RingDecision(Decision):
    """A ring over the outer axis; or a rank that is alone, with nothing to send."""

    plan: Plan
    shape: CallShape
    """What the plan was made for."""
    rotation: Rotation
    backend: LocalAttention
    own_backward: LocalAttention
    """What computes the gradients of this rank's own keys' tiles."""
    state_dtype: torch.dtype

    def call(self, ranks: SequenceRanks | None, scale: float) -> RingCall:
        ring = ranks.outer if ranks is not None and self.plan.world_size > 1 else None
        return RingCall(self.plan, ring, self.rotation, self.backend, self.own_backward, scale, self.state_dtype)


@dataclass(frozen=True)
class UlyssesDecision(Decision):
    """Ulysses over the inner axis around a ring over the outer one; or over the only axis there is."""

    heads: HeadDivision
    stages: tuple[tuple[HeadRows, HeadRows], ...]
    """What the ranks have of each stage's heads: of queries, and of keys and values."""
    inner: tuple[RingDecision, ...]
    """One for each stage."""
    exchange: HeadExchange
    overlaps_stages: bool
    state_dtype: torch.dtype

    def call(self, ranks: SequenceRanks | None, scale: float) -> UlyssesCall:
        assert ranks is not None
        group, ring = (ranks.outer, None) if ranks.inner is None else (ranks.inner, SequenceRanks(ranks.outer))
        inner = tuple(decision.call(ring, scale) for decision in self.inner)
        return UlyssesCall(group, self.heads, self.stages, inner, self.exchange, self.overlaps_stages, self.state_dtype)


@dataclass(frozen=True)
class TwoLevelDecision(Decision):
    """A ring over the outer axis whose every step is a ring over the inner one."""

    outer: RingDecision
    inner: tuple[RingDecision | None, ...]
    """One for each step of the outer ring, None where there is nothing to compute."""

    def call(self, ranks: SequenceRanks | None, scale: float) -> TwoLevelCall:
        assert ranks is not None
        assert ranks.inner is not None
        within = SequenceRanks(ranks.inner)
        inner = tuple(None if decision is None else decision.call(within, scale) for decision in self.inner)
        return TwoLevelCall(self.outer.call(ranks, scale), inner)
