"""Attention of checked local shards: what every entry point calls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from cp_dtensor import _torch_private, agreement
from cp_dtensor.arguments import Mesh, ranks_and_method
from cp_dtensor.attention_call import Attention, AttentionCall
from cp_dtensor.compiled_op import Recipe, backends_token, token_of, traced_attention
from cp_dtensor.layouts import HeadTail, Layout
from cp_dtensor.local_attention.policy import Allowed
from cp_dtensor.rotation.choice import rotation_by_name
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.splitting import Splitting, decide_call


@dataclass(frozen=True)
class AttentionSettings:
    """How a sequence is divided and the work is spread: what a context, a module or a call decides once."""

    ranks: SequenceRanks
    splitting: Splitting
    declared_lengths: tuple[int, ...] | None = None
    """Global lengths known beforehand, of a context's buffers or a module; others are found by exchange."""
    debug: bool = False
    batch_size: int | None = None
    """Of the buffers of a context, where the layout divides batch rows differently."""
    lengths_vary: bool = False
    """Whether `declared_lengths` are those of one context of many that are alike, and change from one to the next."""

    @classmethod
    def of(
        cls, mesh: Mesh, method: str, layout: Layout | None, rotate_method: str | None, *, debug: bool
    ) -> AttentionSettings:
        """From what callers pass.

        Raises:
            TypeError, ValueError, NotImplementedError: arguments that do not fit.
        """
        ranks, method = ranks_and_method(mesh, method)
        return cls(ranks, Splitting(checked_layout(layout), method, rotation_by_name(rotate_method)), debug=debug)

    @property
    def layout(self) -> Layout:
        """Which rank owns which tokens."""
        return self.splitting.layout


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: AttentionSettings,
    *,
    is_causal: bool,
    scale: float | None,
    lengths: tuple[int, int] | None = None,
    needs_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of checked local shards; `lengths` are the global (q, kv) lengths if the caller knows them.

    Without `needs_lse`, lse may be empty.
    """
    ranks = settings.ranks
    q, scale = positive_scale(q, softmax_scale(q, scale))
    if _torch_private.is_traced(q):
        token = token_of(ShardRecipe.of(settings))
        return traced_attention(q, k, v, token, backends_token(), bool(is_causal), scale, lengths, needs_lse)
    lengths = _global_lengths(q, k, v, settings, is_causal, scale, lengths)
    call = decide_call(q, k, v, settings.splitting, lengths, is_causal, scale, ranks)
    return Attention.apply(q, k, v, call, needs_lse)


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
        return _global_lengths(q, k, v, settings, is_causal, scale, known)

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


def check_batch_size(q: torch.Tensor, settings: AttentionSettings) -> None:
    """Refuses batches of another size than the region's buffers, where the layout divides batch rows differently."""
    if settings.batch_size not in (None, q.size(0)):
        raise ValueError(
            f"{settings.layout} divides batch rows differently, so attention needs the batch size of the "
            f"buffers, {settings.batch_size}; got q of shape {tuple(q.shape)}"
        )


def softmax_scale(q: torch.Tensor, scale: float | None) -> float:
    """The factor of the logits; 1 / sqrt(D) if None."""
    return 1.0 / math.sqrt(q.size(3)) if scale is None else float(scale)


def positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """`(q, scale)` of equal logits with a positive scale: kernels mask before they scale, and -inf times 0 is NaN."""
    if scale < 0:
        return q * -1, -scale
    return (q * 0, 1.0) if scale == 0 else (q, scale)


def checked_layout(layout: Layout | None) -> Layout:
    """`layout`, or the default of the public API.

    Raises:
        TypeError: not a layout value (a common slip is the class itself).
    """
    if layout is None:
        return HeadTail()
    if not isinstance(layout, Layout):
        raise TypeError(f"expected layout to be a Layout such as HeadTail() or None, got {layout!r}")
    return layout


def _global_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: AttentionSettings,
    is_causal: bool,
    scale: float,
    lengths: tuple[int, int] | None,
) -> tuple[int, int]:
    layout, splitting = settings.layout, settings.splitting
    rank, world_size = settings.ranks.rank, settings.ranks.size
    if not settings.debug:
        if lengths is not None:
            _check_local_lengths(q, k, lengths, layout, rank, world_size)
            return lengths
        # On a GPU the exchange may have to wait for the device; on a CPU it costs little beside the attention.
        declared = settings.declared_lengths if q.is_cuda and settings.declared_lengths else ()
        known_q, known_kv = (
            agreement.known_length(tensor.size(2), declared, layout, rank, world_size) for tensor in (q, k)
        )
        if known_q is not None and known_kv is not None:
            return known_q, known_kv
    facts = agreement.CallFacts(
        q_length=q.size(2), kv_length=k.size(2), batch_size=q.size(0), q_heads=q.size(1), kv_heads=k.size(1),
        head_dim=q.size(3), v_head_dim=v.size(3), dtype=str(q.dtype), is_causal=bool(is_causal), scale=scale,
        layout=repr(layout), method=splitting.method, rotate_method=splitting.rotation.name,
        requires_grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        declared_q=-1 if lengths is None else lengths[0], declared_kv=-1 if lengths is None else lengths[1],
    )  # fmt: skip
    everyone = agreement.exchange(facts, settings.ranks, q.device)
    found = (
        agreement.global_length([q_local for q_local, _ in everyone], layout, "query"),
        agreement.global_length([kv_local for _, kv_local in everyone], layout, "key"),
    )
    if lengths is not None and lengths != found:
        raise ValueError(f"got seq_len={lengths} for (queries, keys), but the ranks' shards are of {found} tokens")
    return found


def _check_local_lengths(
    q: torch.Tensor, k: torch.Tensor, lengths: tuple[int, int], layout: Layout, rank: int, world_size: int
) -> None:
    for what, total, tensor in (("query", lengths[0], q), ("key", lengths[1], k)):
        expected = _local_length(layout, total, rank, world_size)
        if tensor.size(2) != expected:
            raise ValueError(
                f"{what} length does not fit: got {tensor.size(2)} local tokens on rank {rank} of {world_size}, "
                f"expected {expected} of {total} tokens in {layout}"
            )


@lru_cache(maxsize=1024)
def _local_length(layout: Layout, total: int, rank: int, world_size: int) -> int:
    return layout.local_length(total, rank, world_size)


def checked_seq_len(seq_len: int | tuple[int, int]) -> tuple[int, int]:
    """The global lengths of queries and keys.

    Raises:
        ValueError: neither a length nor a pair of lengths.
    """
    pair = tuple(seq_len) if isinstance(seq_len, (tuple, list)) else (seq_len, seq_len)
    if len(pair) != 2 or not all(map(_is_length, pair)):
        raise ValueError(f"expected seq_len to be a length >= 0 or a pair of lengths (queries, keys), got {seq_len!r}")
    return pair[0], pair[1]


def checked_length(length: int, what: str = "seq_len") -> int:
    """A global length.

    Raises:
        ValueError: not an integer >= 0.
    """
    if not _is_length(length):
        raise ValueError(f"expected {what} to be an integer >= 0, got {length!r}")
    return length


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
