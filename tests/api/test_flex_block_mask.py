"""The block mask of local rows, for any length, block size and layout."""

from __future__ import annotations

import gc
import inspect
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flex_checks import block_mask, documents, listed_blocks, visible, window
from support.problems import shard
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.api.flex_block_mask import LocalRows, cached_block_mask, has_unaligned_blocks, local_block_mask

LAYOUTS = st.sampled_from([Contiguous(), HeadTail(), Striped(1), Striped(3), Striped(8), MirroredBatch()])


def of_rows(mask: BlockMask, lengths: tuple[int, int], rows: LocalRows, unaligned: bool = False) -> BlockMask:
    """The block mask of local rows."""
    unaligned = unaligned or has_unaligned_blocks(rows, mask.BLOCK_SIZE[0])
    local = local_block_mask(mask, lengths[1], rows.positions(torch.device("cpu")), unaligned)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_indices"):
        table = getattr(local, name)
        assert table is None or (table.dtype == torch.int32 and table.is_contiguous()), f"as kernels take {name}"
    kinds = inspect.getclosurevars(local.mask_mod).nonlocals.get("kinds")
    assert (None if kinds is None else kinds.dtype) == (torch.int8 if unaligned else None)
    return local


@st.composite
def sparse_masks(draw: Any) -> tuple[BlockMask, tuple[int, int], int]:
    """A mask whose tables list other blocks than `mask_mod` allows (block-sparse attention); its lengths and batch."""
    lengths = draw(st.integers(1, 70)), draw(st.integers(1, 40))
    block_size = draw(st.sampled_from([(4, 4), (8, 4), (4, 16), (16, 8)]))
    batch, heads = draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 2]))
    shape = (batch, heads, *(-(-length // block) for length, block in zip(lengths, block_size, strict=True)))
    kinds = torch.randint(3, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    tables = []
    for kind in (1, 2):
        listed = (kinds == kind).int()
        tables += [listed.sum(-1, dtype=torch.int32), torch.argsort(listed, dim=-1, descending=True, stable=True).int()]
    mod = draw(st.sampled_from([window, documents, noop_mask]))
    if draw(st.booleans()):
        tables = tables[:2]
    mask = BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=block_size, mask_mod=mod, seq_lengths=lengths)
    return mask, lengths, draw(st.sampled_from([batch, 3]))


@settings(max_examples=100, deadline=None)
@given(sparse_masks(), LAYOUTS, st.integers(1, 5), st.booleans())
def test_a_ranks_mask_shows_its_rows_of_the_whole_mask(
    given_mask: tuple[BlockMask, tuple[int, int], int], layout: Layout, world_size: int, unaligned: bool
) -> None:
    mask, lengths, batch = given_mask
    whole = visible(mask, batch, 2, *lengths)
    for rank in range(world_size):
        rows = LocalRows.of(layout, lengths[0], rank, world_size, batch)
        local_rows = rows.positions(torch.device("cpu")).size(-1)
        if not local_rows:
            continue
        local = of_rows(mask, lengths, rows, unaligned)
        assert torch.equal(visible(local, batch, 2, local_rows, lengths[1]), shard(whole, layout, rank, world_size))
        assert local.seq_lengths == (local_rows, lengths[1])
        partial, full = listed_blocks(local, batch, 2)
        assert not (partial & full).any(), "kernels would add what is listed twice"
        by_queries = BlockMask.from_kv_blocks(
            local.kv_num_blocks, local.kv_indices, local.full_kv_num_blocks, local.full_kv_indices,
            BLOCK_SIZE=local.BLOCK_SIZE, mask_mod=local.mask_mod, seq_lengths=local.seq_lengths,
        )  # fmt: skip
        for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
            ours, torchs = getattr(local, name), getattr(by_queries, name)
            assert (ours is None and torchs is None) or torch.equal(ours, torchs), name


@pytest.mark.parametrize(("layout", "length"), [(HeadTail(), 64), (Striped(16), 61), (Contiguous(), 61)])
def test_whole_blocks_of_rows_are_selected(layout: Layout, length: int) -> None:
    """`mask_mod` gets no lookup, and full blocks stay full."""
    mask = block_mask(documents, length)
    for rank in range(2):
        rows = LocalRows.of(layout, length, rank, 2, 2)
        if layout == Contiguous():  # 31 tokens
            assert has_unaligned_blocks(rows, 8) == (rank == 1)
            continue
        assert not has_unaligned_blocks(rows, 8)
        tables = local_block_mask(mask, length, rows.positions(torch.device("cpu")), False)
        blocks = [position // 8 for position in rows.positions(torch.device("cpu"))[::8].tolist()]
        assert torch.equal(tables.full_kv_num_blocks, mask.full_kv_num_blocks[:, :, blocks])
        assert torch.equal(tables.kv_indices, mask.kv_indices[:, :, blocks])


def test_tables_are_made_once_for_a_mask_and_what_is_written_to_it() -> None:
    rows = LocalRows.of(HeadTail(), 61, 1, 2, 2)
    mask = block_mask(window, 61)
    tables = cached_block_mask(mask, 61, rows)
    assert cached_block_mask(mask, 61, rows) is tables
    assert cached_block_mask(mask, 61, LocalRows.of(HeadTail(), 61, 0, 2, 2)) is not tables
    assert cached_block_mask(block_mask(window, 61), 61, rows) is not tables
    mask.full_kv_num_blocks.zero_()
    after = cached_block_mask(mask, 61, rows)
    assert after is not tables
    assert after.full_kv_num_blocks.sum() == 0
    mask.full_kv_indices = mask.full_kv_indices.clone()
    assert cached_block_mask(mask, 61, rows) is not after
    made = ref(cached_block_mask(mask, 61, rows).kv_indices)
    assert made() is not None
    del mask
    gc.collect()
    assert made() is None, "tables go with their mask"


def test_tables_of_inference_tensors_are_plain_and_never_stale() -> None:
    rows = LocalRows.of(HeadTail(), 61, 1, 2, 2)
    with torch.inference_mode():
        mask = block_mask(window, 61)
        tables = cached_block_mask(mask, 61, rows)
        mask.kv_num_blocks.zero_()
        assert cached_block_mask(mask, 61, rows).kv_num_blocks.sum() == 0
    assert not tables.kv_indices.is_inference()
    assert not tables.q_num_blocks.is_inference()


def test_the_order_of_writes_of_a_deterministic_backward_is_made_anew() -> None:
    try:
        mask = create_block_mask(window, None, None, 61, 61, device="cpu", BLOCK_SIZE=8, compute_dq_write_order=True)
    except TypeError:
        pytest.skip("this torch has no such order")
    rows = LocalRows.of(HeadTail(), 61, 1, 2, 2)
    local = of_rows(mask, (61, 61), rows)
    assert local.dq_write_order is not None
    assert local.dq_write_order.shape == local.q_indices.shape
    assert local.dq_kv_order_spt is mask.dq_kv_order_spt
    mask.dq_kv_order = torch.arange(8).view(1, 1, 8)
    with pytest.raises(NotImplementedError, match="explicit dq_kv_order"):
        of_rows(mask, (61, 61), rows)
