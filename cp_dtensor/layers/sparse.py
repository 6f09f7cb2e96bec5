"""Learned sparse attention of sharded sequences: an indexer selects keys for each query, and attention reads them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from cp_dtensor.api.extension import (
    Mesh,
    cast_by_autocast,
    check_latents,
    check_tensors,
    checked_bools,
    checked_mask,
    parts_of,
    softmax_scale,
)
from cp_dtensor.layers.arguments import check_given, checked_number, layer, refuse_dtensors
from cp_dtensor.layers.blocks import PooledAttention
from cp_dtensor.layers.chosen import BlockAttention, IndexedAttention
from cp_dtensor.layers.indexer import SelectKeys
from cp_dtensor.layers.indexer_loss import IndexerLoss, PooledIndexerLoss
from cp_dtensor.layers.pooled import eager
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask


def select_keys(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, *, topk: int, mesh: Mesh | None = None,
    is_causal: bool = True, mask: Mask | None = None, layout: Layout | None = None, seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the positions of the keys that score best for each query: the lightning indexer of DeepSeek-V3.2.

        score[t, s] = sum over index heads h of weights[t, h] * relu(q_index[t, h] . k_index[s])

    The ranks gather index keys, D values of a token, and each scores its own queries, in blocks of bounded memory: by
    kernels of nvidia-cudnn-frontend where they serve (docs/layers.md), else by torch operations in float64; scores are
    compared in float32. Of equal scores the keys of smaller positions come first, so that on one kind of device indices
    are equal to the bit for every number of ranks and every layout. They have no gradient. In DTensors and in compiled
    code as other layers.

    Args:
        q_index: (B, T, H, D), any floating dtype, this rank's tokens in `layout` order, rotated.
        k_index: (B, T, D), in the dtype of q_index.
        weights: (B, T, H), any floating dtype, with the factors of the model, such as 1 / sqrt(H D).
        topk: number of keys of a query, >= 1; may be larger than the sequence.
        mesh: the ranks that share the sequence, as for `context_parallel_attention`; None for DTensors' own.
        is_causal: True: query t has keys s <= t only, by global position.
        mask: the keys that each query may have, such as `Documents(cu_seqlens)`, besides `is_causal`. None takes the
            mask of the context around the call, if that is over these ranks; `Full()` takes none.
        layout: which rank owns which tokens. None takes the layout of the context (or module) around the call, if that
            is over these ranks, else `HeadTail()`.
        seq_len: tokens of the whole sequence. If None, and no context knows it, all ranks have equally many.

    Returns:
        (B, T, topk) int32: global positions of keys, ascending, then -1 where a query has fewer keys. A DTensor placed
        as q_index for DTensors.

    Raises:
        TypeError, ValueError: arguments that do not fit, before any collective; shards of other lengths, and calls that
            differ between ranks, on every rank at the first call of each kind.
        NotImplementedError: in compiled code, a context whose mask or layout may differ at the next call.

    One rank, three tokens with the index keys 1, 3 and 2, one head, and the best key of each query:

        key = torch.tensor([[[1.0], [3.0], [2.0]]])
        best = select_keys(torch.ones(1, 3, 1, 1), key, torch.ones(1, 3, 1), topk=1, mesh=mesh)  # 0, 1, 1

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    topk = checked_number("select_keys", "topk", topk, least=1)
    check_tensors("select_keys", weights=weights)
    return _selected("select_keys", q_index, k_index, weights, (topk, 1, 0), mesh, is_causal, mask, layout, seq_len)


def indexer_loss(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *,
    scale: float, indices: torch.Tensor | None = None, mesh: Mesh | None = None, is_causal: bool = True,
    mask: Mask | None = None, layout: Layout | None = None, seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the loss that trains the indexer of `select_keys`, of each query of this rank.

        loss[t] = sum over keys s of p[t, s] (log p[t, s] - log softmax(score[t])[s])

    Scores are those of `select_keys`, and p[t] is the mean over heads of the weights of attention, softmax(scale q k),
    without sinks. Both are over the same keys: those of `indices`, or all that the query may have, as in the warm-up.
    The ranks gather index keys and keys; in backward gradients of index keys are summed over the ranks, in float32
    (float64 for float64). Torch operations compute it in blocks of bounded memory. Differentiable once; q and k, whose
    attention is the target, have no gradient. In DTensors and in compiled code as other layers.

    A rank has the losses of its own queries alone, as the losses of its tokens. The mean over the batch is their sum
    over all ranks, divided by the number of all queries.

    Args:
        q_index, k_index, weights: as for `select_keys`.
        q: (B, H, T, D), this rank's queries of attention.
        k: (B, Hkv, T, D). Query head h reads key head h // (H / Hkv). For `indexed_attention` they are absorbed: q is
            `torch.cat((q[..., :Dn] @ up_k, q[..., Dn:]), 3)`, with up_k (H, Dn, R) the rows of keys in up, and k is
            `torch.cat((latent, k_rope), 2).unsqueeze(1)`.
        scale: factor of attention's logits, such as 1 / sqrt(Dn + Dr).
        indices: (B, T, K) int32 or int64, such as those of `select_keys`; None for all keys that `is_causal` and `mask`
            allow, which are not read with indices.
        mesh, is_causal, mask, layout, seq_len: as for `select_keys`.

    Returns:
        (B, T) float32 (float64 for float64 q_index), 0 for a query without keys; a DTensor sharded as q_index for
        DTensors.

    Raises:
        TypeError, ValueError, NotImplementedError: as `indexed_attention`.

    One rank; for the second of two tokens the indexer weighs the keys 1 : 3, and attention weighs them alike:

        q_index, k_index = torch.ones(1, 2, 1, 1), torch.tensor([[[1.0], [3.0]]]).log()
        q = torch.zeros(1, 1, 2, 4)
        loss = indexer_loss(q_index, k_index, torch.ones(1, 2, 1), q, q, scale=0.5, mesh=mesh)  # 0, 0.5 log(4 / 3)

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    owner = "indexer_loss"
    q_index, k_index = cast_by_autocast(q_index, k_index)
    q, k = cast_by_autocast(q, k)
    given = {"q_index": q_index, "k_index": k_index, "weights": weights, "q": q, "k": k, "indices": indices}
    check_given(owner, _DIMS_OF_TARGET, given, "q_index k_index", "weights", "q k", integers="indices")
    checked_bools(is_causal=is_causal)
    _check_placements(owner, q_index, (0, 1))
    operation = IndexerLoss, (parts_of(checked_mask(mask, is_causal)), softmax_scale(q.size(3), float(scale)))
    tensors = [q_index, k_index, weights, q.detach().transpose(1, 2), k.detach().transpose(1, 2), indices]
    return layer(owner, tensors, operation, mesh, layout, None if mask is None else (0,), seq_len)[0]


@eager
def pooled_indexer_loss(
    q_index: torch.Tensor, pooled_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, pooled: torch.Tensor, *,
    size: int, scale: float, indices: torch.Tensor | None = None, mesh: Mesh, layout: Layout | None = None,
    cu_seqlens: Any = None, seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the loss that trains the indexer of `select_pooled`, of each query of this rank.

    It is `indexer_loss` over pooled keys alone, without those of the window.

    Args:
        q_index, weights: as for `select_pooled`.
        pooled_index: (B, n, D), its pooled index keys.
        q, pooled, size, indices: as for `pooled_attention`.
        scale: factor of attention's logits, such as 1 / sqrt(D) of q.
        mesh, layout, cu_seqlens, seq_len: as for `halo`.

    Returns:
        (B, T) float32 (float64 for float64 q_index), 0 for a query without blocks.

    Raises:
        TypeError, ValueError, NotImplementedError: as `pooled_attention`.

    One rank, two tokens in blocks of one; the second weighs both blocks alike, as attention does:

        keys, q = torch.zeros(1, 2, 4), torch.zeros(1, 1, 2, 4)
        given = q.transpose(1, 2), keys, torch.ones(1, 2, 1), q, keys
        loss = pooled_indexer_loss(*given, size=1, scale=0.5, mesh=mesh)  # 0, 0

    Source: DeepSeek-V4, section 2.3.1.
    """
    owner = "pooled_indexer_loss"
    size = checked_number(owner, "size", size, least=1)
    q_index, pooled_index = cast_by_autocast(q_index, pooled_index)
    q, pooled = cast_by_autocast(q, pooled)
    of_index = {"q_index": q_index, "weights": weights, "pooled_index": pooled_index}
    given = {**of_index, "q": q, "pooled": pooled, "indices": indices}
    one_dtype = "q_index pooled_index", "weights", "q pooled"
    check_given(owner, _DIMS_OF_POOLED, given, *one_dtype, integers="indices")
    refuse_dtensors(owner, given)
    tensors = [q_index, weights, q.detach().transpose(1, 2), indices, pooled_index, pooled.detach()]
    operation = PooledIndexerLoss, (size, softmax_scale(q.size(3), float(scale)))
    return layer(owner, tensors, operation, mesh, layout, cu_seqlens, seq_len)[0]


