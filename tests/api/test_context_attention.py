"""Attention in contexts, beside what the matrix has: forms of calls, torch's modules, masks, nesting, refusals."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
    Mask,
    MirroredBatch,
    SlidingWindow,
    Striped,
    context_parallel,
    context_parallel_shard,
)
from cp_dtensor.api.extension import local_sdpa

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
            context_parallel_shard(world, [torch.arange(16)], [0], Contiguous())  # which changes nothing of the context
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


def _module(weights: bool = False, training: bool = True, mask: Any = None, keys: Any = None, **options: Any) -> object:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True, **options), torch.randn(1, 4, 8)
    return attention.train(training)(x, x, x, need_weights=weights, attn_mask=mask, key_padding_mask=keys)


def _layer(training: bool, **masks: Any) -> object:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    return layer.train(training)(torch.randn(1, 4, 8), **masks)


def _attend(*shape: int, **options: Any) -> object:
    q = torch.randn(shape)
    return F.scaled_dot_product_attention(q, q, q, **options)


def _nested() -> object:
    parts = [torch.randn(2, length, 8) for length in (3, 4)]
    nested = torch.nested.nested_tensor(parts, layout=torch.strided)
    return F.scaled_dot_product_attention(nested, nested, nested)


def _more_query_heads() -> object:
    q = torch.randn(1, 2, 4, 8)
    return F.scaled_dot_product_attention(torch.cat([q, q], 1), q, q)


MIRRORED: dict[str, Any] = {"layout": MirroredBatch()}
OF_BATCH: dict[str, Any] = MIRRORED | {"buffers": [torch.zeros(2, 8)], "buffer_seq_dims": [1]}
Refused = tuple[Callable[[], object], dict[str, Any], type[Exception], str]
# A call, the context in which it is refused, and how.
REFUSED: dict[str, Refused] = {
    "add_bias_kv": (partial(_module, add_bias_kv=True), {}, NotImplementedError, "extra key"),
    "add_zero_attn": (partial(_module, add_zero_attn=True), {}, NotImplementedError, "extra key"),
    "need_weights": (partial(_module, True), {}, NotImplementedError, "need_weights=False"),
    "need_weights without dropout": (
        partial(_module, True, False, dropout=0.1), {}, NotImplementedError, "need_weights=False"
    ),
    "nested tensors": (_nested, {}, NotImplementedError, "nested"),
    "rows of three dims": (partial(_attend, 4, 4, 8), MIRRORED, NotImplementedError, "four dims"),
    "rows of five dims": (partial(_attend, 2, 2, 2, 4, 8), MIRRORED, NotImplementedError, "four dims"),
    "another batch size": (partial(_attend, 3, 2, 4, 8), OF_BATCH, ValueError, "batch size of the buffers, 2"),
    "more query heads": (_more_query_heads, {}, ValueError, "key heads as query heads"),
}  # fmt: skip
for _mask in (torch.ones(4, 4, dtype=torch.bool), torch.zeros(4, 4)):
    REFUSED |= {
        f"{name} of this rank's keys, {_mask.dtype}": (call, {}, ValueError, r"the 8 keys of the whole sequence.*, 4\)")
        for name, call in {
            "SDPA": partial(_attend, 1, 1, 4, 8, attn_mask=_mask),
            "attn_mask": partial(_module, mask=_mask),
            "key_padding_mask": partial(_module, keys=_mask[:1]),
            "src_mask": partial(_layer, True, src_mask=_mask),
            "src_key_padding_mask": partial(_layer, False, src_key_padding_mask=_mask[:1]),
        }.items()
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_what_contexts_do_not_take_is_refused(name: str) -> None:
    call, options, error, message = REFUSED[name]

    def body(rank: int) -> None:
        buffers = [each.clone() for each in options.get("buffers", ())]
        with context(**{**options, "buffers": buffers}), pytest.raises(error, match=message):
            call()
        dist.barrier()
        if name not in ("nested tensors", "more query heads"):  # which torch does not take either
            call()

    run_ranks(2, body)


def test_jagged_tensors_are_refused_but_by_each_rank_alone() -> None:
    def body(rank: int) -> None:
        parts = [torch.randn(2, length, 8) for length in (3, 4)]
        rows = [part.transpose(0, 1) for part in parts]
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
        with context():
            with pytest.raises(NotImplementedError, match="nested"):
                F.scaled_dot_product_attention(jagged, jagged, jagged)
            with local_sdpa(queries_are_shards=False):
                inside = F.scaled_dot_product_attention(jagged, jagged, jagged)
        for out in (inside, F.scaled_dot_product_attention(jagged, jagged, jagged)):
            for got, part in zip(out.unbind(), parts, strict=True):
                torch.testing.assert_close(got, F.scaled_dot_product_attention(part, part, part))

    run_ranks(2, body)


def _vmapped(q: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: F.scaled_dot_product_attention(row, row, row, is_causal=True))(q)


def _grad_of_vmapped(q: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda q: _vmapped(q).square().sum())(q)


def _unbatched_in_vmap(q: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda x: F.scaled_dot_product_attention(q, q, q, is_causal=True) + x)(torch.zeros(1)).squeeze(0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of its kernel for CPUs
@pytest.mark.parametrize("call", [_vmapped, _grad_of_vmapped, _unbatched_in_vmap])
def test_vmap_is_refused_and_means_what_it_did_outside(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    q = torch.randn(3, 2, 4, 8)
    before = call(q)

    def body(rank: int) -> None:
        with context():
            with pytest.raises(NotImplementedError, match=r"torch\.vmap; .* any number of leading dims"):
                call(q)
            with ThreadPoolExecutor(1) as elsewhere:  # a thread without a region
                torch.testing.assert_close(elsewhere.submit(call, q).result(), before)

    run_ranks(2, body)
    assert torch.equal(call(q), before)


@pytest.mark.parametrize("ranks", [2, 3])
def test_queries_of_a_whole_buffer_s_length_are_refused(ranks: int) -> None:
    def body(rank: int) -> None:
        tokens, copies = torch.arange(12), torch.ones(1, 1, 12, 8)
        q = copies.tensor_split(ranks, 2)[rank]
        options: dict[str, Any] = {"buffers": [tokens], "buffer_seq_dims": [0], "layout": Contiguous()}
        with context(**options):
            with pytest.raises(ValueError, match=rf"got 12 local tokens on each of {ranks} ranks, .* seq_len="):
                F.scaled_dot_product_attention(copies, copies, copies)
            F.scaled_dot_product_attention(q, q, q)
            F.scaled_dot_product_attention(q, copies, copies)  # of whole keys it makes no difference
        with context(seq_len=12 * ranks, **options):
            F.scaled_dot_product_attention(copies, copies, copies)

    run_ranks(ranks, body)
