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
from support.problems import shard as shard_by_positions
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, Striped, context_parallel_shard
from cp_dtensor.integrations.long_context import (
    AttnType,
    LongContextAttention,
    LongContextAttentionQKVPacked,
    UlyssesAttention,
    UlyssesCut,
    basic_extract_local,
    layout_of,
    set_seq_parallel_pg,
    stripe_extract_local,
    zigzag_extract_local,
)

EXTRACT = {"basic": basic_extract_local, "zigzag": zigzag_extract_local, "strip": stripe_extract_local}


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


def shard(tensor: torch.Tensor, ring_impl_type: str, mesh: DeviceMesh) -> torch.Tensor:
    return context_parallel_shard(mesh, [tensor], [1], layout_of(ring_impl_type, mesh))[0]


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 2), (1, 3), (3, 1), (2, 3)])
@pytest.mark.parametrize("ring_impl_type", EXTRACT)
def test_tokens_of_each_rank_are_those_of_that_package(ring_impl_type: str, ulysses: int, ring: int) -> None:
    world_size, tokens = ulysses * ring, torch.arange(2 * 48).view(2, 48)

    def body(rank: int) -> None:
        of_rank = positions(ring_impl_type, 48, ring, ulysses, *divmod(rank, ulysses))
        assert torch.equal(shard(tokens, ring_impl_type, mesh_of(ulysses, ring, rank, world_size)), tokens[:, of_rank])
        for dim, whole in ((1, tokens), (-1, tokens), (0, tokens.T)):
            extracted = EXTRACT[ring_impl_type](whole, rank, world_size, rd=ring, ud=ulysses, dim=dim)
            assert torch.equal(extracted, whole.index_select(dim, of_rank))

    run_ranks(world_size, body)


@given(
    st.sampled_from([Contiguous(), HeadTail(), Striped(1)]), *[st.integers(*span) for span in ((0, 60), (1, 4), (1, 4))]
)
def test_cut_layouts_cover_every_position_once(ring_layout: Layout, length: int, ulysses: int, ring: int) -> None:
    layout, world_size = UlyssesCut(ring_layout, ulysses), ulysses * ring
    tokens = torch.arange(length)[None]
    seen = []
    for ring_rank in range(ring):  # together, the parts are the ring rank's tokens
        ranks = range(ring_rank * ulysses, (ring_rank + 1) * ulysses)
        parts = [shard_by_positions(tokens, layout, rank, world_size, 1)[0].tolist() for rank in ranks]
        for rank, part in zip(ranks, parts, strict=True):
            assert len(part) == layout.local_length(length, rank, world_size)
            assert layout.local_length(length + 1, rank, world_size) >= len(part)
        together = [position for part in parts for position in part]
        seen += together
        whole = shard_by_positions(tokens, ring_layout, ring_rank, ring, 1)[0].tolist()
        assert sorted(together) == sorted(whole)
    assert sorted(seen) == list(range(length))


@pytest.mark.parametrize("ulysses_low", [True, False])
def test_more_ranks_than_share_a_sequence(ulysses_low: bool) -> None:
    """Ranks 0 to 3 have one sequence, 4 to 7 another."""
    tokens = torch.arange(16)[None]

    def body(rank: int) -> None:
        mesh = mesh_of(2, 2, rank, 8, ulysses_low)
        assert mesh.mesh.flatten().tolist() == [*range(rank // 4 * 4, rank // 4 * 4 + 4)]
        places = divmod(rank % 4, 2) if ulysses_low else divmod(rank % 4, 2)[::-1]
        assert (mesh["ring"].get_local_rank(), mesh["ulysses"].get_local_rank()) == places
        assert torch.equal(shard(tokens, "zigzag", mesh)[0], positions("zigzag", 16, 2, 2, *places))

    run_ranks(8, body)


def test_ulysses_attention() -> None:
    problem = Problem(13, 13, batch=2, q_heads=4, kv_heads=2, is_causal=True, softcap=0.5)
    *qkv, grad_out = (heads_last(tensor) for tensor in problem.draw(0))
    expected = [heads_last(tensor) for tensor in reference(problem, *problem.draw(0))]

    def body(rank: int) -> None:
        leaves = [basic_extract_local(tensor, rank, 3).requires_grad_() for tensor in qkv]
        out = UlyssesAttention(attn_type="torch_flash")(*leaves, causal=True, softcap=0.5, seq_len=13)
        grads = torch.autograd.grad(out, leaves, basic_extract_local(grad_out, rank, 3))
        for got, wanted in zip((out, *grads), expected, strict=True):
            assert_close(got, basic_extract_local(wanted, rank, 3))

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


def test_what_does_not_fit_is_refused_and_not_ignored() -> None:
    dims = r"scatter_idx={} and gather_idx=1.*scatter_idx={} and gather_idx={}"
    axes = 'the axes "ring" and "ulysses".*; got'
    q = torch.randn(2, 4, 6, 8)
    refused: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (layer, (), {"attn_type": kernel}, NotImplementedError, "one of the exact kernels.*'fa'.*; got")
        for layer in (LongContextAttention, LongContextAttentionQKVPacked, UlyssesAttention)
        for kernel in (YunchangAttnType.SAGE_FP8, "sparse_sage")
    ]
    refused += [
        (LongContextAttention, (), {"attn_processor": nn.Identity()}, NotImplementedError, "None.*got Identity"),
        (LongContextAttention, (), {"ring_impl_type": "stripe"}, ValueError, r"'zigzag', 'strip'.; got 'stripe'"),
        (LongContextAttention, (1, 2), {}, ValueError, dims.format(2, 1, 2)),
        (UlyssesAttention, (), {"scatter_idx": 1}, ValueError, dims.format(2, 1, 1)),
        (LongContextAttentionQKVPacked, (2,), {}, ValueError, dims.format(3, 2, 1)),
        (LongContextAttention, (), {"mesh": None}, ValueError, axes + " one without names"),
        (AttnType, ("sage_fp8",), {}, ValueError, "not a valid AttnType"),
        (UlyssesCut, (Striped(2), 2), {}, NotImplementedError, r"got Striped\(block=2\)"),
        (set_seq_parallel_pg, (2, 2, 0, 4), {}, ValueError, r"rank and world size \(., 2\), got \(0, 4\)"),
        (basic_extract_local, (q, 0, 4), {"rd": 2, "ud": 1}, ValueError, "world size 4, got rd=2 and ud=1"),
        (zigzag_extract_local, (q, 1, 4), {}, ValueError, "got rd=None and ud=None"),
    ]

    def body(rank: int) -> None:
        mesh = mesh_of(2, 1, rank, 2)
        others = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ring"))
        here = [(layout_of, ("basic", other), {}, ValueError, axes) for other in others]
        here += [
            (set_seq_parallel_pg, (*degrees, rank, 2), {}, ValueError, "to divide the world size 2")
            for degrees in ((2, 2), (0, 2), (-1, -2))
        ]
        here += [
            (LongContextAttention(mesh=mesh), (q[0], q, q), {}, ValueError, "four dims"),
            (LongContextAttentionQKVPacked(mesh=mesh), (q,), {}, ValueError, r"qkv of shape .*got \(2, 4, 6, 8\)"),
        ]
        for call, arguments, options, error, message in [*refused, *here]:
            meshes = {"mesh": mesh} if call in (LongContextAttention, LongContextAttentionQKVPacked) else {}
            with pytest.raises(error, match=message):
                call(*arguments, **{**meshes, **options})

    run_ranks(2, body)
