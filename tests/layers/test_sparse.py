"""Selected keys and attention over them equal one process, on ranks that are threads."""

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
from support.collectives import check_refused_before_any_exchange, errors_by_rank, kinds, recorded_collectives
from support.masked_problems import shown
from support.ranks import run_ranks
from support.sequences import Sequence, check_layer, equal, normal, sequences, with_sinks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Batched,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Mask,
    MirroredBatch,
    SlidingWindow,
    Striped,
    block_attention,
    context_parallel,
    indexed_attention,
    select_blocks,
    select_keys,
)
from cp_dtensor.layers import chosen_reference, indexer

HEADS, PLAIN, ROTARY, VALUES, RANK = 2, 3, 2, 4, 5
"""H, Dn, Dr, Dv and R."""
small_blocks = st.sampled_from([1 << 26, 400])
"""Bytes of a block: all, and few rows."""


def best_keys(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk: int, seen: torch.Tensor) -> torch.Tensor:
    """The best keys (B, S, topk) of whole sequences; `seen` is (B or 1, 1, S, S)."""
    return best_of((torch.einsum("bthd,bsd->bths", q, k).relu() * weights.unsqueeze(3)).sum(2), topk, seen)


def best_of(scores: torch.Tensor, topk: int, seen: torch.Tensor) -> torch.Tensor:
    """The keys of the best scores (B, S, S), by a stable sort."""
    length = scores.size(1)
    best = scores.masked_fill(~seen[:, 0], float("-inf")).sort(dim=2, descending=True, stable=True)
    index = best.indices.masked_fill(best.values == float("-inf"), length)[..., :topk].sort(2).values
    index = F.pad(index, (0, topk - index.size(2)), value=length)
    return index.masked_fill(index == length, -1).int()


