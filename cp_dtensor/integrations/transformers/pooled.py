"""Indexers and attention of transformers' models that pool blocks of tokens: GLM-5 Next, Qwen4 and DeepSeek-V4.

These functions stand for whole forwards, which pool, score and mask the tokens of one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor import Mask, pool_blocks, select_pooled
from cp_dtensor.api.extension import length_of, positions_of, seen_positions
from cp_dtensor.integrations.transformers.chosen import (
    CONTEXT,
    Chosen,
    Compressed,
    Function,
    rotation_of,
    selecting_context,
    uncompiled,
    whole_mask,
)
from cp_dtensor.integrations.transformers.masks import whole_positions
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.masks import interval_sets_of

Edges = tuple[int, ...]


# GLM-5 Next: blocks begin with the first token that is no padding


@uncompiled
def _select_after_padding(
    _: Function, module: Any, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Stand for the forward of an indexer: return (B, T, K) positions in the whole sequence, -1 for none."""
    size, keys = module.index_kpool, module.k_norm(module.wk(hidden_states))
    queries = module.wq_b(q_resid).unflatten(-1, (-1, module.head_dim))
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype))
    weights = weights.float() * (module.n_heads**-0.5 * module.softmax_scale)
    gates = F.linear(hidden_states, module.index_kpool_compress_gate)

    def select(rows: slice, edges: Edges) -> Tensor:
        place: dict[str, Any] = {"size": size, "mesh": CONTEXT, "cu_seqlens": edges}
        pooled, _ = pool_blocks(keys[rows], gates[rows], module.index_kpool_compress_ape, **place)
        options = {"topk": module.index_topk // size, "expanded": True, **place}
        return select_pooled(queries[rows], pooled, weights[rows], **options)

    indices = _by_row(_after_padding(type(module).__name__, attention_mask), select)
    if not module.index_kpool_always_select_tail:
        indices = indices[..., : module.index_topk]
    return indices.masked_fill(~attention_mask.unsqueeze(-1), -1)


def _after_padding(owner: str, kept: Tensor) -> list[Edges]:
    """Return the documents of each batch row: those of the context's mask, and the padding at the left as one more.

    Args:
        kept: (B, T), False for padding, of this rank.
    """
    call = selecting_context().call
    length = length_of(call, kept.size(1))
    segments = call.layout.segments(length, call.ranks.rank, call.ranks.size, 0)
    # The place of this rank's first token in each row, and behind all tokens one for rows and ranks without any.
    places = F.pad(positions_of(segments, kept.device).masked_fill(~kept, length), (0, 1), value=length)
    starts = zip(*call.ranks.gather_integers(places.amin(1).tolist(), kept.device), strict=True)
    documents = _documents_of(owner, None, *kept.shape)
    return [(*sorted({*edges, min(of_row)}),) for edges, of_row in zip(documents, starts, strict=True)]


def _chosen(_: Function, module: Any, topk_indices: Tensor, *args: Any, **kwargs: Any) -> Chosen:
    """Stand for a function that makes a mask of indices, which have no key that a query does not see."""
    return Chosen(topk_indices)


# Qwen4: blocks begin with the first token that a query sees


class _Seen:
    """Stands for a mask that an indexer and then a layer reads."""

    dtype = torch.bool

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def is_floating_point(self) -> bool:
        return False

    def __and__(self, chosen: Chosen) -> Chosen:
        return chosen


def _with_readable_mask(forward: Function, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for the forward of a layer that reads its mask."""
    bound = inspect.signature(forward).bind(module, *args, **kwargs)
    bound.arguments["attention_mask"] = _Seen(bound.arguments["attention_mask"])
    return forward(*bound.args, **bound.kwargs)


@uncompiled
@torch.no_grad()
def _select_seen(
    forward: Function, module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor],
    attention_mask: _Seen, *args: Any, **kwargs: Any,
) -> Chosen:  # fmt: skip
    """Stand for the forward of an indexer of which each query groups the tokens that it sees."""
    size = module.compress_ratio
    rotate = rotation_of(forward)
    cos, sin = (each.expand(len(hidden_states), -1, -1) for each in position_embeddings)
    both = module.index_qk_proj(hidden_states).unflatten(-1, (-1, module.index_head_dim))
    queries, raw_keys = both.split((module.index_n_heads, module.index_kv_heads), 2)
    queries = rotate(module.q_layernorm(queries), cos=cos, sin=sin, unsqueeze_dim=2)
    weights = queries.new_full(queries.shape[:3], module.index_head_dim**-0.5)
    # These gates take the first token of a block, by whose position its key is rotated.
    first = cos.new_full((size, 2 * cos.size(2)), float("-inf"))
    first[0] = 0.0
    tables = torch.cat((cos, sin), 2)

    def select(rows: slice, edges: Edges) -> Tensor:
        place: dict[str, Any] = {"size": size, "mesh": CONTEXT, "cu_seqlens": edges}
        pooled, _ = pool_blocks(raw_keys[rows].squeeze(2), **place)
        at, _ = pool_blocks(tables[rows], torch.zeros_like(tables[rows]), first, **place)
        keys = rotate(module.k_layernorm(pooled).unsqueeze(1), None, *at.chunk(2, 2)).squeeze(1)
        return select_pooled(queries[rows], keys, weights[rows], topk=module.block_topk, expanded=True, **place)

    documents = _documents_of(type(module).__name__, attention_mask.mask, *hidden_states.shape[:2])
    return Chosen(_by_row(documents, select))


# Documents


def _by_row(documents: list[Edges], select: Callable[[slice, Edges], Tensor]) -> Tensor:
    """Return what `select` returns for batch rows, which it gets together if their documents are the same."""
    if len({*documents}) == 1:
        return select(slice(None), documents[0])
    return torch.cat([select(slice(row, row + 1), edges) for row, edges in enumerate(documents)])


def _documents_of(owner: str, mask: Tensor | None, batch_size: int, local: int) -> list[Edges]:
    """Return the documents of each row of `local` tokens; refuse queries that do not see theirs up to themselves."""
    whole = whole_mask(owner, mask)
    found = _documents(whole, length_of(selecting_context().call, local), batch_size)
    if None in found:
        raise NotImplementedError(
            f"{owner} in context_parallel expects queries to see their documents up to themselves, got {whole}"
        )
    return [edges or () for edges in found] * (1 if len(found) == batch_size else batch_size)


@lru_cached
def _documents(mask: Mask, length: int, batch_size: int) -> list[Edges | None]:
    """Return edges of the documents of each batch row, or one entry for all rows; None for another mask."""
    found, at = list[Edges | None](), torch.arange(length, device="cpu")
    for sets in interval_sets_of(mask, length, length, batch_size):
        lo, hi = torch.stack([seen_positions(bands, at) for bands in sets or ((),)], 1)
        count, start = (hi - lo).clamp(min=0).sum(0), lo.masked_fill(lo >= hi, length).amin(0)
        is_token = ((lo <= at) & (at < hi)).any(0)  # padding does not see itself
        fits = (hi.amax(0) == at + 1) & (count == at + 1 - start)
        fits &= start.index_select(0, start.clamp(max=length - 1)) == start  # in a window it is not
        edges = (*sorted({0, length, *start[is_token].tolist()}),)
        found.append(edges if bool(fits[is_token].all()) else None)
    return found


def check_places(owner: str, batch_size: int, *, in_documents: bool) -> None:
    """Refuse position ids that are not places: models compare them with the places of keys and of blocks.

    They may be those in the documents of the context's mask, and with `in_documents` must be.
    """
    mask, positions = whole_mask(owner, None), whole_positions(selecting_context())
    if positions is None:
        raise NotImplementedError(
            f"{owner} in context_parallel expects position_ids, and a mask that the model makes of them by "
            "transformers.masking_utils: position ids are taken for places of keys, and no mask was made of any"
        )
    length = positions.size(1)
    of_rows = [
        [stop - start for start, stop in pairwise(each or (0, length))] for each in _documents(mask, length, batch_size)
    ]
    places = [torch.stack([torch.cat([torch.arange(each, device="cpu") for each in lengths]) for lengths in of_rows])]
    places += [] if in_documents else [torch.arange(length, device="cpu")]
    if not any(bool((positions == each).all()) for each in places):
        raise NotImplementedError(
            f"{owner}: position ids are taken for places of keys in the sequence, and are others in packed documents: "
            "pass mask=Documents(...) to context_parallel, and position_ids that begin again in each of these documents"
        )


# DeepSeek-V4: attention to a window, and to blocks


@uncompiled
def _compress(
    forward: Function, module: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, *_: Any
) -> tuple[Compressed, None]:
    """Stand for the forward of a compressor and of its indexer."""
    owner = type(module).__name__
    # Blocks begin with documents of the context, and their keys are rotated by positions in these.
    _documents_of(owner, None, *hidden_states.shape[:2])
    check_places(owner, len(hidden_states), in_documents=True)
    rotate = rotation_of(forward)
    indexer, indices = getattr(module, "indexer", None), None
    if indexer is not None:
        cos, sin = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
        queries = indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim)).transpose(1, 2)
        scorer, queries = indexer.scorer, rotate(queries, cos, sin).transpose(1, 2)
        weights = scorer.weights_proj(hidden_states).float() * (scorer.weights_scaling * scorer.softmax_scale)
        options: dict[str, Any] = {"size": indexer.compress_rate, "topk": indexer.index_topk, "mesh": CONTEXT}
        indices = select_pooled(queries, _pooled(rotate, indexer, hidden_states, True), weights, **options)
    pooled = _pooled(rotate, module, hidden_states, indexer is not None)
    return Compressed(pooled, module.compress_rate, indices), None


def _pooled(rotate: Function, module: Any, hidden_states: Tensor, overlap: bool) -> Tensor:
    """Return the keys (B, n, D) of this rank's blocks, of a compressor or an indexer."""
    values, gates = module.kv_proj(hidden_states), module.gate_proj(hidden_states)
    options: dict[str, Any] = {"size": module.compress_rate, "overlap": overlap, "mesh": CONTEXT}
    keys, positions = pool_blocks(values, gates, module.position_bias, **options)
    keys = module.kv_norm(keys)
    at = positions.expand(len(keys), -1)
    cos, sin = module.rotary_emb(keys, position_ids=at, layer_type=module.rope_layer_type)
    rotated: Tensor = rotate(keys.unsqueeze(1), cos, sin).squeeze(1)
    return rotated


METHODS: tuple[tuple[str, frozenset[str], Function], ...] = (
    ("forward", frozenset({"update_indexer", "get_pooled_states", "append_visible_tail"}), _select_after_padding),
    ("build_attention_mask_from_topk", frozenset({"indexer", "scatter_add_", "ne"}), _chosen),
    ("forward", frozenset({"update_indexer", "compress_ratio", "nonzero", "index_qk_proj"}), _select_seen),
    ("forward", frozenset({"indexer", "q_norm", "chunk", "sigmoid"}), _with_readable_mask),
    ("forward", frozenset({"store_compression_weights", "update_compressor_states", "kv_norm"}), _compress),
)  # fmt: skip
"""As `METHODS` of layers that select keys one by one."""
SELECTIONS = frozenset({_select_after_padding, _select_seen, _compress})
