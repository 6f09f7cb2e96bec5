"""Blocks of tokens pooled to one key each, for indexers and for attention over compressed sequences."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cp_dtensor.api.extension import Mesh, cast_by_autocast, never_compiled
from cp_dtensor.layers.arguments import check_given, checked_number, layer, refuse_dtensors
from cp_dtensor.layers.blocks import PoolBlocks, SelectPooled
from cp_dtensor.spec.layouts import Layout

eager = partial(never_compiled, reason="the numbers of blocks differ between ranks")


@eager
def pool_blocks(
    x: torch.Tensor, gate: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, size: int,
    overlap: bool = False, mesh: Mesh, layout: Layout | None = None, cu_seqlens: Any = None,
    seq_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Pool blocks of consecutive tokens to one row each: the compressor of DeepSeek-V4.

        pooled[block] = sum over its tokens j of softmax over j of (gate[j] + bias[j]) * x[j], channel by channel

    Blocks begin with documents. Tokens at the end of a document that fill no block are not pooled. A block is pooled by
    the rank that has its last token, which fetches the others, and with `overlap` the block before, from their ranks.
    Sums are in float32 (float64 for float64), rounded once. Differentiable; the gradient of `bias` is a share of this
    rank's blocks. In compiled code a graph breaks here.

    Args:
        x: (B, T, D), floating, this rank's tokens in `layout` order.
        gate: (B, T, D) in x's dtype. None for means.
        bias: (size, D), floating, equal on every rank: added to the gates of the tokens of a block.
        size: tokens of a block.
        overlap: True pools the tokens of the block before, too. x, gate and bias then have 2 D channels: the first D of
            a token are for the next block, the others for its own. The first block of a document has no block before.
        mesh, layout, cu_seqlens, seq_len: as for `halo`.

    Returns:
        pooled: (B, n, D) in x's dtype, the n blocks whose last tokens this rank has, in its order.
        positions: (n,) int64, of their first tokens in their documents, for RoPE.

    Raises:
        TypeError, ValueError: arguments that do not fit, before any collective.
        NotImplementedError: layouts that divide batch rows differently; contexts as for `halo`.

    One rank and five tokens of values 1 to 5, in blocks of two: [1.5, 3.5], at the positions [0, 2]:

        pooled, positions = pool_blocks(torch.arange(1.0, 6.0).view(1, 5, 1), size=2, mesh=mesh)

    Source: DeepSeek-V4, sections 2.3.1 (with overlap) and 2.3.2.
    """
    owner = "pool_blocks"
    x, *others = cast_by_autocast(x, *([] if gate is None else [gate]))
    gate = others[0] if others else None
    size = checked_number(owner, "size", size, least=1)
    given = {"x": x, "gate": gate, "bias": bias}
    check_given(owner, _DIMS, given, "x gate", "bias")
    refuse_dtensors(owner, given)
    if bias is not None and (gate is None or bias.size(0) != size):
        raise ValueError(f"{owner} expects a bias of {size} rows, with a gate only; got {tuple(bias.shape)}")
    if overlap and (gate is None or x.size(2) % 2):
        raise ValueError(f"{owner} with overlap expects a gate, and 2 D channels; got x {tuple(x.shape)}")
    operation = PoolBlocks, (size, bool(overlap))
    pooled, positions = layer(owner, [x, gate, bias], operation, mesh, layout, cu_seqlens, seq_len)
    assert positions is not None
    return pooled, positions


@eager
def select_pooled(
    q_index: torch.Tensor, pooled: torch.Tensor, weights: torch.Tensor, *, size: int, topk: int,
    expanded: bool = False, mesh: Mesh, layout: Layout | None = None, cu_seqlens: Any = None,
    seq_len: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the blocks that score best for each query, by pooled index keys: the indexer of DeepSeek-V4.

    Scores are those of `select_keys`. A query has the blocks of its document whose last tokens are not after it. Blocks
    of all documents are numbered by position. The ranks gather pooled keys.

    Args:
        q_index: (B, T, H, D), any floating dtype, this rank's tokens, rotated.
        pooled: (B, n, D), in the dtype of q_index: the keys of this rank's blocks, of `pool_blocks`, normed and
            rotated.
        weights: (B, T, H), floating.
        size: tokens of a block.
        topk: number of blocks of a query, >= 1.
        expanded: True returns tokens instead of blocks: those of the selected blocks, and those of the query's document
            up to itself that are in no whole block yet (GLM-5 Next, Qwen4).
        mesh, layout, cu_seqlens, seq_len: as for `halo`.

    Returns:
        (B, T, topk) int32: numbers of blocks, ascending, then -1, for `pooled_attention`. Expanded (B, T, topk * size +
        size - 1): positions of tokens, -1 between and behind them, for `indexed_attention`, or for `block_attention`
        with `block_size=1`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `pool_blocks`.

    One rank, four tokens in blocks of two with the keys 1 and 3, and the best block of each query:

        keys, options = torch.tensor([[[1.0], [3.0]]]), {"size": 2, "topk": 1, "mesh": mesh}
        best = select_pooled(torch.ones(1, 4, 1, 1), keys, torch.ones(1, 4, 1), **options)  # -1, 0, 0, 1
    """
    owner = "select_pooled"
    size, topk = (checked_number(owner, *each, least=1) for each in (("size", size), ("topk", topk)))
    given = {"q_index": q_index, "pooled": pooled, "weights": weights}
    check_given(owner, _DIMS, given, "q_index pooled", "weights")
    refuse_dtensors(owner, given)
    tensors = [q_index.detach(), weights.detach(), pooled.detach()]
    operation = SelectPooled, (size, topk, bool(expanded))
    return layer(owner, tensors, operation, mesh, layout, cu_seqlens, seq_len)[0]


_DIMS = {
    "x": "batch tokens channels", "gate": "?batch tokens channels", "bias": "?size channels",
    "q_index": "batch tokens heads dims", "pooled": "batch blocks dims", "weights": "batch tokens heads",
}  # fmt: skip
