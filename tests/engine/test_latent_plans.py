"""Latents that are expanded before K/V are sent, the cost model's choice between both, and `explain`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.collectives import kinds, recorded_collectives
from support.explained import explained
from support.latent_problems import LatentCase, LatentProblem, check_latents
from support.method_checks import RING_ULYSSES
from support.ranks import run_ranks

from cp_dtensor import (
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    SlidingWindow,
    Striped,
    context_parallel_mla,
)
from cp_dtensor.attention.latent import expand_latents
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.engine import latent as latents
from cp_dtensor.engine import planner
from cp_dtensor.engine.base import Tensors, Values
from cp_dtensor.engine.call import Call
from cp_dtensor.engine.choose import EXPANDED, Estimate, attention_bytes, estimates, fastest
from cp_dtensor.engine.latent import ExpandedPlan
from cp_dtensor.plan.cluster import Cluster, Hardware, Tier
from cp_dtensor.plan.partition import CallSpec, LayoutPartition

H200 = Hardware.of("H200")
AUTO = ROTATE_METHODS["auto"]


def expanding(method: str) -> Any:
    return mock.patch.object(planner, "_predicted_fastest", return_value=EXPANDED + method)


@pytest.mark.parametrize("layout", [HeadTail(), Striped(2)], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Documents([0, 9, 29], within=Causal())], ids=["causal", "documents"])
@pytest.mark.parametrize(
    ("method", "shape", "names"),
    [
        ("ring", (3,), ("cp",)), ("ulysses", (3,), ("cp",)),
        ("hybrid", (2, 2), RING_ULYSSES), ("ring", (2, 2), RING_ULYSSES),
    ],
)  # fmt: skip
def test_expanded_before_sending(
    method: str, shape: tuple[int, ...], names: tuple[str, ...], mask: Any, layout: Any
) -> None:
    some = [LatentCase(LatentProblem(29, 29, mask, 2, heads, sinks=True), layout, seed=1) for heads in (3, 4)]
    with expanding(method), mock.patch.object(planner, "ExpandedPlan", wraps=ExpandedPlan) as made:
        check_latents(some, shape, names)
    assert made.call_count >= 1


@pytest.mark.parametrize("method", ["ring", "ulysses", EXPANDED + "ring", EXPANDED + "ulysses"])
def test_what_forward_saves_can_be_made_again(method: str) -> None:
    """As compiled code does where it has lost the rows of other ranks."""
    problem = LatentProblem(13, 13, Causal(), 2, 4)

    def body(rank: int) -> None:
        q, latent, k_rope, up, _ = problem.shards(problem.draw(0), HeadTail(), rank, 2)
        k, v, modifiers = latent.unsqueeze(1), k_rope.unsqueeze(1), Modifiers(up=up.unflatten(0, (4, -1)))
        call = Call.of(dist.group.WORLD, seq_len=13, is_causal=True, scale=0.5)
        done = planner.planned(call, Tensors(q, k, v, up=modifiers.up))
        values = Values(modifiers, done.call.ranks, done.scale)
        out, lse, saved = done.plan.forward(q, k, v, values, True)
        again = done.plan.remake_saved(q, k, v, out, lse, values)
        assert len(again) == len(saved)
        assert all(map(torch.equal, again, saved))

    with mock.patch.object(planner, "_predicted_fastest", return_value=method):
        run_ranks(2, body)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_the_backend_is_chosen_for_keys_of_each_head(method: str) -> None:
    """Kernels may refuse grouped heads, which tiles of expanded latents do not have."""
    chosen = mock.Mock(wraps=planner.choose_backend)
    with mock.patch.object(planner, "choose_backend", chosen):
        check_latents([LatentCase(LatentProblem(14, 14, Causal(), 1, 5), HeadTail(), (("method", method),))], (2,))
    assert {(call.args[0].q_heads, call.args[0].kv_heads) for call in chosen.call_args_list} == {(5, 5)}


def test_a_rank_that_is_alone_expands_latents_once() -> None:
    """And again in backward by `method="ring"`, which keeps no keys and values."""
    products: list[torch.Size] = []
    linear = torch.nn.functional.linear

    def counted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        products.append(x.shape)
        return linear(x, *others)

    problem = LatentProblem(9, 9, Causal())
    for method, count in (("auto", 1), ("ring", 2)):
        products.clear()
        with mock.patch.object(torch.nn.functional, "linear", counted):
            check_latents([LatentCase(problem, HeadTail(), (("method", method),))], (1,))
        assert len(products) == count


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("heads_at_once", "groups"), [(1, [1] * 7), (3, [3, 2, 2]), (6, [4, 3])])
def test_keys_and_values_of_a_group_of_heads_are_bounded(heads_at_once: int, groups: list[int], ranks: int) -> None:
    """The rows that a step reads are of one shard in a ring: 8 tokens of 2 batch rows."""
    problem = LatentProblem(8 * ranks, 8 * ranks, Full(), 2, 7)
    row = problem.head_dim + problem.value_dim
    expanded_heads: list[int] = []

    def recorded(latent: torch.Tensor, rotary: torch.Tensor, up: torch.Tensor, *others: Any) -> Any:
        expanded_heads.append(up.size(0))
        return expand_latents(latent, rotary, up, *others)

    options = (("method", "ring"), ("rotate_method", "alltoall"))
    with (
        mock.patch.object(latents, "EXPANDED_BYTES", heads_at_once * 8 * 2 * row * 8),
        mock.patch.object(latents, "expand_latents", recorded),
    ):
        check_latents([LatentCase(problem, HeadTail(), options)], (ranks,))
    assert sorted(expanded_heads) == sorted(groups * ranks * ranks * 2)


@pytest.mark.parametrize("rotate_method", ["allgather", "alltoall"])
def test_only_rows_that_tiles_read_are_expanded(rotate_method: str) -> None:
    """Each rank expands its 8 tokens, ranks 1 and 2 also the first 2 and the last 3 before theirs; in each pass."""
    problem = LatentProblem(24, 24, SlidingWindow(3, 0) | Documents([0, 24], [0, 2]))
    read: list[int] = []

    def recorded(latent: torch.Tensor, *others: torch.Tensor) -> Any:
        read.append(latent.size(2))
        return expand_latents(latent, *others)

    options = (("method", "ring"), ("rotate_method", rotate_method))
    with mock.patch.object(latents, "expand_latents", recorded):
        check_latents([LatentCase(problem, Contiguous(), options)], (3,))
    of_ranks = [8, 8 + 2 + 3, 8 + 2 + 3]
    assert sum(read) == 2 * sum(of_ranks)


def test_expanded_keys_and_values_of_heads_travel() -> None:
    problem = LatentProblem(24, 24, Causal(), 1, 4)

    def body(rank: int) -> None:
        q, latent, k_rope, up, _ = problem.shards(problem.draw(0), HeadTail(), rank, 2)
        context_parallel_mla(q, latent, k_rope, up=up, mesh=dist.group.WORLD, seq_len=24)

    with expanding("ring"), recorded_collectives() as collectives:
        run_ranks(2, body)
    assert kinds(collectives) == ["AllToAllBase"] * len(kinds(collectives))
    sent = sum(x.numel() for each in collectives if each.rank == 0 for x in each.sent)
    assert sent == 12 * 4 * (problem.head_dim + problem.value_dim)


# The cost model


def shape(length: int, ranks: int, heads: int) -> CallSpec:
    """DeepSeek-V3's dims."""
    partition = LayoutPartition(HeadTail(), length, length, 1, ranks)
    return CallSpec(partition, Causal(), 1, heads, 1, 192, 128, "bfloat16", latent_dims=(512, 64))


