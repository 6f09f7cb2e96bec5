"""Drop-ins of ring-flash-attention and yunchang: functions and layers give what one device gives; refusals."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.packed_documents import PackedProblem, equal_generators
from support.problems import assert_close, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Layout
from cp_dtensor.integrations import long_context, ring_flash_attn
from cp_dtensor.integrations.long_context import LongContextAttention, LongContextAttentionQKVPacked
from cp_dtensor.integrations.ring_flash_attn import LAYOUTS

PACKINGS = {"": ["q", "k", "v"], "kvpacked_": ["q", "kv"], "qkvpacked_": ["qkv"]}
TYPES = ("basic", "zigzag", "strip")
ORDER = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic", "return_attn_probs"]


def function(kind: str, packing: str = "") -> Callable[..., Any]:
    return getattr(ring_flash_attn, f"{kind}_flash_attn_{packing}func")


def packed(packing: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    count = {"": 0, "kvpacked_": 2, "qkvpacked_": 3}[packing]
    return [*tensors[: 3 - count], *([torch.stack(tensors[3 - count :], 2)] if count else [])]


def attention(name: str, packing: str, rank: int, ranks: int) -> tuple[Callable[..., Any], Layout]:
    """Return a function of a kind, or a layer of a type over a ring and up to 2 ranks of Ulysses, and its layout."""
    if name in LAYOUTS:
        return function(name, packing), LAYOUTS[name]
    ulysses = 1 if ranks % 2 else 2
    mesh = long_context.set_seq_parallel_pg(ulysses, ranks // ulysses, rank, ranks, device_type="cpu")
    layer = (LongContextAttentionQKVPacked if packing else LongContextAttention)(ring_impl_type=name, mesh=mesh)
    return layer, layer.layout


each_name = pytest.mark.parametrize("name", [*LAYOUTS, *TYPES])
each_form = pytest.mark.parametrize(
    ("name", "packing"),
    [(kind, packing) for kind in LAYOUTS for packing in PACKINGS]
    + [(ring_impl_type, packing) for ring_impl_type in TYPES for packing in ("", "qkvpacked_")],
)


def batch(problem: PackedProblem) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return q, k, v, grad_out (B, S, H, D) of two rows, and out, dq, dk, dv of one device and lse (B, H, S)."""
    rows = [problem.draw(seed) for seed in range(2)]
    results = [problem.reference(*row) for row in rows]
    wholes, expected = ([torch.stack(each) for each in zip(*many, strict=True)] for many in (rows, results))
    return wholes, expected


def check(name: str, packing: str, problem: PackedProblem, ranks: int, **options: Any) -> None:
    (*qkv, grad_out), (out, *grads, lse) = batch(problem)
    inputs, wanted_grads = packed(packing, qkv), packed(packing, grads)
    left, right = (-1 if end is None else end for end in problem.window)

    def body(rank: int) -> None:
        attend, layout = attention(name, packing, rank, ranks)

        def local(tensor: torch.Tensor) -> torch.Tensor:
            return shard(tensor, layout, rank, ranks, 1)

        leaves = [local(tensor).requires_grad_() for tensor in inputs]
        got = attend(
            *leaves, causal=problem.is_causal, window_size=(left, right), softmax_scale=problem.scale,
            softcap=problem.softcap, return_attn_probs=True, **options,
        )  # fmt: skip
        if name in LAYOUTS:
            got, got_lse, nothing = got
            assert nothing is None
            assert_close(got_lse, local(lse.mT).mT, f"lse of rank {rank}, {problem}")
        assert got.is_contiguous()
        assert_close(got, local(out), f"out of rank {rank}, {problem}")
        for index, pair in enumerate(zip(torch.autograd.grad(got, leaves, local(grad_out)), wanted_grads, strict=True)):
            assert_close(pair[0], local(pair[1]), f"gradient {index} of rank {rank}, {problem}")

    run_ranks(ranks, body)


_ends = st.one_of(st.none(), st.integers(0, 12))
_lengths = st.integers(1, 24)


@each_form
def test_out_and_gradients_are_those_of_one_device(name: str, packing: str) -> None:
    """Any length on any number of ranks; the last query is aligned with the last key."""

    @settings(max_examples=examples(12), deadline=None)
    @given(
        st.integers(1, 6), _lengths, st.one_of(st.none(), _lengths), st.sampled_from([(4, 4), (4, 2), (3, 1)]),
        st.booleans(), st.tuples(_ends, _ends), st.sampled_from([(None, 0.0), (0.3, 0.0), (None, 0.5)]),
    )  # fmt: skip
    def checked(
        ranks: int, q_len: int, kv_len: int | None, heads: tuple[int, int], causal: bool,
        window: tuple[int | None, int | None], factors: tuple[float | None, float],
    ) -> None:  # fmt: skip
        q_heads, kv_heads = heads
        if packing == "qkvpacked_":
            kv_len, kv_heads = None, q_heads
        problem = PackedProblem(
            (0, q_len), (0, kv_len or q_len), q_heads=q_heads, kv_heads=kv_heads, is_causal=causal, window=window,
            scale=factors[0], softcap=factors[1],
        )  # fmt: skip
        check(name, packing, problem, ranks, seq_len=problem.lengths)

    checked()