def indexed_attention(
    q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, *, up: torch.Tensor, indices: torch.Tensor,
    mesh: Mesh | None = None, sinks: torch.Tensor | None = None, scale: float | None = None,
    layout: Layout | None = None, seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute multi-head latent attention over chosen keys of a sharded sequence.

    Every rank passes its shard, and the keys of its queries by global position, such as those of `select_keys`. It gets
    its rows of `context_parallel_mla` in which each query sees these keys alone. The ranks gather latents and rotary
    keys, R + Dr values of a token (576 in DeepSeek-V3.2), once in forward; in backward their gradients are summed over
    the ranks, in float32 (float64 for float64). Heads read latents as they are: up projections are absorbed into
    queries and outputs, a part of the queries at a time. Kernels of sgl-flash-mla and nvidia-cudnn-frontend compute it
    where they serve (docs/layers.md), else torch operations, in float32 or float64.

    The gradients of `up` and `sinks` are shares of this rank's queries; the sums over ranks are the whole gradients.
    Differentiable once. In DTensors and in compiled code as other layers.

    Args:
        q: (B, H, S, Dn + Dr), this rank's queries in `layout` order, the Dr rotary dims last.
        latent: (B, S, R), this rank's compressed keys and values, after their norm.
        k_rope: (B, S, Dr), this rank's rotary keys, rotated.
        up: (H * (Dn + Dv), R), equal on every rank: for each head Dn rows of keys, then Dv rows of values.
        indices: (B, S, K) int32 or int64: positions in the whole sequence, each once in a row, in any order; -1 for
            none. Attention has no other mask. Layers can share indices.
        sinks: (H,), any floating dtype, equal on every rank: logits that count in the softmax denominator alone.
        scale: factor of the logits; None is 1 / sqrt(Dn + Dr).
        mesh, layout, seq_len: as for `select_keys`.

    Returns:
        (B, H, S, Dv) in q's dtype, 0 for a query without keys; a DTensor placed as q for DTensors, which may be sharded
        along heads as well.

    Raises:
        TypeError, ValueError, NotImplementedError: as `select_keys`. Positions beyond the sequence are refused on CPUs,
            in the first call of a kind on every rank, later on the rank that has them alone, for which the others wait
            until the deadline. GPUs are not waited for: they raise a device-side assertion, or by kernels of
            packages such positions stand for none.

    One rank with two tokens, one head, and R = Dn = Dr = Dv = 1, values 5 latent; queries of zeros weigh keys alike:

        latent = torch.tensor([[[1.0], [2.0]]])
        up, indices = torch.tensor([[3.0], [5.0]]), torch.tensor([[[0, -1], [0, 1]]])
        out = indexed_attention(torch.zeros(1, 1, 2, 2), latent, latent, up=up, indices=indices, mesh=mesh)  # 5, 7.5

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; DeepSeek-V3.2 (arXiv 2512.02556).
    """
    owner = "indexed_attention"
    q, latent, k_rope, up = cast_by_autocast(q, latent, k_rope, up)
    check_latents(q, latent, k_rope, up)
    given = {"q": q, "latent": latent, "k_rope": k_rope, "indices": indices, "sinks": sinks}
    check_given(owner, _DIMS, given, "sinks", integers="indices")
    _check_placements(owner, q, (0, 1, 2))
    if q.size(1) % _parts_along(up, 0):
        raise ValueError(
            f"{owner} expects up sharded by whole heads, got {q.size(1)} heads on {_parts_along(up, 0)} ranks: pass up "
            "replicated"
        )
    factor = None if scale is None else softmax_scale(q.size(3), scale)
    tensors = [q, latent, k_rope, indices, up.unflatten(0, (q.size(1), -1)), sinks]
    return layer(owner, tensors, (IndexedAttention, (factor,)), mesh, layout, (0,), seq_len)[0]


def select_blocks(
    q_index: torch.Tensor, k_index: torch.Tensor, *, block_size: int, topk: int, local_blocks: int = 1,
    mesh: Mesh | None = None, is_causal: bool = True, mask: Mask | None = None, layout: Layout | None = None,
    seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the blocks of keys that score best for each query and index head: the indexer of MiniMax M3.

    The score of a block is the largest q_index . k_index of its keys that the query may have. A query's own block, and
    the `local_blocks` - 1 before it, come first. Else as `select_keys`.

    Args:
        q_index: (B, T, G, D), an index head for each key head.
        k_index: (B, T, D).
        block_size: keys of a block; block b has the positions from b * block_size on.
        topk: number of blocks, >= 1; may be larger than that of all blocks.
        local_blocks: 0 for none.
        mesh, is_causal, mask, layout, seq_len: as for `select_keys`.

    Returns:
        (B, T, G, topk) int32: numbers of blocks, ascending, then -1.

    Raises:
        TypeError, ValueError, NotImplementedError: as `select_keys`.

    One rank, four tokens with the index keys 3, 1, 2 and 1, in blocks of one token, and the best one of each query:

        key = torch.tensor([[[3.0], [1.0], [2.0], [1.0]]])
        options = {"block_size": 1, "topk": 1, "local_blocks": 0, "mesh": mesh}
        best = select_blocks(torch.ones(1, 4, 1, 1), key, **options)  # 0, 0, 0, 0
    """
    owner = "select_blocks"
    topk, block_size = (checked_number(owner, *each, least=1) for each in (("topk", topk), ("block_size", block_size)))
    numbers = topk, block_size, checked_number(owner, "local_blocks", local_blocks, least=0)
    return _selected(owner, q_index, k_index, None, numbers, mesh, is_causal, mask, layout, seq_len)


def _selected(
    owner: str, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None, numbers: tuple[int, int, int],
    mesh: Mesh | None, is_causal: bool, mask: Mask | None, layout: Layout | None, seq_len: int | None,
) -> torch.Tensor:  # fmt: skip
    """Return the result of `SelectKeys`; `numbers` are its topk, block_size and local_blocks."""
    given = {"q_index": q, "k_index": k, "weights": weights}
    check_given(owner, {**_DIMS, "weights": "?batch tokens index_heads"}, given, "q_index k_index", "weights")
    checked_bools(is_causal=is_causal)
    _check_placements(owner, q, (0, 1, 2) if weights is None else (0, 1))
    topk, block_size, local_blocks = numbers
    operation = SelectKeys, (topk, parts_of(checked_mask(mask, is_causal)), block_size, local_blocks)
    tensors = [q.detach(), k.detach(), None if weights is None else weights.detach()]
    return layer(owner, tensors, operation, mesh, layout, None if mask is None else (0,), seq_len)[0]


def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_indices: torch.Tensor, block_size: int,
    mesh: Mesh | None = None, is_causal: bool = True, mask: Mask | None = None, sinks: torch.Tensor | None = None,
    scale: float | None = None, layout: Layout | None = None, seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention of a sharded sequence over chosen blocks of keys, one choice for each key head.

    Each query sees the keys of its blocks that `is_causal` and `mask` allow. The ranks gather keys and values once; in
    backward the gradients are summed over the ranks, in float32 (float64 for float64). Kernels of fla-core compute it
    where they serve (docs/layers.md). Else as `indexed_attention`.

    Args:
        q: (B, H, S, D), this rank's queries in `layout` order.
        k: (B, Hkv, S, D). Query head h reads key head h // (H / Hkv).
        v: (B, Hkv, S, Dv).
        block_indices: (B, S, Hkv, N) int32 or int64, numbers of blocks, each once in a row, -1 for none, such as
            those of `select_blocks`.
        block_size: keys of a block.
        scale: factor of the logits; None is 1 / sqrt(D).
        mesh, is_causal, mask, layout, seq_len: as for `select_keys`.
        sinks: as for `indexed_attention`.

    Returns:
        (B, H, S, Dv) in q's dtype, 0 for a query without keys; a DTensor placed as q for DTensors.

    Raises:
        TypeError, ValueError, NotImplementedError: as `indexed_attention`; on GPUs, numbers beyond the blocks of the
            sequence stand for none.

    One rank, three tokens in blocks of two, the last query with block 1; queries of zeros weigh keys alike:

        v, blocks = torch.tensor([[[[1.0], [2.0], [9.0]]]]), torch.tensor([[[[0]], [[0]], [[1]]]])
        out = block_attention(v * 0, v, v, block_indices=blocks, block_size=2, mesh=mesh)  # 1, 1.5, 9
    """
    owner = "block_attention"
    block_size = checked_number(owner, "block_size", block_size, least=1)
    q, k, v = cast_by_autocast(q, k, v)
    given = {"q": q, "k": k, "v": v, "block_indices": block_indices, "sinks": sinks}
    check_given(owner, _DIMS, given, "q k v", "sinks", integers="block_indices")
    parts = _parts_along(q, 1)
    if k.size(1) % parts:
        raise ValueError(
            f"{owner} expects heads of k to be a multiple of the {parts} ranks over which those of q are sharded, got "
            f"{k.size(1)}"
        )
    checked_bools(is_causal=is_causal)
    _check_placements(owner, q, (0, 1, 2))
    factor = None if scale is None else softmax_scale(q.size(3), scale)
    operation = BlockAttention, (block_size, parts_of(checked_mask(mask, is_causal)), factor)
    tensors = [q, k.transpose(1, 2), v.transpose(1, 2), block_indices, sinks]
    return layer(owner, tensors, operation, mesh, layout, None if mask is None else (0,), seq_len)[0]


@eager
def pooled_attention(
    q: torch.Tensor, kv: torch.Tensor, pooled: torch.Tensor, *, size: int, window: int,
    indices: torch.Tensor | None = None, sinks: torch.Tensor | None = None, scale: float | None = None, mesh: Mesh,
    layout: Layout | None = None, cu_seqlens: Any = None, seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention over a window of tokens and pooled keys, in one softmax: that of DeepSeek-V4.

    All heads share one key a token, which is its value too. A query sees the last `window` tokens of its document up to
    itself, and pooled keys of blocks whose last tokens are not after it: those of `indices`, or all. The ranks exchange
    the window - 1 rows before their runs, and gather pooled keys; in backward gradients are summed over the ranks, in
    float32 (float64 for float64). Kernels of packages or torch operations compute it, as `indexed_attention`.

    The gradient of `sinks` is a share of this rank's queries. Differentiable once. In compiled code a graph breaks.

    Args:
        q: (B, H, T, D), this rank's queries in `layout` order, rotated.
        kv: (B, T, D), this rank's tokens, rotated.
        pooled: (B, n, D), the keys of this rank's blocks, of `pool_blocks`, normed and rotated.
        size: tokens of a block.
        window: number of tokens, >= 1; 128 in DeepSeek-V4.
        indices: (B, T, K) int32 or int64, numbers of blocks, each once in a row, -1 for none, such as those of
            `select_pooled`. None for all blocks that the query may have.
        sinks: (H,), as for `indexed_attention`.
        scale: factor of the logits; None is 1 / sqrt(D).
        mesh, layout, cu_seqlens, seq_len: as for `halo`.

    Returns:
        (B, H, T, D) in q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: as `pool_blocks`, and as `indexed_attention` for indices.

    One rank, three tokens and a block of the first two; queries of zeros weigh keys alike:

        kv, q = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.zeros(1, 1, 3, 1)
        pooled = torch.tensor([[[7.0]]])
        out = pooled_attention(q, kv, pooled, size=2, window=1, mesh=mesh)  # 1, (2 + 7) / 2, (3 + 7) / 2

    Source: DeepSeek-V4, section 2.3.
    """
    owner = "pooled_attention"
    size, window = (checked_number(owner, *each, least=1) for each in (("size", size), ("window", window)))
    q, kv, pooled = cast_by_autocast(q, kv, pooled)
    given = {"q": q, "kv": kv, "pooled": pooled, "indices": indices, "sinks": sinks}
    check_given(owner, _DIMS_OF_POOLED, given, "q kv pooled", "sinks", integers="indices")
    refuse_dtensors(owner, given)
    operation = PooledAttention, (size, window, None if scale is None else softmax_scale(q.size(3), scale))
    return layer(owner, [q, kv, indices, pooled, sinks], operation, mesh, layout, cu_seqlens, seq_len)[0]


_DIMS = {
    "q_index": "batch tokens index_heads index_dims", "k_index": "batch tokens index_dims",
    "weights": "batch tokens index_heads",
    "q": "batch heads tokens dims", "latent": "batch tokens R", "k_rope": "batch tokens Dr",
    "indices": "batch tokens keys", "sinks": "?heads", "k": "batch groups tokens dims", "v": "batch groups tokens Dv",
    "block_indices": "batch tokens groups chosen",
}  # fmt: skip
_DIMS_OF_TARGET = {**_DIMS, "indices": "?batch tokens keys"}
_DIMS_OF_POOLED = {
    **_DIMS_OF_TARGET, "pooled_index": "batch blocks index_dims", "kv": "batch tokens dims",
    "pooled": "batch blocks dims",
}  # fmt: skip


def _parts_along(x: torch.Tensor, dim: int) -> int:
    """Return the number of ranks over which a dim is sharded, 1 of a plain tensor."""
    if not isinstance(x, DTensor):
        return 1
    return math.prod([x.device_mesh.size(axis) for axis, each in enumerate(x.placements) if each == Shard(dim)])


def _check_placements(owner: str, x: torch.Tensor, dims: Collection[int]) -> None:
    """Refuse a DTensor that is sharded along dims over which the function sums."""
    placements = x.placements if isinstance(x, DTensor) else ()
    if any([isinstance(each, Shard) and each.dim not in dims for each in placements]):  # noqa: C419, for Dynamo
        raise ValueError(f"{owner} expects a DTensor sharded along dims {tuple(dims)} at most, got {placements}")
