"""Global lengths, and what ranks find by comparing their first calls."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    context_parallel_attention,
    context_parallel_flex_attention,
    context_parallel_shard,
)
from cp_dtensor.engine import agreement, contexts, planner
from cp_dtensor.engine.agreement import length_of
from cp_dtensor.engine.call import Call
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Striped, shard_lengths

LAYOUTS = st.sampled_from([Contiguous(), HeadTail(), Striped(1), Striped(3), MirroredBatch()])
DECLARED = st.sets(st.integers(0, 40), max_size=3).map(lambda lengths: tuple(sorted(lengths)))
REFUSED = "refused"


def answers(shards: tuple[int, ...], declared: tuple[int, ...], layout: Layout) -> list[Any]:
    """What each rank concludes from its local length."""
    concluded: list[Any] = []
    for rank, local in enumerate(shards):
        sharding = Mock(layout=layout, lengths=declared, ranks=Mock(rank=rank, size=len(shards)))
        try:
            concluded.append(length_of(sharding, local))
        except ValueError:
            concluded.append(REFUSED)
    return concluded


@given(layout=LAYOUTS, ranks=st.integers(1, 8), declared=DECLARED, length=st.integers(0, 60))
@example(
    layout=Striped(3), ranks=2, declared=(10,), length=11
)  # 6 and 5 tokens: 6 of 10 on rank 0, and 2 x 5 on rank 1
def test_all_ranks_find_the_length_of_their_shards_or_some_refuse(
    layout: Layout, ranks: int, declared: tuple[int, ...], length: int
) -> None:
    shards = shard_lengths(layout, length, ranks)
    found = answers(shards, declared, layout)
    look_alike = any(
        other != length and any(x == y for x, y in zip(shards, shard_lengths(layout, other, ranks), strict=True))
        for other in declared
    )
    if length in declared:
        assert found == [REFUSED if look_alike else length] * ranks
    elif not look_alike and len({*shards}) == 1:  # ranks x local length, unless each has as much as a whole buffer
        assert found == [REFUSED if ranks > 1 and shards[0] in declared else length] * ranks
    else:  # found by comparing the ranks' lengths
        assert len({*found}) > 1 or found[0] in (REFUSED, length)


# First calls


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


def test_each_function_has_first_calls_of_its_own() -> None:
    """FlexAttention is compared although attention of equal shapes and options was."""

    def body(rank: int) -> None:
        q = torch.randn(1, 2, 6, 4)
        context_parallel_attention(q, q, q, mesh=dist.group.WORLD)
        context_parallel_flex_attention(q, q, q, mesh=dist.group.WORLD, scale=0.5 + rank)

    with pytest.raises(ValueError, match="disagree about scale: rank 1 says"):
        run_ranks(2, body)


def test_calls_in_a_cuda_graph_are_compared_when_they_come_again_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured, ranks compare nothing, and the plan is not kept for later calls."""

    def body(rank: int, scale: float) -> None:
        q = torch.randn(1, 2, 6, 4)
        context_parallel_attention(q, q, q, mesh=dist.group.WORLD, scale=scale)

    def both(rank: int) -> None:
        for module in (agreement, planner):
            monkeypatch.setattr(module, "capturing", lambda: True)
        body(rank, 0.5)
        dist.barrier()
        for module in (agreement, planner):
            monkeypatch.setattr(module, "capturing", lambda: False)
        dist.barrier()
        body(rank, 0.5 + rank)

    with pytest.raises(ValueError, match="disagree about scale: rank 1 says"):
        run_ranks(2, both)


def test_passes_of_compiled_code_without_a_backward_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_MOST_PENDING", 2)
    monkeypatch.setattr(contexts, "_pending", pending := contexts.Counter())
    call = Mock(spec=Call)
    for name in "abc":
        contexts.Left(call, (name, call)).handle(True)
    assert [name for name, _ in pending] == ["b", "c"]
