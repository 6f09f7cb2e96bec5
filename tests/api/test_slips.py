"""Mistakes of users that shards alone do not show: found by comparing ranks at the first entry and the first call."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.collectives import errors_by_rank, kinds, recorded_collectives
from support.problems import shard
from support.ranks import run_ranks
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from cp_dtensor import (
    ContextParallel,
    Contiguous,
    HeadTail,
    SlidingWindow,
    Striped,
    causal_conv1d,
    context_parallel,
    linear_attention,
    ring_attention,
    shift,
)
from cp_dtensor._torch import content_hash
from cp_dtensor.api.extension import local_sdpa

RANKS = 3
LENGTH = 12
LOCAL = LENGTH // RANKS


def group() -> Any:
    return dist.group.WORLD


def attend(q: torch.Tensor, k: torch.Tensor | None = None, is_causal: bool = True) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q if k is None else k, q if k is None else k, is_causal=is_causal)


def refused(body: Callable[[int], object], ranks: int = RANKS) -> str:
    """The message of the ValueError that every rank raises alike."""
    errors = errors_by_rank(ranks, body)
    assert {type(error) for error in errors} == {ValueError}
    (message,) = {str(error) for error in errors}
    return message


# Entry


WHOLE = torch.arange(LENGTH)
OTHERS = torch.ones(2, LENGTH)
Change = Callable[[int], list[torch.Tensor]]
# What differs: the buffers of each rank, or the options of rank 1; and what is said of it.
ENTRIES: dict[str, tuple[Change | dict[str, Any], str]] = {
    "shards": (
        lambda rank: [shard(WHOLE, HeadTail(), rank, RANKS, 0), OTHERS],
        r"buffer 0: rank 1 says 'int64 \(4,\), .*, rank 2 says .*, the others",
    ),
    "another batch": (
        lambda rank: [WHOLE + (rank == 1), OTHERS],
        r"buffer 0: rank 1 says 'int64 \(12,\), sequence dim 0, contents \w+', the others 'int64",
    ),
    "other lengths": (
        lambda rank: [torch.arange(LENGTH + (rank == 1)), OTHERS],
        r"buffer 0: rank 1 says 'int64 \(13,\).*the others 'int64 \(12,\)",
    ),
    "another dtype": (lambda rank: [WHOLE.int() if rank == 1 else WHOLE, OTHERS], r"buffer 0: rank 1 says 'int32"),
    "fewer": (
        lambda rank: [WHOLE, OTHERS][: 1 + (rank != 1)],
        r"the number of buffers: rank 1 says 1, the others 2; about buffer 1: rank 1 says None",
    ),
    "debug": ({"debug": True}, "debug: rank 1 says True, the others False"),
    "seq_len": ({"seq_len": 24}, r"seq_len: rank 1 says \(24,\), the others \(\)"),
    "layout": ({"layout": Contiguous()}, r"layout: rank 1 says 'Contiguous\(\)', the others 'HeadTail\(\)'"),
    "method": ({"method": "ulysses"}, "method: rank 1 says 'ulysses', the others 'auto'"),
    "mask": ({"mask": SlidingWindow(3, 0)}, "mask: rank 1 says .*SlidingWindow"),
    "sinks": ({"sinks": torch.zeros(2)}, r"sinks: rank 1 says 'float32 \(2,\)"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("which", "debug"), [(name, debug) for name in ENTRIES for debug in [False, True][: 1 + callable(ENTRIES[name][0])]]
)
def test_contexts_that_differ_between_ranks(which: str, debug: bool) -> None:
    odd, message = ENTRIES[which]

    def body(rank: int) -> None:
        options: dict[str, Any] = odd if isinstance(odd, dict) and rank == 1 else {"debug": debug}
        buffers = [] if isinstance(odd, dict) else [each.clone() for each in odd(rank)]
        before = [each.clone() for each in buffers]
        try:
            with context_parallel(group(), buffers=buffers, buffer_seq_dims=[0, 1][: len(buffers)], **options):
                raise AssertionError("entered")
        finally:
            assert all(map(torch.equal, buffers, before))

    found = refused(body)
    assert re.search(f"the ranks of the context-parallel axis disagree about {message}", found), found
    assert ("Expected the same whole tensors on every rank" in found) == (not isinstance(odd, dict))


@pytest.mark.parametrize("debug", [False, True])
def test_ranks_compare_each_signature_once_and_with_debug_always(debug: bool) -> None:
    """Another batch, also of another length, has no other one."""
    tokens = [torch.randn(1, 2, length, 4) for length in (LENGTH, LENGTH, 2 * LENGTH)]

    def body(rank: int) -> None:
        for whole in tokens:
            x = whole.clone()
            with context_parallel(group(), buffers=[x], buffer_seq_dims=[2], debug=debug, rotate_method="alltoall"):
                attend(x)

    with recorded_collectives(of_first_calls=True) as collectives:
        run_ranks(RANKS, body)
    assert kinds(collectives).count("AllGather") == (6 if debug else 2)  # of contexts and calls


def test_what_was_refused_is_compared_again_and_lazy_signs_by_value() -> None:
    def body(rank: int) -> None:
        for odd in (1, 2):
            x = torch.arange(LENGTH) + (rank == odd)
            with (
                pytest.raises(ValueError, match=f"rank {odd} says"),
                context_parallel(group(), buffers=[x], buffer_seq_dims=[0]),
            ):
                pass
        lazy = torch.polar(torch.ones(LENGTH), torch.arange(float(LENGTH))).conj()
        signs = [lazy, lazy.imag] if rank else [lazy.resolve_conj(), lazy.imag.resolve_neg()]
        for buffers in ([torch.arange(LENGTH)], signs):
            with context_parallel(group(), buffers=buffers, buffer_seq_dims=[0] * len(buffers)):
                assert len(buffers[0]) == LOCAL

    run_ranks(RANKS, body)


def test_hashes_of_contents() -> None:
    x = torch.randn(3 << 20, dtype=torch.float64).bfloat16()
    copy = torch.cat([x[:1], x])[1:]  # at an odd place in memory, not a multiple of a word
    assert content_hash(copy) == content_hash(x)
    last, swapped = x.clone(), x.clone()
    last[-1] += 1
    swapped[[0, -1]] = x[[-1, 0]]
    others = [x, last, swapped, x.view(3, -1), x.view(torch.int16), x[1:], x.flip(0), x.roll(1 << 20)]
    assert len({content_hash(each) for each in others}) == len(others)
    assert 0 <= min(map(content_hash, others)) <= max(map(content_hash, others)) < 1 << 63
    assert content_hash(torch.ones(3, 4)[:, ::2]) == content_hash(torch.ones(3, 2))
    assert content_hash(torch.ones(1, 2, dtype=torch.float64)[:, 0]) == content_hash(torch.ones(1, dtype=torch.float64))
    assert content_hash(torch.ones(0, 4)) != content_hash(torch.ones(0, 3))
    assert content_hash(torch.ones(2, device="meta")) != content_hash(torch.ones(2))
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint64):
        ones = torch.ones(3).to(dtype)
        assert content_hash(ones) == content_hash(ones.clone()) != content_hash(torch.zeros(3).to(dtype))


# Calls


def _attend_linearly(seq_len: int | None, **odd: Any) -> None:
    case = {"heads": 2, "dim": 2, "g": (2,), "has_state": False} | odd
    of_head = 1, LOCAL, case["heads"], case["dim"]
    q, k, v = torch.ones(of_head), torch.ones(of_head), torch.ones(1, LOCAL, 2, 5)
    g = None if case["g"] is None else -torch.ones(1, LOCAL, *case["g"])
    state = torch.ones(1, 2, case["dim"], 5) if case["has_state"] else None
    linear_attention(q, k, v, g, initial_state=state, mesh=group(), seq_len=seq_len)


def _shift(n: int = 1, channels: int = 3) -> None:
    shift(torch.ones(2, LOCAL, channels), n, mesh=group(), dim=1, seq_len=LENGTH)


def _convolve(width: int = 4) -> None:
    causal_conv1d(torch.ones(1, LOCAL, 3), torch.ones(3, width), mesh=group(), seq_len=LENGTH)


LAYERS: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (_shift, {"n": 2}), (_shift, {"channels": 4}), (_convolve, {"width": 5}),
    *((_attend_linearly, odd) for odd in ({"dim": 3}, {"heads": 1}, {"g": (2, 2)}, {"g": None}, {"has_state": True})),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "odd"), LAYERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_layers_that_differ_between_ranks(layer: Callable[..., None], odd: dict[str, Any]) -> None:
    """Whether or not their lengths are declared."""
    for usual in [{"seq_len": LENGTH}, {"seq_len": None}] if layer is _attend_linearly else [{}]:
        errors = errors_by_rank(RANKS, lambda rank, usual=usual: layer(**usual, **(odd if rank == 1 else {})))
        assert all("rank 1 says" in str(each) for each in errors)
        assert "width" not in odd or "other tensors: rank 1 says [(1, 'torch.float32', 3, 5)]" in str(errors[1])


@pytest.mark.parametrize("seq_lens", [(11, 12), (11, None)])
def test_lengths_of_sequence_operations_that_fit_each_rank_and_differ(seq_lens: tuple[int | None, ...]) -> None:
    """The ranks' shards are those of 11 tokens; the first rank has as many of 12."""

    def body(rank: int) -> None:
        shift(torch.ones(6 - rank, 1), 1, mesh=group(), dim=0, layout=Contiguous(), seq_len=seq_lens[1 - rank])

    for error in errors_by_rank(2, body):
        assert "global length: rank 1 says 11, the others 12" in str(error)


