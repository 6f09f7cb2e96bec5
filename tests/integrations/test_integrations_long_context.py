"""Meshes, layouts, arguments and refusals of long-context-attention. Results: test_integrations_ring_flash_attn.py."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.problems import Problem, assert_close, reference
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, Striped
from cp_dtensor.integrations.long_context import (
    AttnType,
    LongContextAttention,
    LongContextAttentionQKVPacked,
    UlyssesAttention,
    UlyssesCut,
    basic_extract_local,
    set_seq_parallel_pg,
    shard,
    stripe_extract_local,
    unshard,
    zigzag_extract_local,
)

EXTRACT = {"basic": basic_extract_local, "zigzag": zigzag_extract_local, "strip": stripe_extract_local}
TYPES = list(EXTRACT)
each_type = pytest.mark.parametrize("ring_impl_type", TYPES)
degrees = pytest.mark.parametrize(("ulysses", "ring"), [(2, 2), (1, 3), (3, 1), (4, 1), (2, 3)])


def heads_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous()


def positions(ring_impl_type: str, length: int, ring: int, ulysses: int, ring_rank: int, part: int) -> torch.Tensor:
    """The tokens of a rank, in local order; all chunks have the same length."""
    if ring_impl_type == "strip":
        of_ring_rank = torch.arange(ring_rank, length, ring)
    elif ring_impl_type == "zigzag":
        chunks = torch.arange(length).chunk(2 * ring)
        of_ring_rank = torch.cat([chunks[ring_rank], chunks[-1 - ring_rank]])
    else:
        of_ring_rank = torch.arange(length).chunk(ring)[ring_rank]
    return of_ring_rank.chunk(ulysses)[part]


def mesh_of(ulysses: int, ring: int, rank: int, world_size: int, ulysses_low: bool = True) -> DeviceMesh:
    return set_seq_parallel_pg(ulysses, ring, rank, world_size, ulysses_low, device_type="cpu")


@degrees
@each_type
def test_tokens_of_each_rank_are_those_of_that_package(ring_impl_type: str, ulysses: int, ring: int) -> None:
    world_size = ulysses * ring
    tokens = torch.arange(2 * 48).view(2, 48)

    def body(rank: int) -> None:
        mesh = mesh_of(ulysses, ring, rank, world_size)
        local = shard(tokens, ring_impl_type, mesh)
        of_rank = positions(ring_impl_type, 48, ring, ulysses, *divmod(rank, ulysses))
        assert torch.equal(local, tokens[:, of_rank])
        assert torch.equal(unshard(local, ring_impl_type, mesh), tokens)
        for dim, whole in ((1, tokens), (-1, tokens), (0, tokens.T)):
            extracted = EXTRACT[ring_impl_type](whole, rank, world_size, rd=ring, ud=ulysses, dim=dim)
            assert torch.equal(extracted, whole.index_select(dim, of_rank))

    run_ranks(world_size, body)


@given(
    st.sampled_from([Contiguous(), HeadTail(), Striped(1)]), *[st.integers(*span) for span in ((0, 60), (1, 4), (1, 4))]
)
def test_cut_layouts_cover_every_position_once(ring_layout: Layout, length: int, ulysses: int, ring: int) -> None:
    layout, world_size = UlyssesCut(ring_layout, ulysses), ulysses * ring
    seen = []
    for rank in range(world_size):
        mine = [p for segment in layout.segments(length, rank, world_size) for p in segment.positions()]
        assert len(mine) == layout.local_length(length, rank, world_size)
        assert layout.local_length(length + 1, rank, world_size) >= len(mine)
        seen += mine
    assert sorted(seen) == list(range(length))
    for rank in range(ring):  # together, the parts are the ring rank's tokens, in order
        parts = [
            p
            for part in range(ulysses)
            for segment in layout.segments(length, rank * ulysses + part, world_size)
            for p in segment.positions()
        ]
        whole = [p for segment in ring_layout.segments(length, rank, ring) for p in segment.positions()]
        assert sorted(parts) == sorted(whole)


def test_cutting_blocks_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="blocks of 1 token"):
        UlyssesCut(Striped(2), 2).segments(16, 0, 4)


@each_type
def test_unshard_is_differentiable(ring_impl_type: str) -> None:
    whole = torch.randn(2, 13, 3, dtype=torch.float64)

    def body(rank: int) -> None:
        mesh = mesh_of(2, 2, rank, 4)
        for grad, factor in (("replicated", 1), ("partial", 4)):
            leaf = shard(whole, ring_impl_type, mesh).requires_grad_()
            (unshard(leaf, ring_impl_type, mesh, grad=grad) * whole).sum().backward()
            assert_close(leaf.grad, factor * leaf.detach())

    run_ranks(4, body)


@pytest.mark.parametrize("ulysses_low", [True, False])
def test_more_ranks_than_share_a_sequence(ulysses_low: bool) -> None:
    """Ranks 0 to 3 have one sequence, 4 to 7 another."""
    problem = Problem(16, 16, is_causal=True)

    def body(rank: int) -> None:
        mesh = mesh_of(2, 2, rank, 8, ulysses_low)
        *qkv, _ = tensors = problem.draw(rank // 4)
        attention = LongContextAttention(ring_impl_type="zigzag", mesh=mesh)
        got = attention(*(shard(heads_last(tensor), "zigzag", mesh) for tensor in qkv), causal=True)
        assert_close(got, shard(heads_last(reference(problem, *tensors)[0]), "zigzag", mesh))

    run_ranks(8, body)


@pytest.mark.parametrize("attn_type", [AttnType.TORCH_MATH, "torch_flash", AttnType.from_string("fa")])
def test_ulysses_attention(attn_type: Any) -> None:
    problem = Problem(13, 13, batch=2, q_heads=4, kv_heads=2, is_causal=True, softcap=0.5)
    *qkv, grad_out = (heads_last(tensor) for tensor in problem.draw(0))
    expected = [heads_last(tensor) for tensor in reference(problem, *problem.draw(0))]

    def body(rank: int) -> None:
        def local(tensor: torch.Tensor) -> torch.Tensor:
            return basic_extract_local(tensor, rank, 3)

        leaves = [local(tensor).requires_grad_() for tensor in qkv]
        out = UlyssesAttention(attn_type=attn_type)(*leaves, causal=True, softcap=0.5, seq_len=13)
        for got, wanted in zip((out, *torch.autograd.grad(out, leaves, local(grad_out))), expected, strict=True):
            assert_close(got, local(wanted))

    run_ranks(3, body)


class YunchangAttnType(Enum):
    """Stands in for that package's enum."""

    FA3 = "fa3"
    SAGE_FP8 = "sage_fp8"


