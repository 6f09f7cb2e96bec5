"""Attention in contexts, beside what the matrix has: forms of calls, torch's modules, masks of all kinds, nesting."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import eq
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.collectives import errors_by_rank
from support.masked_problems import MaskedProblem
from support.method_checks import RING_ULYSSES, ULYSSES_RING, place
from support.problems import assert_close, shard
from support.ranks import run_ranks
from support.shards import Shards
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

from cp_dtensor import (
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    SlidingWindow,
    Striped,
    context_parallel,
    context_parallel_shard,
)
from cp_dtensor.spec.layouts import shard_lengths

RANKS, LENGTH, WIDTH = 3, 11, 8


def context(**options: Any) -> context_parallel:
    return context_parallel(dist.group.WORLD, **options)


# Forms of calls

PLAIN = MaskedProblem(LENGTH, LENGTH, Full(), 2, is_causal=True)
FORMS: dict[str, tuple[Callable[..., torch.Tensor], Any]] = {
    "by attribute": (lambda *args, **options: F.scaled_dot_product_attention(*args, **options), nullcontext()),
    "imported by name": (imported_by_name, nullcontext()),
    "torch._C._nn": (torch._C._nn.scaled_dot_product_attention, nullcontext()),
    "torch.ops": (torch.ops.aten.scaled_dot_product_attention, nullcontext()),
    "math": (imported_by_name, sdpa_kernel([SDPBackend.MATH])),
    "priority": (imported_by_name, sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True)),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_calls(form: str) -> None:
    sdpa, of_process = FORMS[form]
    call = partial(sdpa, is_causal=True)
    with of_process:  # around all ranks: it sets flags of the process
        run_ranks(RANKS, lambda rank: Shards(rank, PLAIN, ranks=RANKS).check(call, partial(context, seq_len=LENGTH)))


def test_one_key_head_is_for_all_query_heads() -> None:
    """SDPA broadcasts it, as Falcon's attention expects: without `enable_gqa`."""
    problem, call = MaskedProblem(8, 8, Full(), 1, 4, 1, is_causal=True), partial(imported_by_name, is_causal=True)
    run_ranks(2, lambda rank: Shards(rank, problem).check(call, context))


def test_autocast_casts_as_for_plain_sdpa() -> None:
    whole = [each.float() for each in MaskedProblem(64, 64, Full()).draw(0)[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        alone = imported_by_name(*whole, is_causal=True)

    def body(rank: int) -> None:
        leaves = [shard(each, HeadTail(), rank, 2).requires_grad_() for each in whole]
        with torch.autocast("cpu", torch.bfloat16), context():
            out = imported_by_name(*leaves, is_causal=True)
        torch.testing.assert_close(out, shard(alone, HeadTail(), rank, 2), rtol=0.02, atol=0.02)  # the dtype, too
        out.sum().backward()
        assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)

    run_ranks(2, body)


@pytest.mark.parametrize("buffer_length", [6, 8, 9, 10, 12])
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped()], ids=repr)
def test_attention_over_a_length_that_no_buffer_has(layout: Layout, buffer_length: int) -> None:
    """Refused on every rank where some own as many tokens of the one length as of the other."""
    problem = MaskedProblem(9, 9, Full(), is_causal=True)

    def body(rank: int) -> None:
        with context(buffers=[torch.arange(buffer_length)], buffer_seq_dims=[0], layout=layout, seq_len=9):
            Shards(rank, problem, layout, 4).check()

    look_alike = any(map(eq, shard_lengths(layout, 9, 4), shard_lengths(layout, buffer_length, 4)))
    if buffer_length == 9 or not look_alike:
        run_ranks(4, body)
        return
    for error in errors_by_rank(4, body):
        assert "both declared, have equally long shards on some ranks. Pad one" in str(error)


def test_meta_tensors_are_left_to_torch() -> None:
    def body(rank: int) -> None:
        q = torch.empty(1, 2, 5, 4, device="meta")
        with context():
            assert imported_by_name(q, q, q).shape == q.shape

    run_ranks(2, body)