def _in_declared_context(q: torch.Tensor) -> None:
    with context_parallel(group(), seq_len=LENGTH):
        attend(q, is_causal=False)


@pytest.mark.parametrize(
    "call",
    [
        _in_declared_context,
        lambda q: ring_attention(q, q, q, mesh=group(), seq_len=LENGTH),
        lambda q: shift(q, 1, mesh=group(), dim=2, seq_len=LENGTH),
    ],
    ids=["context", "function", "shift"],
)
def test_shards_of_a_wrong_length_are_refused_on_every_rank(call: Callable[..., object]) -> None:
    """At the first call of a signature, though lengths are declared. A wrong rank says what is expected."""

    def body(rank: int, wrong: tuple[int, ...]) -> None:
        call(torch.randn(1, 2, LOCAL + (rank in wrong), 4))

    # In a context, equal shards of another length are those of ranks x local tokens.
    for wrong in ((1,),) if call is _in_declared_context else ((1,), (0, 1, 2)):
        for rank, error in enumerate(errors_by_rank(RANKS, lambda rank, wrong=wrong: body(rank, wrong))):
            assert isinstance(error, ValueError)
            named = "rank 1 says .*(15|5 local tokens).*, the others .*12"
            if rank in wrong:  # they may be those of an undeclared length in a context
                named = rf"got 5 local tokens.* on rank {rank} of 3|rank 1 says \(15, 15\)"
            assert re.search(named, str(error))
    run_ranks(RANKS, lambda rank: body(rank, ()))


