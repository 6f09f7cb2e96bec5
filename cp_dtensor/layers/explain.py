"""`explain_recurrence` and `explain_sparse`: tables of predictions for recurrent layers and sparse attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cp_dtensor.api.extension import (
    Assumed,
    Call,
    Estimate,
    Explanation,
    Mesh,
    Step,
    check_numbers,
    checked_length,
    cluster_of_mesh,
    counted_ranks,
    fastest,
    inherited,
    refuse_other_lengths,
    seconds,
    shortened,
)
from cp_dtensor.layers.call import SequenceCall, document_edges
from cp_dtensor.layers.chunked import Rows
from cp_dtensor.layers.cost import busiest_of_axes, counted_recurrence, recurrence_estimates
from cp_dtensor.layers.rows import Whole, rows_over_axes
from cp_dtensor.spec.layouts import Layout, shard_lengths

RECURRENCES = {
    "gated_delta_rule": (True, "by head", False),
    "kda": (True, "by channel", False),
    "linear_attention": (False, "by head", False),
    "mamba2": (False, "by head", True),  # its values are x dt
}
"""By name of a layer: whether maps are matrices, its decays, and whether its values are float32."""


def explain_recurrence(
    mesh: Mesh, *, seq_len: int, heads: int, key_heads: int | None = None, key_dim: int = 128, value_dim: int = 128,
    layer: str = "gated_delta_rule", batch_size: int = 1, dtype: torch.dtype = torch.bfloat16,
    layout: Layout | None = None, cu_seqlens: Any = None, hardware: Assumed | Mapping[str, Assumed] | None = None,
    quiet: bool = False,
) -> Explanation:  # fmt: skip
    """Predict time, bytes and memory of every method of a recurrent layer, and print the table on rank 0.

    Args:
        mesh: the ranks that share the sequence, as for `gated_delta_rule`.
        seq_len: the global number of tokens.
        heads: H of v (of x for "mamba2").
        key_heads: H' of q and k (of B and C); None: as many.
        key_dim, value_dim: K and V (of "mamba2" N and P).
        layer: "gated_delta_rule", "kda", "linear_attention" (with a decay of each head) or "mamba2".
        layout: the tokens of each rank. None takes the layout of the context around the call, if that is over
            these ranks, else `HeadTail()`.
        cu_seqlens: positions where documents begin and end; None for one document.
        batch_size, dtype, hardware, quiet: as for `explain`.

    Returns:
        the predictions; `str()` is the table. Methods that the heads or the ranks do not allow are left out, and
        "relayout" where each rank has one run already.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    A gated delta net of 64 heads over two H100s:

        explain_recurrence(mesh, seq_len=131072, heads=64, hardware="H100").chosen
    """
    if layer not in RECURRENCES:
        raise ValueError(f"expected layer to be one of {', '.join(RECURRENCES)}, got {layer!r}")
    key_heads = heads if key_heads is None else key_heads
    check_numbers(dtype, heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, batch_size=batch_size)
    if heads % key_heads:
        raise ValueError(f"expected heads to be a multiple of key_heads, got {heads} and {key_heads}")
    call = _call("explain_recurrence", mesh, layout, seq_len, cu_seqlens)
    is_delta, decays, wide_values = RECURRENCES[layer]

    def rows(batch: int) -> Rows:
        def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(batch, 1, *shape, dtype=dtype, device="meta")

        keys = of(dtype, key_heads, key_dim)
        g = of(torch.float32, heads, *[key_dim] * (decays == "by channel"))
        values = of(torch.float32 if wide_values else dtype, heads, value_dim)
        return Rows(values, keys, keys, g, of(dtype, heads) if is_delta else None)

    ranks = call.ranks
    groups = [(rows(stop - start), sequence) for (start, stop), sequence in call.sequences(batch_size)]
    cluster, names, assumption = cluster_of_mesh(mesh, ranks, hardware, dtype.itemsize)
    found = recurrence_estimates(rows(batch_size), groups[0][1], cluster, one_axis=ranks.inner is None)
    of_keys = "" if key_heads == heads else f":{key_heads}"
    explanation = Explanation(
        f"{layer} of {seq_len:,} tokens on {counted_ranks(str(ranks.size))}, {heads}{of_keys} heads of "
        f"{key_dim}/{value_dim}, batch {batch_size}, {dtype}, {shortened(call.layout)}",
        assumption, names, counted_recurrence(found, groups, ranks.sizes), fastest(found),
    )  # fmt: skip
    if ranks.rank == 0 and not quiet:
        print(explanation, flush=True)
    return explanation


def explain_sparse(
    mesh: Mesh, *, seq_len: int, row_dim: int = 576, index_dim: int = 128, batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16, layout: Layout | None = None,
    hardware: Assumed | Mapping[str, Assumed] | None = None, quiet: bool = False,
) -> Explanation:  # fmt: skip
    """Predict what learned sparse attention exchanges: bytes, their time and their memory; print a table on rank 0.

    Args:
        mesh: the ranks that share the sequence, as for `select_keys`.
        seq_len: the global number of tokens.
        row_dim: values of a token that attention gathers: R + Dr of `indexed_attention`, Hkv (D + Dv) of
            `block_attention`.
        index_dim: D of k_index.
        layout: the tokens of each rank. None takes the layout of the context around the call, if that is over
            these ranks, else `HeadTail()`.
        batch_size, dtype, hardware, quiet: as for `explain`.

    Returns:
        predictions for each function by its name; `str()` is the table. Times are those of exchanges alone, which
        nothing hides. Memory: bytes of gathered rows, of their gradients, and of the rows that an exchange sends and
        receives.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    A layer of DeepSeek-V3.2 on H100s, and the bytes that a rank receives for its attention:

        explain_sparse(mesh, seq_len=131072, hardware="H100").methods["indexed_attention"].outer_bytes
    """
    check_numbers(dtype, row_dim=row_dim, index_dim=index_dim, batch_size=batch_size)
    call = _call("explain_sparse", mesh, layout, seq_len, None)
    ranks, size = call.ranks, call.ranks.size
    cluster, names, assumption = cluster_of_mesh(mesh, ranks, hardware, dtype.itemsize)
    groups = [(stop - start, sequence) for (start, stop), sequence in call.sequences(batch_size)]
    lengths = shard_lengths(call.layout, seq_len, size)

    def received(there: int, back: int) -> tuple[int, ...]:
        """Return bytes over each axis into the busiest rank, for those of a row and its gradient."""
        return busiest_of_axes(
            [rows_over_axes(Whole(), each, ranks.sizes, (count * there, count * back)) for count, each in groups]
        )

    def estimate(there: int, back: int) -> Estimate:
        """Return the estimate of a function, for bytes of a row that is gathered, and of its gradient."""
        passes = received(there, 0), received(0, back)
        forward, backward = (seconds((Step(received=of_axes[::-1]),), cluster) for of_axes in passes)
        rows = max(seq_len - own + own * (size - 1) for own in lengths)
        memory = batch_size * (seq_len * (there + back) + rows * (back or there))
        return Estimate("-", forward, backward, memory, received(there, back))

    narrow, wide = dtype.itemsize, max(dtype.itemsize, 4)
    found = {
        "select_keys": estimate(index_dim * narrow, 0),
        "indexed_attention": estimate(row_dim * narrow, row_dim * wide),
        "indexer_loss": estimate((index_dim + row_dim) * narrow, index_dim * wide),
    }
    explanation = Explanation(
        f"exchanges of sparse attention of {seq_len:,} tokens on {counted_ranks(str(size))}, {row_dim} values a token, "
        f"{index_dim} of index keys, batch {batch_size}, {dtype}, {shortened(call.layout)}",
        assumption, names, found, "",
    )  # fmt: skip
    if ranks.rank == 0 and not quiet:
        print(explanation, flush=True)
    return explanation


def _call(owner: str, mesh: Mesh, layout: Layout | None, seq_len: int, cu_seqlens: Any) -> SequenceCall:
    """Return the call of a prediction, with the layout of the context around it if `layout` is None."""
    checked_length(seq_len)
    call = inherited(owner, Call.of(mesh, layout=layout), layout=layout is None, mask=False)
    refuse_other_lengths(call.layout, seq_len, owner)
    return SequenceCall(call.ranks, call.layout, seq_len=seq_len, edges=document_edges(owner, cu_seqlens))
