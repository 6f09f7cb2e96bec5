"""Recipes of attention of shards, for compiled code."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from cp_dtensor import _torch_private
from cp_dtensor.attention_call import AttentionCall
from cp_dtensor.compiled_op import Recipe, token_of
from cp_dtensor.decisions import Decision
from cp_dtensor.extras import Extras
from cp_dtensor.global_lengths import global_lengths
from cp_dtensor.layouts import Contiguous
from cp_dtensor.local_attention.policy import Allowed
from cp_dtensor.mask_arguments import check_bias
from cp_dtensor.masks import Mask
from cp_dtensor.packed_rows import PackedEdges
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.settings import AttentionSettings, check_batch_size, with_ambient_mask
from cp_dtensor.splitting import Splitting, decide_call, decision_on, remembered
from cp_dtensor.tensors import split_rows
from cp_dtensor.traced_masks import Ambient, Found, outstanding

AMBIENT_SETTINGS = "cp_dtensor_settings"
"""Where a region leaves `AmbientSettings` of its thread for compiled code, which holds none."""
_FOUND_LAYOUT = Contiguous()  # in the place of one that is found where code runs


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

    Lengths that a region knows of its buffers, its mask, and a layout made for it are not part of it, or code would be
    compiled for each: they are looked up in the region that is open when the code runs.
    """

    groups: tuple[str, ...]
    splitting: Splitting
    fixed_lengths: tuple[int, ...] | None
    debug: bool
    finds_mask: bool = False  # or the layout
    fixed_mask: Mask | None = None
    alignment: int = 1
    """Of the layout that is found."""

    @classmethod
    def of(cls, settings: AttentionSettings) -> ShardRecipe:
        """The recipe of some settings."""
        groups = tuple(
            _torch_private.name_of_group(group)
            for group in (settings.ranks.outer, settings.ranks.inner)
            if group is not None
        )
        fixed = None if settings.lengths_vary else settings.declared_lengths
        splitting, mask = settings.splitting, None if settings.lengths_vary else settings.mask
        # A layout of one length is made for a mask, and like it differs from context to context.
        of_one_context = settings.lengths_vary and splitting.layout.only_length is not None
        alignment = splitting.layout.alignment if of_one_context else 1
        if of_one_context:
            splitting = replace(splitting, layout=_FOUND_LAYOUT)
        finds = settings.lengths_vary and (settings.mask is not None or of_one_context)
        return cls(groups, splitting, fixed, settings.debug, finds, mask, alignment)

    def __repr__(self) -> str:
        splitting = self.splitting
        lengths = "" if self.fixed_lengths is None else f", lengths {self.fixed_lengths}"
        return (
            f"{splitting.method} ({splitting.rotation.name}) over {' x '.join(self.groups)}, {splitting.layout}"
            f"{lengths}{', deterministic' * splitting.deterministic}{', debug' * self.debug}"
            f"{', masked' * self.finds_mask}"
            f"{'' if self.fixed_mask is None else f', {self.fixed_mask}'}"
            f"{'' if self.alignment == 1 else f', in blocks of {self.alignment}'}"
        )

    @property
    def compares(self) -> bool:
        return self.debug

    def resolve(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, extras: Extras, scale: float,
        known: tuple[int, int] | None, edges: PackedEdges | None = None, *, gives_lse: bool = False,
    ) -> tuple[tuple[int, int], Found]:  # fmt: skip
        state = _torch_private.get_thread_state(AMBIENT_SETTINGS)
        ambient, entered_in = (None, None) if state is None or state[0].token != token_of(self) else state
        of_region = None
        if self.finds_mask or (edges is not None and self.fixed_lengths is None):
            again = _torch_private.current_backward() is not None and entered_in != _torch_private.current_backward()
            of_region = _of_recompute() if again else _of_open_region(ambient)
        if ambient is not None and (known is None or self.finds_mask) and of_region in (None, _of_open_region(ambient)):
            settings = ambient.settings
        else:
            settings = self.settings() if of_region is None else self._settings_with(of_region)
        rows = 1
        if edges is not None:
            packed = edges.in_rows(settings.declared_lengths)
            rows, known, mask = packed.rows, packed.lengths, packed.mask(within=mask)
            q, k, v = (split_rows(x, rows) for x in (q, k, v))
            mask = with_ambient_mask(self.fixed_mask, mask)
        if of_region is not None:
            mask = with_ambient_mask(of_region.mask, mask)
        check_batch_size(q, settings)
        lengths = global_lengths(
            q, k, v, settings, mask, extras, scale, known, gives_lse=gives_lse, compiled=True
        )  # fmt: skip
        check_bias(q, extras.bias, lengths, settings.layout, settings.ranks.size)
        return lengths, Found(mask, None if of_region is None else of_region.layout, of_region, rows)

    def decide(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, int], found: Found, extras: Extras,
        scale: float, allowed: Allowed,
    ) -> AttentionCall:  # fmt: skip
        splitting = self.splitting if found.layout is None else replace(self.splitting, layout=found.layout)
        return decide_call(q, k, v, splitting, lengths, found.mask, extras, scale, self._ranks(), allowed)

    def decide_known(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, int], mask: Mask, extras: Extras,
        scale: float, allowed: Allowed, constants: Hashable,
    ) -> AttentionCall:  # fmt: skip
        ranks = self._ranks()
        bias = None if extras.bias is None else extras.bias.shape
        of_extras = (bias, extras.dropout_p > 0)
        key = (constants, q.shape, k.shape, v.shape, q.dtype, q.device, lengths, of_extras, ranks.rank, ranks.size)

        def make() -> Decision:
            self.resolve(q, k, v, mask, extras, scale, lengths)  # refuses what does not fit
            return decision_on(q, k, v, self.splitting, lengths, mask, extras, ranks, allowed)

        return remembered(ranks.outer, key, make).call(ranks, scale)

    def settings(self) -> AttentionSettings:
        """The settings, on this process's groups."""
        return AttentionSettings(self._ranks(), self.splitting, self.fixed_lengths, self.debug, mask=self.fixed_mask)

    def _settings_with(self, found: Ambient) -> AttentionSettings:
        splitting = replace(self.splitting, layout=found.layout)
        return replace(self.settings(), splitting=splitting, declared_lengths=found.lengths)

    def _ranks(self) -> SequenceRanks:
        return SequenceRanks.over([_torch_private.group_of_name(name) for name in self.groups])


def _of_open_region(ambient: AmbientSettings | None) -> Ambient:
    if ambient is None:
        raise RuntimeError(
            "this code was compiled in a context_parallel region with a mask, a layout or packed documents of its own, "
            "and runs outside of any such"
        )
    return Ambient(ambient.settings.mask, ambient.settings.layout, ambient.settings.declared_lengths)


def _of_recompute() -> Ambient:
    """Of attention that is computed again in a backward, by code that does not know for which forward pass."""
    only = outstanding.only()
    if only is None:
        raise RuntimeError(
            "attention is computed again in a backward, by code that was compiled in a context_parallel region with a "
            "mask, a layout or packed documents of its own; there have been several such regions whose backward has "
            "not come, and it cannot be told which of them this is: keep attention (selective checkpointing with a "
            "policy that saves cp_dtensor.ATTENTION_OPS), or checkpoint around what is compiled"
        )
    return only