def test_layers_take_that_package_s_arguments_and_can_be_copied() -> None:
    q = torch.randn(1, 8, 2, 4, dtype=torch.float64)

    def body(rank: int) -> None:
        mesh = mesh_of(2, 1, rank, 2)
        local = shard(q, "zigzag", mesh)
        attention = LongContextAttention(2, 1, "zigzag", True, True, YunchangAttnType.FA3, None, mesh=mesh)
        wanted = attention(local, local, local, 0.0, None, True, (-1, -1), 0.0, None, True, True)
        assert isinstance(wanted, torch.Tensor)
        for attn_type in (AttnType.from_string("fa"), "torch"):
            other = LongContextAttention(ring_impl_type="zigzag", attn_type=attn_type, mesh=mesh)
            assert_close(other(local, local, local, causal=True), wanted)
        assert_close(copy.deepcopy(attention)(local, local, local, causal=True), wanted)
        assert not attention.state_dict()
        assert "HeadTail" in repr(nn.ModuleList([attention]))

    run_ranks(2, body)


def test_what_a_layer_cannot_do_is_refused_and_not_ignored() -> None:
    def body(rank: int) -> None:
        mesh = mesh_of(2, 1, rank, 2)
        for attn_type in (AttnType.SAGE_FP8, YunchangAttnType.SAGE_FP8, "sparse_sage", "torch_nonsense"):
            with pytest.raises(NotImplementedError, match="exact kernels"):
                LongContextAttention(attn_type=attn_type, mesh=mesh)
            with pytest.raises(NotImplementedError, match="exact kernels"):
                LongContextAttentionQKVPacked(attn_type=attn_type, mesh=mesh)
            with pytest.raises(NotImplementedError, match="exact kernels"):
                UlyssesAttention(attn_type=attn_type)
        with pytest.raises(NotImplementedError, match=r"attn_processor=None.*got Identity"):
            LongContextAttention(attn_processor=nn.Identity(), mesh=mesh)

    run_ranks(2, body)


def test_arguments_that_do_not_fit() -> None:
    def body(rank: int) -> None:
        mesh = mesh_of(2, 1, rank, 2)
        q = torch.randn(2, 4, 6, 8)
        with pytest.raises(ValueError, match=r"'basic', 'zigzag', 'strip'; got 'stripe'"):
            LongContextAttention(ring_impl_type="stripe", mesh=mesh)
        with pytest.raises(ValueError, match=r"scatter_idx=2 and gather_idx=1.*scatter_idx=1 and gather_idx=2"):
            LongContextAttention(1, 2, mesh=mesh)
        with pytest.raises(ValueError, match=r"scatter_idx=2 and gather_idx=1.*scatter_idx=1"):
            UlyssesAttention(scatter_idx=1)
        with pytest.raises(ValueError, match=r"scatter_idx=3 and gather_idx=1.*scatter_idx=2"):
            LongContextAttentionQKVPacked(2, mesh=mesh)
        with pytest.raises(TypeError, match="got NoneType"):
            LongContextAttention(mesh=None)  # type: ignore[arg-type]
        for other in (init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ring"))):
            with pytest.raises(ValueError, match='the axes "ring" and "ulysses", got'):
                shard(q, "basic", other)
        with pytest.raises(ValueError, match=r"rank and world size \(., 2\), got \(., 4\)"):
            set_seq_parallel_pg(2, 2, rank, 4)
        for bad in ((2, 2), (0, 2), (-1, -2)):
            with pytest.raises(ValueError, match="to divide the world size 2"):
                set_seq_parallel_pg(*bad, rank, 2)
        with pytest.raises(ValueError, match="four dims"):
            LongContextAttention(mesh=mesh)(q[0], q, q)
        with pytest.raises(ValueError, match=r"qkv of shape .*got \(2, 4, 6, 8\)"):
            LongContextAttentionQKVPacked(mesh=mesh)(q)
        with pytest.raises(ValueError, match=r"world size 4, got rd=2 and ud=1"):
            basic_extract_local(q, 0, 4, rd=2, ud=1)
        with pytest.raises(ValueError, match="got rd=None and ud=None"):
            zigzag_extract_local(q, 1, 4)

    run_ranks(2, body)