@pytest.mark.parametrize("lead", [(), (2,), (2, 1, 2)], ids=str)
def test_any_number_of_leading_dims(lead: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*lead, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(*lead[-1:], LENGTH, LENGTH, generator=generator) > 0.4
    mask = mask | torch.eye(LENGTH, dtype=torch.bool)
    whole = [tensor.requires_grad_() for tensor in (q, k, v)]
    expected = imported_by_name(*whole, attn_mask=mask)
    grads = torch.autograd.grad(expected.square().sum(), whole)

    def body(rank: int) -> None:
        world, dims = dist.group.WORLD, [-2] * 4
        with context(seq_len=LENGTH):
            *parts, rows = context_parallel_shard(world, [*(tensor.detach() for tensor in whole), mask], dims)
            leaves = [part.requires_grad_() for part in parts]
            out = imported_by_name(*leaves, attn_mask=rows)
            found = out.detach(), *torch.autograd.grad(out.square().sum(), leaves)
        for ours, wanted in zip(found, context_parallel_shard(world, [expected.detach(), *grads], dims), strict=True):
            assert_close(ours, wanted)

    run_ranks(RANKS, body)


# Modules of torch


def attention(batch_first: bool, is_causal: bool) -> nn.Module:
    class SelfAttention(nn.MultiheadAttention):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            length = hidden.size(1 if batch_first else 0)
            hidden_from = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
            mask = hidden_from if is_causal else None
            return super().forward(hidden, hidden, hidden, need_weights=False, is_causal=is_causal, attn_mask=mask)[0]

    return SelfAttention(WIDTH, 2, batch_first=batch_first, dtype=torch.float64)


def encoder_layer(batch_first: bool, norm_first: bool) -> nn.Module:
    options: dict[str, Any] = {"batch_first": batch_first, "norm_first": norm_first, "dtype": torch.float64}
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, **options)


