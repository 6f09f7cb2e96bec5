"""Attention modes on every kind of mesh, `replicated_keys` and `disable`, functions, meshes, refusals.

Features of one mode are in tests/matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.packed_documents import equal_generators
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Contiguous, HeadTail, context_parallel
from cp_dtensor.integrations.unified import (
    RingAttnMode,
    UlyssesAttnMode,
    UnifiedAttnMode,
    init_context_parallel_mesh,
    ring_attn_func,
    ulysses_attn_func,
)

WORLD = 4
Mode = UnifiedAttnMode | UlyssesAttnMode | RingAttnMode


def _mesh(*axes: str) -> Any:
    return init_device_mesh("cpu", (2, 2) if len(axes) == 2 else (WORLD,), mesh_dim_names=axes or None)


MODES: dict[str, Callable[[], Mode]] = {
    "unified, ring x ulysses": lambda: UnifiedAttnMode(_mesh("ring", "ulysses")),
    "unified, ulysses x ring": lambda: UnifiedAttnMode(_mesh("ulysses", "ring")),
    "unified, ulysses": lambda: UnifiedAttnMode(_mesh("ulysses")),
    "unified, ring": lambda: UnifiedAttnMode(_mesh("ring")),
    "unified, group": lambda: UnifiedAttnMode(dist.group.WORLD),
    "unified, default": UnifiedAttnMode,
    "ulysses": lambda: UlyssesAttnMode(_mesh()),
    "ulysses, default": UlyssesAttnMode,
    "ring": lambda: RingAttnMode(_mesh()),
    "ring, default": RingAttnMode,
}


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("name", MODES)
def test_shards_and_keys_that_every_rank_has_whole(name: str) -> None:
    """Gradients of whole keys are shares; a mask has the rows of the local queries; checkpoints recompute both."""
    problem = Problem(16, 16, batch=2, q_heads=4, is_causal=True)
    q, k, v, grad_out = problem.draw(0)
    sharded = reference(problem, q, k, v, grad_out)
    text_k, text_v = (torch.randn(2, 4, 5, q.size(3), dtype=q.dtype).requires_grad_() for _ in range(2))
    whole, mask = q.clone().requires_grad_(), torch.rand(2, 1, 16, 5) < 0.7
    expected = F.scaled_dot_product_attention(whole, text_k, text_v, mask)
    grads = torch.autograd.grad(expected, (whole, text_k, text_v), grad_out)

    def body(rank: int) -> list[torch.Tensor]:
        place = rank // 2 + rank % 2 * 2 if name == "unified, ulysses x ring" else rank  # ring rank first

        def local(tensor: torch.Tensor) -> torch.Tensor:
            return shard(tensor.detach(), Contiguous(), place, WORLD)

        leaves = [local(tensor).requires_grad_() for tensor in (q, k, v)]
        own, (keys, values) = local(q).requires_grad_(), (x.detach().requires_grad_() for x in (text_k, text_v))
        outs, mode = [], MODES[name]()

        def cross(*qkv: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(*qkv, local(mask))

        with mode:
            out = causal(*leaves)
            with mode.replicated_keys():
                outs.append(cross(own, keys, values))
                outs += [checkpoint(cross, own, keys, values, use_reentrant=each) for each in (False, True)]
        for actual, wanted in zip((out, *torch.autograd.grad(out, leaves, local(grad_out))), sharded, strict=True):
            assert_close(actual, local(wanted))
        for each in outs:
            assert_close(each, local(expected))
            each.backward(local(grad_out))
        assert_close(own.grad, 3 * local(grads[0]))
        return [leaf.grad for leaf in (keys, values) if leaf.grad is not None]

    for parts, wanted in zip(zip(*run_ranks(WORLD, body), strict=True), grads[1:], strict=True):
        assert_close(sum(parts), 3 * wanted)  # type: ignore[arg-type]


def test_the_innermost_context_holds() -> None:
    problem = Problem(12, 12, is_causal=True)
    q, k, v, _ = whole = problem.draw(0)
    expected = reference(problem, *whole)[0]

    def body(rank: int) -> None:
        local = [shard(tensor, Contiguous(), rank, 2) for tensor in (q, k, v)]
        wanted, alone = shard(expected, Contiguous(), rank, 2), causal(*local)
        mode = UlyssesAttnMode()
        for nothing_to_do in (UnifiedAttnMode.disable(), RingAttnMode.replicated_keys()):
            with nothing_to_do:
                assert_close(causal(*local), alone)
        for _ in range(2):  # a mode may be entered again
            with mode:
                assert_close(causal(*local), wanted)
                with mode.replicated_keys(), mode.disable():
                    assert_close(causal(*local), alone)
                with mode.disable():
                    assert_close(causal(*local), alone)
                    mask = torch.ones(len(alone[0, 0]), len(alone[0, 0]), dtype=torch.bool).tril()
                    assert_close(F.scaled_dot_product_attention(*local, mask), alone)
                    with RingAttnMode():
                        assert_close(causal(*local), wanted)
                        with RingAttnMode.disable():
                            assert_close(causal(*local), alone)
                        assert_close(causal(*local), wanted)
                    assert_close(causal(*local), alone)
                    with context_parallel(dist.group.WORLD, layout=Contiguous()):
                        assert_close(causal(*local), wanted)
                assert_close(causal(*local), wanted)
                with pytest.raises(RuntimeError, match="already entered"), mode:
                    pass
        dist.barrier()
        assert_close(causal(*local), alone)

    run_ranks(2, body)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")


def test_a_batch_axis_is_left_alone() -> None:
    """Ranks 0 to 3 share one sequence, ranks 4 to 7 another."""
    problem = Problem(16, 16, q_heads=4, is_causal=True)

    def body(rank: int) -> None:
        for limits, method in (({"max_ring_dim_size": 2}, "hybrid"), ({}, "ulysses"), ({"max_ring_dim_size": 4}, "")):
            mesh = init_context_parallel_mesh("cpu", max_batch_dim_size=2, **limits)
            tensors = problem.draw(rank // 4)
            q, k, v, _ = (shard(tensor, Contiguous(), rank % 4, 4) for tensor in tensors)
            wanted = shard(reference(problem, *tensors)[0], Contiguous(), rank % 4, 4)
            with UnifiedAttnMode(mesh["batch", "ulysses"] if method == "ulysses" else mesh):
                assert_close(causal(q, k, v), wanted, method)

    run_ranks(8, body)


@pytest.mark.parametrize("function", [ulysses_attn_func, ring_attn_func])
@pytest.mark.parametrize("layout", [None, HeadTail()], ids=repr)
def test_functions(function: Callable[..., torch.Tensor], layout: Any) -> None:
    """Arguments by position and by name: a mask, dropout that is that of one device, scale, grouped heads."""
    q, k, v, _ = Problem(19, 19, q_heads=6, kv_heads=3).draw(0)
    order, mask = layout or Contiguous(), torch.rand(1, 1, 19, 19) < 0.7
    mask[..., 0] = True
    expected = [
        F.scaled_dot_product_attention(q, k, v, *options, scale=0.4, enable_gqa=True)
        for options in ((), (mask,), (None, 0.0, True))
    ]

    def body(rank: int, ranks: int) -> list[torch.Tensor]:
        mesh = None if layout is None else init_device_mesh("cpu", (ranks,))
        qkv, own_mask = [shard(each, order, rank, ranks) for each in (q, k, v)], shard(mask, order, rank, ranks)
        options: dict[str, Any] = {"scale": 0.4, "enable_gqa": True, "mesh": mesh, "layout": layout, "seq_len": 19}
        return [function(*qkv, *given, **options) for given in ((), (own_mask,), (None, 0.0, True), (None, 0.5))]

    with equal_generators():
        ((*_, dropped),) = run_ranks(1, body, 1)
        assert not torch.allclose(dropped, expected[0])
        for rank, outs in enumerate(run_ranks(WORLD, body, WORLD)):
            for out, wanted in zip(outs, (*expected, dropped), strict=True):
                assert_close(out, shard(wanted, order, rank, WORLD))


def test_what_does_not_fit_is_refused_and_not_ignored() -> None:
    with pytest.raises(ValueError, match="group=None"):
        UnifiedAttnMode()

    def body(rank: int) -> None:
        q = torch.randn(1, 2, 4, 8) + rank
        mode, message = UnifiedAttnMode(), "is_causal=True, expected"
        with mode, mode.replicated_keys(), pytest.raises(NotImplementedError, match=message):
            causal(q, q, q)
        two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
        unnamed, other = (init_device_mesh("cpu", (2,), mesh_dim_names=each) for each in (None, ("cp",)))
        qkv, axes = dict.fromkeys(("query", "key", "value"), q), '"ulysses", "ring" or both; got'
        refused: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
            *[
                (each, {"skip_small_kv": True}, NotImplementedError, "skip_small_kv=True.*replicated_keys")
                for each in (UnifiedAttnMode, UlyssesAttnMode, RingAttnMode)
            ],
            (RingAttnMode, {"attn_func": max}, NotImplementedError, "None.*sdpa_kernel"),
            (ulysses_attn_func, {**qkv, "attn_func": max}, NotImplementedError, "None.*sdpa_kernel"),
            (UnifiedAttnMode, {"mesh": unnamed}, ValueError, axes),
            (UnifiedAttnMode, {"mesh": other}, ValueError, axes),
            (UlyssesAttnMode, {"mesh": two}, ValueError, "mesh of one dim"),
            (RingAttnMode, {"mesh": 3}, TypeError, "got int"),
            (RingAttnMode, {"layout": HeadTail}, TypeError, "layout"),
            *[
                (init_context_parallel_mesh, limits, ValueError, "limits of at least 1, of one of the axes .*; got dev")
                for limits in (
                    {}, {"device_type": "cpu", "max_ring_dim_size": 2, "max_ulysses_dim_size": 1},
                    {"device_type": "cpu", "max_batch_dim_size": 0},
                )
            ],
        ]  # fmt: skip
        for call, options, error, message in refused:
            with pytest.raises(error, match=message):
                call(**options)
        assert init_context_parallel_mesh(mesh=two) is two

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
