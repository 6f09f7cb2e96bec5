"""Calls of every public attention function with local shards, run under the user's settings of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from cp_dtensor import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    PerDocument,
    SlidingWindow,
    Striped,
    _torch,
    context_parallel,
    context_parallel_attention,
    context_parallel_flex_attention,
    context_parallel_shard,
    context_parallel_unshard,
    enable_context_parallel_dispatcher,
    local_positions,
    ring_attention,
    ulysses_attention,
    varlen_attention,
)
from cp_dtensor.integrations import long_context, ring_flash_attn, torch_experimental, unified
from cp_dtensor.integrations.long_context import UlyssesCut
from support.flex_checks import dense_flex_attention
from support.masked_problems import MaskedProblem, Tensors
from support.problems import shard
from support.ranks import run_ranks
from support.settings_state import cold_caches, thread_state

LENGTH, RANKS = 16, 4
EDGES = [0, 8, 16]
PACKED = Documents(EDGES, within=Causal())
Setting = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Call:
    """Attention of one problem over 2 x 2 ranks; `attend(mesh, q, k, v, *bias and sinks)` gets shards."""

    attend: Callable[..., torch.Tensor]
    mask: Mask = field(default_factory=Causal)
    layout: Layout = field(default_factory=HeadTail)
    bias: str = ""
    sinks: bool = False

    @property
    def problem(self) -> MaskedProblem:
        return MaskedProblem(LENGTH, LENGTH, self.mask, 1, 4, 4, 8, bias=self.bias, sinks=self.sinks)


def _in_context(mesh: DeviceMesh, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in a context, of shards that are unsharded and sharded again."""
    whole = context_parallel_unshard(mesh, (q, k, v), (2, 2, 2), grad="partial")
    q, k, v = context_parallel_shard(mesh, whole, (2, 2, 2))
    numbers = torch.arange(LENGTH, device="cpu")
    with context_parallel(mesh, buffers=[numbers], buffer_seq_dims=[0], mask=SlidingWindow(3, 0)):
        assert torch.equal(numbers, local_positions(mesh, LENGTH, device="cpu"))
        out = F.scaled_dot_product_attention(q, k, v)
    assert numbers.size(0) == LENGTH
    return out