@each_name
def test_equal_shards_need_no_length_and_dropout_is_that_of_one_device(name: str) -> None:
    (*qkv, _), (expected, *_) = batch(PackedProblem((0, 12), q_heads=4, is_causal=True, window=(7, None)))

    def body(rank: int, ranks: int, dropout_p: float) -> tuple[torch.Tensor, Layout]:
        attend, layout = attention(name, "", rank, ranks)
        # By position, in that package's order; yunchang has the softcap before the slopes.
        softcap = () if name in LAYOUTS else (0.0,)
        local = (shard(tensor, layout, rank, ranks, 1) for tensor in qkv)
        return attend(*local, dropout_p, None, True, [7, -1], *softcap, None, True), layout

    with equal_generators():
        ((dropped, _),) = run_ranks(1, body, 1, 0.4)
        assert not torch.allclose(dropped, expected)
        for whole, dropout_p in ((dropped, 0.4), (expected, 0.0)):
            for rank, (out, layout) in enumerate(run_ranks(3, body, 3, dropout_p)):
                assert_close(out, shard(whole, layout, rank, 3, 1), f"rank {rank}")


def test_groups_axes_and_nested_rings() -> None:
    """An axis of 2 x 2 ranks and its group: two rings with other tensors. The whole mesh: one nested ring."""
    problem = PackedProblem((0, 12), is_causal=True)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_node", "cp_gpu"))
        groups = ((mesh, 4, 0), (mesh["cp_gpu"], 2, rank // 2), (mesh["cp_gpu"].get_group(), 2, rank // 2))
        for kind, layout in LAYOUTS.items():
            for group, ranks, seed in groups:
                *qkv, grad_out = (tensor.expand(2, -1, -1, -1) for tensor in problem.draw(seed))
                expected = problem.reference(*(each[0] for each in (*qkv, grad_out)))[0].expand(2, -1, -1, -1)
                local = (shard(tensor, layout, rank % ranks, ranks, 1) for tensor in qkv)
                got = function(kind)(*local, causal=True, group=group)
                assert_close(got, shard(expected, layout, rank % ranks, ranks, 1))

    run_ranks(4, body)


def test_all_names_are_exported_documented_and_can_be_pickled() -> None:
    varlen = ["cu_seqlens", "max_seqlen"]
    prepared = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"]
    arguments: dict[str, list[str]] = {f"{kind}_flash_attn": [] for kind in LAYOUTS}
    arguments |= {"ring_flash_attn_varlen": varlen, "zigzag_ring_flash_attn_varlen": varlen}
    arguments |= {"llama3_flash_attn_varlen": prepared}
    names = {"llama3_flash_attn_prepare_cu_seqlens", "LAYOUTS", "ContiguousPerDocument"}
    for prefix, documents in arguments.items():
        for packing, tensors in PACKINGS.items():
            name = f"{prefix}_{packing}func"
            names.add(name)
            public = getattr(ring_flash_attn, name)
            assert public.__doc__
            assert pickle.loads(pickle.dumps(public)) is public
            parameters = inspect.signature(public).parameters.values()
            by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
            assert by_position == [*tensors, *documents, *ORDER, "group"], "in that package's order"
    assert names == set(ring_flash_attn.__all__)
    assert len(ring_flash_attn.__all__) == len(names)


@each_name
def test_what_it_cannot_do_is_refused_and_not_ignored(name: str) -> None:
    q = torch.randn(2, 4, 2, 8)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"alibi_slopes": q[0, 0, :, 0]},
            NotImplementedError,
            r"alibi_slopes, a tensor of shape \(2,\), expected None",
        ),
        ({"softcap": -1.0}, ValueError, "softcap to be a finite number of at least 0.0"),
        ({"sofcap": 1.0}, TypeError, "unexpected keyword argument 'sofcap'"),
        ({"scale": 1.0}, TypeError, "keyword argument 'scale'"),
        ({"mask": None}, TypeError, "keyword argument 'mask'"),
    ]
    pairs: tuple[Any, ...] = ((-2, 0), (1.5, 0), (True, 0), ("1", 0))
    refused += [({"window_size": each}, ValueError, "numbers of keys >= 0.*got") for each in pairs]
    others: tuple[Any, ...] = ((3,), (1, 2, 3), 5, None)
    refused += [({"window_size": each}, ValueError, r"a pair \(left, right\).*; got") for each in others]

    def body(rank: int) -> None:
        attend, _ = attention(name, "", rank, 2)
        if rank == 0:  # the others would have to join a collective
            for options, error, message in refused:
                with pytest.raises(error, match=message):
                    attend(q, q, q, **options)

    run_ranks(2, body)


def test_tensors_and_groups_that_do_not_fit() -> None:
    q, ring, qkvpacked = torch.randn(2, 4, 6, 8), function("ring"), function("ring", "qkvpacked_")
    with pytest.raises(TypeError, match=r"expected k to be a torch.Tensor, got list"):
        ring(q, [1], q)
    with pytest.raises(TypeError, match=r"expected qkv to be a torch.Tensor, got NoneType"):
        qkvpacked(None)
    for shape in ((2, 4, 8), (2, 4, 2, 6, 8), (2, 4, 6, 8)):
        with pytest.raises(ValueError, match=r"qkv of shape \(batch, sequence, 3, heads, head_dim\), got \(2, 4"):
            qkvpacked(torch.randn(shape))
    with pytest.raises(ValueError, match=r"four dims.*got q \(2, 4, 6, 8\), k \(4, 6, 8\)"):
        ring(q, q[0], q[0])
    with pytest.raises(ValueError, match="group=None"):
        ring(q, q, q)
    with pytest.raises(TypeError, match=r"ProcessGroup.*got int"):
        ring(q, q, q, group=0)

    def body(rank: int) -> None:
        uneven = torch.randn(1, 4 + 3 * rank, 2, 8)
        with pytest.raises(ValueError, match=r"disagree about global .*pass seq_len="):
            function("zigzag_ring")(uneven, uneven, uneven)

    run_ranks(2, body)
