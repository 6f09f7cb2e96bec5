"""`explain_recurrence`: a table of the cost model's predictions for one recurrent layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from cp_dtensor.api.extension import (
    Assumed,
    Call,
    Explanation,
    Mesh,
    check_numbers,
    checked_length,
    cluster_of_mesh,
    counted_ranks,
    fastest,
    inherited,
    refuse_other_lengths,
    shortened,
)
from cp_dtensor.layers.call import document_edges
from cp_dtensor.layers.chunked import Rows
from cp_dtensor.layers.cost import counted_recurrence, recurrence_estimates
from cp_dtensor.layers.rows import SequenceLayout
from cp_dtensor.spec.layouts import Layout

RECURRENCES: Mapping[str, tuple[bool, str, bool]] = MappingProxyType(
    {
        "gated_delta_rule": (True, "by head", False),
        "kda": (True, "by channel", False),
        "linear_attention": (False, "by head", False),
        "mamba2": (False, "by head", True),  # its values are x dt
    }
)
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
    checked_length(seq_len)
    call = inherited("explain_recurrence", Call.of(mesh, layout=layout), layout=layout is None, mask=False)
    ranks, edges = call.ranks, document_edges("explain_recurrence", cu_seqlens)
    refuse_other_lengths(call.layout, seq_len, "explain_recurrence")
    is_delta, decays, wide_values = RECURRENCES[layer]

    def rows(batch: int) -> Rows:
        def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(batch, 1, *shape, dtype=dtype, device="meta")

        keys = of(dtype, key_heads, key_dim)
        g = of(torch.float32, heads, *[key_dim] * (decays == "by channel"))
        values = of(torch.float32 if wide_values else dtype, heads, value_dim)
        return Rows(values, keys, keys, g, of(dtype, heads) if is_delta else None)

    groups = [
        (rows(stop - start), SequenceLayout(call.layout, seq_len, ranks.size, group, edges))
        for group, (start, stop) in enumerate(call.layout.batch_groups(batch_size))
    ]
    cluster, names, assumption = cluster_of_mesh(mesh, ranks, hardware, dtype.itemsize)
    found = recurrence_estimates(rows(batch_size), groups[0][1], cluster, one_axis=ranks.inner is None)
    of_keys = "" if key_heads == heads else f":{key_heads}"
    explanation = Explanation(
        f"{layer} of {seq_len:,} tokens on {counted_ranks(str(ranks.size))}, {heads}{of_keys} heads of "
        f"{key_dim}/{value_dim}, batch {batch_size}, {dtype}, {shortened(call.layout)}",
        assumption, names, counted_recurrence(found, groups, ranks.inner_size), fastest(found),
    )  # fmt: skip
    if ranks.rank == 0 and not quiet:
        print(explanation, flush=True)
    return explanation
