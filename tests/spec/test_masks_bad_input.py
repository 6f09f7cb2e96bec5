"""Refusals of masks and dropout that do not fit: alike on every rank, before K/V are sent, without side effects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.collectives import errors_by_rank, kinds, recorded_collectives
from support.problems import shard
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import (
    Batched,
    Causal,
    ContextParallel,
    Documents,
    Full,
    HeadTail,
    MirroredBatch,
    PrefixLM,
    SlidingWindow,
    context_parallel,
    context_parallel_attention,
)

RANKS, LENGTH = 3, 24
Arguments = dict[str, Any]
Entry = Callable[[Arguments], None]


def tensor(heads: int = 4) -> torch.Tensor:
    return torch.ones(2, heads, LENGTH // RANKS, 16)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, **options)


@contextmanager
def nothing_changes() -> Iterator[None]:
    """Checks that torch's SDPA and the state of its generator stay the same."""
    whole, before = torch.arange(24.0).view(1, 1, 6, 4), F.scaled_dot_product_attention
    alone, drawn = before(whole, whole, whole), torch.get_rng_state()
    yield
    assert F.scaled_dot_product_attention is before
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")
    assert torch.equal(F.scaled_dot_product_attention(whole, whole, whole), alone)
    assert torch.equal(torch.get_rng_state(), drawn)


def in_call(arguments: Arguments) -> None:
    q = tensor()
    context_parallel_attention(q, q, q, **{"mesh": dist.group.WORLD, "seq_len": LENGTH, **arguments})


def in_call_without_lengths(arguments: Arguments) -> None:
    in_call({**arguments, "seq_len": None})


def in_context(arguments: Arguments) -> None:
    tokens, labels = torch.arange(LENGTH), torch.arange(2.0 * LENGTH).view(2, LENGTH)
    data, here = labels.data_ptr(), shard(torch.arange(LENGTH), HeadTail(), dist.get_rank(), RANKS, 0)
    options = {name: arguments[name] for name in ("mask", "debug") if name in arguments}
    try:
        with context_parallel(dist.group.WORLD, buffers=[tokens, labels], buffer_seq_dims=[0, 1], **options):
            assert torch.equal(tokens, here)
            labels.requires_grad_()
            Attention()(tensor(), **{name: value for name, value in arguments.items() if name not in options})
    finally:
        assert torch.equal(tokens, torch.arange(LENGTH))
        assert torch.equal(labels, torch.arange(2.0 * LENGTH).view(2, LENGTH))
        assert (labels.requires_grad, labels.data_ptr()) == (False, data)


def in_module(arguments: Arguments) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    style = ContextParallel(mask=arguments.get("mask"), seq_len=LENGTH)
    module = parallelize_module(Attention(), mesh, style)
    module(tensor(), **{name: value for name, value in arguments.items() if name != "mask"})


ENTRIES: dict[str, Entry] = {
    "call": in_call, "call without lengths": in_call_without_lengths, "context": in_context, "module": in_module,
}  # fmt: skip
each_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


def check_refused(entry: Entry, arguments: Arguments, error: type[Exception], message: str) -> int:
    """Returns the number of collectives of each rank, which are exchanges of lengths, without those on entry."""
    with nothing_changes(), recorded_collectives() as collectives:
        errors = errors_by_rank(RANKS, lambda rank: entry(arguments))
    assert [type(each) for each in errors] == [error] * RANKS
    assert len({str(each) for each in errors}) == 1
    with pytest.raises(error, match=message):
        raise errors[0] or AssertionError
    by_rank = [kinds(collectives, rank) for rank in range(RANKS)]
    assert {kind for kinds_of_rank in by_rank for kind in kinds_of_rank} <= {"AllGather"}
    assert len({len(kinds_of_rank) for kinds_of_rank in by_rank}) == 1
    return len(by_rank[0]) - (entry is in_context and len(by_rank[0]) > 0)


