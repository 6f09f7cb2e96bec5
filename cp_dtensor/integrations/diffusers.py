"""An attention backend of diffusers for `ContextParallelConfig`.

    from cp_dtensor.integrations import diffusers as cp_diffusers

    cp_diffusers.register()
    transformer.set_attention_backend("cp_dtensor")
    transformer.enable_parallelism(config=ContextParallelConfig(ring_degree=2, ulysses_degree=4))

diffusers shards the inputs of the model and gathers its output, by the plan of the model. Attention between them is
this library's: over the axis "ring", over the axis "ulysses", or a hybrid over both. Unlike diffusers' own, it takes
causal calls, GQA, masks, dropout, and any number of heads. For lengths that the ranks do not divide evenly, set
`ring_anything=True` or `ulysses_anything=True`, as diffusers documents; with both degrees above 1 set the attribute
after the config was made, since its constructor refuses it.

Ranks own adjacent parts of the sequence. Where a model joins sequences, such as text and image, each rank joins its
parts of both. Without a causal mask the order of keys does not matter. A causal call on joined sequences would have
another order of tokens than on one device, which the backend cannot see.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from cp_dtensor import Contiguous, Layout, context_parallel_attention, context_parallel_unshard
from cp_dtensor.api.extension import CachedHash, Mesh, Segment, sequence_ranks

__all__ = ["AdjacentParts", "attention", "register"]

NAME = "cp_dtensor"


def register() -> None:
    """Add the attention backend "cp_dtensor" to diffusers, for `set_attention_backend` and `attention_backend`.

    Models use it only where they are set to. Further calls do nothing.

    Raises:
        ImportError: diffusers is not installed, or too old to have context parallelism (before 0.36).
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    if NAME in AttentionBackendName._value2member_map_:
        return
    member = str.__new__(AttentionBackendName, NAME)  # diffusers' names are an Enum
    member._name_, member._value_ = NAME.upper(), NAME
    type.__setattr__(AttentionBackendName, member._name_, member)
    AttentionBackendName._member_names_.append(member._name_)
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[NAME] = member
    _AttentionBackendRegistry.register(member, constraints=[], supports_context_parallel=True)(attention)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, _parallel_config: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute attention of this rank's shards (B, S, H, D), with the arguments of diffusers' backends.

    `attn_mask`, boolean or floating, is (B, keys) or broadcasts to (B, H, S, keys). The keys are those of all ranks, in
    the order of ranks, or this rank's own, if the mask is the same for all queries. Without `_parallel_config`,
    attention is that of this rank's tensors alone, as in cross-attention to keys that every rank has whole.
    `return_lse` adds (B, S, H), natural log of the softmax denominator.

    Raises:
        ValueError: a mask of this rank's keys with a row for each query; queries and keys of one length, divided
            differently, on every rank alike.
        NotImplementedError: `return_lse` without `_parallel_config`.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if attn_mask is not None and attn_mask.dim() == 2:
        attn_mask = attn_mask[:, None, None]
    options: dict[str, Any] = {
        "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
        "enable_gqa": enable_gqa,
    }  # fmt: skip
    config = None if _parallel_config is None else _parallel_config.context_parallel_config
    if config is None:
        if return_lse:
            raise NotImplementedError("return_lse is supported with context parallelism only")
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)
    mesh, method = _axes(config)
    width, rows = (1, 1) if attn_mask is None else (attn_mask.size(-1), attn_mask.size(-2))
    layout, queries, keys, widths = _order(mesh, q, k, width, config.ring_anything or config.ulysses_anything)
    lengths, are_own = (sum(queries), sum(keys)), widths == keys and rows == 1
    # A mask of one column is that of all keys, or, equally, this rank's own if every rank has one key.
    if attn_mask is not None and {*widths} != {lengths[1]} and (are_own or {*widths} != {1}):
        if not are_own:
            raise ValueError(
                f"expected attn_mask with the {lengths[1]} keys of all ranks, or with this rank's {k.size(2)} keys and "
                f"one row for all queries; got {tuple(attn_mask.shape)}"
            )
        (options["attn_mask"],) = context_parallel_unshard(mesh, [attn_mask], [-1], layout)
    result = context_parallel_attention(
        q, k, v, mesh=mesh, method=method, layout=layout, seq_len=lengths, return_lse=return_lse, **options
    )
    if isinstance(result, tuple):
        return result[0].transpose(1, 2), result[1].transpose(1, 2)
    return result.transpose(1, 2)


def _axes(config: Any) -> tuple[Mesh, str]:
    """Return the axes of a `ContextParallelConfig`, and the method over them."""
    if config.ulysses_degree == 1:
        return config._ring_mesh, "ring"
    if config.ring_degree == 1:
        return config._ulysses_mesh, "ulysses"
    axes = ("ring", "ulysses")
    mesh = config._mesh
    return (mesh if tuple(mesh.mesh_dim_names) == axes else mesh[axes]), "hybrid"


def _order(
    mesh: Mesh, q: torch.Tensor, k: torch.Tensor, width: int, is_uneven: bool
) -> tuple[Layout, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the layout of q and k (B, H, S, D), and of all ranks the numbers of queries, keys and columns of masks.

    Uneven ones are exchanged.
    """
    ranks, here = sequence_ranks(mesh), [q.size(2), k.size(2), width]
    by_rank = ranks.gather_integers(here, q.device) if is_uneven else [here] * ranks.size
    queries, keys, widths = zip(*by_rank, strict=True)
    if sum(queries) == sum(keys) and queries != keys:
        raise ValueError(
            f"expected queries and keys of {sum(keys)} tokens to be divided alike, got {queries} and {keys}"
        )
    parts = AdjacentParts((queries,) if queries == keys else (queries, keys))
    return parts if is_uneven else Contiguous(), queries, keys, widths


@dataclass(frozen=True)
class AdjacentParts(CachedHash, Layout):
    """Rank r owns the r-th of adjacent parts of any lengths.

    Args:
        parts: the lengths of the ranks' parts, for sequences of one or two lengths (queries and keys).

    >>> layout = AdjacentParts(((2, 1), (3, 5)))
    >>> [(segment.start, segment.length) for rank in range(2) for segment in layout.segments(8, rank, 2)]
    [(0, 3), (3, 5)]
    """

    parts: tuple[tuple[int, ...], ...]

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        for lengths in self.parts:
            if sum(lengths) == seq_len and len(lengths) == world_size:
                edges = [0, *accumulate(lengths)]
                return (Segment.contiguous(edges[rank], edges[rank + 1]),)
        raise ValueError(f"{self} divides no sequence of {seq_len} tokens among {world_size} ranks")

    @property
    def only_length(self) -> int | None:
        return sum(self.parts[0]) if len(self.parts) == 1 else None
