"""Calls that contexts refuse."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks
from torch import nn

from cp_dtensor import Contiguous, MirroredBatch, context_parallel
from cp_dtensor.api.extension import local_sdpa


def context(**options: Any) -> context_parallel:
    return context_parallel(dist.group.WORLD, **options)


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


def test_buffers_that_are_shards_by_now_are_refused_on_entry() -> None:
    def body(rank: int) -> None:
        tokens = torch.arange(16)
        options: dict[str, Any] = {"buffers": [tokens], "buffer_seq_dims": [0], "no_restore_buffers": [tokens]}
        one, other = context_parallel(dist.group.WORLD, **options), context_parallel(dist.group.WORLD, **options)
        with one, pytest.raises(ValueError, match=r"got a shard of shape \(8,\): it was"), other:
            pytest.fail("entered")
        for context in (one, other):
            with pytest.raises(ValueError, match=r"it was left sharded .* or this one before"), context:
                pytest.fail("entered")
        assert tokens.numel() == 8

    run_ranks(2, body)


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
