"""Functions of ring-flash-attention and layers of yunchang: every kind and form, names, refusals.

Features of one function of each kind are in tests/matrix.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.packed_documents import PackedProblem, equal_generators
from support.problems import assert_close, shard
from support.ranks import run_ranks

from cp_dtensor import Causal, Layout
from cp_dtensor.integrations import long_context, ring_flash_attn
from cp_dtensor.integrations.long_context import LongContextAttention, LongContextAttentionQKVPacked
from cp_dtensor.integrations.ring_flash_attn import LAYOUTS, llama3_flash_attn_prepare_cu_seqlens

PACKINGS = {"": ["q", "k", "v"], "kvpacked_": ["q", "kv"], "qkvpacked_": ["qkv"]}
TYPES = ("basic", "zigzag", "strip")
ORDER = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic", "return_attn_probs"]


def function(kind: str, packing: str = "") -> Callable[..., Any]:
    return getattr(ring_flash_attn, f"{kind}_flash_attn_{packing}func")


def attention(name: str, packing: str, rank: int, ranks: int) -> tuple[Callable[..., Any], Layout]:
    """Return a function of a kind, or a layer of a type over a ring and up to 2 ranks of Ulysses, and its layout."""
    if name in LAYOUTS:
        return function(name, packing), LAYOUTS[name]
    ulysses = 1 if ranks % 2 else 2
    mesh = long_context.set_seq_parallel_pg(ulysses, ranks // ulysses, rank, ranks, device_type="cpu")
    layer = (LongContextAttentionQKVPacked if packing else LongContextAttention)(ring_impl_type=name, mesh=mesh)
    return layer, layer.layout


each_name = pytest.mark.parametrize("name", [*LAYOUTS, *TYPES])


@pytest.mark.parametrize("ranks", [3, 4])
@each_name
def test_out_and_gradients_are_those_of_one_device(name: str, ranks: int) -> None:
    """Keys of another length, of fewer heads; dropout and options by position, as in those packages."""
    problem = PackedProblem((0, 13), (0, 18), q_heads=4, is_causal=True, window=(7, None), scale=0.3)
    rows = [problem.draw(seed) for seed in range(2)]
    *qkv, grad_out = (torch.stack(each) for each in zip(*rows, strict=True))
    results = [problem.reference(*row) for row in rows]
    out, *grads, lse = (torch.stack(each) for each in zip(*results, strict=True))
    softcap = () if name in LAYOUTS else (0.0,)  # which yunchang has before the slopes

    def body(rank: int) -> None:
        attend, layout = attention(name, "", rank, ranks)

        def local(tensor: torch.Tensor) -> torch.Tensor:
            return shard(tensor, layout, rank, ranks, 1)

        leaves = [local(tensor).requires_grad_() for tensor in qkv]
        got = attend(*leaves, 0.0, 0.3, True, [7, -1], *softcap, None, True, True, seq_len=problem.lengths)
        if name in LAYOUTS:
            got, got_lse, nothing = got
            assert nothing is None
            assert_close(got_lse, local(lse.mT).mT)
        assert got.is_contiguous()
        for actual, wanted in zip(
            (got, *torch.autograd.grad(got, leaves, local(grad_out))), (out, *grads), strict=True
        ):
            assert_close(actual, local(wanted))

    run_ranks(ranks, body)


@each_name
def test_equal_shards_need_no_length_and_dropout_is_that_of_one_device(name: str) -> None:
    qkv = [tensor.expand(2, -1, -1, -1) for tensor in PackedProblem((0, 12), q_heads=4).draw(0)[:3]]

    def body(rank: int, ranks: int) -> tuple[torch.Tensor, Layout]:
        attend, layout = attention(name, "", rank, ranks)
        return attend(*(shard(tensor, layout, rank, ranks, 1) for tensor in qkv), 0.4, causal=True), layout

    with equal_generators():
        ((whole, _),) = run_ranks(1, body, 1)
        for rank, (out, layout) in enumerate(run_ranks(3, body, 3)):
            assert_close(out, shard(whole, layout, rank, 3, 1), f"rank {rank}")


def documents_of(prefix: str, rank: int) -> tuple[Any, ...]:
    """Return the arguments of two ranks for documents of 2 and 6 tokens."""
    if "llama3" in prefix:
        *told, keys = llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 2, 8]), True, rank, 2)
        return *told, 1, keys
    return ([0, 1, 4], 3) if prefix == "ring_flash_attn_varlen" else ([0, 2, 4], 2) if "varlen" in prefix else ()


def test_packed_forms_are_the_functions_of_their_views() -> None:
    def body(rank: int) -> None:
        dense = [torch.randn(2, 4, 2, 8) + rank for _ in range(3)]
        for prefix in ARGUMENTS:
            is_packed = "varlen" in prefix
            qkv, documents = [x[0] if is_packed else x for x in dense], documents_of(prefix, rank)
            whole = getattr(ring_flash_attn, f"{prefix}_func")(*qkv, *documents, causal=True)
            for packing, count in (("kvpacked", 2), ("qkvpacked", 3)):
                form = getattr(ring_flash_attn, f"{prefix}_{packing}_func")
                tensors = *qkv[: 3 - count], torch.stack(qkv[3 - count :], 1 if is_packed else 2)
                assert torch.equal(form(*tensors, *documents, causal=True), whole)
        layers = [attention("zigzag", packing, rank, 2)[0] for packing in ("", "qkvpacked_")]
        assert torch.equal(layers[1](torch.stack(dense, 2), causal=True), layers[0](*dense, causal=True))

    run_ranks(2, body)


ARGUMENTS: dict[str, list[str]] = {f"{kind}_flash_attn": [] for kind in LAYOUTS}
ARGUMENTS |= {f"{kind}_flash_attn_varlen": ["cu_seqlens", "max_seqlen"] for kind in ("ring", "zigzag_ring")}
ARGUMENTS["llama3_flash_attn_varlen"] = [
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice",
]  # fmt: skip
"""By the beginning of a name: the arguments that describe documents."""


def test_all_names_are_exported_documented_and_can_be_pickled() -> None:
    names = {"llama3_flash_attn_prepare_cu_seqlens", "LAYOUTS", "ContiguousPerDocument"}
    for prefix, documents in ARGUMENTS.items():
        for packing, tensors in PACKINGS.items():
            name = f"{prefix}_{packing}func"
            names.add(name)
            public = getattr(ring_flash_attn, name)
            assert public.__doc__
            assert pickle.loads(pickle.dumps(public)) is public
            parameters = inspect.signature(public).parameters.values()
            by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
            assert by_position == [*tensors, *documents, *ORDER, "group"], "in that package's order"
    assert sorted(names) == sorted(ring_flash_attn.__all__)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"alibi_slopes": torch.ones(2)}, NotImplementedError,
        r"alibi_slopes, a tensor of shape \(2,\), expected None",
    ),
    ({"softcap": -1.0}, ValueError, "softcap to be a finite number of at least 0.0"),
    ({"sofcap": 1.0}, TypeError, "unexpected keyword argument 'sofcap'"),
    ({"scale": 1.0}, TypeError, "keyword argument 'scale'"),
    ({"mask": Causal()}, TypeError, "keyword argument 'mask'|takes no mask beside cu_seqlens"),
    *[({"window_size": (each, 0)}, ValueError, "numbers of keys >= 0.*got") for each in (-2, 1.5, True, "1")],
    *[({"window_size": each}, ValueError, r"a pair \(left, right\).*; got") for each in ((3,), (1, 2, 3), 5, None)],
]  # fmt: skip


def test_what_they_cannot_do_is_refused_and_not_ignored() -> None:
    q = torch.randn(2, 4, 2, 8)

    def body(rank: int) -> None:
        layers = [attention(name, "", rank, 2)[0] for name in TYPES]
        functions = {getattr(ring_flash_attn, f"{prefix}_func"): prefix for prefix in ARGUMENTS}
        for attend in (*functions, *layers):
            prefix = functions.get(attend, "")
            tensors = [q[0] if "varlen" in prefix else q] * 3
            for options, error, message in REFUSED:
                with pytest.raises(error, match=message):
                    attend(*tensors, *documents_of(prefix, rank), causal=True, **options)

    run_ranks(2, body)


def test_tensors_and_groups_that_do_not_fit() -> None:
    q, ring, qkvpacked = torch.randn(2, 4, 6, 8), function("ring"), function("ring", "qkvpacked_")
    with pytest.raises(TypeError, match=r"expected qkv to be a torch.Tensor, got NoneType"):
        qkvpacked(None)
    for shape in ((2, 4, 8), (2, 4, 2, 6, 8), (2, 4, 6, 8)):
        with pytest.raises(ValueError, match=r"qkv of shape \(batch, sequence, 3, heads, head_dim\), got \(2, 4"):
            qkvpacked(torch.randn(shape))
    with pytest.raises(ValueError, match=r"kv of shape \(tokens, 2, heads, head_dim\), got \(8, 2, 8\)"):
        function("ring", "varlen_kvpacked_")(q[0], torch.randn(8, 2, 8), [0, 8], 8)
    with pytest.raises(ValueError, match="group=None"):
        ring(q, q, q)
    with pytest.raises(TypeError, match=r"ProcessGroup.*got int"):
        ring(q, q, q, group=0)
