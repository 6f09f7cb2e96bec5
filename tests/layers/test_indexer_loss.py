"""The loss of the indexer, and its gradients, equal one process, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.collectives import check_refused_before_any_exchange, kinds, recorded_collectives
from support.masked_problems import shown
from support.ranks import run_ranks
from support.sequences import Sequence, check_layer, equal, normal, sequences
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Mask,
    SlidingWindow,
    context_parallel,
    indexer_loss,
)
from cp_dtensor.layers import indexer_loss as module

SCALE = 0.7


def target(sequence: Sequence, keys: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q (B, S, 4, 3), k (B, S, 2, 3), and indices of distinct keys, some rows with few or none."""
    batch, length = sequence.batch, sequence.length
    q, k = normal(batch, length, 4, 3, seed=11), normal(batch, length, 2, 3, seed=12)
    if keys is None:
        return q, k, None
    order = normal(batch, length, length, seed=5).argsort(2)[..., :keys]
    order = F.pad(order, (0, keys - order.size(2)), value=-1)
    return q, k, order.masked_fill(normal(*order.shape, seed=6) > 0.5, -1).int()


def indexer(sequence: Sequence) -> list[torch.Tensor]:
    """q_index (B, S, 3, 2), k_index (B, S, 2) and weights (B, S, 3)."""
    return [normal(sequence.batch, sequence.length, *dims, seed=len(dims)) for dims in ((3, 2), (2,), (3,))]


