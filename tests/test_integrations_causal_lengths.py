"""Functions in flash-attn's style refuse causal attention between different lengths on every rank, or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collectives import errors_by_rank, kinds, recorded_collectives
from ranks import run_ranks

from cp_dtensor.integrations import long_context, ring_flash_attn
from cp_dtensor.integrations.long_context import LongContextAttention, set_seq_parallel_pg

RANKS = 2


def by_function(rank: int, q: torch.Tensor, k: torch.Tensor, **options: Any) -> None:
    """Attention of whole queries to whole keys."""
    q, k = (ring_flash_attn.shard(each, "ring") for each in (q, k))
    ring_flash_attn.ring_flash_attn_func(q, k, k, **options)


def by_layer(rank: int, q: torch.Tensor, k: torch.Tensor, **options: Any) -> None:
    mesh = set_seq_parallel_pg(2, 1, rank, RANKS, device_type="cpu")
    q, k = (long_context.shard(each, "basic", mesh) for each in (q, k))
    LongContextAttention(mesh=mesh)(q, k, k, **options)


each_attention = pytest.mark.parametrize("attention", [by_function, by_layer])


@each_attention
@pytest.mark.parametrize("seq_len", [None, (9, 10)])
def test_different_lengths_are_refused_on_every_rank(
    seq_len: tuple[int, int] | None, attention: Callable[..., None]
) -> None:
    """Also on rank 0, which has 5 queries and 5 keys; rank 1 has 4 and 5."""
    q, k = torch.randn(1, 9, 2, 8), torch.randn(1, 10, 2, 8)
    errors = errors_by_rank(RANKS, lambda rank: attention(rank, q, k, causal=True, seq_len=seq_len))
    told = [f"{length} local queries and 5 local keys of (9, 10)" for length in (5, 4)]
    exchanged = ["[5, 4] local queries and [5, 5] local keys, by rank"] * RANKS
    for error, received in zip(errors, told if seq_len else exchanged, strict=True):
        assert type(error) is NotImplementedError
        assert f"got {received}, expected equal lengths" in str(error)


@each_attention
def test_different_lengths_without_a_causal_mask(attention: Callable[..., None]) -> None:
    q, k = torch.randn(1, 9, 2, 8), torch.randn(1, 10, 2, 8)
    run_ranks(RANKS, lambda rank: attention(rank, q, k))


@pytest.mark.parametrize(
    ("options", "exchanges"),
    [({}, 1), ({"causal": True}, 2), ({"causal": True, "seq_len": 8}, 0), ({"causal": True, "seq_len": (8, 8)}, 0)],
)
def test_ranks_tell_each_other_only_what_nobody_has_told_them(options: dict[str, Any], exchanges: int) -> None:
    q = torch.randn(1, 8, 2, 8)
    with recorded_collectives() as collectives:
        run_ranks(RANKS, lambda rank: by_function(rank, q, q, **options))
    told = [each for each in collectives if each.kind == "AllGather" and each.sent[0].dtype == torch.int64]
    assert len(told) == exchanges * RANKS


def test_nothing_is_exchanged_once_different_lengths_are_found() -> None:
    q, k = torch.randn(1, 9, 2, 8), torch.randn(1, 10, 2, 8)
    with recorded_collectives() as collectives:
        errors_by_rank(RANKS, lambda rank: by_function(rank, q, k, causal=True))
    assert kinds(collectives) == ["AllGather"]


def test_compiled_code_compares_local_lengths() -> None:
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 5, 2, 8)

    def body(rank: int) -> None:
        compiled = torch.compile(ring_flash_attn.ring_flash_attn_func, backend="eager", fullgraph=True)
        torch.testing.assert_close(
            compiled(q, q, q, causal=True), ring_flash_attn.ring_flash_attn_func(q, q, q, causal=True)
        )
        with pytest.raises(NotImplementedError, match="4 local queries and 5 local keys, expected equal lengths"):
            torch.compile(ring_flash_attn.ring_flash_attn_func, backend="eager")(q, k, k, causal=True)

    run_ranks(1, body)