def linked(ranks: int, link_speed: float) -> Cluster:
    return Cluster(H200, (Tier(ranks, link_speed, H200.link_latency, shares_memory=True),))


def found(length: int, ranks: int, heads: int, link_speed: float) -> dict[str, Estimate]:
    return estimates(shape(length, ranks, heads), linked(ranks, link_speed), AUTO)


def test_rings_send_latents_over_slow_links_and_are_faster_with_expanded_rows_over_fast_ones() -> None:
    """A ring on 8 ranks expands 8 times as many rows, and a third more products."""
    slow, fast = (found(32768, 8, 16, speed) for speed in (5e9, 5e12))
    assert fastest(slow) == "ring"
    assert fast[EXPANDED + "ring"].seconds < 0.9 * fast["ring"].seconds


def test_bytes_of_latents_by_hand() -> None:
    """K/V in forward, and K/V and gradients in backward: 3 * 7/8 of 8,192 tokens, 2 bytes each value."""
    call = replace(shape(8192, 8, 16), mask=Full())
    both = {name: attention_bytes(call, name, (8,)) for name in found(8192, 8, 16, H200.link_speed)}
    tokens = 3 * 8192 * 7 // 8 * 2
    assert both["ring"] == (tokens * 576,)
    assert both["expanded ring"] == (tokens * 16 * 320,)
    # By heads, latents of 1,024 own tokens go to 8 ranks, and q, out and their gradients as with K/V.
    rows = 2 * 1024 * 7 / 8 * 2
    assert both["ulysses"] == (rows * (8 * 576 + 16 * 320),)
    assert both["expanded ulysses"] == (rows * (16 * 320 + 16 * 320),)


def test_explain_compares_both() -> None:
    table = str(explained(2, names=(), head_dim=192, v_head_dim=128, latent_dims=(512, 64)))
    assert "16:16 heads of 192/128, latents of 512 + 64, batch 1" in table
    assert [line.split("  ")[0] for line in table.splitlines()[3:7]] == [
        "ring *", "ulysses", "expanded ring", "expanded ulysses",
    ]  # fmt: skip
