"""The block mask of local rows, made of the tables of a whole sequence's `BlockMask` without a call of `mask_mod`.

The tables list, for each block of queries, the blocks of keys that `mask_mod` decides (partial) and those that every
query of the block sees (full). A block of local queries lists as full what all global blocks that it spans see fully,
and as partial all other blocks that any of them sees. Where it spans several (chunks that do not begin at a block,
stripes), `mask_mod` looks up the entry of the query's own global block (`Tables.block_kinds`), since tables may leave
out keys that `mask_mod` allows: block-sparse attention has no `mask_mod` at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from cp_dtensor import _torch
from cp_dtensor._torch.cache import capturing
from cp_dtensor.api.buffers import positions_by_group, rows_of_batch
from cp_dtensor.engine.gather_kv import cached
from cp_dtensor.spec.layouts import Layout

# Local rows


@dataclass(frozen=True)
class LocalRows:
    """The queries of one rank."""

    layout: Layout
    seq_len: int
    rank: int
    world_size: int
    batch_size: int
    """1 if all batch rows have the same positions."""

    @classmethod
    def of(cls, layout: Layout, seq_len: int, rank: int, world_size: int, batch_size: int) -> LocalRows:
        """Return the queries of one rank, of a batch of this size."""
        differ = len(layout.batch_groups(batch_size)) > 1
        return cls(layout, seq_len, rank, world_size, batch_size if differ else 1)

    def check_batch_size(self, of_mask: int) -> None:
        """Refuse masks that lack a row for each batch row, where positions differ between batch rows."""
        if self.batch_size > 1 and of_mask not in (1, self.batch_size):
            raise ValueError(
                f"{self.layout} divides batch rows differently, so it needs a block mask of one batch row or of "
                f"{self.batch_size}, got one of {of_mask}"
            )

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return global positions, cached: (rows,) int32, or (batch, rows) where batch rows differ."""
        return cached(_positions, device, self)

    def has_unaligned_blocks(self, q_block: int) -> bool:
        """Return whether a local block of this many queries spans several global blocks."""
        return bool(cached(_has_unaligned_blocks, torch.device("cpu"), self, q_block))


def _positions(device: torch.device, rows: LocalRows) -> torch.Tensor:
    place = rows.layout, rows.seq_len, rows.rank, rows.world_size, rows.batch_size
    return rows_of_batch(positions_by_group(*place, device), rows.layout.batch_groups(rows.batch_size)).int()


def _has_unaligned_blocks(device: torch.device, rows: LocalRows, q_block: int) -> torch.Tensor:
    blocks = _positions(device, rows) // q_block
    first_rows = torch.arange(blocks.size(-1), device=device) // q_block * q_block
    return (blocks != blocks[..., first_rows]).any()


# Tables

PARTIAL, FULL = 1, 2
"""Entries of `Tables.block_kinds`; 0 for blocks that are not listed."""


class Tables(NamedTuple):
    """The tables of a `BlockMask`, by its names for them."""

    kv_num_blocks: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    full_kv_num_blocks: torch.Tensor | None = None
    full_kv_indices: torch.Tensor | None = None
    q_num_blocks: torch.Tensor | None = None
    q_indices: torch.Tensor | None = None
    full_q_num_blocks: torch.Tensor | None = None
    full_q_indices: torch.Tensor | None = None
    block_kinds: torch.Tensor | None = None
    """(B, H, global blocks of queries, blocks of keys) int8, if a local block spans several global blocks."""

    @classmethod
    def of(cls, mask: BlockMask) -> Tables:
        """Return the tables of a block mask."""
        return cls(*(getattr(mask, name) for name in cls._fields[:8]))


def mask_lengths(mask: BlockMask | None) -> tuple[int, int] | None:
    """Return the numbers of queries and keys that a mask was made for; None for a mask of one block, which fits any."""
    if mask is None or min(mask.BLOCK_SIZE) >= _torch.WHOLE_BLOCK:
        return None
    return mask.seq_lengths[0], mask.seq_lengths[1]


def check_mask_lengths(expected: tuple[int, int], received: tuple[int, int] | None) -> None:
    """Refuse a block mask of other lengths than those of the sequence."""
    if received not in (None, expected):
        raise ValueError(
            f"expected a block mask of the whole sequence, of {expected[0]} queries and {expected[1]} keys, got one of "
            f"{received}: make it with create_block_mask(mask_mod, B, H, {expected[0]}, {expected[1]})"
        )


