"""Drop-ins of ring-flash-attention and yunchang: functions and layers give what one device gives; refusals."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.packed_documents import PackedProblem, equal_generators
from support.problems import assert_close
from support.problems import shard as shard_by_positions
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.integrations import long_context, ring_flash_attn
from cp_dtensor.integrations.long_context import LongContextAttention, LongContextAttentionQKVPacked
from cp_dtensor.integrations.ring_flash_attn import shard, unshard

PACKINGS = ("", "kvpacked_", "qkvpacked_")
KINDS: dict[str, Layout] = {
    "ring": Contiguous(), "zigzag_ring": HeadTail(), "stripe": Striped(1), "step": MirroredBatch(),
}  # fmt: skip
TYPES = ("basic", "zigzag", "strip")
each_kind = pytest.mark.parametrize("kind", KINDS)
ORDER = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic", "return_attn_probs"]
SPELLINGS = {"": ["q", "k", "v"], "kvpacked_": ["q", "kv"], "qkvpacked_": ["qkv"]}


def function(kind: str, packing: str = "") -> Callable[..., Any]:
    return getattr(ring_flash_attn, f"{kind}_flash_attn_{packing}func")


def packed(packing: str, tensors: list[torch.Tensor], dim: int = 2) -> list[torch.Tensor]:
    count = {"": 0, "kvpacked_": 2, "qkvpacked_": 3}[packing]
    return [*tensors[: 3 - count], *([torch.stack(tensors[3 - count :], dim)] if count else [])]


class Way(NamedTuple):
    shard: Callable[[torch.Tensor], torch.Tensor]
    attend: Callable[..., Any]


def way(name: str, packing: str, rank: int, ranks: int) -> Way:
    """Return a rank's way: kinds are functions, types are layers over a ring and up to 2 ranks of Ulysses."""
    if name in KINDS:
        return Way(lambda tensor: shard(tensor, name), function(name, packing))
    ulysses = 1 if ranks % 2 else 2
    mesh = long_context.set_seq_parallel_pg(ulysses, ranks // ulysses, rank, ranks, device_type="cpu")
    layer = LongContextAttentionQKVPacked if packing else LongContextAttention
    return Way(lambda tensor: long_context.shard(tensor, name, mesh), layer(ring_impl_type=name, mesh=mesh))


WAYS = [(kind, packing) for kind in KINDS for packing in PACKINGS]
WAYS += [(ring_impl_type, packing) for ring_impl_type in TYPES for packing in ("", "qkvpacked_")]
each_way = pytest.mark.parametrize(("name", "packing"), WAYS)


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
        local, attend = way(name, packing, rank, ranks)
        leaves = [local(tensor).requires_grad_() for tensor in inputs]
        got = attend(
            *leaves, causal=problem.is_causal, window_size=(left, right), softmax_scale=problem.scale,
            softcap=problem.softcap, return_attn_probs=True, **options,
        )  # fmt: skip
        if name in KINDS:
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


@each_way
def test_out_and_gradients_are_those_of_one_device(name: str, packing: str) -> None:
    """Any length on any number of ranks; the last query is aligned with the last key."""

    @settings(max_examples=examples(12), deadline=None)
    @given(
        st.integers(1, 6), _lengths, st.one_of(st.none(), _lengths), st.sampled_from([(4, 4), (4, 2), (3, 1)]),
        st.booleans(), _ends, _ends, st.sampled_from([(None, 0.0), (0.3, 0.0), (None, 0.5)]),
    )  # fmt: skip
    def checked(
        ranks: int, q_len: int, kv_len: int | None, heads: tuple[int, int], causal: bool, left: int | None,
        right: int | None, factors: tuple[float | None, float],
    ) -> None:  # fmt: skip
        q_heads, kv_heads = heads
        if packing == "qkvpacked_":
            kv_len, kv_heads = None, q_heads
        problem = PackedProblem(
            (0, q_len), (0, kv_len or q_len), q_heads=q_heads, kv_heads=kv_heads, is_causal=causal,
            window=(left, right), scale=factors[0], softcap=factors[1],
        )  # fmt: skip
        check(name, packing, problem, ranks, seq_len=problem.lengths)

    checked()


@pytest.mark.parametrize("name", [*KINDS, *TYPES])
def test_equal_shards_need_no_length_and_dropout_is_that_of_one_device(name: str) -> None:
    (*qkv, _), (expected, *_) = batch(PackedProblem((0, 12), q_heads=4, is_causal=True, window=(7, None)))

    def body(rank: int, ranks: int, dropout_p: float) -> torch.Tensor:
        local, attend = way(name, "", rank, ranks)
        # By position, in that package's order; yunchang has the softcap before the slopes.
        softcap = () if name in KINDS else (0.0,)
        return attend(*map(local, qkv), dropout_p, None, True, [7, -1], *softcap, None, True)

    def check_shards(rank: int, whole: torch.Tensor, dropout_p: float) -> None:
        assert_close(body(rank, 3, dropout_p), way(name, "", rank, 3).shard(whole), f"rank {rank}")

    with equal_generators():
        (dropped,) = run_ranks(1, body, 1, 0.4)
        assert not torch.allclose(dropped, expected)
        run_ranks(3, check_shards, dropped, 0.4)
    run_ranks(3, check_shards, expected, 0.0)


@each_kind
def test_shard_and_unshard(kind: str) -> None:
    whole = torch.randn(4, 11, 2, 3)
    tokens = torch.arange(44).view(4, 11)

    def body(rank: int) -> None:
        local = shard(whole, kind)
        assert torch.equal(local, shard_by_positions(whole, KINDS[kind], rank, 3, 1))
        assert torch.equal(unshard(local, kind), whole)
        assert torch.equal(unshard(shard(tokens, kind, dim=-1), kind, dim=-1), tokens)
        leaf = local.clone().requires_grad_()
        (unshard(leaf, kind, grad="partial") * whole).sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, 3 * local)

    run_ranks(3, body)


