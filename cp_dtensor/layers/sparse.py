"""Learned sparse attention of sharded sequences: an indexer selects keys for each query, and attention reads them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.distributed.tensor import DTensor, Shard

from cp_dtensor.api.extension import (
    Mesh,
    cast_by_autocast,
    check_latents,
    checked_bools,
    checked_mask,
    parts_of,
    softmax_scale,
)
from cp_dtensor.layers.arguments import check_dims, checked_number, layer
from cp_dtensor.layers.chosen import IndexedAttention
from cp_dtensor.layers.indexer import SelectKeys
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask


def select_keys(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, *, topk: int, mesh: Mesh | None = None,
    is_causal: bool = True, mask: Mask | None = None, layout: Layout | None = None, seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the positions of the keys that score best for each query: the lightning indexer of DeepSeek-V3.2.

        score[t, s] = sum over index heads h of weights[t, h] * relu(q_index[t, h] . k_index[s])

    The ranks gather index keys, D values of a token, and each scores its own queries, in blocks of bounded memory, by
    torch operations in float64; scores are compared in float32. Of equal scores the keys of smaller positions come
    first, so that on one kind of device indices are equal to the bit for every number of ranks and every layout. They
    have no gradient. In DTensors and in compiled code as other layers.

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
    owner = "select_keys"
    topk = checked_number(owner, "topk", topk, least=1)
    given = {"q_index": q_index, "k_index": k_index, "weights": weights}
    check_dims(owner, _DIMS_OF_INDEXER, given)
    if q_index.dtype != k_index.dtype or not (q_index.is_floating_point() and weights.is_floating_point()):
        raise ValueError(
            f"{owner} expects q_index and k_index of one floating dtype, and floating weights; got {q_index.dtype}, "
            f"{k_index.dtype} and {weights.dtype}"
        )
    if 0 in q_index.shape[2:]:
        raise ValueError(f"{owner} expects at least one head and dim of q_index, got {tuple(q_index.shape)}")
    checked_bools(is_causal=is_causal)
    _check_placements(owner, q_index, (0, 1))
    operation = SelectKeys, (topk, parts_of(checked_mask(mask, is_causal)))
    return layer(
        owner, [each.detach() for each in given.values()], ["BTHD", "BTD", "BTH"], operation, mesh, layout,
        None if mask is None else (0,), seq_len,
    )[0]  # fmt: skip


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
    queries and outputs. Torch operations compute it, in blocks of bounded memory, in float32 or float64, on any device.

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
            on the rank that has them; GPUs are not waited for: they raise a device-side assertion.

    One rank with two tokens, one head, and R = Dn = Dr = Dv = 1, values 5 latent; queries of zeros weigh keys alike:

        latent = torch.tensor([[[1.0], [2.0]]])
        up, indices = torch.tensor([[3.0], [5.0]]), torch.tensor([[[0, -1], [0, 1]]])
        out = indexed_attention(torch.zeros(1, 1, 2, 2), latent, latent, up=up, indices=indices, mesh=mesh)  # 5, 7.5

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; DeepSeek-V3.2 (arXiv 2512.02556).
    """
    owner = "indexed_attention"
    q, latent, k_rope, up = cast_by_autocast(q, latent, k_rope, up)
    check_latents(q, latent, k_rope, up)
    check_dims(
        owner, _DIMS_OF_ATTENTION, {"q": q, "latent": latent, "k_rope": k_rope, "indices": indices, "sinks": sinks}
    )
    if indices.dtype not in (torch.int32, torch.int64) or not indices.size(2):
        raise ValueError(
            f"{owner} expects indices of int32 or int64 and at least one of each query, got {indices.dtype} "
            f"{tuple(indices.shape)}"
        )
    if sinks is not None and not sinks.is_floating_point():
        raise ValueError(f"{owner} expects sinks of a floating dtype, got {sinks.dtype}")
    _check_placements(owner, q, (0, 1, 2))
    factor = None if scale is None else softmax_scale(q.size(3), scale)
    return layer(
        owner, [q, latent, k_rope, indices, up.unflatten(0, (q.size(1), -1)), sinks],
        ["BHTD", "BTR", "BTE", "BTK", "HNR", "H"], (IndexedAttention, (factor,)), mesh, layout, (0,), seq_len, dim=2,
    )[0]  # fmt: skip


_DIMS_OF_INDEXER = {
    "q_index": "batch tokens heads dims", "k_index": "batch tokens dims", "weights": "batch tokens heads"
}  # fmt: skip
_DIMS_OF_ATTENTION = {
    "q": "batch heads tokens dims", "latent": "batch tokens R", "k_rope": "batch tokens Dr",
    "indices": "batch tokens keys", "sinks": "?heads",
}  # fmt: skip


def _check_placements(owner: str, x: torch.Tensor, dims: Collection[int]) -> None:
    """Refuse a DTensor that is sharded along dims over which the function sums."""
    placements = x.placements if isinstance(x, DTensor) else ()
    if any([isinstance(each, Shard) and each.dim not in dims for each in placements]):  # noqa: C419, for Dynamo
        raise ValueError(f"{owner} expects a DTensor sharded along dims {tuple(dims)} at most, got {placements}")