def dense(
    q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, q_index: torch.Tensor, k_index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The loss of whole sequences by `F.kl_div`; `seen` is (B or 1, S, S)."""
    scores = (torch.einsum("bthd,bsd->bths", q_index, k_index).relu() * weights.unsqueeze(3)).sum(2)
    logits = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, 2)) * SCALE
    attention = logits.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(3).sum(1)
    attention = attention / attention.sum(2, keepdim=True)
    found = scores.masked_fill(~seen, float("-inf")).log_softmax(2).masked_fill(~seen, 0.0)
    return F.kl_div(found, attention.masked_fill(~seen, 0.0), reduction="none").sum(2)


def seen_keys(sequence: Sequence, mask: Mask | None, indices: torch.Tensor | None) -> torch.Tensor:
    """The keys of each query, (B or 1, S, S)."""
    length = sequence.length
    if indices is None:
        return (shown(mask or Full(), length, length, sequence.batch) & shown(Causal(), length, length, 1))[:, 0]
    seen = torch.zeros(sequence.batch, length, length + 1, dtype=torch.bool)
    seen.scatter_(2, indices.long().masked_fill(indices < 0, length), torch.ones_like(indices, dtype=torch.bool))
    return seen[..., :-1]


def ours(sequence: Sequence, wanted: tuple[Any, ...], **changed: Any) -> Callable[..., torch.Tensor]:
    """`indexer_loss` for `check_layer`."""

    def call(mesh: Any, *given: torch.Tensor) -> torch.Tensor:
        q, k, indices = (None if x is None else sequence.shard(x, dist.get_rank()) for x in wanted)
        assert q is not None
        assert k is not None
        options = {"layout": sequence.layout, "seq_len": sequence.length, "scale": SCALE, "mesh": mesh, **changed}
        return indexer_loss(*given, q.transpose(1, 2), k.transpose(1, 2), indices=indices, **options)

    return call


@settings(max_examples=examples(60))
@given(sequences(), st.one_of(st.none(), st.integers(1, 30)), st.integers(0, 2), st.sampled_from([1 << 26, 400]))
def test_loss_and_gradients_are_those_of_one_process(
    sequence: Sequence, keys: int | None, kind: int, block: int
) -> None:
    edges = sequence.edges if sequence.has_documents else (0, sequence.length)
    mask: Mask | None = [None, Documents(edges), SlidingWindow(3, 1)][kind]  # type: ignore[arg-type]
    wanted = target(sequence, keys)
    reference = partial(dense, *wanted[:2], seen_keys(sequence, mask, wanted[2]))
    with mock.patch.object(module, "_BYTES", block):
        check_layer(sequence, ours(sequence, wanted, mask=mask), reference, indexer(sequence))


@pytest.mark.parametrize("alone", range(3))
def test_each_gradient_alone_in_a_checkpoint_over_two_axes(alone: int) -> None:
    sequence = Sequence(5, 6, HeadTail(), 2)
    wanted = target(sequence, 3)
    call = ours(sequence, wanted)
    check_layer(
        sequence, lambda *x: checkpoint(call, *x, use_reentrant=False),
        partial(dense, *wanted[:2], seen_keys(sequence, None, wanted[2])), indexer(sequence), mesh_shape=(3, 2),
        alone=alone,
    )  # fmt: skip


def test_what_travels_and_in_which_dtype() -> None:
    """Index keys and keys of attention in bfloat16; in backward gradients of index keys alone, in float32."""
    sequence = Sequence(16, 8, Contiguous())

    def body(rank: int) -> None:
        given = [sequence.shard(x, rank).bfloat16().requires_grad_() for x in indexer(sequence)]
        q, k, indices = target(sequence, 4)
        q, k = (sequence.shard(x, rank).bfloat16().requires_grad_() for x in (q, k))
        assert indices is not None
        loss = indexer_loss(
            *given, q.transpose(1, 2), k.transpose(1, 2), indices=sequence.shard(indices, rank), scale=SCALE,
            mesh=dist.group.WORLD, layout=sequence.layout,
        )  # fmt: skip
        assert loss.dtype == torch.float32
        loss.sum().backward()
        assert q.grad is None
        assert k.grad is None
        assert [x.grad.dtype for x in given] == [torch.bfloat16] * 3  # type: ignore[union-attr]

    with recorded_collectives() as collectives:
        run_ranks(8, body)
    assert kinds(collectives) == ["AllToAllBase"] * 3
    assert [each.sent[0].size(-1) for each in collectives[::8]] == [2 * 2, 2 * 2 * 3, 4 * 2]  # bytes of a token


def test_dtensors_and_a_context() -> None:
    sequence, mask = Sequence(10, 2, Contiguous(), 2), Documents([0, 4, 10])
    wanted, given = target(sequence, None), indexer(sequence)
    expected = dense(*wanted[:2], seen_keys(sequence, mask, None), *given)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        placed = [distribute_tensor(x, mesh, [Shard(1), Replicate()]).requires_grad_() for x in given]
        q, k = (distribute_tensor(x.transpose(1, 2), mesh, [Shard(2), Shard(1)]) for x in wanted[:2])  # type: ignore[union-attr]
        loss = indexer_loss(*placed, q, k, scale=SCALE, mask=mask)
        assert isinstance(loss, DTensor)
        equal(loss.full_tensor(), expected)
        heads = [distribute_tensor(x, mesh, [Shard(1), Shard(2)]) for x in given[::2]]
        with pytest.raises(ValueError, match="indexer_loss expects a DTensor sharded along dims"):
            indexer_loss(heads[0], placed[1], heads[1], q, k, scale=SCALE)
        mine = [sequence.shard(x, rank // 2) for x in given]
        local = [sequence.shard(x, rank // 2).transpose(1, 2) for x in wanted[:2]]  # type: ignore[arg-type]
        with context_parallel(mesh["cp"], layout=Contiguous(), mask=mask, seq_len=10):
            equal(indexer_loss(*mine, *local, scale=SCALE, mesh=mesh["cp"]), sequence.shard(expected, rank // 2))

    run_ranks(4, body)


def test_the_example_of_the_docstring() -> None:
    def body(rank: int) -> None:
        q_index, k_index = torch.ones(1, 2, 1, 1), torch.tensor([[[1.0], [3.0]]]).log()
        q = torch.zeros(1, 1, 2, 4)
        loss = indexer_loss(q_index, k_index, torch.ones(1, 2, 1), q, q, scale=0.5, mesh=dist.group.WORLD)
        equal(loss, torch.tensor([[0.0, 0.5 * torch.tensor(4 / 3).log()]]), 1e-6)

    run_ranks(1, body)


GIVEN, (Q, KEYS, CHOSEN) = indexer(Sequence(3, 1, Contiguous())), target(Sequence(3, 1, Contiguous()), 2)


def _loss(**changed: Any) -> Callable[[Any], object]:
    names = dict(zip(("q_index", "k_index", "weights"), GIVEN, strict=True))
    given = {**names, "q": Q.transpose(1, 2), "k": KEYS.transpose(1, 2), "indices": CHOSEN, "scale": SCALE, **changed}
    return lambda mesh: indexer_loss(**{"mesh": mesh, **given})


BAD = [
    (r"k_index \(batch, tokens, index_dims\), where .*; got \(1, 3, 3\)", _loss(k_index=GIVEN[2])),
    ("got q_index torch.float64 .*, k_index torch.float32", _loss(k_index=GIVEN[1].float())),
    (r"q \(batch, heads, tokens, dims\), where batch 1, tokens 3, .*; got \(1, 4, 2, 3\)",
     _loss(q=Q[:, :2].transpose(1, 2), k=KEYS[:, :2].transpose(1, 2), indices=CHOSEN[:, :2])),
    (r"a multiple of the 2 groups as heads; got .* q .* \(1, 3, 3, 3\)", _loss(q=Q[:, :, :3].transpose(1, 2))),
    ("k torch.float32", _loss(k=KEYS.float().transpose(1, 2))),
    (r"k \(batch, groups, tokens, dims\), where .*; got \(1, 2, 3, 2\)", _loss(k=KEYS[..., :2].transpose(1, 2))),
    ("indices of int32 or int64; got .* indices torch.float32", _loss(indices=CHOSEN.float())),
    ("indices from -1 to the last of 6 tokens, got .* to 6", _loss(indices=torch.full_like(CHOSEN, 6))),
    ("expected a finite scale, got nan", _loss(scale=float("nan"))),
    ("NoneType", _loss(scale=None)),
    ("expected is_causal to be True or False, got 1", _loss(is_causal=1)),
]  # fmt: skip


def test_refused_before_any_exchange() -> None:
    check_refused_before_any_exchange(BAD)