COLUMNS = (
    r"expected attn_mask to have this rank's query rows \(8, in layout order\) and the 24 keys of the whole sequence"
)
OF_LENGTHS: dict[str, tuple[Arguments, str]] = {
    "keys of this rank": ({"attn_mask": torch.ones(8, 8)}, rf"{COLUMNS}.*got \(1, 1, 8, 8\).*context_parallel_shard"),
    "one key too many": ({"attn_mask": torch.ones(2, 1, 1, 25).bool()}, rf"{COLUMNS}.*got \(2, 1, 1, 25\)"),
    "padding of this rank": (
        {"attn_mask": torch.ones(2, 1, 1, 8).bool()}, rf"{COLUMNS}.*the same for all queries is passed whole"
    ),
    "a mask for three rows": ({"mask": Batched([Full(), Causal(), Full()])}, "of 3 batch rows, got a batch of 2"),
    "two masks of three rows": (
        {"mask": Batched([Full(), Causal(), Full()]) & SlidingWindow(3, 0)},
        "of 3 batch rows, got a batch of 2",
    ),
    "documents beyond the end": (
        {"mask": Documents([0, 7, 25], within=Causal())},
        r"documents of a mask end at 25 \(queries\) and 25 \(keys\), expected at most .*, 24 and 24",
    ),
    "keys beyond the end": (
        {"mask": Documents([0, 24], [0, 30])},
        r"end at 24 \(queries\) and 30 \(keys\), expected at most .*, 24 and 24",
    ),
    "documents of some batch row": (
        {"mask": Batched([Documents([0, 24]), Documents([0, 99])]) | PrefixLM(2)},
        r"end at 99 \(queries\) and 99 \(keys\)",
    ),
    "document ids for positions": (
        {"mask": Documents([0] * 9 + [1] * 8 + [2] * 7)}, r"24 numbers .* for 24 tokens, .* a document id of each token"
    ),
    "ids of this rank's tokens": ({"mask": Documents.from_ids([0, 0, 1, 1, 1, 2, 2, 2])}, "ids of 8 tokens, .* the 24"),
    "lengths of documents for positions": ({"mask": Documents([8, 8, 8])}, r"\(8, 8, 8\) for 24 .* the lengths"),
}  # fmt: skip


@each_entry
@pytest.mark.parametrize(("arguments", "message"), OF_LENGTHS.values(), ids=OF_LENGTHS)
def test_what_depends_on_the_whole_length_is_refused_when_that_is_known(
    arguments: Arguments, message: str, entry: Entry
) -> None:
    collectives = check_refused(entry, arguments, ValueError, message)
    # Undeclared lengths are found together; then ranks compare whether all have the same tokens.
    assert collectives == 0


@pytest.mark.parametrize("rows", [8, 1])
def test_layouts_that_differ_between_batch_rows_need_a_mask_for_each(rows: int) -> None:
    arguments = {"attn_mask": torch.zeros(4, rows, LENGTH), "layout": MirroredBatch()}
    message = r"MirroredBatch\(\) gives .* so an attn_mask with query rows needs all 2 batch rows; got \(1, 4, 8, 24\)"
    if rows == 1:  # the same for all queries, so for those of all batch rows
        run_ranks(RANKS, lambda rank: in_call(arguments))
        return
    assert check_refused(in_call, arguments, ValueError, message) == 0
    assert check_refused(in_call_without_lengths, arguments, ValueError, message) == 0
    run_ranks(RANKS, lambda rank: in_call({**arguments, "attn_mask": torch.zeros(2, 1, rows, LENGTH)}))


def test_masks_of_each_rank_s_own_keys_where_ranks_have_unequally_many() -> None:
    """A padding mask of local keys, with a length that does not divide: the error has the expected number of keys."""

    def body(rank: int) -> None:
        q = torch.zeros(1, 1, 3 if rank == 0 else 2, 8)
        with context_parallel(dist.group.WORLD):
            F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(1, 1, 1, q.size(2)))

    message = r"attn_mask has only this rank's keys on rank 0, 1.*, expected the keys of the whole sequence: "
    for error in errors_by_rank(RANKS, body):
        assert type(error) is ValueError
        assert re.search(message, str(error))


@each_entry
def test_a_call_after_one_that_was_refused_is_right(entry: Entry) -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="24 keys"):
            entry({"attn_mask": torch.ones(8, 8)})
        dist.barrier()
        with pytest.raises(ValueError, match="documents of a mask end"):
            entry({"mask": Documents([0, 99])})
        dist.barrier()
        entry({"attn_mask": torch.zeros(8, 24), "mask": Causal()})

    run_ranks(RANKS, body)