@pytest.mark.parametrize("mode", ["train", "eval", "inference_mode"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("build", [attention, encoder_layer])
def test_modules_of_torch(build: Callable[[bool, bool], nn.Module], option: bool, batch_first: bool, mode: str) -> None:
    torch.manual_seed(0)
    dim = 1 if batch_first else 0
    whole = torch.randn((2, LENGTH, WIDTH) if batch_first else (LENGTH, 2, WIDTH), dtype=torch.float64)
    weights = build(batch_first, option).state_dict()

    def run(hidden: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        module = build(batch_first, option)
        module.load_state_dict(weights)
        module.train(mode == "train")
        with torch.inference_mode(mode == "inference_mode"):
            out = module(hidden)
        if out.requires_grad:
            (out**2).sum().backward()
        return out.detach(), [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    alone, alone_grads = run(whole)

    def body(rank: int) -> list[torch.Tensor]:
        hidden = whole.clone()
        with context(buffers=[hidden], buffer_seq_dims=[dim]):
            out, grads = run(hidden)
        order = shard(torch.arange(LENGTH), HeadTail(), rank, RANKS, 0)
        assert_close(out, alone.index_select(dim, order))
        return grads

    totals = [sum(parts) for parts in zip(*run_ranks(RANKS, body), strict=True)]
    assert len(totals) == len(alone_grads) == (len(weights) if mode in ("train", "eval") else 0)
    for total, expected in zip(totals, alone_grads, strict=True):
        assert_close(total, expected)


# Masks

DOCUMENTS = Documents([0, 3, 3, 8, 10], within=Causal())  # one is empty, the last token is padding


@pytest.mark.parametrize("bias", ["boolean s", "boolean bhs", "additive hs"])
@pytest.mark.parametrize("mask", [None, DOCUMENTS])
def test_an_attn_mask_that_is_a_buffer(bias: str, mask: Mask | None) -> None:
    problem = MaskedProblem(LENGTH, LENGTH, mask or Full(), 2, 4, 2, bias=bias)

    def body(rank: int) -> None:
        of_rank = Shards(rank, problem, ranks=RANKS)
        leaves = [tensor.clone() for tensor in (*of_rank.whole[:3], *of_rank.whole[4:])]
        with context(buffers=leaves, buffer_seq_dims=[2] * 4, mask=mask):
            *qkv, rows = (leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves)
            out = of_rank.sdpa(*qkv, attn_mask=rows)
            grads = torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], of_rank.grad)
        of_rank.check_results(out, *grads[:3])
        for got, whole in zip(grads[3:], of_rank.expected[5:], strict=True):
            assert_close(got, of_rank.shard(whole), "dbias")

    run_ranks(RANKS, body)


BIASES: dict[str, tuple[Any, Causal]] = {
    "lower right": (causal_lower_right, Causal("bottom_right")), "upper left": (causal_upper_left, Causal()),
}  # fmt: skip


@pytest.mark.parametrize("lengths", [(9, 14), (2, 9)], ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_torchs_causal_biases_are_of_the_whole_sequences(name: str, lengths: tuple[int, int]) -> None:
    bias, mask = BIASES[name]

    def body(rank: int) -> None:
        for in_context in (None, SlidingWindow(4, 4)):
            problem = MaskedProblem(*lengths, mask if in_context is None else mask & in_context, 2, 4, 2)
            of_rank = Shards(rank, problem, ranks=RANKS)
            for size in (lengths, (of_rank.q.size(2), of_rank.k.size(2))):  # of the whole, or of this rank's shards
                call = partial(of_rank.sdpa, attn_mask=bias(*size))
                of_rank.check(call, partial(context, mask=in_context, seq_len=lengths))

    run_ranks(RANKS, body)


def test_torchs_causal_bias_is_put_back() -> None:
    original = vars(CausalBias)["_dispatch"]
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    alone = imported_by_name(q, k, k, attn_mask=causal_lower_right(3, 5))

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with context_parallel(mesh):
            assert vars(CausalBias)["_dispatch"] is not original
            wrapped = [DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in (q, k, k)]
            with pytest.raises(NotImplementedError, match="takes plain tensors"):
                imported_by_name(*wrapped, attn_mask=causal_lower_right(6, 10))

    run_ranks(2, body)
    assert vars(CausalBias)["_dispatch"] is original
    assert torch.equal(imported_by_name(q, k, k, attn_mask=causal_lower_right(3, 5)), alone)


def test_dtensors_over_other_dims_are_refused() -> None:
    def body(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        whole = distribute_tensor(torch.randn(1, 2, 6, 4), mesh, [Shard(1)], src_data_rank=None)
        with context_parallel(mesh, mask=DOCUMENTS):
            imported_by_name(whole, whole, whole)

    with pytest.raises(NotImplementedError, match="the mask of this context"):  # RanksFailed if ranks differ
        run_ranks(RANKS, body)


# Nested contexts


def test_nested_contexts_and_backward_elsewhere() -> None:
    """Each has its mask; a backward belongs to the context of its forward, which was left or is another."""
    outer, inner = (MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2) for mask in (DOCUMENTS, SlidingWindow(1, 0)))
    layout = Striped(2)  # of which ranks receive rows that none of their queries reads

    def body(rank: int) -> None:
        options: dict[str, Any] = {"layout": layout, "seq_len": LENGTH}
        with context(mask=outer.mask, **options):
            with context(mask=inner.mask, **options):
                Shards(rank, inner, layout, RANKS).check()
            backward = Shards(rank, outer, layout, RANKS).forward()
        with context(mask=SlidingWindow(0, 0), layout=Contiguous()):
            backward()

    run_ranks(RANKS, body)


@pytest.mark.parametrize("names", [RING_ULYSSES, ULYSSES_RING], ids=", ".join)
def test_nested_contexts_with_other_methods(names: tuple[str, ...]) -> None:
    """Each level has its own ranks, layout and method."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        here = place(list(mesh.get_coordinate() or []), names, (2, 2))
        outer, of_rings = Shards(here, ranks=4), Shards(here, layout=Striped(1), ranks=4)
        of_axis = Shards(mesh.get_local_rank("ulysses"), layout=Contiguous())
        with context_parallel(mesh, method="hybrid", seq_len=LENGTH):
            pending = [outer.forward()]
            with context_parallel(mesh, method="ring", layout=Striped(1), seq_len=LENGTH):
                pending.append(of_rings.forward())
                pending.pop(0)()
                with context_parallel(mesh["ulysses"], method="ulysses", layout=Contiguous(), seq_len=LENGTH):
                    pending.append(of_axis.forward())
                    pending.pop(0)()
                pending.append(of_rings.forward())
            pending.append(outer.forward())
            pending.pop(0)()
            with pytest.raises(KeyError), context_parallel(mesh, method="ring"):
                raise KeyError
            pending.append(outer.forward())
        for backward in pending:
            backward()

    run_ranks(4, body)