def attention(
    indices: torch.Tensor, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of whole sequences, q and out (B, S, H, D), with expanded keys and values."""
    batch, length, heads = q.shape[:3]
    expanded = torch.einsum("bsr,hdr->bhsd", latent, up.unflatten(0, (heads, -1)))
    k = torch.cat([expanded[..., :PLAIN], k_rope.unsqueeze(1).expand(-1, heads, -1, -1)], 3)
    seen = torch.zeros(batch, length, length + 1, dtype=torch.bool)
    seen.scatter_(2, indices.long().masked_fill(indices < 0, length), torch.ones_like(indices, dtype=torch.bool))
    return with_sinks(q, k, expanded[..., PLAIN:], seen[:, None, :, :-1], sinks)


def problem(sequence: Sequence, keys: int, with_sinks: bool = True) -> tuple[list[Any], list[Any], torch.Tensor]:
    """Tensors of tokens, those that are whole, and indices: distinct keys, some rows with few or none."""
    batch, length = sequence.batch, sequence.length
    tokens = [
        normal(batch, length, HEADS, PLAIN + ROTARY), normal(batch, length, RANK, seed=1),
        normal(batch, length, ROTARY, seed=2),
    ]  # fmt: skip
    whole = [normal(HEADS * (PLAIN + VALUES), RANK, seed=3), normal(HEADS, seed=4)][: 1 + with_sinks]
    order = normal(batch, length, length, seed=5).argsort(2)[..., :keys]
    order = F.pad(order, (0, keys - order.size(2)), value=-1)
    return tokens, whole, order.masked_fill(normal(*order.shape, seed=6) > 0.5, -1).int()


def attend(sequence: Sequence, indices: torch.Tensor, **changed: Any) -> Callable[..., torch.Tensor]:
    """`indexed_attention` for `check_layer`, q and out (B, S, H, D)."""

    def ours(mesh: Any, q: Any, latent: Any, k_rope: Any, up: Any, sinks: Any = None) -> torch.Tensor:
        mine = sequence.shard(indices, dist.get_rank())
        options = {"mesh": mesh, "layout": sequence.layout, "seq_len": sequence.length, **changed}
        out = indexed_attention(q.transpose(1, 2), latent, k_rope, up=up, indices=mine, sinks=sinks, **options)
        return out.transpose(1, 2)

    return ours


def selected(sequence: Sequence, given: list[torch.Tensor], topk: int, **options: Any) -> list[torch.Tensor]:
    """`select_keys` on each rank."""
    place = {"layout": sequence.layout, "seq_len": sequence.length, "topk": topk, **options}

    def body(rank: int) -> torch.Tensor:
        shards = [sequence.shard(x, rank) for x in given]
        return select_keys(*shards, mesh=dist.group.WORLD, **place)  # type: ignore[arg-type]

    return run_ranks(sequence.ranks, body)


@settings(max_examples=examples(60))
@given(sequences(), st.integers(1, 30), st.booleans(), st.integers(0, 4), st.booleans(), small_blocks)
def test_keys_are_those_of_one_process(
    sequence: Sequence, topk: int, is_causal: bool, kind: int, has_ties: bool, block: int
) -> None:
    """Ties are of small integers, whose scores are exact."""
    mask = masks_of(sequence)[kind]
    given = [normal(sequence.batch, sequence.length, *dims, seed=len(dims)) for dims in ((3, 2), (2,), (3,))]
    given[2] = given[2] + normal(1, 1, 3, seed=9)
    given = [x.round() for x in given] if has_ties else given
    seen = shown(mask or Full(), sequence.length, sequence.length, sequence.batch)
    wanted = best_keys(*given, topk, seen & shown(Causal(), *[sequence.length] * 2, 1) if is_causal else seen)
    with mock.patch.object(indexer, "_BYTES", block):
        found = selected(sequence, given, topk, is_causal=is_causal, mask=mask)
    for rank, got in enumerate(found):
        assert got.dtype == torch.int32
        assert torch.equal(got, sequence.shard(wanted, rank))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ties_of_equal_keys_go_to_the_first_ones_on_any_number_of_ranks(dtype: torch.dtype) -> None:
    """Products of equal keys in different columns differ in the last bits."""
    length, topk, distinct = 203, 40, 3
    place = torch.arange(length) % distinct
    q, k, weights = normal(2, length, 5, 16, seed=1), normal(2, distinct, 16), normal(2, length, 5, seed=2)
    given = [x.to(dtype) for x in (q, k[:, place], weights)]
    # Scores of the distinct keys, so that those of equal keys are equal.
    scores = torch.einsum("bthd,bsd->bths", given[0].double(), given[1][:, :distinct].double()).relu()
    scores = (scores * given[2].double().unsqueeze(3)).sum(2).float()[..., place]
    wanted = best_of(scores, topk, shown(Causal(), length, length, 1))
    for ranks, layout in ((1, HeadTail()), (2, HeadTail()), (3, Striped(2)), (4, MirroredBatch()), (8, Contiguous())):
        sequence = Sequence(length, ranks, layout, 2)
        for rank, got in enumerate(selected(sequence, given, topk)):
            assert torch.equal(got, sequence.shard(wanted, rank)), (ranks, layout)


@settings(max_examples=examples(60))
@given(sequences(), st.integers(1, 30), st.booleans(), small_blocks)
def test_attention_and_gradients_are_those_of_one_process(
    sequence: Sequence, keys: int, with_sinks: bool, block: int
) -> None:
    tokens, whole, indices = problem(sequence, keys, with_sinks)
    with mock.patch.object(chosen_reference, "_BYTES", block):
        check_layer(sequence, attend(sequence, indices), partial(attention, indices), tokens, whole)


def masks_of(sequence: Sequence) -> list[Mask | None]:
    """Masks that fit a sequence."""
    documents = Documents(sequence.edges if sequence.has_documents else (0, sequence.length))  # type: ignore[arg-type]
    by_row = Batched([Causal(), SlidingWindow(1, 0), documents][: sequence.batch])
    return [None, documents, SlidingWindow(3, 1), documents | SlidingWindow(2, None), by_row]


@settings(max_examples=examples(60))
@given(sequences(), st.integers(1, 9), st.integers(1, 6), st.integers(0, 2), st.integers(0, 4), small_blocks)
def test_blocks_are_those_of_one_process(
    sequence: Sequence, size: int, topk: int, local: int, kind: int, block: int
) -> None:
    length, batch, mask = sequence.length, sequence.batch, masks_of(sequence)[kind]
    given = [normal(batch, length, 2, 3).round(), normal(batch, length, 3, seed=1).round()]
    seen = shown(mask or Full(), length, length, batch) & shown(Causal(), length, length, 1)
    scores = torch.einsum("bthd,bsd->bhts", *given).masked_fill(~seen, float("-inf"))
    pooled = F.pad(scores, (0, -length % size), value=float("-inf")).unflatten(3, (-1, size)).amax(4)
    own, numbers = torch.arange(length).unsqueeze(1) // size, torch.arange(pooled.size(3))
    boosted = pooled.masked_fill((numbers <= own) & (numbers > own - local), float("inf"))
    is_seen = pooled > float("-inf")
    wanted = [best_of(boosted[:, head], topk, is_seen[:, head : head + 1]) for head in range(2)]
    options: dict[str, Any] = {"layout": sequence.layout, "seq_len": length, "mask": mask, "local_blocks": local}

    def body(rank: int) -> torch.Tensor:
        shards = [sequence.shard(x, rank) for x in given]
        return select_blocks(*shards, block_size=size, topk=topk, mesh=dist.group.WORLD, **options)

    with mock.patch.object(indexer, "_BYTES", block):
        found = run_ranks(sequence.ranks, body)
    for rank, got in enumerate(found):
        assert torch.equal(got, sequence.shard(torch.stack(wanted, 2), rank))


def block_problem(sequence: Sequence, size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v (B, S, H, D) of 4 and 2 heads, and numbers of distinct blocks, -1 for some."""
    batch, length = sequence.batch, sequence.length
    tokens = [normal(batch, length, heads, dim, seed=dim) for heads, dim in ((4, 3), (2, 3), (2, 5))]
    order = normal(batch, length, 2, -(-length // size), seed=7).argsort(3)[..., :3]
    order = F.pad(order, (0, 1), value=-1)
    return tokens, order.masked_fill(normal(*order.shape, seed=8) > 0.7, -1)


def dense_blocks(
    numbers: torch.Tensor, size: int, seen: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sinks: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Attention of whole sequences over blocks, q and out (B, S, H, D); `seen` (B or 1, 1, S, S) is the mask."""
    length = q.size(1)
    block_of = torch.arange(length) // size
    in_blocks = (numbers.transpose(1, 2).unsqueeze(3) == block_of.view(-1, 1)).any(4)
    return with_sinks(q, k.transpose(1, 2), v.transpose(1, 2), in_blocks.repeat_interleave(2, 1) & seen, sinks)


@settings(max_examples=examples(60))
@given(sequences(), st.integers(1, 9), st.booleans(), st.integers(0, 4), small_blocks)
def test_attention_over_blocks_is_that_of_one_process(
    sequence: Sequence, size: int, is_causal: bool, kind: int, block: int
) -> None:
    (tokens, numbers), mask = block_problem(sequence, size), masks_of(sequence)[kind]
    seen = shown(mask or Full(), sequence.length, sequence.length, sequence.batch)
    seen = seen & shown(Causal(), sequence.length, sequence.length, 1) if is_causal else seen

    def ours(mesh: Any, q: Any, k: Any, v: Any, sinks: Any) -> torch.Tensor:
        mine = sequence.shard(numbers, dist.get_rank())
        options = {"layout": sequence.layout, "seq_len": sequence.length, "mask": mask, "is_causal": is_causal}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = block_attention(q, k, v, block_indices=mine, block_size=size, sinks=sinks, mesh=mesh, **options)
        return out.transpose(1, 2)

    with mock.patch.object(chosen_reference, "_BYTES", block):
        check_layer(sequence, ours, partial(dense_blocks, numbers, size, seen), tokens, [normal(4, seed=4)])


@pytest.mark.parametrize("alone", range(5))
def test_each_gradient_alone_in_a_checkpoint_over_two_axes(alone: int) -> None:
    """Ranks without tokens, too, exchange in recomputes."""
    sequence = Sequence(5, 6, HeadTail(), 2)
    tokens, whole, indices = problem(sequence, 3)
    ours = attend(sequence, indices)
    check_layer(
        sequence, lambda *x: checkpoint(ours, *x, use_reentrant=False), partial(attention, indices), tokens,
        whole, mesh_shape=(3, 2), alone=alone,
    )  # fmt: skip


def test_one_exchange_each_and_gradients_of_rows_in_float32() -> None:
    """Rows of latents and rotary keys in bfloat16, their gradients in float32."""
    sequence = Sequence(16, 8, Contiguous())
    tokens, whole, indices = problem(sequence, 4)

    def body(rank: int) -> None:
        mine = [sequence.shard(x, rank).bfloat16().requires_grad_() for x in tokens]
        attend(sequence, indices)(dist.group.WORLD, *mine, *[x.bfloat16() for x in whole]).sum().backward()

    with recorded_collectives() as collectives:
        run_ranks(8, body)
    assert kinds(collectives) == ["AllToAllBase", "AllToAllBase"]
    assert [each.sent[0].size(-1) for each in collectives[::8]] == [2 * (RANK + ROTARY), 4 * (RANK + ROTARY)]  # bytes
    with recorded_collectives() as collectives:
        selected(sequence, [normal(1, 16, 2, 3), normal(1, 16, 3), normal(1, 16, 2)], 4)
    assert kinds(collectives) == ["AllToAllBase"]


def test_nan_of_a_key_reaches_the_queries_that_chose_it_alone() -> None:
    sequence = Sequence(6, 2, HeadTail())
    tokens, whole, _ = problem(sequence, 2)
    tokens[0][:, 5] = float("nan")
    tokens[1][:, 0] = float("inf")
    indices = torch.tensor([[[1, -1], [0, 3], [2, 1], [-1, -1], [4, 1], [4, -1]]])

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = [sequence.shard(x, rank).requires_grad_() for x in tokens]
        out = attend(sequence, indices)(dist.group.WORLD, *mine, whole[0])
        return out.detach(), torch.autograd.grad(out.sum(), mine[1])[0]

    for rank, (out, grad) in enumerate(run_ranks(2, body)):
        positions = sequence.shard(torch.arange(6).view(1, 6, 1), rank).flatten().tolist()
        assert [at for at, x in zip(positions, out[0], strict=True) if not x.isfinite().all()] == [
            at for at in positions if at in (1, 5)
        ]
        assert {at for at, x in zip(positions, grad[0], strict=True) if not x.isfinite().all()} <= {0, 3, 4}


def test_a_nan_score_is_selected() -> None:
    q, k = torch.ones(1, 4, 1, 1), torch.tensor([[[1.0], [float("nan")], [3.0], [2.0]]])
    (got,) = selected(Sequence(4, 1, Contiguous()), [q, k, torch.ones(1, 4, 1)], 2)
    assert got[0].tolist() == [[0, -1], [0, 1], [1, 2], [1, 2]]


def test_dtensors() -> None:
    """Along the sequence and along heads."""
    sequence = Sequence(7, 2, Contiguous(), 2)
    tokens, whole, indices = problem(sequence, 3)
    leaves = [x.clone().requires_grad_() for x in (*tokens, *whole)]
    wanted = attention(indices, *leaves)
    expected = torch.autograd.grad(wanted.square().sum(), leaves)
    index_tensors = [normal(2, 7, 3, 4), normal(2, 7, 4, seed=1), normal(2, 7, 3, seed=2)]
    seen = shown(Causal(), 7, 7, 1)
    best, (blocks, numbers), logits = best_keys(*index_tensors, 3, seen), block_problem(sequence, 2), normal(4)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        placements = [[Shard(1), Shard(2)], *[[Shard(1), Replicate()]] * 2, *[[Replicate(), Shard(0)]] * 2]
        q, latent, k_rope, up, sinks = (
            distribute_tensor(x, mesh, each).requires_grad_()
            for x, each in zip((*tokens, *whole), placements, strict=True)
        )
        local = distribute_tensor(indices, mesh, [Shard(1), Replicate()])
        out = indexed_attention(q.transpose(1, 2), latent, k_rope, up=up, indices=local, sinks=sinks)
        assert isinstance(out, DTensor)
        assert tuple(out.placements) == (Shard(2), Shard(1))
        equal(out.full_tensor().transpose(1, 2), wanted)
        grads = torch.autograd.grad(out.square().sum(), [q, latent, k_rope, up, sinks])
        for got, of_all in zip(grads, expected, strict=True):
            equal(got.full_tensor(), of_all)  # type: ignore[attr-defined]
        heads = [distribute_tensor(x.transpose(1, 2), mesh, [Shard(2), Shard(1)]) for x in blocks]
        of_blocks = {"block_indices": distribute_tensor(numbers, mesh, [Shard(1), Shard(2)]), "block_size": 2}
        got = block_attention(*heads, sinks=distribute_tensor(logits, mesh, [Replicate(), Shard(0)]), **of_blocks)
        equal(got.full_tensor().transpose(1, 2), dense_blocks(numbers, 2, seen, *blocks, logits))  # type: ignore[attr-defined]
        one = distribute_tensor(blocks[1].transpose(1, 2)[:, :1], mesh, [Shard(2), Replicate()])
        with pytest.raises(ValueError, match="the 2 ranks over which those of q are sharded"):
            block_attention(heads[0], one, one, block_size=2, block_indices=of_blocks["block_indices"][:, :, :1])
        placed = [distribute_tensor(x, mesh, [Shard(1), Replicate()]) for x in index_tensors]
        assert torch.equal(select_keys(*placed, topk=3).full_tensor(), best)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="select_keys expects a DTensor sharded along dims"):
            select_keys(distribute_tensor(index_tensors[0], mesh, [Shard(1), Shard(2)]), *placed[1:], topk=3)
        wide = distribute_tensor(tokens[0].transpose(1, 2), mesh, [Shard(2), Shard(3)])
        with pytest.raises(ValueError, match="indexed_attention expects a DTensor sharded along dims"):
            indexed_attention(wide, latent, k_rope, up=up, indices=local)
        halves = up.redistribute(mesh, [Shard(0), Shard(0)])  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="expects up sharded by whole heads, got 2 heads on 4 ranks"):
            indexed_attention(q.transpose(1, 2), latent, k_rope, up=halves, indices=local)

    run_ranks(4, body)


def test_layout_mask_and_length_of_the_context() -> None:
    sequence, mask = Sequence(10, 2, Striped(2)), Documents([0, 4, 10], within=SlidingWindow(2, 2))
    given = [normal(1, 10, 3, 2), normal(1, 10, 2, seed=1), normal(1, 10, 3, seed=2)]

    def body(rank: int) -> None:
        mesh, mine = init_device_mesh("cpu", (2,)), [sequence.shard(x, rank) for x in given]
        with context_parallel(mesh, layout=Striped(2), mask=mask, seq_len=10):
            for own, seen in ((None, mask & Causal()), (Full(), Causal())):
                wanted = best_keys(*given, 3, shown(seen, 10, 10, 1))
                assert torch.equal(select_keys(*mine, topk=3, mesh=mesh, mask=own), sequence.shard(wanted, rank))
            tokens, whole, indices = problem(sequence, 3)
            local = [sequence.shard(x, rank) for x in tokens]
            out = attend(sequence, indices, layout=None, seq_len=None)(mesh, *local, *whole)
            equal(out, sequence.shard(attention(indices, *tokens, *whole), rank))

    run_ranks(2, body)


def test_examples_of_docstrings() -> None:
    def body(rank: int) -> None:
        key = torch.tensor([[[1.0], [3.0], [2.0]]])
        best = select_keys(torch.ones(1, 3, 1, 1), key, torch.ones(1, 3, 1), topk=1, mesh=dist.group.WORLD)
        assert best.flatten().tolist() == [0, 1, 1]
        latent = torch.tensor([[[1.0], [2.0]]])
        up, indices = torch.tensor([[3.0], [5.0]]), torch.tensor([[[0, -1], [0, 1]]])
        options: dict[str, Any] = {"up": up, "indices": indices, "mesh": dist.group.WORLD}
        out = indexed_attention(torch.zeros(1, 1, 2, 2), latent, latent, **options)
        equal(out.flatten(), torch.tensor([5.0, 7.5]), 1e-6)
        key = torch.tensor([[[3.0], [1.0], [2.0], [1.0]]])
        options = {"block_size": 1, "topk": 1, "local_blocks": 0, "mesh": dist.group.WORLD}
        assert select_blocks(torch.ones(1, 4, 1, 1), key, **options).flatten().tolist() == [0, 0, 0, 0]
        v, blocks = torch.tensor([[[[1.0], [2.0], [9.0]]]]), torch.tensor([[[[0]], [[0]], [[1]]]])
        out = block_attention(v * 0, v, v, block_indices=blocks, block_size=2, mesh=dist.group.WORLD)
        equal(out.flatten(), torch.tensor([1.0, 1.5, 9.0]), 1e-6)

    run_ranks(1, body)


# Refusals

Q, K, W = normal(1, 3, 2, 4), normal(1, 3, 4), normal(1, 3, 2)
TOKENS, WHOLE, INDICES = problem(Sequence(3, 1, Contiguous()), 2)


def _select(q: Any = Q, k: Any = K, weights: Any = W, topk: Any = 2, **options: Any) -> Callable[[Any], object]:
    return lambda mesh: select_keys(q, k, weights, topk=topk, **{"mesh": mesh, **options})


def _attend(**changed: Any) -> Callable[[Any], object]:
    names = dict(zip(("q", "latent", "k_rope"), [TOKENS[0].transpose(1, 2), *TOKENS[1:]], strict=True))
    given = {**names, "up": WHOLE[0], "indices": INDICES, **changed}
    return lambda mesh: indexed_attention(**{"mesh": mesh, **given})


def _blocks(**changed: Any) -> Callable[[Any], object]:
    (q, k, v), numbers = block_problem(Sequence(3, 1, Contiguous()), 2)
    names = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2), "block_indices": numbers}
    return lambda mesh: block_attention(**{"mesh": mesh, "block_size": 2, **names, **changed})


BAD = [
    (r"q_index \(batch, tokens, index_heads, index_dims\); got \(1, 3, 4\)", _select(q=K)),
    (r"k_index \(batch, tokens, index_dims\), where batch 1, tokens 3, .*; got \(1, 3, 2\)", _select(k=W)),
    ("topk to be an integer >= 1, got 0", _select(topk=0)),
    ("q_index, k_index of one floating dtype; got q_index torch.float64 .*, k_index torch.float32",
     _select(k=K.float())),
    ("weights of a floating dtype; got .*, weights torch.int64", _select(weights=W.long())),
    (r"at least one of index_heads; got q_index torch.float64 \(1, 3, 0, 4\)",
     _select(q=Q[:, :, :0], weights=W[..., :0])),
    ("expected is_causal to be True or False, got 1", _select(is_causal=1)),
    ("expected mask to be a Mask such as .*, got Tensor", _select(mask=W)),
    ("documents of a mask end at 8 .*, expected at most .* 6", _select(mask=Documents([0, 4, 8]))),
    ("the mask is of 2 batch rows, got a batch of 1", _select(mask=Batched([Causal(), Causal()]))),
    ("got 3 local tokens", _select(seq_len=400)),
    ("got tensors on cpu and meta", _select(k=K.to("meta"))),
    ("indices to be a torch.Tensor, got list", _attend(indices=[0])),
    (r"indices \(batch, tokens, keys\), where .*; got \(1, 2, 2\)", _attend(indices=INDICES[:, :2])),
    (r"indices of int32 or int64; got .* indices torch.float32 \(1, 3, 2\)", _attend(indices=INDICES.float())),
    (r"at least one of keys; got .* indices torch.int32 \(1, 3, 0\)", _attend(indices=INDICES[..., :0])),
    ("indices from -1 to the last of 6 tokens, got .* to 6", _attend(indices=torch.full_like(INDICES, 6))),
    ("indices from -1 to the last of 6 tokens, got -2 to", _attend(indices=torch.full_like(INDICES, -2))),
    (r"sinks \(heads\), where .* heads 2, .*; got \(3,\)", _attend(sinks=torch.ones(3))),
    ("sinks of a floating dtype; got .* sinks torch.int64", _attend(sinks=torch.ones(2).long())),
    ("expected one dtype for q, latent, k_rope and up; got", _attend(latent=TOKENS[1].float())),
    (r"latent \(batch, tokens, R\), where .*; got \(1, 2, 5\)",
     _attend(latent=TOKENS[1][:, :2], k_rope=TOKENS[2][:, :2])),
    ("expected a finite scale, got nan", _attend(scale=float("nan"))),
    ("block_size to be an integer >= 1, got 0", lambda mesh: select_blocks(Q, K, block_size=0, topk=1, mesh=mesh)),
    ("local_blocks to be an integer >= 0, got -1",
     lambda mesh: select_blocks(Q, K, block_size=1, topk=1, local_blocks=-1, mesh=mesh)),
    ("q_index, k_index of one floating dtype",
     lambda mesh: select_blocks(Q, K.half(), block_size=1, topk=1, mesh=mesh)),
    (r"block_indices \(batch, tokens, groups, chosen\), where .*", _blocks(block_indices=INDICES)),
    ("block_indices of int32 or int64", _blocks(block_indices=normal(1, 3, 2, 4))),
    ("from -1 to the last of 3 blocks, got 3 to 3", _blocks(block_indices=torch.full((1, 3, 2, 1), 3))),
    ("a multiple of the 2 groups as heads; got q", _blocks(q=normal(1, 3, 3, 3))),
    ("q, k, v of one floating dtype", _blocks(v=normal(1, 2, 3, 5).half())),
]  # fmt: skip


def test_refused_before_any_exchange() -> None:
    check_refused_before_any_exchange(BAD)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rank: _select(topk=1 + rank)(dist.group.WORLD), 'operation: rank 1 says "SelectKeys(topk=2'),
        (lambda rank: _select(mask=SlidingWindow(rank, 0))(dist.group.WORLD), "operation: rank 1 says"),
        (lambda rank: _attend(scale=[1.0, 2.0][rank])(dist.group.WORLD), "operation: rank 1 says"),
        (lambda rank: _attend(indices=INDICES + 9 * rank)(dist.group.WORLD), "indices from -1 to the last of 6 tokens"),
    ],
)
def test_different_calls_are_refused_on_every_rank(call: Callable[[int], object], message: str) -> None:
    assert all(message in str(error) for error in errors_by_rank(2, call))


def test_a_second_derivative_is_refused() -> None:
    def body(rank: int) -> None:
        mine = [x.clone().requires_grad_() for x in TOKENS]
        out = attend(Sequence(3, 1, Contiguous()), INDICES)(dist.group.WORLD, *mine, *WHOLE)
        (grad,) = torch.autograd.grad(out.square().sum(), mine[1], create_graph=True)
        with pytest.raises(RuntimeError, match="trying to differentiate twice"):
            grad.sum().backward()

    run_ranks(1, body)


def test_a_backward_inside_of_autocast_is_that_outside() -> None:
    def body(rank: int) -> None:
        def gradients(inside: bool) -> tuple[torch.Tensor, ...]:
            mine = [x.float().requires_grad_() for x in TOKENS]
            whole = [x.float() for x in WHOLE]
            out = attend(Sequence(3, 1, Contiguous()), INDICES)(dist.group.WORLD, *mine, *whole)
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                return torch.autograd.grad(out.square().sum(), mine)

        equal(gradients(True), gradients(False), 0.0)

    run_ranks(1, body)
