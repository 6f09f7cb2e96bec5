"""Functions refuse meta tensors by name; SDPA in a context leaves them to torch (test_context_attention.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.collectives import recorded_collectives
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    Contiguous,
    Documents,
    affine_scan,
    causal_conv1d,
    context_parallel_attention,
    context_parallel_flex_attention,
    context_parallel_mla,
    context_parallel_unshard,
    gated_delta_rule,
    halo,
    kda,
    linear_attention,
    mamba2,
    relayout,
    shift,
    varlen_attention,
)

Call = Callable[[Any, dict[str, Any]], object]


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


q, x, beta = meta(1, 4, 2, 3), meta(1, 4, 6), meta(1, 4, 2)
CALLS: dict[str, Call] = {
    "context_parallel_attention": lambda mesh, o: context_parallel_attention(q, q, q, **o),
    "varlen_attention": lambda mesh, o: varlen_attention(q[0], q[0], q[0], cu_seqlens=[0, 8], **o),
    "context_parallel_flex_attention": lambda mesh, o: context_parallel_flex_attention(q, q, q, **o),
    "context_parallel_mla": lambda mesh, o: context_parallel_mla(q, meta(1, 2, 4), meta(1, 2, 1), up=meta(16, 4), **o),
    "context_parallel_unshard": lambda mesh, o: context_parallel_unshard(mesh, [x], [1]),
    "gated_delta_rule": lambda mesh, o: gated_delta_rule(q, q, q, beta, beta, **o),
    "kda": lambda mesh, o: kda(q, q, q, q, beta, **o),
    "linear_attention": lambda mesh, o: linear_attention(q, q, q, **o),
    "mamba2": lambda mesh, o: mamba2(q, beta, meta(2), q, q, **o),
    "causal_conv1d": lambda mesh, o: causal_conv1d(x, meta(6, 2), **o),
    "halo": lambda mesh, o: halo(x, 1, dim=1, **o),
    "shift": lambda mesh, o: shift(x, 1, dim=1, **o),
    "relayout": lambda mesh, o: relayout(x, Contiguous(), Contiguous(), mesh=mesh, dim=1),
    "affine_scan": lambda mesh, o: affine_scan(meta(1), meta(1, 2, 2), seq_len=8, **o),
    "Documents": lambda mesh, o: Documents(meta(3).int()),
    "from_ids": lambda mesh, o: Documents.from_ids(meta(2, 3).int()),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_before_any_exchange(name: str) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match=r"got .*meta"):
            CALLS[name](mesh, {"mesh": mesh, "layout": Contiguous()})

    with recorded_collectives() as collectives:
        run_ranks(2, body)
    assert not collectives
