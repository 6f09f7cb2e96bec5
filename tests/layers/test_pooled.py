"""Pooled blocks, their indexer and attention over them equal one process, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
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
from support.ranks import run_ranks
from support.sequences import Sequence, check_layer, equal, normal, sequences, with_sinks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Contiguous,
    Documents,
    HeadTail,
    MirroredBatch,
    Striped,
    context_parallel,
    pool_blocks,
    pooled_attention,
    pooled_indexer_loss,
    select_pooled,
)
from cp_dtensor.layers import blocks as module

LAYOUTS = (Contiguous(), HeadTail(), Striped(1), Striped(3))
divided_alike = sequences(layouts=LAYOUTS)
HEADS, DIM, TOPK = 2, 3, 2


def blocks_of(sequence: Sequence, size: int) -> list[tuple[int, int]]:
    """The first token of each block, and that of its document."""
    return [(start + at * size, start) for start, stop in sequence.documents() for at in range((stop - start) // size)]


def pooled_rows(
    sequence: Sequence, size: int, overlap: bool, x: torch.Tensor, gate: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Pooled blocks of whole sequences, one at a time."""
    if gate is not None and bias is not None:
        gate = gate.clone()
        for start, stop in sequence.documents():
            for at in range(start, stop):
                gate[:, at] = gate[:, at] + bias[(at - start) % size]
    half, found = x.size(2) // 2, []
    for start, document in blocks_of(sequence, size):
        own = slice(start, start + size)
        if gate is None:
            found.append(x[:, own].mean(1))
        elif not overlap:
            found.append((x[:, own] * gate[:, own].softmax(1)).sum(1))
        else:
            before = slice(max(start - size, document), start)
            gates = torch.cat((gate[:, before, :half], gate[:, own, half:]), 1)
            found.append((torch.cat((x[:, before, :half], x[:, own, half:]), 1) * gates.softmax(1)).sum(1))
    width = half if overlap else x.size(2)
    return torch.stack(found, 1) if found else x.new_zeros(x.size(0), 0, width) * x.sum()


def seen_blocks(sequence: Sequence, size: int) -> torch.Tensor:
    """(S, W): blocks of a query's document that end with it or before."""
    seen = torch.zeros(sequence.length, len(blocks_of(sequence, size)), dtype=torch.bool)
    for number, (start, document) in enumerate(blocks_of(sequence, size)):
        stop = next(stop for begin, stop in sequence.documents() if begin == document and start < stop)
        seen[start + size - 1 : stop, number] = True
    return seen