class _Layer(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _module(mesh: DeviceMesh, *qkv: torch.Tensor) -> torch.Tensor:
    return parallelize_module(_Layer(), mesh, ContextParallel(mask=PACKED))(*qkv)


def _dtensor(mesh: DeviceMesh, *qkv: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        qkv = tuple(each.detach() for each in qkv)  # otherwise torch warns of its own redistribution
    q, k, v = (DTensor.from_local(each, mesh, [Shard(2)] * 2, run_check=False) for each in qkv)
    with enable_context_parallel_dispatcher():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).to_local()


def _packed(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Attention of (tokens, heads, D), as in flash-attn."""

    def attend(mesh: DeviceMesh, *qkv: torch.Tensor) -> torch.Tensor:
        return function(mesh, *(each.squeeze(0).transpose(0, 1) for each in qkv)).transpose(0, 1).unsqueeze(0)

    return attend


def _varlen(mesh: Any, *qkv: torch.Tensor, **options: Any) -> Any:
    edges = torch.tensor(EDGES, device="cpu")
    return varlen_attention(*qkv, mesh=mesh, cu_seqlens=edges, is_causal=True, **options)


def _rows_first(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Attention of (B, S, H, D)."""
    return lambda mesh, *qkv: function(mesh, *(each.transpose(1, 2) for each in qkv)).transpose(1, 2)


def _llama3(mesh: DeviceMesh, *qkv: torch.Tensor) -> Any:
    edges = torch.tensor(EDGES, dtype=torch.int32, device="cpu")
    q_edges, k_edges, *longest, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
        edges, True, dist.get_rank(), RANKS
    )
    return ring_flash_attn.llama3_flash_attn_varlen_func(
        *qkv, q_edges, k_edges, *longest, heads_k_stride=1, local_k_slice=keys, causal=True
    )


def _zigzag_varlen(mesh: DeviceMesh, *qkv: torch.Tensor) -> Any:
    edges = torch.tensor(EDGES, dtype=torch.int32, device="cpu") // RANKS
    return ring_flash_attn.zigzag_ring_flash_attn_varlen_func(*qkv, edges, 2, causal=True)


def _long_context(mesh: DeviceMesh, *qkv: torch.Tensor) -> Any:
    usp = long_context.set_seq_parallel_pg(2, 2, dist.get_rank(), RANKS, device_type="cpu")
    layer = long_context.LongContextAttention(ring_impl_type="zigzag", mesh=usp)
    return layer(*qkv, causal=True)


def _unified(mesh: DeviceMesh, *qkv: torch.Tensor) -> torch.Tensor:
    with unified.UnifiedAttnMode(mesh):
        return F.scaled_dot_product_attention(*qkv, is_causal=True)


def _torch_experimental(mesh: DeviceMesh, *qkv: torch.Tensor) -> torch.Tensor:
    world = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    numbers = torch.arange(LENGTH, device="cpu")
    with torch_experimental.context_parallel(world, buffers=[numbers], buffer_seq_dims=[0]):
        out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        shard_of_numbers = numbers.clone()
    (again,) = torch_experimental.context_parallel_unshard(world, [shard_of_numbers], [0])
    assert torch.equal(again, numbers)
    return out


def _causal_mod(b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return q >= kv


@cache
def _block_mask() -> BlockMask:
    return create_block_mask(_causal_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4)


def _flex_in_context(mesh: DeviceMesh, *qkv: torch.Tensor) -> torch.Tensor:
    with context_parallel(mesh):
        return flex_attention(*qkv, block_mask=_block_mask())


def _everything(mesh: DeviceMesh, *tensors: torch.Tensor) -> torch.Tensor:
    *qkv, bias, sinks = tensors
    return context_parallel_attention(
        *qkv, mesh=mesh, attn_mask=bias, sinks=sinks, mask=SlidingWindow(5, 2), layout=Striped(2), debug=True,
        deterministic=True,
    )  # fmt: skip


BALANCED, PER_DOCUMENT = Balanced(PACKED, LENGTH), PerDocument(EDGES)
CALLS: dict[str, Call] = {
    "ring": Call(lambda mesh, *qkv: ring_attention(*qkv, mesh=mesh, is_causal=True, rotate_method="alltoall")),
    "ulysses": Call(lambda mesh, *qkv: ulysses_attention(*qkv, mesh=dist.group.WORLD, is_causal=True)),
    "hybrid": Call(lambda mesh, *qkv: context_parallel_attention(*qkv, mesh=mesh, method="hybrid"), Full()),
    "everything": Call(_everything, SlidingWindow(5, 2), Striped(2), "additive bhs", sinks=True),
    "varlen": Call(_packed(lambda mesh, *qkv: _varlen(mesh, *qkv, layout=BALANCED)), PACKED, BALANCED),
    "varlen ulysses": Call(
        _packed(lambda _, *qkv: _varlen(dist.group.WORLD, *qkv, layout=PER_DOCUMENT, method="ulysses")),
        PACKED,
        PER_DOCUMENT,
    ),
    "context": Call(_in_context, SlidingWindow(3, 0)),
    "module": Call(_module, PACKED),
    "dtensor": Call(_dtensor, layout=Contiguous()),
    "flex": Call(
        lambda mesh, *qkv: context_parallel_flex_attention(*qkv, mesh=mesh, block_mask=_block_mask()),
    ),
    "flex in context": Call(_flex_in_context),
    "zigzag": Call(
        _rows_first(lambda mesh, *qkv: ring_flash_attn.zigzag_ring_flash_attn_func(*qkv, causal=True)),
    ),
    "zigzag varlen": Call(_packed(_zigzag_varlen), PACKED, PER_DOCUMENT),
    "llama3": Call(_packed(_llama3), PACKED, Contiguous()),
    "long context": Call(_rows_first(_long_context), layout=UlyssesCut(HeadTail(), 2)),
    "unified": Call(_unified, layout=Contiguous()),
    "torch experimental": Call(_torch_experimental),
}


def check_call(name: str, setting: Setting = nullcontext, training: bool = True) -> None:
    """Checks a first call, with empty caches, under a setting of each rank's thread, and a cached call without it.

    Results and gradients must equal those of dense attention in float64.
    """
    call = CALLS[name]
    tensors = call.problem.draw(0)
    sinks = call.problem.draw_sinks(0)
    expected = call.problem.reference(*tensors, sinks=sinks)
    cold_caches()
    _block_mask.cache_clear()
    with mock.patch.object(_torch, "original_flex_attention", dense_flex_attention):
        by_rank = run_ranks(RANKS, _attend_twice, call, tensors, sinks, setting, training)
    for results in by_rank:
        for rank, got in results:
            _compare(call, rank, got, expected)


def _attend_twice(
    rank: int, call: Call, tensors: Tensors, sinks: torch.Tensor | None, setting: Setting, training: bool
) -> list[tuple[int, list[torch.Tensor]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    q, k, v, grad_out, *bias = call.problem.shard(tensors, call.layout, rank, RANKS)
    leaves = [each.clone().requires_grad_() for each in (q, k, v, *bias)]
    if sinks is not None:
        leaves.append(sinks.clone().requires_grad_())

    def results(backward: bool) -> list[torch.Tensor]:
        out = call.attend(mesh, *leaves)
        if not backward:
            return [out]
        out.backward(grad_out)
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return [out.detach(), *(grad for grad in grads if grad is not None)]

    with setting():
        before = thread_state()
        under = results(training)
        assert thread_state() == before
    return [(rank, under), (rank, results(backward=True))]


def _compare(call: Call, rank: int, got: list[torch.Tensor], wholes: Tensors) -> None:
    out, dq, dk, dv, _lse, *of_modifiers = wholes
    expected = [shard(each, call.layout, rank, RANKS) for each in (out, dq, dk, dv)]
    if call.bias:
        expected.append(call.problem.shard_bias(of_modifiers[0], call.layout, rank, RANKS))
    if call.sinks:
        expected.append(shard(of_modifiers[-1], call.layout, rank, RANKS).sum((0, 2)))
    assert len(got) in (1, len(expected))
    for index, (ours, whole) in enumerate(zip(got, expected, strict=False)):
        what = f"result {index} of rank {rank}"
        torch.testing.assert_close(ours, whole, rtol=1e-10, atol=1e-10, msg=lambda text, what=what: f"{what}: {text}")
