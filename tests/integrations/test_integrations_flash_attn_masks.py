"""Functions and layers in flash-attn's style: windows, causal masks between different lengths, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.packed_documents import PackedProblem, equal_generators
from support.problems import assert_close
from support.ranks import run_ranks

from cp_dtensor.integrations import long_context, ring_flash_attn
from cp_dtensor.integrations.long_context import LongContextAttention, set_seq_parallel_pg

KINDS = ("ring", "zigzag_ring", "stripe", "step")
TYPES = ("basic", "zigzag", "strip")
Way = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[..., Any]]


def by_function(kind: str, rank: int, ranks: int) -> Way:
    """Returns a function that shards whole tensors, and the attention function."""
    return lambda tensor: ring_flash_attn.shard(tensor, kind), getattr(ring_flash_attn, f"{kind}_flash_attn_func")


def by_layer(ring_impl_type: str, rank: int, ranks: int) -> Way:
    ring = ranks if ranks % 2 else ranks // 2
    mesh = set_seq_parallel_pg(ranks // ring, ring, rank, ranks, device_type="cpu")
    attention = LongContextAttention(ring_impl_type=ring_impl_type, mesh=mesh)
    return lambda tensor: long_context.shard(tensor, ring_impl_type, mesh), attention


WAYS = {**dict.fromkeys(KINDS, by_function), **dict.fromkeys(TYPES, by_layer)}
each_way = pytest.mark.parametrize("name", WAYS)


def check(name: str, problem: PackedProblem, ranks: int, **options: Any) -> None:
    """A batch of two rows: out and gradients of every rank are those of one device."""
    rows = [problem.draw(seed) for seed in range(2)]
    wholes = [torch.stack(each) for each in zip(*rows, strict=True)]
    expected = [torch.stack(each) for each in zip(*(problem.reference(*row)[:4] for row in rows), strict=True)]

    def body(rank: int) -> None:
        local, attention = WAYS[name](name, rank, ranks)
        *leaves, grad_out = map(local, wholes)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        left, right = (-1 if end is None else end for end in problem.window)
        out = attention(*leaves, causal=problem.is_causal, window_size=(left, right), **options)
        got = (out, *torch.autograd.grad(out, leaves, grad_out))
        for what, each, whole in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
            assert_close(each, local(whole), f"{what} of rank {rank}, {problem}")

    run_ranks(ranks, body)


_ends = st.one_of(st.none(), st.integers(0, 12))


@each_way
def test_windows_and_causal_masks_are_those_of_flash_attn(name: str) -> None:
    """Also with different lengths of queries and keys, where the last query is aligned with the last key."""

    @settings(max_examples=examples(8), deadline=None)
    @given(st.integers(1, 5), st.integers(1, 24), st.integers(1, 24), st.booleans(), st.booleans(), _ends, _ends)
    def checked(
        ranks: int, q_len: int, kv_len: int, same: bool, causal: bool, left: int | None, right: int | None
    ) -> None:
        kv_len = q_len if same else kv_len
        problem = PackedProblem((0, q_len), (0, kv_len), q_heads=4, is_causal=causal, window=(left, right))
        check(name, problem, ranks, seq_len=(q_len, kv_len))

    checked()


@each_way
def test_dropout_is_that_of_one_device(name: str) -> None:
    *qkv, _ = (tensor.unsqueeze(0).expand(2, -1, -1, -1) for tensor in PackedProblem((0, 12)).draw(0))

    def body(rank: int, ranks: int, dropout_p: float) -> torch.Tensor:
        local, attention = WAYS[name](name, rank, ranks)
        return attention(*map(local, qkv), dropout_p=dropout_p, causal=True, window_size=(7, -1))

    def check_dropped(rank: int, whole: torch.Tensor) -> None:
        local, _ = WAYS[name](name, rank, 3)
        assert_close(body(rank, 3, 0.4), local(whole), f"rank {rank}")

    with equal_generators():
        (dropped,), (plain,) = run_ranks(1, body, 1, 0.4), run_ranks(1, body, 1, 0.0)
        assert not torch.allclose(dropped, plain)
        run_ranks(3, check_dropped, dropped)


@pytest.mark.parametrize(
    "window_size", [(-2, 0), (3,), (1, 2, 3), 5, None, (1.5, 0), (True, 0), ("1", 0)], ids=lambda value: str(value)
)
def test_values_that_are_not_windows(window_size: Any) -> None:
    q = torch.randn(1, 4, 2, 8)

    def body(rank: int) -> None:
        for name in ("ring", "basic"):
            _, attention = WAYS[name](name, rank, 1)
            with pytest.raises(ValueError, match=r"window_size to be a pair \(left, right\).*-1 for no limit; got"):
                attention(q, q, q, window_size=window_size)

    run_ranks(1, body)