def best_blocks(
    sequence: Sequence, size: int, q: torch.Tensor, pooled: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The best blocks of each query, (B, S, TOPK), as one process finds them."""
    scores = (torch.einsum("bthd,bsd->bths", q, pooled).relu() * weights.unsqueeze(3)).sum(2).float()
    seen = seen_blocks(sequence, size)
    out = torch.full((*q.shape[:2], TOPK), -1, dtype=torch.int32)
    for row in range(q.size(0)):
        for at in range(q.size(1)):
            numbers = seen[at].nonzero().flatten().tolist()
            best = sorted(sorted(numbers, key=lambda each: (-scores[row, at, each].item(), each))[:TOPK])
            out[row, at, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return out


def is_chosen(chosen: torch.Tensor, count: int) -> torch.Tensor:
    """(B, S, count): the numbers that rows of `chosen` have."""
    found = torch.zeros(*chosen.shape[:2], count + 1, dtype=torch.bool)
    return found.scatter_(2, chosen.long().masked_fill(chosen < 0, count), torch.ones_like(chosen).bool())[..., :-1]


def attention(
    sequence: Sequence, size: int, window: int, chosen: torch.Tensor | None, q: torch.Tensor, kv: torch.Tensor,
    pooled: torch.Tensor, sinks: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Attention of whole sequences, q and out (B, S, H, D)."""
    near = torch.zeros(sequence.length, sequence.length, dtype=torch.bool)
    for start, stop in sequence.documents():
        for at in range(start, stop):
            near[at, max(start, at - window + 1) : at + 1] = True
    far = seen_blocks(sequence, size).expand(q.size(0), -1, -1)
    far = far if chosen is None else far & is_chosen(chosen, far.size(2))
    seen = torch.cat((near.expand(q.size(0), -1, -1), far), 2)
    rows = torch.cat((kv, pooled), 1).unsqueeze(1)
    return with_sinks(q, rows, rows, seen.unsqueeze(1), sinks)


def tokens_of(sequence: Sequence, overlap: bool) -> list[torch.Tensor]:
    """q (B, S, H, D), kv, and x and gate to pool."""
    shape = sequence.batch, sequence.length
    width = DIM * (1 + overlap)
    return [normal(*shape, HEADS, DIM), *(normal(*shape, n, seed=i) for i, n in enumerate((DIM, width, width), 1))]


@settings(max_examples=examples(60))
@given(
    divided_alike, st.integers(1, 5), st.booleans(), st.booleans(), st.integers(1, 6), st.integers(0, 2),
    st.sampled_from([1 << 26, 200]),
)  # fmt: skip
def test_attention_over_a_window_and_pooled_keys(
    sequence: Sequence, size: int, overlap: bool, with_gate: bool, window: int, kind: int, part: int
) -> None:
    """Kinds: all blocks that are seen, selected ones, and any."""
    overlap = overlap and with_gate
    options = {**sequence.options(), "size": size}
    shape, seen = (sequence.batch, sequence.length), seen_blocks(sequence, size)
    q_index, weights = normal(*shape, 2, DIM, seed=8), normal(*shape, 2)

    def chosen_of(pooled: torch.Tensor) -> torch.Tensor | None:
        if kind == 0:
            return None
        if kind == 1:
            return best_blocks(sequence, size, q_index, pooled.detach(), weights)
        order = normal(*shape, seen.size(1), seed=7).argsort(2)[..., :2]
        return F.pad(order.masked_fill(~seen.expand(shape[0], -1, -1).gather(2, order), -1), (0, 1), value=-1)

    def reference(q: Any, kv: Any, x: Any, gate: Any, bias: Any, sinks: Any) -> torch.Tensor:
        pooled = pooled_rows(sequence, size, overlap, x, *((gate, bias) if with_gate else (None, None)))
        return attention(sequence, size, window, chosen_of(pooled), q, kv, pooled, sinks)

    def ours(mesh: Any, q: Any, kv: Any, x: Any, gate: Any, bias: Any, sinks: Any) -> torch.Tensor:
        rank = dist.get_rank()
        given = (gate, bias) if with_gate else ()
        pooled, positions = pool_blocks(x, *given, overlap=overlap, mesh=mesh, **options)
        assert len(positions) == pooled.size(1)
        indices: Any = None
        if kind == 1:
            indexer = sequence.shard(q_index, rank), pooled, sequence.shard(weights, rank)
            indices = select_pooled(*indexer, topk=TOPK, mesh=mesh, **options)
        elif kind == 2:
            indices = chosen_of(pooled)
            assert indices is not None
            indices = sequence.shard(indices, rank)
        out = pooled_attention(
            q.transpose(1, 2), kv, pooled, window=window, indices=indices, sinks=sinks, mesh=mesh, **options
        )
        return out.transpose(1, 2)

    width = DIM * (1 + overlap)
    whole = [normal(size, width, seed=20), normal(HEADS, seed=21)]
    with mock.patch.object(module, "_BYTES", part):
        check_layer(sequence, ours, reference, tokens_of(sequence, overlap), whole)


@settings(max_examples=examples(40))
@given(divided_alike, st.integers(1, 5), st.booleans())
def test_selected_blocks_are_those_of_one_process_and_so_are_their_tokens(
    sequence: Sequence, size: int, has_ties: bool
) -> None:
    shape = sequence.batch, sequence.length
    x, q, weights = normal(*shape, DIM), normal(*shape, 2, DIM, seed=1), normal(*shape, 2, seed=2)
    if has_ties:
        x, q, weights = (each.round() for each in (torch.ones_like(x), q, weights))
    wanted = best_blocks(sequence, size, q, pooled_rows(sequence, size, False, x, None, None), weights)
    blocks, options = blocks_of(sequence, size), {**sequence.options(), "size": size, "mesh": dist.group.WORLD}
    starts = torch.tensor([start - document for start, document in blocks], dtype=torch.int64)

    def body(rank: int) -> list[torch.Tensor]:
        pooled, positions = pool_blocks(sequence.shard(x, rank), size=size, mesh=dist.group.WORLD, **sequence.options())
        given = sequence.shard(q, rank), pooled, sequence.shard(weights, rank)
        place: Any = {**options, "mesh": dist.group.WORLD, "topk": TOPK}
        return [select_pooled(*given, **place), select_pooled(*given, expanded=True, **place), positions]

    found = run_ranks(sequence.ranks, body)
    assert sorted(torch.cat([positions for *_, positions in found]).tolist()) == sorted(starts.tolist())
    for rank, (got, tokens, _) in enumerate(found):
        mine = sequence.shard(wanted, rank)
        assert torch.equal(got, mine)
        places = sequence.shard(torch.arange(sequence.length).view(1, -1, 1), rank).flatten().tolist()
        assert tokens.dtype == torch.int32
        for row in range(sequence.batch):
            for at, numbers, all_tokens in zip(places, mine[row].tolist(), tokens[row].tolist(), strict=True):
                document = max(start for start, stop in sequence.documents() if start <= at < stop)
                rest = range(document + (at - document + 1) // size * size, at + 1)
                expected = [blocks[each][0] + i for each in numbers if each >= 0 for i in range(size)]
                assert [each for each in all_tokens if each >= 0] == [*expected, *rest]


@settings(max_examples=examples(40))
@given(divided_alike, st.integers(1, 5), st.booleans())
def test_the_loss_of_an_indexer_of_pooled_keys(sequence: Sequence, size: int, is_dense: bool) -> None:
    q, kv, x, _ = tokens_of(sequence, False)
    weights, seen = normal(sequence.batch, sequence.length, HEADS, seed=8), seen_blocks(sequence, size)
    order = normal(sequence.batch, sequence.length, seen.size(1), seed=7).argsort(2)[..., :TOPK]
    chosen = F.pad(order.masked_fill(~seen.expand(len(order), -1, -1).gather(2, order), -1), (0, 1), value=-1)
    seen = seen.expand(len(order), -1, -1)
    seen = seen if is_dense else seen & is_chosen(chosen, seen.size(2))

    def reference(q_index: Any, x: Any, weights: Any) -> torch.Tensor:
        pooled, keys = (pooled_rows(sequence, size, False, each, None, None) for each in (x, kv))
        scores = (torch.einsum("bthd,bsd->bths", q_index, pooled).relu() * weights.unsqueeze(3)).sum(2)
        logits = torch.einsum("bthd,bsd->bhts", q, keys) * 0.7
        target = logits.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(3).mean(1).masked_fill(~seen, 0.0)
        found = scores.masked_fill(~seen, float("-inf")).log_softmax(2).masked_fill(~seen, 0.0)
        return F.kl_div(found, target, reduction="none").sum(2)

    def ours(mesh: Any, q_index: Any, x: Any, weights: Any) -> torch.Tensor:
        place: Any = {"size": size, "mesh": mesh, **sequence.options()}
        mine = [sequence.shard(each, dist.get_rank()) for each in (q, kv)]
        (pooled, _), (keys, _) = (pool_blocks(each, **place) for each in (x, mine[1]))
        place["indices"] = None if is_dense else sequence.shard(chosen, dist.get_rank())
        return pooled_indexer_loss(q_index, pooled, weights, mine[0].transpose(1, 2), keys, scale=0.7, **place)

    check_layer(sequence, ours, reference, [q * 2.0 - 0.5, x, weights])


@pytest.mark.parametrize("alone", range(6))
def test_each_gradient_alone_in_a_checkpoint_over_two_axes(alone: int) -> None:
    """Ranks without tokens and without blocks, too, exchange in recomputes."""
    sequence = Sequence(5, 6, HeadTail(), 2)
    place: Any = {"size": 2, **sequence.options()}

    def ours(mesh: Any, q: Any, kv: Any, x: Any, gate: Any, bias: Any, sinks: Any) -> torch.Tensor:
        pooled, _ = pool_blocks(x, gate, bias, overlap=True, mesh=mesh, **place)
        out = pooled_attention(q.transpose(1, 2), kv, pooled, window=2, sinks=sinks, mesh=mesh, **place)
        return out.transpose(1, 2)

    def reference(q: Any, kv: Any, x: Any, gate: Any, bias: Any, sinks: Any) -> torch.Tensor:
        return attention(sequence, 2, 2, None, q, kv, pooled_rows(sequence, 2, True, x, gate, bias), sinks)

    check_layer(
        sequence, lambda *x: checkpoint(ours, *x, use_reentrant=False), reference, tokens_of(sequence, True),
        [normal(2, 2 * DIM, seed=20), normal(HEADS, seed=21)], mesh_shape=(3, 2), alone=alone,
    )  # fmt: skip


def test_windows_and_pooled_keys_travel_alone() -> None:
    """Of 4 ranks with 16 tokens each: 2 rows before a run, and 4 pooled keys, and back in float32."""
    sequence, collected = Sequence(64, 4, Contiguous()), {}

    def body(rank: int) -> None:
        q, kv, x, gate = (sequence.shard(each, rank).bfloat16().requires_grad_() for each in tokens_of(sequence, False))
        place: Any = {"size": 4, "mesh": dist.group.WORLD, "layout": Contiguous()}
        pooled, positions = pool_blocks(x, gate, **place)
        collected[rank] = positions.tolist()
        pooled_attention(q.transpose(1, 2), kv, pooled, window=3, **place).sum().backward()
        assert [each.grad.dtype for each in (q, kv, x, gate)] == [torch.bfloat16] * 4  # type: ignore[union-attr]

    with recorded_collectives() as collectives:
        run_ranks(4, body)
    assert collected == {rank: [16 * rank + 4 * each for each in range(4)] for rank in range(4)}
    assert kinds(collectives) == ["AllToAllBase"] * 4  # whole blocks: nothing to fetch
    sent = [each.sent[0] for each in collectives if each.rank == 0]
    assert [x.size(-1) for x in sent] == [2 * DIM, 2 * DIM, 4 * DIM, 4 * DIM]  # bytes of a row
    assert [x.size(0) for x in sent[:2]] == [2, 12]


def test_documents_and_layout_of_the_context() -> None:
    sequence = Sequence(11, 2, Striped(2), 1, (0, 4, 11))
    q, kv, x, gate = tokens_of(sequence, False)
    expected = attention(sequence, 2, 2, None, q, kv, pooled_rows(sequence, 2, False, x, gate, None), normal(HEADS))

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mine = [sequence.shard(each, rank) for each in (q, kv, x, gate)]
        with context_parallel(mesh, layout=Striped(2), mask=Documents([0, 4, 11]), seq_len=11):
            pooled, _ = pool_blocks(*mine[2:], size=2, mesh=mesh)
            options: Any = {"size": 2, "window": 2, "sinks": normal(HEADS), "mesh": mesh}
            out = pooled_attention(mine[0].transpose(1, 2), mine[1], pooled, **options)
        with pytest.raises(TypeError, match="expects x to be a plain tensor, got a DTensor"):
            pool_blocks(distribute_tensor(x, mesh, [Shard(1)]), size=2, mesh=mesh)
        equal(out.transpose(1, 2), sequence.shard(expected, rank))

    run_ranks(2, body)


def test_examples_of_docstrings() -> None:
    def body(rank: int) -> None:
        mesh: Any = dist.group.WORLD
        pooled, positions = pool_blocks(torch.arange(1.0, 6.0).view(1, 5, 1), size=2, mesh=mesh)
        assert (pooled.flatten().tolist(), positions.tolist()) == ([1.5, 3.5], [0, 2])
        keys, options = torch.tensor([[[1.0], [3.0]]]), {"size": 2, "topk": 1, "mesh": mesh}
        best = select_pooled(torch.ones(1, 4, 1, 1), keys, torch.ones(1, 4, 1), **options)
        assert best.flatten().tolist() == [-1, 0, 0, 1]
        kv, q = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.zeros(1, 1, 3, 1)
        out = pooled_attention(q, kv, torch.tensor([[[7.0]]]), size=2, window=1, mesh=mesh)
        assert out.flatten().tolist() == [1.0, 4.5, 5.0]
        keys, q = torch.zeros(1, 2, 4), torch.zeros(1, 1, 2, 4)
        given = q.transpose(1, 2), keys, torch.ones(1, 2, 1), q, keys
        equal(pooled_indexer_loss(*given, size=1, scale=0.5, mesh=mesh), torch.zeros(1, 2), 1e-6)

    run_ranks(1, body)


X, Q = normal(1, 3, 4), normal(1, 2, 3, 4)


def _pool(*given: Any, **changed: Any) -> Callable[[Any], object]:
    return lambda mesh: pool_blocks(*(given or (X,)), **{"mesh": mesh, "size": 2, **changed})


def _attend(**changed: Any) -> Callable[[Any], object]:
    given = {"q": Q, "kv": X, "pooled": X[:, :1], "size": 2, "window": 2, **changed}
    return lambda mesh: pooled_attention(**{"mesh": mesh, **given})


def _select(**changed: Any) -> Callable[[Any], object]:
    given = {"q_index": Q.transpose(1, 2), "pooled": X[:, :1], "weights": X[..., :2], "size": 2, "topk": 1, **changed}
    return lambda mesh: select_pooled(**{"mesh": mesh, **given})


def _loss(**changed: Any) -> Callable[[Any], object]:
    given = {"q_index": Q.transpose(1, 2), "pooled_index": X[:, :1], "weights": X[..., :2], "q": Q, "pooled": X[:, :1]}
    return lambda mesh: pooled_indexer_loss(**{"mesh": mesh, "size": 2, "scale": 1.0, **given, **changed})


BAD = [
    (r"pooled \(batch, blocks, dims\), where .* blocks 1, .*; got \(1, 2, 4\)", _loss(pooled=X[:, :2])),
    (r"q \(batch, heads, tokens, dims\), where batch 1, tokens 3, .*; got \(1, 2, 2, 4\)", _loss(q=Q[:, :, :2])),
    ("q, pooled of one floating dtype; got .* q torch.float64 .*, pooled .*32", _loss(pooled=X[:, :1].float())),
    ("expected a finite scale", _loss(scale=float("inf"))),
    ("size to be an integer >= 1, got 0", _pool(size=0)),
    (r"gate \(batch, tokens, channels\), where .*; got \(1, 3, 2\)", _pool(X, X[..., :2])),
    ("x, gate of one floating dtype; got x torch.float64 .*, gate torch.float32", _pool(X, X.float())),
    (r"a bias of 2 rows, with a gate only; got \(3, 4\)", _pool(X, X, X[0])),
    ("a bias of 2 rows, with a gate only", _pool(X, None, X[0, :2])),
    ("with overlap expects a gate, and 2 D channels; got x", _pool(overlap=True)),
    ("window to be an integer >= 1, got 0", _attend(window=0)),
    (r"kv \(batch, tokens, dims\), where .*; got \(1, 2, 4\)", _attend(kv=X[:, :2])),
    ("q, kv, pooled of one floating dtype; got .*, pooled torch.float32", _attend(pooled=X[:, :1].float())),
    ("indices of int32 or int64; got .* indices torch.float64", _attend(indices=X)),
    ("sinks of a floating dtype; got .* sinks torch.int64", _attend(sinks=torch.ones(2).long())),
    ("topk to be an integer >= 1, got 0", _select(topk=0)),
    ("weights of a floating dtype; got .* torch.int64", _select(weights=X[..., :2].long())),
]  # fmt: skip


def test_refused_before_any_exchange() -> None:
    check_refused_before_any_exchange(BAD)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"this rank's 1 blocks of 2 tokens, got \(1, 2, 4\)", _attend(pooled=X[:, :2])),
        (ValueError, "indices from -1 to the last of 1 blocks, got 1", _attend(indices=torch.ones(1, 3, 1).int())),
        (NotImplementedError, "divides all batch rows alike", _pool(X.expand(2, -1, -1), layout=MirroredBatch())),
    ],
)  # fmt: skip
def test_refused(error: type[Exception], message: str, call: Callable[[Any], object]) -> None:
    def body(rank: int) -> None:
        with pytest.raises(error, match=message):
            call(dist.group.WORLD)

    run_ranks(1, body)


TOKENS = {"q": Q[:, :, :2], "kv": X[:, :2]}
INDEX = {"q_index": Q[:, :, :2].transpose(1, 2), "weights": X[:, :2, :2]}


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"this rank's 1 blocks of 2 tokens, got \(1, 2, 4\)", lambda bad: _attend(**TOKENS, pooled=X[:, : 1 + bad])),
        (r"this rank's 1 blocks of 2 tokens, got \(1, 2, 4\)", lambda bad: _select(**INDEX, pooled=X[:, : 1 + bad])),
        ("-1 to the last of 2 blocks, got 4", lambda bad: _attend(**TOKENS, indices=torch.full((1, 2, 1), 4 * bad))),
        (
            "-1 to the last of 2 blocks, got 4",
            lambda bad: _loss(**INDEX, q=Q[:, :, :2], indices=torch.full((1, 2, 1), 4 * bad)),
        ),
    ],
)
def test_what_is_wrong_on_one_rank_is_refused_on_every_rank(message: str, call: Callable[[bool], Any]) -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=message if rank == 0 else f"arguments: .*refused: .*{message}"):
            call(rank == 0)(dist.group.WORLD)
        call(False)(dist.group.WORLD)

    run_ranks(2, body)
