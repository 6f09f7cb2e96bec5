"""The block mask of local rows: slices of the tables of a whole sequence's `BlockMask`.

The tables list, for each block of queries, the blocks of keys that `mask_mod` decides (partial) and those that every
query of the block sees (full). The tables of one rank follow from them, without a call of `mask_mod`:

- A local block inside one global block has that block's row of the tables.
- A local block that spans several global blocks (chunks that do not begin at a block, stripes) lists as full what all
  of them see fully, and as partial all other blocks that any of them sees. There `mask_mod` looks up the entry of the
  query's own global block (`Tables.block_kinds`), since tables may leave out keys that `mask_mod` allows: block-sparse
  attention has no `mask_mod` at all.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple, TypeVar
from weakref import ref

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from cp_dtensor import _torch
from cp_dtensor._torch.cache import capturing
from cp_dtensor.attention.masked import positions_of
from cp_dtensor.engine.gather_kv import cached
from cp_dtensor.spec.layouts import Layout, shard_lengths

T = TypeVar("T")
Shape = tuple[int, ...]


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
        """The queries of one rank, of a batch of this size."""
        differ = len(layout.batch_groups(batch_size)) > 1
        return cls(layout, seq_len, rank, world_size, batch_size if differ else 1)

    @property
    def count(self) -> int:
        """Local rows of each batch row."""
        return shard_lengths(self.layout, self.seq_len, self.world_size)[self.rank]

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Spans of batch rows with the same positions."""
        return self.layout.batch_groups(self.batch_size)

    def check_batch_size(self, of_mask: int) -> None:
        """Refuses masks that lack a row for each batch row, where positions differ between batch rows."""
        if of_mask not in (1, self.batch_size) and len(self.groups) > 1:
            raise ValueError(
                f"{self.layout} divides batch rows differently, so it needs a block mask of one batch row or of "
                f"{self.batch_size}, got one of {of_mask}"
            )

    def positions(self, device: torch.device) -> torch.Tensor:
        """Global positions: (rows,) int32, or (batch, rows) where batch rows differ. Cached: do not write to them."""
        return cached(_positions, device, self)

    def group_positions(self, device: torch.device) -> list[torch.Tensor]:
        """Global positions of each batch group: (rows,) int64."""
        shards = [self.layout.segments(self.seq_len, self.rank, self.world_size, g) for g in range(len(self.groups))]
        return [positions_of(each, device) for each in shards]

    def has_unaligned_blocks(self, q_block: int) -> bool:
        """True if a local block of this many queries spans several global blocks."""
        return cached(_global_blocks, torch.device("cpu"), self, q_block).size(2) > 1


def _positions(device: torch.device, rows: LocalRows) -> torch.Tensor:
    of_groups = rows.group_positions(device)
    if len(of_groups) == 1:
        return of_groups[0].int()
    spans = zip(of_groups, rows.groups, strict=True)
    return torch.cat([positions.expand(stop - start, -1) for positions, (start, stop) in spans]).int()