@each_kind
def test_groups_axes_and_nested_rings(kind: str) -> None:
    """An axis of 2 x 2 ranks and its group: two rings with other tensors. The whole mesh: one nested ring."""
    problem = PackedProblem((0, 12), is_causal=True)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_node", "cp_gpu"))
        for group, seed in ((mesh, 0), (mesh["cp_gpu"], rank // 2), (mesh["cp_gpu"].get_group(), rank // 2)):
            *qkv, grad_out = (tensor.expand(2, -1, -1, -1) for tensor in problem.draw(seed))
            expected = problem.reference(*(each[0] for each in (*qkv, grad_out)))[0].expand(2, -1, -1, -1)
            got = function(kind)(*(shard(tensor, kind, group) for tensor in qkv), causal=True, group=group)
            assert_close(got, shard(expected, kind, group))
            assert torch.equal(unshard(shard(expected, kind, group), kind, group), expected)

    run_ranks(4, body)


def test_all_names_are_exported_documented_and_can_be_pickled() -> None:
    varlen = ["cu_seqlens", "max_seqlen"]
    prepared = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"]
    arguments = {f"{kind}_flash_attn": [] for kind in KINDS}
    arguments |= {"ring_flash_attn_varlen": varlen, "zigzag_ring_flash_attn_varlen": varlen}
    arguments |= {"llama3_flash_attn_varlen": prepared}
    names = {"llama3_flash_attn_prepare_cu_seqlens", "shard", "unshard", "shard_varlen", "unshard_varlen"}
    for prefix, documents in arguments.items():
        for packing, tensors in SPELLINGS.items():
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


@each_way
def test_what_it_cannot_do_is_refused_and_not_ignored(name: str, packing: str) -> None:
    q = torch.randn(2, 4, 2, 8)
    slopes = {"alibi_slopes": torch.ones(2)}
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        (slopes, NotImplementedError, r"alibi_slopes, a tensor of shape \(2,\), expected None"),
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
        _, attend = way(name, packing, rank, 2)
        if rank == 0:  # the others would have to join a collective
            for options, error, message in refused:
                with pytest.raises(error, match=message):
                    attend(*packed(packing, [q, q, q]), **options)

    run_ranks(2, body)


def test_tensors_that_do_not_fit() -> None:
    q, ring, qkvpacked = torch.randn(2, 4, 6, 8), function("ring"), function("ring", "qkvpacked_")
    with pytest.raises(TypeError, match=r"expected k to be a torch.Tensor, got list"):
        ring(q, [1], q)
    with pytest.raises(TypeError, match=r"expected qkv to be a torch.Tensor, got NoneType"):
        qkvpacked(None)
    for shape in ((2, 4, 8), (2, 4, 2, 6, 8), (2, 4, 6, 8)):
        with pytest.raises(ValueError, match=r"qkv of shape \(batch, sequence, 3, heads, head_dim\), got \(2, 4"):
            qkvpacked(torch.randn(shape))
    for k, v, message in (
        (q[0], q[0], "four dims"),
        (q[:1], q[:1], "one batch size"),
        (q, q[:, :3], "as many tokens .* in v as in k"),
        (q[:, :, :3], q, "heads .* in v as in k"),
        (q[..., :4], q, "one head dim"),
        (q[:, :, :4], q[:, :, :4], "a multiple of key heads"),
        (q[:, :, :0], q[:, :, :0], "a multiple of key heads"),
    ):
        with pytest.raises(ValueError, match=message + r".*got q \(2, 4, 6, 8\), k \("):
            ring(q, k, v)

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="one dtype"):
            ring(q, q.double(), q)

    run_ranks(1, body)


def test_groups_kinds_and_lengths_that_do_not_fit() -> None:
    q = torch.randn(2, 4, 6, 8)
    with pytest.raises(ValueError, match="group=None"):
        function("ring")(q, q, q)
    with pytest.raises(TypeError, match=r"ProcessGroup.*got int"):
        function("ring")(q, q, q, group=0)

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=r"'ring', 'zigzag_ring', .*; got 'zigzag'"):
            shard(q, "zigzag")
        with pytest.raises(ValueError, match="out of range"):
            shard(q, "ring", dim=4)
        uneven = torch.randn(1, 4 + 3 * rank, 2, 8)
        with pytest.raises(ValueError, match=r"disagree about global .*pass seq_len="):
            function("zigzag_ring")(uneven, uneven, uneven)

    run_ranks(2, body)
