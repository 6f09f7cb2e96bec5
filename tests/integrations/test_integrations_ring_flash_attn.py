"""Drop-in functions of ring-flash-attention: out and gradients equal those of one device; refusals."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.problems import Problem, assert_close, reference
from support.problems import shard as shard_by_positions
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.integrations import ring_flash_attn
from cp_dtensor.integrations.ring_flash_attn import shard, unshard

WORLD = 3
KINDS: dict[str, Layout] = {
    "ring": Contiguous(),
    "zigzag_ring": HeadTail(),
    "stripe": Striped(1),
    "step": MirroredBatch(),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def function(kind: str, packing: str = "") -> Callable[..., Any]:
    return getattr(ring_flash_attn, f"{kind}_flash_attn_{packing}func")


def heads_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous()


def packed(packing: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    if packing == "qkvpacked_":
        return [torch.stack([q, k, v], 2)]
    return [q, torch.stack([k, v], 2)] if packing == "kvpacked_" else [q, k, v]


def check(kind: str, packing: str, problem: Problem, world_size: int = WORLD, **options: Any) -> None:
    """Out and gradients of every rank are those of one device."""
    *qkv, grad_out = whole = problem.draw(0)
    out, *grads = (heads_last(tensor) for tensor in reference(problem, *whole))
    inputs, wanted_grads = packed(packing, *map(heads_last, qkv)), packed(packing, *grads)
    layout = KINDS[kind]

    def body(rank: int) -> None:
        def local(tensor: torch.Tensor) -> torch.Tensor:
            return shard_by_positions(tensor, layout, rank, world_size, 1)

        leaves = [local(tensor).requires_grad_() for tensor in inputs]
        got = function(kind, packing)(
            *leaves, causal=problem.is_causal, softmax_scale=problem.scale, softcap=problem.softcap, **options
        )
        assert got.is_contiguous()
        assert_close(got, local(out), f"out of rank {rank}")
        got.backward(local(heads_last(grad_out)))
        for index, (leaf, wanted) in enumerate(zip(leaves, wanted_grads, strict=True)):
            assert_close(leaf.grad, local(wanted), f"gradient {index} of rank {rank}")

    run_ranks(world_size, body)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("packing", "kv_heads"), [("", 4), ("", 2), ("kvpacked_", 4), ("kvpacked_", 1), ("qkvpacked_", 4)]
)
@each_kind
def test_out_and_gradients_are_those_of_one_device(kind: str, packing: str, kv_heads: int, causal: bool) -> None:
    check(kind, packing, Problem(24, 24, batch=3, q_heads=4, kv_heads=kv_heads, is_causal=causal))


@pytest.mark.parametrize("length", [2, 7, 31])
@each_kind
def test_any_length(kind: str, length: int) -> None:
    check(kind, "kvpacked_", Problem(length, length, batch=2, is_causal=True), seq_len=length)


@each_kind
def test_scale_softcap_and_cross_attention(kind: str) -> None:
    check(kind, "", Problem(10, 17, batch=2, q_heads=4, scale=0.3), seq_len=(10, 17))
    check(kind, "", Problem(10, 17, batch=2, softcap=0.5), seq_len=(10, 17))


@each_kind
def test_lse_is_returned_where_attn_probs_are_asked_for(kind: str) -> None:
    q, k, v, _ = Problem(13, 13, batch=2).draw(0)
    logits = (q @ k.mT / 8**0.5).masked_fill(torch.ones(13, 13, dtype=torch.bool).triu(1), float("-inf"))
    expected = logits.logsumexp(-1)

    def body(rank: int) -> None:
        local = [shard(heads_last(tensor), kind) for tensor in (q, k, v)]
        out, lse, nothing = function(kind)(*local, causal=True, return_attn_probs=True, seq_len=13)
        assert_close(lse, shard_by_positions(expected, KINDS[kind], rank, WORLD, 2))
        assert_close(out, function(kind)(*local, causal=True, seq_len=13))
        assert nothing is None

    run_ranks(WORLD, body)


@each_kind
def test_shard_and_unshard(kind: str) -> None:
    whole = torch.randn(4, 11, 2, 3)
    tokens = torch.arange(44).view(4, 11)

    def body(rank: int) -> None:
        local = shard(whole, kind)
        assert torch.equal(local, shard_by_positions(whole, KINDS[kind], rank, WORLD, 1))
        assert torch.equal(unshard(local, kind), whole)
        assert torch.equal(unshard(shard(tokens, kind, dim=-1), kind, dim=-1), tokens)
        leaf = local.clone().requires_grad_()
        (unshard(leaf, kind, grad="partial") * whole).sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, WORLD * local)

    run_ranks(WORLD, body)


def test_a_group_and_an_axis_of_a_mesh() -> None:
    """Ranks 0 and 1 form one ring; ranks 2 and 3 form another, with other tensors."""
    problem = Problem(12, 12, is_causal=True)

    def body(rank: int) -> None:
        axis = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
        replica, cp_rank = divmod(rank, 2)
        *qkv, _ = tensors = problem.draw(replica)
        wanted = shard_by_positions(heads_last(reference(problem, *tensors)[0]), HeadTail(), cp_rank, 2, 1)
        for group in (axis, axis.get_group()):
            local = [shard(heads_last(tensor), "zigzag_ring", group) for tensor in qkv]
            assert_close(function("zigzag_ring")(*local, causal=True, group=group), wanted)

    run_ranks(4, body)


@each_kind
def test_nested_ring(kind: str) -> None:
    problem = Problem(21, 21, batch=2, is_causal=True)
    *qkv, _ = whole = problem.draw(0)
    out = heads_last(reference(problem, *whole)[0])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_node", "cp_gpu"))
        got = function(kind)(
            *(shard(heads_last(tensor), kind, mesh) for tensor in qkv), causal=True, group=mesh, seq_len=21
        )
        assert_close(got, shard_by_positions(out, KINDS[kind], rank, 4, 1))
        assert torch.equal(unshard(shard(out, kind, mesh), kind, mesh), out)

    run_ranks(4, body)


def test_positional_arguments_are_in_that_package_s_order() -> None:
    options = [
        "dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic", "return_attn_probs",
        "group",
    ]  # fmt: skip
    for kind in KINDS:
        for packing, tensors in {
            "": ["q", "k", "v", *options],
            "kvpacked_": ["q", "kv"],
            "qkvpacked_": ["qkv"],
        }.items():
            parameters = inspect.signature(function(kind, packing)).parameters.values()
            assert [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] == tensors


def test_all_names_are_exported_documented_and_can_be_pickled() -> None:
    names = {f"{kind}_flash_attn_{packing}func" for kind in KINDS for packing in ("", "kvpacked_", "qkvpacked_")}
    kinds = ("ring", "zigzag_ring", "llama3")
    names |= {
        f"{kind}_flash_attn_varlen_{packing}func" for kind in kinds for packing in ("", "kvpacked_", "qkvpacked_")
    }
    others = {"llama3_flash_attn_prepare_cu_seqlens", "shard", "unshard", "shard_varlen", "unshard_varlen"}
    assert names | others == set(ring_flash_attn.__all__)
    for name in names:
        public = getattr(ring_flash_attn, name)
        assert public.__doc__
        copied = pickle.loads(pickle.dumps(public))
        assert (copied.__name__, getattr(copied, "__self__", None)) == (
            public.__name__,
            getattr(public, "__self__", None),
        )


REFUSED = {
    "alibi_slopes": (torch.ones(2), r"alibi_slopes, a tensor of shape \(2,\), expected None"),
}


@pytest.mark.parametrize("option", REFUSED)
@pytest.mark.parametrize("packing", ["", "kvpacked_", "qkvpacked_"])
@each_kind
def test_what_it_cannot_do_is_refused_and_not_ignored(kind: str, packing: str, option: str) -> None:
    value, message = REFUSED[option]
    q = torch.randn(2, 4, 2, 8)

    def body(rank: int) -> None:
        if rank == 0:  # the others would have to join a collective
            with pytest.raises(NotImplementedError, match=message):
                function(kind, packing)(*packed(packing, q, q, q), **{option: value})

    run_ranks(2, body)


def test_options_that_change_nothing_here() -> None:
    check("ring", "", Problem(12, 12), deterministic=True, window_size=[-1, -1], dropout_p=0)


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


def test_groups_and_kinds_that_do_not_fit() -> None:
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

    run_ranks(2, body)


def test_lengths_that_no_layout_gives_are_refused_on_every_rank() -> None:
    def body(rank: int) -> None:
        q = torch.randn(1, 4 + 3 * rank, 2, 8)
        with pytest.raises(ValueError, match=r"disagree about global .*pass seq_len="):
            function("zigzag_ring")(q, q, q)

    run_ranks(WORLD, body)
