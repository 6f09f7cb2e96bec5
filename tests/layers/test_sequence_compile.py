"""Sequence operations in compiled code, on real processes with gloo between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compile_checks import check_equals_eager, compiled, fresh, no_compilation
from support.problems import normals
from support.processes import Processes
from support.sequences import GivenSegments, Sequence, normal
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cp_dtensor import (
    Contiguous,
    Documents,
    HeadTail,
    Layout,
    SlidingWindow,
    Striped,
    affine_scan,
    block_attention,
    causal_conv1d,
    context_parallel,
    context_parallel_attention,
    gated_delta_rule,
    halo,
    indexed_attention,
    indexer_loss,
    linear_attention,
    pool_blocks,
    pooled_attention,
    relayout,
    select_blocks,
    select_keys,
    select_pooled,
    shift,
)

Tensors = tuple[torch.Tensor, ...]


def _drawn(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    normal = normals(seed)
    return [normal(*shape).requires_grad_() for shape in shapes]


def _shard(x: torch.Tensor, rank: int, layout: Layout) -> torch.Tensor:
    return Sequence(x.size(1), 2, layout).shard(x.detach(), rank).requires_grad_()


def _compare(function: Any, make: Any, *, again: Any = None, **options: Any) -> None:
    """Compares results and gradients of a compiled function with eager ones; `again` must not compile it again."""
    fresh()
    in_graph = compiled(function, **options)
    for inputs in (make, again or make):
        check_equals_eager(function, in_graph, inputs())
    with no_compilation():
        in_graph(*(again or make)())


def _local(rank: int) -> None:
    mesh, own = init_device_mesh("cpu", (2,)), GivenSegments.of(HeadTail(), 11, 2)

    def every(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"mesh": mesh, "layout": Striped(2), "cu_seqlens": cu_seqlens, "seq_len": 11}
        x = shift(x * 2.0, -1, dim=1, **options)
        x = x + causal_conv1d(x, weight, activation="silu", **options)
        x = relayout(x, Striped(2), own, mesh=mesh, dim=1, seq_len=11)
        before = halo(x, 2, mesh=mesh, dim=1, layout=own, seq_len=11)
        return x * before.sum() + 1.0

    def inputs(seed: int = 0, documents: tuple[int, ...] = (0, 4, 11)) -> Tensors:
        x, weight = _drawn(seed, (2, 11, 3), (3, 4))
        return _shard(x, rank, Striped(2)), weight, torch.tensor(documents)

    _compare(every, inputs, again=lambda: inputs(1, (0, 7, 11)))


def _dtensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def every(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(shift(x * 2.0, 1, dim=1), weight, activation="silu") + 1.0

    def inputs() -> Tensors:
        x, weight = torch.arange(14.0).view(1, 7, 2).double(), torch.ones(2, 3).double()
        return (
            distribute_tensor(x, mesh, [Shard(1)]).requires_grad_(),
            distribute_tensor(weight, mesh, [Replicate()]).requires_grad_(),
        )

    _compare(every, inputs)


def _in_context(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def labels(x: torch.Tensor) -> torch.Tensor:
        return shift(x * 2.0, -1, mesh=mesh, dim=1)

    def inputs() -> Tensors:
        return (torch.arange(1.0, 5.0).view(1, 4).requires_grad_(),)

    for layout in (Contiguous(), HeadTail()):
        with context_parallel(mesh, layout=layout, seq_len=8):
            _compare(labels, inputs)


def _layers(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def every(q: torch.Tensor, v: torch.Tensor, g: torch.Tensor, state: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
        options: dict[str, Any] = {"mesh": mesh, "layout": HeadTail(), "cu_seqlens": cu_seqlens, "seq_len": 11}
        k = torch.nn.functional.normalize(q, dim=-1)
        out, final = gated_delta_rule(
            q, k, v * 2.0, g, g.exp(), initial_state=state, output_final_state=True, method="heads", **options
        )  # fmt: skip
        out = out + linear_attention(q, k, v, g.unsqueeze(-1).expand_as(q), **options)
        entering = affine_scan(final, state, mesh=mesh, seq_len=4, layout=Striped(1), cu_seqlens=[0])
        return out.sum() * final.square().sum() + entering.square().sum()

    def inputs(seed: int = 0) -> Tensors:
        q, v, g, state = _drawn(seed, (1, 11, 2, 3), (1, 11, 2, 3), (1, 11, 2), (2, 2, 3, 3))
        shards = (_shard(x, rank, HeadTail()) for x in (q, v, -g.abs()))
        return *shards, state, torch.tensor([0, 4 + seed, 11])

    _compare(every, inputs, again=lambda: inputs(1))


def _dynamic_shapes(rank: int) -> None:
    """No bias and no scale, whose defaults depend on shapes."""
    mesh = init_device_mesh("cpu", (2,))

    def every(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        q = causal_conv1d(q.flatten(2), weight, mesh=mesh).unflatten(2, q.shape[2:])
        return linear_attention(q, q, q, mesh=mesh)  # type: ignore[return-value]

    def inputs(length: int = 12) -> Tensors:
        q, weight = _drawn(length, (1, length, 2, 3), (6, 4))
        return _shard(q, rank, HeadTail()), weight

    for dynamic in (True, None):
        _compare(every, inputs, again=lambda: inputs(14), dynamic=dynamic)


def _sparse(rank: int) -> None:
    """Selected keys and attention over them, with DTensors too; a mask of a context that may change is refused."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def every(q: torch.Tensor, latent: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {} if isinstance(q, DTensor) else {"mesh": mesh, "layout": HeadTail()}
        indices = select_keys(q * 2.0, latent, q[..., 0], topk=4, mask=SlidingWindow(6, 0), **options)
        options |= {"up": up, "indices": indices, "sinks": up[:2, 0]}
        out = indexed_attention(q.transpose(1, 2), latent, latent[..., :2], **options) + 1.0
        if isinstance(q, DTensor):
            return out
        options = {"mesh": mesh, "layout": HeadTail(), "block_size": 3}
        blocks, key = select_blocks(q, latent, topk=2, **options), q.transpose(1, 2)
        target: dict[str, Any] = {"mesh": mesh, "layout": HeadTail(), "indices": indices, "scale": 0.5}
        out = out + indexer_loss(q * 2.0, latent, q[..., 0], key, key, **target)[:, None, :, None]
        return out + block_attention(key * 2.0, key, key[..., :4], block_indices=blocks, **options)

    def inputs(length: int = 12, placed: bool = False) -> Tensors:
        generator, sequence = torch.Generator().manual_seed(length), Sequence(length, 2, HeadTail())
        shapes = (1, length, 2, 5), (1, length, 5), (14, 5)
        *whole, up = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)
        if placed:
            made = [distribute_tensor(x, mesh, [Shard(1)]) for x in whole]
            return *(x.requires_grad_() for x in made), distribute_tensor(up, mesh, [Replicate()]).requires_grad_()
        return *(sequence.shard(x, rank).requires_grad_() for x in whole), up.requires_grad_()

    _compare(every, inputs, again=lambda: inputs(16))
    _compare(every, lambda: inputs(7, placed=True))
    select, (q, k, _) = compiled(lambda q, k: select_keys(q, k, q[..., 0], topk=4, mesh=mesh)), inputs()
    with context_parallel(mesh, mask=Documents([0, 4, 12]), seq_len=12), pytest.raises(Exception, match="and mask="):
        select(q, k)


