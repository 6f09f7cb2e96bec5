"""An attn_mask that was made from a shard: of its own keys, or equal on all ranks."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, context_parallel_attention, context_parallel_shard


def call(rank: int, attn_mask: torch.Tensor | None, kv_heads: int = 2, debug: bool = False) -> torch.Tensor:
    q, k = torch.randn(1, 2, 6, 4), torch.randn(1, kv_heads, 6, 4)
    out = context_parallel_attention(
        q, k, k, mesh=init_device_mesh("cpu", (2,)), attn_mask=attn_mask, is_causal=attn_mask is None, enable_gqa=True,
        layout=Contiguous(), debug=debug,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


def test_a_mask_of_local_keys_on_one_rank_is_the_only_thing_that_the_error_names() -> None:
    def body(rank: int) -> None:
        call(rank, torch.ones(6, 6, dtype=torch.bool) if rank else None, kv_heads=2 if rank else 1)

    with pytest.raises(ValueError, match=r"^attn_mask has only this rank's keys on rank 1 .* mask=\.\.\.$"):
        run_ranks(2, body)


def test_one_column_for_all_keys_is_no_mask_of_a_single_local_key() -> None:
    """Rank 1 has one query, so that its mask looks as if it had no rows, and ranks look at each other's facts."""
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)

    def body(rank: int) -> None:
        mesh, rows = init_device_mesh("cpu", (2,)), slice(2, 3) if rank else slice(0, 2)
        mine, mask = q[:, :, rows], torch.ones(3, 1, dtype=torch.bool)[rows]
        out = context_parallel_attention(
            mine, mine, mine, mesh=mesh, attn_mask=mask, layout=Contiguous(), method="ulysses", seq_len=3
        )
        torch.testing.assert_close(out, expected[:, :, rows], rtol=1e-10, atol=1e-10)

    run_ranks(2, body)


def test_debug_refuses_rows_that_are_equal_on_all_ranks() -> None:
    causal = torch.ones(12, 12, dtype=torch.bool).tril()

    def of_rank_0(rank: int) -> None:
        call(rank, causal[:6], debug=True)

    def right(rank: int) -> None:
        call(rank, *context_parallel_shard(init_device_mesh("cpu", (2,)), [causal], [0], Contiguous()), debug=True)
        call(rank, torch.ones(6, 12, dtype=torch.bool), debug=True)

    with pytest.raises(ValueError, match="is equal on all ranks, although its rows differ"):
        run_ranks(2, of_rank_0)
    run_ranks(2, right)