def test_ranks_compare_the_first_call_of_each_signature_and_again_if_it_was_refused() -> None:
    """Declared lengths and values of masks are of the data: no other signature."""

    def call(heads: int, length: int = LENGTH, window: int = 3, odd: bool = False) -> None:
        q = torch.randn(1 + odd, heads, length // RANKS, 4)
        ring_attention(q, q, q, mesh=group(), seq_len=length, mask=SlidingWindow(window, 0), rotate_method="alltoall")

    def body(rank: int) -> list[int]:
        for _ in range(2):
            with pytest.raises(ValueError, match="batch_size"):
                call(2, odd=rank == 1)
        numbers = []
        for options in ({"heads": 2}, {"heads": 2}, {"heads": 2, "length": 24, "window": 4}, {"heads": 1}):
            call(**options)
            numbers.append(kinds(collectives, rank).count("AllGather"))
        return numbers

    with recorded_collectives(of_first_calls=True) as collectives:
        first, *others = run_ranks(RANKS, body)
    assert [each - first[0] for each in first] == [0, 0, 0, 1]
    assert others == [first] * (RANKS - 1)


def test_fake_groups_compare_nothing() -> None:
    """Their other ranks would have this rank's number of tokens."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        q, options = torch.randn(1, 2, 5, 4), {"mesh": group(), "layout": Striped(3), "seq_len": 14}
        assert ring_attention(q, q, q, **options).shape == q.shape
        assert shift(q, 1, dim=2, **options).shape == q.shape
    finally:
        dist.destroy_process_group()


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attend(x)


@pytest.mark.parametrize("form", ["context", "context without a mask", "function", "module"])
def test_whole_tensors(form: str) -> None:
    """Refused in contexts. Other programs may draw equal shards to measure; without a mask results are right."""
    q = torch.randn(1, 2, LENGTH, 4)

    def body(rank: int) -> None:
        if form == "function":
            ring_attention(q, q, q, mesh=group(), is_causal=True)
        elif form == "module":
            parallelize_module(Attention(), group(), ContextParallel())(q)
        else:
            with context_parallel(group()):
                for _ in range(2):
                    attend(q, is_causal=form == "context")

    if form == "context":
        found = refused(body)
        assert "q, k and v (1, 2, 12, 4), (1, 2, 12, 4), (1, 2, 12, 4) are equal on all 3 ranks" in found
        assert "local_sdpa" in found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(RANKS, body)
    assert ["are equal on all 3 ranks" in str(each.message) for each in caught] == [True] * RANKS  # once a rank


def test_equal_tensors_that_are_no_mistake() -> None:
    whole = torch.randn(1, 2, LENGTH, 4)

    def body(rank: int) -> None:
        shards = whole.chunk(RANKS, dim=2)[rank]
        with context_parallel(group(), layout=Contiguous()):
            attend(torch.ones(1, 2, LENGTH, 4))  # dummy tokens
            attend(shards, whole, is_causal=False)
            attend(shards)
            with local_sdpa(queries_are_shards=False):
                attend(whole)
        # Each rank of a ring may have a mask of one row for all queries, where others have a row for each.
        q, mask = torch.randn(1, 1, 4, 8) + rank, torch.randn(1, 1, 1 if rank else 4, 8 + 4)
        ring_attention(q, q, q, mesh=group(), attn_mask=mask.expand(1, 1, -1, 12), seq_len=12, debug=True)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("has_buffers", [False, True])
def test_generation_inside_of_a_context(has_buffers: bool) -> None:
    """The new token's query is on every rank, with this rank's part of the cached keys and one more."""

    def body(rank: int, **announced: int) -> None:
        given = {"buffers": [torch.arange(LENGTH)], "buffer_seq_dims": [0]} if has_buffers else {}
        with context_parallel(group(), **given, **announced):
            attend(torch.randn(1, 2, LOCAL, 4))
            attend(torch.randn(1, 2, 1, 4), torch.randn(1, 2, LOCAL + (not announced), 4), is_causal=False)

    found = refused(body)
    assert "got one query and 5 keys on each of 3 ranks, as in generation" in found
    assert "seq_len=3" in found
    if has_buffers:
        run_ranks(RANKS, lambda rank: body(rank, seq_len=RANKS))