def _global_blocks(device: torch.device, rows: LocalRows, q_block: int) -> torch.Tensor:
    """(batch groups, local blocks, most) int64: global blocks that each local block spans, the last repeated."""
    of_groups, global_count = [], -(-rows.seq_len // q_block)
    for positions in rows.group_positions(torch.device("cpu")):
        local = torch.arange(rows.count, device="cpu") // q_block
        pairs = torch.unique(local * global_count + positions // q_block)
        counts = torch.bincount(pairs // global_count).unsqueeze(1)
        slots = torch.arange(int(counts.max()), device="cpu")
        of_groups.append((pairs % global_count)[counts.cumsum(0) - counts + torch.minimum(slots, counts - 1)])
    most = max(blocks.size(1) for blocks in of_groups)
    return torch.stack([torch.cat([b, b[:, -1:].expand(-1, most - b.size(1))], 1) for b in of_groups]).to(device)


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
        """The tables of a block mask."""
        return cls(
            mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
            mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices,
        )  # fmt: skip


def mask_lengths(mask: BlockMask | None) -> tuple[int, int] | None:
    """The numbers of queries and keys that a mask was made for; None for a mask of one block, which fits any."""
    if mask is None or min(mask.BLOCK_SIZE) >= _torch.WHOLE_BLOCK:
        return None
    return mask.seq_lengths[0], mask.seq_lengths[1]


def check_mask_lengths(expected: tuple[int, int], received: tuple[int, int] | None) -> None:
    """Refuses a block mask of other lengths than those of the sequence."""
    if received not in (None, expected):
        raise ValueError(
            f"expected a block mask of the whole sequence, of {expected[0]} queries and {expected[1]} keys, got one of "
            f"{received}: make it with create_block_mask(mask_mod, B, H, {expected[0]}, {expected[1]})"
        )


def table_shapes(
    mask_shape: Shape, has_full: bool, block_size: tuple[int, int], lengths: tuple[int, int], batch: int, local: int,
    with_q: bool, unaligned: bool,
) -> list[Shape | None]:  # fmt: skip
    """The shapes of the tables that `local_tables` returns, None for those it leaves out.

    `mask_shape` is that of the whole mask's `kv_indices`, `lengths` are global, `batch` and `local` count batch rows of
    the local tables and local queries.
    """
    q_blocks, kv_blocks = (-(-length // block) for length, block in zip(lengths, block_size, strict=True))
    first, local_blocks = (batch, mask_shape[1]), -(-local // block_size[0])
    columns = kv_blocks if unaligned else mask_shape[3]
    of_keys: list[Shape] = [(*first, local_blocks), (*first, local_blocks, columns)]
    of_queries: list[Shape] = [(*first, columns), (*first, columns, local_blocks)]
    parts = ((of_keys, True), (of_keys, has_full), (of_queries, with_q), (of_queries, with_q and has_full))
    shapes = [shape if exists else None for pair, exists in parts for shape in pair]
    return [*shapes, (*mask_shape[:2], q_blocks, kv_blocks) if unaligned else None]


def local_tables(
    mask: Tables, block_size: tuple[int, int], kv_len: int, rows: LocalRows, with_q: bool, unaligned: bool = False
) -> Tables:
    """The tables of one rank's mask, int32 except for `block_kinds`.

    Args:
        mask: the tables of the whole sequence, of which those by blocks of queries are read.
        kv_len: global number of keys.
        rows: the local queries, one at least.
        with_q: True to also return tables by blocks of keys, which backward needs.
        unaligned: True to return `block_kinds` even if all local blocks lie inside one global block.
    """
    assert mask.kv_indices is not None
    rows.check_batch_size(mask.kv_indices.size(0))
    blocks = cached(_global_blocks, mask.kv_indices.device, rows, block_size[0])
    kinds = None
    if unaligned or blocks.size(2) > 1:
        kinds = _block_kinds(mask, -(-kv_len // block_size[1]))
    parts = []
    for (start, stop), of_group in zip(rows.groups, blocks, strict=True):

        def of_batch(table: torch.Tensor, start: int = start, stop: int = stop) -> torch.Tensor:
            if len(rows.groups) == 1:
                return table
            return table.expand(stop - start, *table.shape[1:]) if table.size(0) == 1 else table[start:stop]

        if kinds is not None:
            parts.append(_merged(of_batch(kinds), of_group, mask.full_kv_indices is not None))
        else:
            index = of_group[:, 0]
            parts.append([of_batch(table).index_select(2, index) for table in mask[:4] if table is not None])
    made = Tables(*(tables[0] if len(tables) == 1 else torch.cat(tables) for tables in zip(*parts, strict=True)))
    if with_q:
        made = made._replace(**_transposed(made.kv_num_blocks, made.kv_indices, ""))
        made = made._replace(**_transposed(made.full_kv_num_blocks, made.full_kv_indices, "full_"))
    return made._replace(block_kinds=kinds)


def _block_kinds(mask: Tables, columns: int) -> torch.Tensor:
    """`Tables.block_kinds` of the whole mask."""
    # Bytes: Triton keeps lookups of wider integers in several stages of shared memory, where they do not fit.
    kinds = _dense(mask.kv_num_blocks, mask.kv_indices, columns).to(torch.int8) * PARTIAL
    if mask.full_kv_indices is None:
        return kinds
    return kinds.masked_fill_(_dense(mask.full_kv_num_blocks, mask.full_kv_indices, columns), FULL)


def _merged(kinds: torch.Tensor, blocks: torch.Tensor, has_full: bool) -> list[torch.Tensor]:
    """Tables of local blocks that span several global blocks, (local blocks, most)."""
    spanned = kinds.index_select(2, blocks.flatten()).unflatten(2, blocks.shape)
    all_full, any_listed = spanned.amin(3) == FULL, spanned.amax(3) > 0
    return [*_listed(any_listed & ~all_full), *(_listed(all_full) if has_full else ())]


def _transposed(counts: torch.Tensor | None, indices: torch.Tensor | None, prefix: str) -> dict[str, torch.Tensor]:
    """The blocks of queries that see each block of keys."""
    if indices is None:
        return {}
    by_keys = _listed(_dense(counts, indices, indices.size(-1)).transpose(-2, -1))
    return {f"{prefix}q_num_blocks": by_keys[0], f"{prefix}q_indices": by_keys[1]}


def _dense(counts: torch.Tensor | None, indices: torch.Tensor | None, columns: int) -> torch.Tensor:
    """(..., blocks, columns) bool: True for the blocks of keys that are listed."""
    assert counts is not None
    assert indices is not None
    listed = torch.arange(indices.size(-1), device=indices.device) < counts.unsqueeze(-1)
    dense = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter_(-1, torch.where(listed, indices, columns).long(), True)[..., :columns]


def _listed(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `_dense`: counts and indices."""
    order = torch.argsort(dense.to(torch.int8), dim=-1, descending=True, stable=True)
    # Contiguous, whatever the strides of `dense`: FlexAttention's kernels assume it.
    return dense.sum(-1, dtype=torch.int32).contiguous(), order.int().contiguous()


# Cache of tables


class _TableCache:
    """Local tables by the whole mask's tables, as long as these exist and have not been written to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_indices = WeakIdKeyDictionary()

    def __len__(self) -> int:
        """Masks with cached tables."""
        return len(self._by_indices)

    def tables_of(self, mask: Tables) -> dict[object, Tables]:
        """The cached tables of a mask by layout and rank, to be added to."""
        tables = [table for table in mask[:4] if table is not None]
        versions = [_torch.version_of(table) for table in tables]
        if None in versions:  # inference tensors: writes to them are not counted
            return {}
        with self._lock:
            refs, seen, made = self._by_indices.get(mask.kv_indices, ((), (), {}))
            same = len(refs) == len(tables) and all(weak() is table for weak, table in zip(refs, tables, strict=True))
            if not same or seen != versions:
                made = {}
                self._by_indices[mask.kv_indices] = ([ref(table) for table in tables], versions, made)
        return made


table_cache = _TableCache()


def cached_tables(mask: Tables, block_size: tuple[int, int], kv_len: int, rows: LocalRows, with_q: bool) -> Tables:
    """`local_tables` from the cache.

    Not for compiled code: it writes the masks of later steps to the same tensors without changing their version.
    """
    made = table_cache.tables_of(mask)
    key = (block_size, kv_len, rows, with_q)
    tables = made.get(key)
    if tables is None:
        tables = _torch.prepared(lambda: local_tables(mask, block_size, kv_len, rows, with_q))
        if not capturing():
            made[key] = tables
    return tables
