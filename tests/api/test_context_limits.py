"""Refusals of contexts, and buffers in unusual orders of contexts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, MirroredBatch, context_parallel
from cp_dtensor.api.extension import local_sdpa


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _with_extra_key(option: str) -> object:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True, **{option: True}), torch.randn(1, 4, 8)
    return attention(x, x, x, need_weights=False)


def _attend(*shape: int) -> object:
    q = torch.randn(shape)
    return F.scaled_dot_product_attention(q, q, q)


def _nested() -> object:
    parts = [torch.randn(2, length, 8) for length in (3, 4)]
    nested = torch.nested.nested_tensor(parts, layout=torch.strided)
    return F.scaled_dot_product_attention(nested, nested, nested)


MIRRORED: dict[str, Any] = {"layout": MirroredBatch()}
# A call, the context in which it is refused, and how.
REFUSED: dict[str, tuple[Callable[[], object], dict[str, Any], type[Exception], str]] = {
    "add_bias_kv": (lambda: _with_extra_key("add_bias_kv"), {}, NotImplementedError, "extra key"),
    "add_zero_attn": (lambda: _with_extra_key("add_zero_attn"), {}, NotImplementedError, "extra key"),
    "nested tensors": (_nested, {}, NotImplementedError, "nested"),
    "rows of three dims": (lambda: _attend(4, 4, 8), MIRRORED, NotImplementedError, "four dims"),
    "rows of five dims": (lambda: _attend(2, 2, 2, 4, 8), MIRRORED, NotImplementedError, "four dims"),
    "another batch size": (
        lambda: _attend(3, 2, 4, 8), MIRRORED | {"buffers": [torch.zeros(2, 8)], "buffer_seq_dims": [1]}, ValueError,
        "batch size of the buffers, 2",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_what_contexts_do_not_take_is_refused(name: str) -> None:
    call, options, error, message = REFUSED[name]

    def body(rank: int) -> None:
        buffers = [each.clone() for each in options.get("buffers", ())]
        with context_parallel(group(), **{**options, "buffers": buffers}), pytest.raises(error, match=message):
            call()
        dist.barrier()
        if name != "nested tensors":  # which torch does not take either
            call()

    run_ranks(2, body)


@pytest.mark.parametrize("mask", [torch.ones(4, 4, dtype=torch.bool), torch.zeros(4, 4)], ids=["boolean", "additive"])
def test_masks_of_the_keys_of_this_rank_are_refused(mask: torch.Tensor) -> None:
    def body(rank: int) -> None:
        hidden = torch.randn(1, 4, 8)
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        q = hidden.unsqueeze(1)
        calls: list[Callable[[], object]] = [
            lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
            lambda: attention(hidden, hidden, hidden, need_weights=False, attn_mask=mask),
            lambda: attention(hidden, hidden, hidden, need_weights=False, key_padding_mask=mask[:1]),
            lambda: layer(hidden, src_mask=mask),
            lambda: layer.eval()(hidden, src_key_padding_mask=mask[:1]),
        ]
        for call in calls:
            with context_parallel(group()), pytest.raises(ValueError, match=r"the 8 keys of the whole sequence.*, 4\)"):
                call()
            dist.barrier()

    run_ranks(2, body)


def test_jagged_tensors_are_refused_but_by_each_rank_alone() -> None:
    def body(rank: int) -> None:
        parts = [torch.randn(2, length, 8) for length in (3, 4)]
        rows = [part.transpose(0, 1) for part in parts]
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
        with context_parallel(group()):
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
    grad: torch.Tensor = torch.func.grad(lambda q: _vmapped(q).square().sum())(q)
    return grad


def _unbatched_in_vmap(q: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda x: F.scaled_dot_product_attention(q, q, q, is_causal=True) + x)(torch.zeros(1)).squeeze(0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of its kernel for CPUs
@pytest.mark.parametrize("call", [_vmapped, _grad_of_vmapped, _unbatched_in_vmap])
def test_vmap_is_refused_and_means_what_it_did_outside(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    q = torch.randn(3, 2, 4, 8)
    before = call(q)

    def body(rank: int) -> None:
        with context_parallel(group()):
            with pytest.raises(NotImplementedError, match=r"torch\.vmap; .* any number of leading dims"):
                call(q)
            with ThreadPoolExecutor(1) as elsewhere:  # a thread without a region
                torch.testing.assert_close(elsewhere.submit(call, q).result(), before)

    run_ranks(2, body)
    assert torch.equal(call(q), before)


def test_contexts_over_one_buffer_left_in_the_wrong_order_are_refused() -> None:
    def body(rank: int) -> None:
        tokens, mesh = torch.arange(16), init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "gpus"))
        options: dict[str, Any] = {"buffers": [tokens], "buffer_seq_dims": [0], "layout": Contiguous()}
        outer = context_parallel(mesh["nodes"], **options)
        outer.__enter__()
        inner = context_parallel(mesh["gpus"], **options)
        inner.__enter__()
        assert tokens.numel() == 4
        with pytest.raises(RuntimeError, match="reverse order"):
            outer.__exit__(None, None, None)
        assert tokens.numel() == 4  # nothing has changed
        inner.__exit__(None, None, None)
        outer.__exit__(None, None, None)
        assert torch.equal(tokens, torch.arange(16))

    run_ranks(4, body)


def test_buffers_that_are_shards_by_now_are_refused_on_entry() -> None:
    def body(rank: int) -> None:
        tokens = torch.arange(16)
        options: dict[str, Any] = {"buffers": [tokens], "buffer_seq_dims": [0], "no_restore_buffers": [tokens]}
        one, other = context_parallel(group(), **options), context_parallel(group(), **options)
        with one, pytest.raises(ValueError, match=r"got a shard of shape \(8,\): it was"), other:
            pytest.fail("entered")
        for context in (one, other):
            with pytest.raises(ValueError, match=r"it was left sharded .* or this one before"), context:
                pytest.fail("entered")
        assert tokens.numel() == 8

    run_ranks(2, body)


def test_shards_are_no_buffers_over_the_same_ranks() -> None:
    def body(rank: int) -> None:
        tokens, labels, mesh = torch.arange(16), torch.arange(16), init_device_mesh("cpu", (2, 2))
        rows, cols = mesh.get_group(0), mesh.get_group(1)
        with context_parallel(rows, buffers=[tokens, labels], buffer_seq_dims=[0, 0], no_restore_buffers=[labels]):
            for index, buffers in enumerate(([tokens], [labels.clone(), tokens])):
                with pytest.raises(ValueError, match=rf"buffer {index}: .* a shard of shape \(8,\): it is a buffer of"):
                    context_parallel(rows, buffers=buffers, buffer_seq_dims=[0] * len(buffers))
            with context_parallel(cols, buffers=[tokens], buffer_seq_dims=[0]):
                assert len(tokens) == 4
        with pytest.raises(ValueError, match=r"a shard of shape \(8,\): it was left sharded \(no_restore_buffers\) by"):
            context_parallel(rows, buffers=[tokens, labels], buffer_seq_dims=[0, 0])
        context_parallel(cols, buffers=[tokens, labels], buffer_seq_dims=[0, 0])
        labels.set_(torch.arange(16))
        context_parallel(rows, buffers=[tokens, labels], buffer_seq_dims=[0, 0])

    run_ranks(4, body)


@pytest.mark.parametrize("ranks", [2, 3])
def test_queries_of_a_whole_buffer_s_length_are_refused(ranks: int) -> None:
    def body(rank: int) -> None:
        tokens, copies = torch.arange(12), torch.ones(1, 1, 12, 8)
        q = copies.tensor_split(ranks, 2)[rank]
        options: dict[str, Any] = {"buffers": [tokens], "buffer_seq_dims": [0], "layout": Contiguous()}
        with context_parallel(group(), **options):
            with pytest.raises(ValueError, match=rf"got 12 local tokens on each of {ranks} ranks, .* seq_len="):
                F.scaled_dot_product_attention(copies, copies, copies)
            F.scaled_dot_product_attention(q, q, q)
            F.scaled_dot_product_attention(q, copies, copies)  # of whole keys it makes no difference
        with context_parallel(group(), seq_len=12 * ranks, **options):
            F.scaled_dot_product_attention(copies, copies, copies)

    run_ranks(ranks, body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffers": torch.arange(4), "buffer_seq_dims": [0]}, "buffers to be a sequence"),
        ({"buffers": [torch.arange(4)], "buffer_seq_dims": 0}, "buffer_seq_dims to be a sequence"),
        (
            {"buffers": [torch.arange(4)], "buffer_seq_dims": [0], "no_restore_buffers": torch.arange(4)},
            "no_restore_buffers to be a collection",
        ),
    ],
)
def test_a_single_value_where_several_are_expected_is_refused(options: dict[str, Any], message: str) -> None:
    def body(rank: int) -> None:
        with pytest.raises(TypeError, match=message):
            context_parallel(group(), **options)

    run_ranks(2, body)