def local_tables(mask: BlockMask, kv_len: int, positions: torch.Tensor, unaligned: bool) -> Tables:
    """Return the tables of one rank's mask, int32 except for `block_kinds`. Dynamo may trace it.

    Args:
        mask: of the whole sequence; its tables by blocks of queries are read.
        kv_len: global number of keys.
        positions: of the local queries, one at least, as `LocalRows.positions`.
        unaligned: True to return `block_kinds`, which is needed if a local block spans several global blocks.
    """
    (q_block, kv_block), counts, indices = mask.BLOCK_SIZE, mask.full_kv_num_blocks, mask.full_kv_indices
    columns = -(-kv_len // kv_block)
    # Bytes: Triton keeps lookups of wider integers in several stages of shared memory, where they do not fit.
    kinds = _dense(mask.kv_num_blocks, mask.kv_indices, columns).to(torch.int8) * PARTIAL
    if counts is not None and indices is not None:
        kinds = kinds.masked_fill(_dense(counts, indices, columns), FULL)
    full, partial = (_spanned if unaligned else _selected)(kinds, positions, q_block)
    dense = [partial, None if indices is None else full]
    if mask.q_indices is not None:  # tables by blocks of keys, which backward reads
        dense += [None if each is None else each.mT for each in dense]
    tables = [table for each in dense for table in (_listed(each) if each is not None else (None, None))]
    return Tables(*tables)._replace(block_kinds=kinds if unaligned else None)


def _selected(kinds: torch.Tensor, positions: torch.Tensor, q_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which blocks local ones see fully and in part, where each lies inside of one global block."""
    blocks = (positions[..., ::q_block] // q_block).long()
    chosen = torch.take_along_dim(kinds, blocks.view(-1, 1, blocks.size(-1), 1), 2)
    return chosen == FULL, chosen == PARTIAL


def _spanned(kinds: torch.Tensor, positions: torch.Tensor, q_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which blocks local ones see fully and in part, where they may span several global blocks."""
    q_blocks, local_blocks = kinds.size(2), -(-positions.size(-1) // q_block)
    rows = torch.arange(positions.size(-1), device=positions.device) // q_block
    # 1 where a local block spans a global one. Its products are counts, of which only zeros matter: any dtype will do.
    spans = torch.zeros(*positions.shape[:-1], local_blocks * q_blocks, dtype=torch.bfloat16, device=positions.device)
    spans = spans.scatter(-1, rows * q_blocks + positions // q_block, 1.0).unflatten(-1, (local_blocks, q_blocks))
    spans = spans if spans.dim() == 2 else spans.unsqueeze(1)
    full = spans @ (kinds != FULL).bfloat16() == 0
    return full, (spans @ (kinds > 0).bfloat16() > 0) & ~full


def _dense(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Return (..., blocks, columns), True for the blocks of keys that are listed."""
    listed = torch.arange(indices.size(-1), device=indices.device) < counts.unsqueeze(-1)
    dense = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter(-1, torch.where(listed, indices, columns).long(), True)[..., :columns]


def _listed(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inverse of `_dense`: counts and indices."""
    order = torch.argsort(dense.to(torch.int8), dim=-1, descending=True, stable=True)
    # Contiguous, whatever the strides of `dense`: FlexAttention's kernels assume it.
    return dense.sum(-1, dtype=torch.int32).contiguous(), order.int().contiguous()


# Cache of tables

_LOCAL_TABLES = "cp_dtensor_local_tables"
"""Attribute of a block mask: its tables, their ids and versions, and the local tables made of these."""


def cached_tables(mask: BlockMask, kv_len: int, rows: LocalRows) -> Tables:
    """Return `local_tables` of a mask, kept with it as long as nothing is written to its tables.

    Not for compiled code: it writes the masks of later steps to the same tensors without changing their version.
    """
    whole = Tables.of(mask)
    state = [(id(table), _torch.version_of(table)) for table in whole if table is not None]
    _, seen, made = vars(mask).get(_LOCAL_TABLES, (None, None, {}))
    if seen != state:
        made = {}
        setattr(mask, _LOCAL_TABLES, (whole, state, made))  # with the tables, whose ids would be those of others
    tables = made.get((kv_len, rows))
    if tables is None or any(version is None for _, version in state):  # writes to these are not counted
        positions, unaligned = rows.positions(mask.kv_indices.device), rows.has_unaligned_blocks(mask.BLOCK_SIZE[0])
        tables = _torch.prepared(lambda: local_tables(mask, kv_len, positions, unaligned))
        if not capturing():
            made[kv_len, rows] = tables
    return tables
