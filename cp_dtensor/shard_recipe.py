"""Recipes of attention of shards, for compiled code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from cp_dtensor import _torch_private
from cp_dtensor.attention_call import AttentionCall
from cp_dtensor.compiled_op import Recipe, token_of
from cp_dtensor.global_lengths import global_lengths
from cp_dtensor.local_attention.policy import Allowed
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.settings import AttentionSettings, check_batch_size
from cp_dtensor.splitting import Splitting, decide_call

AMBIENT_SETTINGS = "cp_dtensor_settings"
"""Where a region leaves `AmbientSettings` of its thread for compiled code, which holds none."""


@dataclass(frozen=True)
class AmbientSettings:
    """The settings of an open region."""

    settings: AttentionSettings

    @cached_property
    def token(self) -> str:
        """Of its recipe."""
        return token_of(ShardRecipe.of(self.settings))


@dataclass(frozen=True)
class ShardRecipe(Recipe):
    """How to decide calls on shards of one kind: `AttentionSettings`, with groups by their names.

    Lengths that a region knows of its buffers are not part of it, or code would be compiled for each: they are looked
    up in the region that is open when the code runs.
    """

    groups: tuple[str, ...]
    splitting: Splitting
    fixed_lengths: tuple[int, ...] | None
    debug: bool

    @classmethod
    def of(cls, settings: AttentionSettings) -> ShardRecipe:
        """The recipe of some settings."""
        groups = tuple(
            _torch_private.name_of_group(group)
            for group in (settings.ranks.outer, settings.ranks.inner)
            if group is not None
        )
        fixed = None if settings.lengths_vary else settings.declared_lengths
        return cls(groups, settings.splitting, fixed, settings.debug)

    def __repr__(self) -> str:
        splitting = self.splitting
        lengths = "" if self.fixed_lengths is None else f", lengths {self.fixed_lengths}"
        return (
            f"{splitting.method} ({splitting.rotation.name}) over {' x '.join(self.groups)}, {splitting.layout}"
            f"{lengths}{', debug' * self.debug}"
        )

    def lengths(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float,
        known: tuple[int, int] | None,
    ) -> tuple[int, int]:  # fmt: skip
        ambient = _torch_private.get_thread_state(AMBIENT_SETTINGS)
        if known is None and ambient is not None and ambient.token == token_of(self):
            settings = ambient.settings
            check_batch_size(q, settings)
        else:
            settings = self.settings()
        return global_lengths(q, k, v, settings, is_causal, scale, known)

    def decide(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, int], is_causal: bool,
        scale: float, allowed: Allowed,
    ) -> AttentionCall:  # fmt: skip
        return decide_call(q, k, v, self.splitting, lengths, is_causal, scale, self._ranks(), allowed)

    def settings(self) -> AttentionSettings:
        """The settings, on this process's groups."""
        return AttentionSettings(self._ranks(), self.splitting, self.fixed_lengths, self.debug)

    def _ranks(self) -> SequenceRanks:
        return SequenceRanks.over([_torch_private.group_of_name(name) for name in self.groups])
