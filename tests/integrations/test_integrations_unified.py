"""Attention modes: SDPA of shards equals that of one device, gradients too; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention_modes import WORLD, Mode, each_mode, rank_in_sequence
from support.masked_problems import MaskedProblem
from support.packed_documents import equal_generators
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, Full, HeadTail, Layout
from cp_dtensor.integrations.unified import (
    RingAttnMode,
    UlyssesAttnMode,
    UnifiedAttnMode,
    init_context_parallel_mesh,
    ring_attn_func,
    ulysses_attn_func,
)


def check(mode: Callable[..., Mode], problem: Problem, layout: Layout | None = None) -> None:
    whole = problem.draw(0)
    expected = reference(problem, *whole)
    options: dict[str, Any] = {"seq_len": (problem.q_len, problem.kv_len)} | ({"layout": layout} if layout else {})

    def body(rank: int) -> None:
        def local(tensor: torch.Tensor) -> torch.Tensor:
            return shard(tensor, layout or Contiguous(), rank_in_sequence(mode, rank), WORLD)

        *leaves, grad_out = (local(tensor) for tensor in whole)
        q, k, v = (leaf.requires_grad_() for leaf in leaves)
        with mode(**options):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=problem.is_causal, scale=problem.scale, enable_gqa=problem.q_heads > problem.kv_heads
            )
        out.backward(grad_out)
        for name, got, wanted in zip(("out", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad), expected, strict=True):
            assert_close(got, local(wanted), f"{name} of rank {rank}")

    run_ranks(WORLD, body)


@each_mode
def test_other_layouts_any_length_and_sharded_cross_attention(mode: Callable[..., Mode]) -> None:
    check(mode, Problem(21, 21, is_causal=True), HeadTail())
    check(mode, Problem(7, 18, q_heads=4, kv_heads=4, scale=0.3))


def test_a_batch_axis_is_left_alone() -> None:
    """Ranks 0 to 3 share one sequence, ranks 4 to 7 another."""
    problem = Problem(16, 16, q_heads=4, is_causal=True)

    def body(rank: int) -> None:
        for limits, method in (({"max_ring_dim_size": 2}, "hybrid"), ({}, "ulysses"), ({"max_ring_dim_size": 4}, "")):
            mesh = init_context_parallel_mesh("cpu", max_batch_dim_size=2, **limits)
            tensors = problem.draw(rank // 4)
            q, k, v, _ = (shard(tensor, Contiguous(), rank % 4, 4) for tensor in tensors)
            wanted = shard(reference(problem, *tensors)[0], Contiguous(), rank % 4, 4)
            with UnifiedAttnMode(mesh):
                assert_close(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), wanted, method)
            with torch.inference_mode(), UnifiedAttnMode(mesh["batch", "ulysses"] if method == "ulysses" else mesh):
                assert_close(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), wanted, method)

    run_ranks(8, body)


@pytest.mark.parametrize("function", [ulysses_attn_func, ring_attn_func])
@pytest.mark.parametrize("layout", [None, HeadTail()], ids=repr)
def test_functions(function: Callable[..., torch.Tensor], layout: Layout | None) -> None:
    """By position and by name: masks, dropout that is that of one device, causal, scale, grouped heads."""
    causal = Problem(19, 19, q_heads=6, kv_heads=3, is_causal=True, scale=0.4)
    masked = MaskedProblem(19, 19, Full(), q_heads=6, kv_heads=3, bias="boolean hs")
    whole, drawn = causal.draw(0), masked.draw(0)
    expected, of_mask = reference(causal, *whole), masked.reference(*drawn)[0]
    order = layout or Contiguous()

    def dropped(rank: int, ranks: int, dropout_p: float) -> torch.Tensor:
        q, k, v, _, mask = masked.shard(drawn, order, rank, ranks)
        return function(q, k, v, mask, dropout_p, enable_gqa=True, layout=layout, seq_len=19)

    def body(rank: int) -> None:
        *leaves, grad_out = (shard(tensor, order, rank, WORLD) for tensor in whole)
        q, k, v = (leaf.requires_grad_() for leaf in leaves)
        mesh = None if layout is None else init_device_mesh("cpu", (WORLD,))
        out = function(q, k, v, None, 0.0, True, scale=0.4, enable_gqa=True, mesh=mesh, layout=layout, seq_len=19)
        out.backward(grad_out)
        for got, wanted in zip((out, q.grad, k.grad, v.grad), expected, strict=True):
            assert_close(got, shard(wanted, order, rank, WORLD))
        assert_close(dropped(rank, WORLD, 0.0), shard(of_mask, order, rank, WORLD))
        assert_close(dropped(rank, WORLD, 0.5), shard(alone, order, rank, WORLD))

    with equal_generators():
        (alone,) = run_ranks(1, dropped, 1, 0.5)
        assert not torch.allclose(alone, of_mask)
        run_ranks(WORLD, body)


def test_what_does_not_fit_is_refused_and_not_ignored() -> None:
    theirs: list[tuple[dict[str, Any], str]] = [
        ({"skip_small_kv": True}, "skip_small_kv=True.*replicated_keys"),
        ({"attn_func": max}, "attn_func=None.*sdpa_kernel"),
    ]
    keys_of_this_rank = "the 8 keys of the whole sequence, in the order of their positions"
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"attn_mask": torch.zeros(4, 4)}, ValueError, keys_of_this_rank),
        ({"attn_mask": torch.zeros(8, 8)}, ValueError, r"this rank's queries.*\(8, 8\)"),
        ({"dropout_p": 1.1}, ValueError, "dropout"),
    ]

    def body(rank: int) -> None:
        q = torch.randn(1, 2, 4, 8) + rank
        for mode in (UnifiedAttnMode, UlyssesAttnMode, RingAttnMode):
            for options, error, message in refused:
                with mode(), pytest.raises(error, match=message):
                    F.scaled_dot_product_attention(q, q, q, **options)
            with mode(), mode.replicated_keys(), pytest.raises(NotImplementedError, match="is_causal=True, expected"):
                F.scaled_dot_product_attention(q, q, q, is_causal=True)
            for arguments, message in theirs:
                with pytest.raises(NotImplementedError, match=message):
                    mode(**arguments)
        with pytest.raises(NotImplementedError, match=r"attn_func=None.*sdpa_kernel"):
            ulysses_attn_func(q, q, q, attn_func=max)

    run_ranks(2, body)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="group=None"):
        UnifiedAttnMode()

    def body(rank: int) -> None:
        for mesh in (init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))):
            with pytest.raises(ValueError, match='"ulysses", "ring" or both; got'):
                UnifiedAttnMode(mesh)
        two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
        with pytest.raises(ValueError, match="mesh of one dim"):
            UlyssesAttnMode(two)
        with pytest.raises(TypeError, match="got int"):
            RingAttnMode(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="layout"):
            RingAttnMode(layout=HeadTail)  # type: ignore[arg-type]
        assert init_context_parallel_mesh(mesh=two) is two
        for device, limits in (
            (None, {}),
            ("cpu", {"max_ring_dim_size": 2, "max_ulysses_dim_size": 1}),
            ("cpu", {"max_batch_dim_size": 0}),
        ):
            with pytest.raises(ValueError, match=r"limits of at least 1, of one of the axes .*; got device_type=.*"):
                init_context_parallel_mesh(device, **limits)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("limits", "shape"),
    [
        ({}, (1, 1, 4)),
        ({"max_ring_dim_size": 2}, (1, 2, 2)),
        ({"max_ring_dim_size": 3}, (1, 1, 4)),
        ({"max_ulysses_dim_size": 2}, (1, 2, 2)),
        ({"max_ulysses_dim_size": 6, "max_batch_dim_size": 2}, (2, 1, 2)),
        ({"max_batch_dim_size": 8}, (4, 1, 1)),
    ],
)
def test_meshes_by_limits(limits: dict[str, int], shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        mesh = init_context_parallel_mesh("cpu", **limits)  # type: ignore[arg-type]
        assert tuple(mesh.shape) == shape
        assert mesh.mesh_dim_names == ("batch", "ring", "ulysses")

    run_ranks(WORLD, body)
