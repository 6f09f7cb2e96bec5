"""Context-parallel attention as a function of local shards, and what every other entry point calls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor import _torch_private, agreement
from cp_dtensor.arguments import check_qkv, group_of
from cp_dtensor.layouts import HeadTail, Layout
from cp_dtensor.planning import decide_call
from cp_dtensor.ring import RingAttention
from cp_dtensor.rotation.base import RotationMethod
from cp_dtensor.rotation.choice import rotation_by_name


@_torch_private.never_compiled
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: Layout | None = None,
    rotate_method: str | None = None,
    return_lse: bool = False,
    seq_len: int | tuple[int, int] | None = None,
    debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot product attention of a sequence that is sharded over the ranks of `mesh`.

    Every rank passes its shard and gets its rows of softmax(scale q k^T + mask) v over the whole sequence.
    Differentiable; backward needs no context and may run in any thread.

    Args:
        q: (B, H, S, D), this rank's queries in `layout` order; S may differ between ranks, and be 0.
        k: (B, Hkv, T, D), this rank's keys. T may differ from S (cross-attention).
        v: (B, Hkv, T, Dv), this rank's values.
        mesh: the context-parallel axis: a DeviceMesh of one dim or a process group.
        is_causal: query i sees keys j <= i, by global position (also where the global lengths differ).
        scale: factor of the logits, 1 / sqrt(D) if None.
        enable_gqa: allow H to be a multiple of Hkv; query head h reads key head h // (H / Hkv).
        layout: which rank owns which tokens, `HeadTail()` if None.
        rotate_method: "auto", "symm_mem", "allgather" or "alltoall" (see `set_rotate_method`); the process default if
            None.
        return_lse: also return the log-sum-exp.
        seq_len: the global number of tokens, or a pair of those of queries and keys. If None, the ranks exchange
            their local lengths in one small collective (on the host where the group has a CPU backend).
        debug: let the ranks exchange and compare everything that must agree; a disagreement names the rank.

    Returns:
        out: (B, H, S, Dv) in q's dtype. With `return_lse`, also lse: (B, H, S), natural log of the softmax denominator
        in float32 (float64 for float64 inputs), -inf for a query that sees no key; not differentiable.

    Raises:
        TypeError, ValueError: arguments that do not fit, before any collective; lengths that are no division of any
            global length in the layout, on every rank alike. (A `seq_len` that is wrong on some ranks only is found
            there only; `debug=True` finds it on all.)
        NotImplementedError: no allowed SDPA backend can compute it.

    Source: Ring Attention (arXiv 2310.01889).
    """
    q, k, v = (_as_autocast_says(tensor) for tensor in (q, k, v))
    check_qkv(q, k, v, enable_gqa)
    settings = RingSettings(
        group=group_of(mesh),
        layout=checked_layout(layout),
        rotation=rotation_by_name(rotate_method),
        declared_lengths=None,
        debug=debug,
    )
    lengths = None if seq_len is None else checked_seq_len(seq_len)
    out, lse = attend(q, k, v, settings, is_causal=is_causal, scale=scale, lengths=lengths)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class RingSettings:
    """How shards are divided and moved: what a context, a module or a call decides once."""

    group: dist.ProcessGroup
    layout: Layout
    rotation: RotationMethod
    declared_lengths: tuple[int, ...] | None
    """Global lengths known beforehand, of a context's buffers or a module; others are found by exchange."""
    debug: bool
    batch_size: int | None = None
    """Of the buffers of a context, where the layout divides batch rows differently."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: RingSettings,
    *,
    is_causal: bool,
    scale: float | None,
    lengths: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of checked local shards; `lengths` are the global (q, kv) lengths if the caller knows them."""
    rank, world_size = settings.group.rank(), settings.group.size()
    q, scale = positive_scale(q, softmax_scale(q, scale))
    q_len, kv_len = _global_lengths(q, k, v, settings, is_causal, scale, lengths, rank, world_size)
    call = decide_call(q, k, v, settings.layout, (q_len, kv_len), is_causal, scale, settings.rotation, settings.group)
    return RingAttention.apply(q, k, v, call)


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
    settings: RingSettings,
    is_causal: bool,
    scale: float,
    lengths: tuple[int, int] | None,
    rank: int,
    world_size: int,
) -> tuple[int, int]:
    layout = settings.layout
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
        layout=repr(layout), rotate_method=settings.rotation.name,
        requires_grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
    )  # fmt: skip
    everyone = agreement.exchange(facts, settings.group, q.device)
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


def _as_autocast_says(tensor: torch.Tensor) -> torch.Tensor:
    """Casts as autocast does for `F.scaled_dot_product_attention`; float64 is left alone."""
    if not isinstance(tensor, torch.Tensor) or not torch.amp.is_autocast_available(tensor.device.type):
        return tensor
    if not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
