"""Layers with a state refuse arguments that do not fit, and calls that differ between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import errors_by_rank, recorded_collectives
from support.ranks import run_ranks

from cp_dtensor import HeadTail, Striped, affine_scan, gated_delta_rule, local_runs, mamba2

K, V, HEADS = 3, 2, 2


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


GIVEN: dict[str, torch.Tensor] = {
    "q": normal(1, 3, 1, K), "k": normal(1, 3, 1, K), "v": normal(1, 3, HEADS, V), "g": -normal(1, 3, HEADS).abs(),
    "beta": normal(1, 3, HEADS).sigmoid(),
}  # fmt: skip
BAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, r"expects q \(batch, tokens, groups, K\); got \(1, 3, 2\)", {"q": normal(1, 3, 2)}),
    (
        ValueError,
        r"k \(batch, tokens, groups, K\), where batch 1, tokens 3, groups 1, K 3; got \(1, 4, 1, 3\)",
        {"k": normal(1, 4, 1, K)},
    ),
    (
        ValueError,
        "heads of v to be a multiple of groups of q and k",
        {"q": normal(1, 3, 4, K), "k": normal(1, 3, 4, K)},
    ),
    (ValueError, r"beta \(batch, tokens, heads\)", {"beta": normal(1, 3, 1)}),
    (TypeError, "beta to be a torch.Tensor, got NoneType", {"beta": None}),
    (ValueError, r"g \(batch, tokens, heads\)", {"g": normal(1, 3, 1)}),
    (TypeError, "v to be a torch.Tensor", {"v": [1]}),
    (ValueError, "expects q, k, v of one floating dtype, got q torch.float64", {"v": normal(1, 3, HEADS, V).float()}),
    (ValueError, r"initial_state \(states, heads, K, V\), where .*; got", {"initial_state": normal(1, HEADS, V, K)}),
    (
        ValueError,
        r"at least one channel \(K\); got q torch.float64 \(1, 3, 1, 0\)",
        {"q": normal(1, 3, 1, 0), "k": normal(1, 3, 1, 0)},
    ),
    (ValueError, "expected a finite scale, got nan", {"scale": float("nan")}),
    (ValueError, "expected a finite scale, got -inf", {"scale": -float("inf")}),
    (ValueError, "a CPU or a CUDA device; got tensors on cpu and meta", {"beta": GIVEN["beta"].to("meta")}),
    (ValueError, "cpu and meta", {"initial_state": torch.empty(1, HEADS, K, V, dtype=torch.float64, device="meta")}),
    (ValueError, "one batch row|initial state", {"initial_state": normal(3, HEADS, K, V)}),
]


def test_refused_before_any_exchange() -> None:
    def body(rank: int) -> None:
        for kind, message, changed in BAD:
            with pytest.raises(kind, match=message):
                gated_delta_rule(**{**GIVEN, **changed}, mesh=dist.group.WORLD)

    with recorded_collectives() as collectives:
        run_ranks(2, body)
    assert not collectives


BAD_MAMBA2: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (
        ValueError,
        r"B \(batch, tokens, groups, N\), where batch 1, tokens 3, heads 2, P 2; got \(1, 3, 1\)",
        {"B": normal(1, 3, 1)},
    ),
    (ValueError, r"A \(heads\), where .* heads 2, .*; got \(\)", {"A": torch.tensor(-0.7)}),
    (ValueError, r"dt_bias \(heads\), .*; got \(1,\)", {"dt_bias": normal(1)}),
    (ValueError, r"D \(heads\) or \(heads, P\), .*; got \(3,\)", {"D": normal(3)}),
    (TypeError, "D to be a torch.Tensor, got float", {"D": 1.0}),
    (ValueError, "heads of x to be a multiple of groups", {"B": normal(1, 3, 3, 3), "C": normal(1, 3, 3, 3)}),
    (ValueError, r"at least one channel \(N\); got B .*, 0\)", {"B": normal(1, 3, 1, 0), "C": normal(1, 3, 1, 0)}),
    (ValueError, r"dt_limit to be a smallest and a largest dt, got \(nan, 1.0\)", {"dt_limit": (float("nan"), 1.0)}),
    (ValueError, r"dt_limit .* got \(1.0, 0.0\)", {"dt_limit": (1.0, 0.0)}),
    (ValueError, "a CPU or a CUDA device; got tensors on cpu and meta", {"dt": torch.ones(1, 3, 2, device="meta")}),
    (
        ValueError,
        r"initial_states \(states, heads, P, N\), .*; got \(1, 2, 3, 2\)",
        {"initial_states": normal(1, 2, 3, 2)},
    ),
]


def test_mamba2_refuses_by_the_names_of_its_arguments() -> None:
    def body(rank: int) -> None:
        given = {
            "x": normal(1, 3, 2, 2),
            "dt": normal(1, 3, 2),
            "A": normal(2),
            "B": normal(1, 3, 1, 3),
            "C": normal(1, 3, 1, 3),
        }
        for kind, message, changed in BAD_MAMBA2:
            with pytest.raises(kind, match=message):
                mamba2(**{**given, **changed}, mesh=dist.group.WORLD)

    with recorded_collectives() as collectives:
        run_ranks(2, body)
    assert not collectives


def test_documents_of_scans_are_checked() -> None:
    def body(rank: int) -> None:
        for edges, message in (
            ([0, 9], "up to 9, expected at most"),
            ([0, 0, 0, 0, 1, 1, 1, 1], "look like a document id"),
        ):
            with pytest.raises(ValueError, match=message):
                local_runs(dist.group.WORLD, 8, cu_seqlens=edges)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=message):
                affine_scan(torch.ones(1), torch.ones(1, 1, 1), mesh=dist.group.WORLD, seq_len=8, cu_seqlens=edges)

    run_ranks(1, body)


def test_different_calls_are_refused_on_every_rank() -> None:
    def body(rank: int) -> None:
        tensors = dict(GIVEN)
        gated_delta_rule(**tensors, mesh=dist.group.WORLD, layout=Striped() if rank else HeadTail())  # type: ignore[arg-type]

    assert all("layout: rank 1 says" in str(error) for error in errors_by_rank(2, body))