def _pooled_blocks(rank: int) -> None:
    """A graph breaks at each function of pooled blocks; without breaks it is refused."""
    mesh = init_device_mesh("cpu", (2,))

    def every(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        pooled, _ = pool_blocks(kv * 2.0, size=2, mesh=mesh)
        indices = select_pooled(q, pooled, q[..., 0], size=2, topk=2, mesh=mesh)
        options: dict[str, Any] = {"size": 2, "window": 3, "mesh": mesh, "indices": indices}
        return pooled_attention(q.transpose(1, 2), kv, pooled, **options) + 1.0

    def inputs() -> Tensors:
        shards = (Sequence(12, 2, HeadTail()).shard(normal(1, 12, *dims), rank) for dims in ((2, 5), (5,)))
        return tuple(x.requires_grad_() for x in shards)

    fresh()
    check_equals_eager(every, torch.compile(every, backend="aot_eager"), inputs())
    fresh()
    with pytest.raises(Exception, match="numbers of blocks differ between ranks"):
        compiled(every)(*inputs())


def _refusals(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    fresh()
    with pytest.raises(Exception, match="expects seq_len"):
        compiled(lambda x: halo(x, 1, mesh=mesh, dim=0))(torch.ones(4))
    x = torch.ones(1, 2, 4, 3)
    for function in (
        lambda x: shift(x, 1, mesh=mesh, dim=2),
        lambda x: linear_attention(x, x, x, mesh=mesh),
        lambda x: context_parallel_attention(x, x, x, mesh=mesh),
    ):  # torch would take operators for constants
        with pytest.raises(Exception, match=r"NotImplementedError: .* transform of torch\.func"):
            compiled(lambda x, function=function: torch.func.jvp(function, (x,), (x,)))(x)
        refused = "got tangents of forward-mode differentiation|wrap a dual tensor input"  # the latter by torch 2.15
        with forward_ad.dual_level(), pytest.raises(Exception, match=refused):
            compiled(function)(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    "body",
    [_local, _dtensors, _in_context, _layers, _dynamic_shapes, _sparse, _pooled_blocks, _refusals],
    ids=lambda body: body.__name__[1:],
)
def test_compiled(two_processes: Processes, body: Any) -> None:
    two_processes.run(body)
