"""The tables of a block mask of the whole sequence, as one rank's queries see them.

They say which blocks of keys each block of queries sees, and which of those entirely. They are made of tables, without
asking the mask's function about every pair: where a local block of rows lies in one global block, it has that block's
row; where it lies in several (chunks that do not begin at a block, stripes), it sees what any of them sees, entirely
what all of them see so, and of the others each query what its own global block says (`Tables.kinds`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from cp_dtensor import _torch
from cp_dtensor._torch.cache import LRUCache, capturing
from cp_dtensor.attention.masked import positions_of
from cp_dtensor.spec.layouts import Layout

# The rows of one rank, as FlexAttention of shards counts them: how many there are, and where they stand.

T = TypeVar("T")
Pair = tuple[torch.Tensor, torch.Tensor]
"""Something of keys and of values, (B, Hkv, T, D) and (B, Hkv, T, Dv)."""


@dataclass(frozen=True)
class LocalRows:
    """The queries of one rank."""

    layout: Layout
    seq_len: int
    rank: int
    world_size: int
    batch_size: int
    """1 where all batch rows are divided alike."""

    @classmethod
    def of(cls, layout: Layout, seq_len: int, rank: int, world_size: int, batch_size: int) -> LocalRows:
        """Those of a batch."""
        differ = len(layout.batch_groups(batch_size)) > 1
        return cls(layout, seq_len, rank, world_size, batch_size if differ else 1)

    @property
    def count(self) -> int:
        """How many there are in each batch row."""
        return shard_lengths(self.layout, self.seq_len, self.world_size)[self.rank]

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The batch rows that share their positions."""
        return self.layout.batch_groups(self.batch_size)

    def check_batch_size(self, of_mask: int) -> None:
        """Refuses masks that do not have a row for each of the batch, where these differ."""
        if of_mask not in (1, self.batch_size) and len(self.groups) > 1:
            raise ValueError(
                f"{self.layout} divides batch rows differently, so it needs a block mask of one batch row or of "
                f"{self.batch_size}, got one of {of_mask}"
            )

    def positions(self, device: torch.device) -> torch.Tensor:
        """(rows,) int32, or (batch, rows) where batch rows differ; not to be written to."""
        return kept(_positions, self, device)

    def group_positions(self, device: torch.device) -> list[torch.Tensor]:
        """For each batch group (rows,) int64."""
        places = [self.layout.segments(self.seq_len, self.rank, self.world_size, g) for g in range(len(self.groups))]
        return [positions_of(each, device) for each in places]


def _positions(rows: LocalRows, device: torch.device) -> torch.Tensor:
    of_groups = rows.group_positions(device)
    if len(of_groups) == 1:
        return of_groups[0].int()
    spans = zip(of_groups, rows.groups, strict=True)
    return torch.cat([positions.expand(stop - start, -1) for positions, (start, stop) in spans]).int()


@lru_cache(maxsize=256)
def shard_lengths(layout: Layout, seq_len: int, world_size: int) -> tuple[int, ...]:
    """The number of tokens of each rank."""
    return tuple(layout.local_length(seq_len, rank, world_size) for rank in range(world_size))


def most_tokens(layout: Layout, local: int, rank: int, world_size: int) -> int:
    """The length of the longest sequence of which a rank owns so many tokens.

    >>> from cp_dtensor.spec.layouts import HeadTail
    >>> most_tokens(HeadTail(), 2, 0, 2)  # of 4 tokens rank 0 has 1 + 1, of 5 it has 2 + 1
    4
    """
    if layout.only_length is not None:
        return layout.only_length
    length = 1
    while layout.local_length(length, rank, world_size) <= local:
        length *= 2
    low = length // 2  # shares grow with the length in every layout
    while length - low > 1:
        middle = (low + length) // 2
        low, length = (low, middle) if layout.local_length(middle, rank, world_size) > local else (middle, length)
    return low


def kept(make: Callable[..., T], *key: Any) -> T:
    """`make(*key)`, a few small tensors, remembered; in a capture, what is not yet is computed by the graph."""
    value = _kept.get((make, *key))
    if value is None:
        if capturing():
            return make(*key)
        value = _kept.add((make, *key), _torch.prepared(lambda: make(*key)))
    return value  # type: ignore[return-value]


_kept = LRUCache[object](most=32)  # of a million tokens each has megabytes


PARTIAL, FULL = 1, 2
"""What `Tables.kinds` says of blocks that are seen."""


class Tables(NamedTuple):
    """Those of a `BlockMask`, by its names for them, and more where local blocks lie in several global ones."""

    kv_num_blocks: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    full_kv_num_blocks: torch.Tensor | None = None
    full_kv_indices: torch.Tensor | None = None
    q_num_blocks: torch.Tensor | None = None
    q_indices: torch.Tensor | None = None
    full_q_num_blocks: torch.Tensor | None = None
    full_q_indices: torch.Tensor | None = None
    kinds: torch.Tensor | None = None
    """(B, H, global blocks of queries, blocks of keys) int8: `PARTIAL`, `FULL` or 0; of those that hold local rows."""
    kinds_row: torch.Tensor | None = None
    """(rows,) or (batch, rows): in which of those blocks a query lies."""

    @classmethod
    def of(cls, mask: BlockMask) -> Tables:
        """The tables of keys, from which all others follow."""
        return cls(mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)


class _Touched(NamedTuple):
    """In which global blocks of queries the local ones lie, for each batch group."""

    blocks: torch.Tensor
    """(groups, local blocks, as many as there are at most), repeated where there are fewer."""
    unique: torch.Tensor
    """(groups, all of them), likewise."""
    row: torch.Tensor
    """(groups, rows) int32: which of `unique` each row lies in."""


def mask_lengths(mask: BlockMask | None) -> tuple[int, int] | None:
    """The lengths that a mask was made for; None for one that is a single block, which goes with all lengths."""
    if mask is None or min(mask.BLOCK_SIZE) >= _torch.WHOLE_BLOCK:
        return None
    return mask.seq_lengths[0], mask.seq_lengths[1]


def remembered_tables(mask: Tables, block_size: tuple[int, int], kv_len: int, rows: LocalRows, with_q: bool) -> Tables:
    """`local_tables`, made once as long as the whole mask's tables exist.

    Not for compiled code, which writes other masks to the same tensors, and the tensors do not count it.
    """
    made = cache.made_of(mask)
    key = (block_size, kv_len, rows, with_q)
    tables = made.get(key)
    if tables is None:
        tables = _torch.prepared(lambda: local_tables(mask, block_size, kv_len, rows, with_q))
        if not capturing():
            made[key] = tables
    return tables


def table_shapes(
    mask_shape: tuple[int, ...], has_full: bool, block_size: tuple[int, int], kv_len: int, rows: LocalRows, with_q: bool
) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of what `local_tables` returns, None for what there is not; `mask_shape` is that of `kv_indices`."""
    batch, heads, _, columns = mask_shape
    rows.check_batch_size(batch)
    touched = kept(_touched, rows, block_size[0], torch.device("cpu"))
    if len(rows.groups) > 1:
        batch = rows.batch_size
    several = touched.blocks.size(2) > 1
    if several:
        columns = -(-kv_len // block_size[1])
    blocks = touched.blocks.size(1)
    per_row = (rows.count,) if len(rows.groups) == 1 else (batch, rows.count)
    return (
        *_shapes_of_pairs((batch, heads), blocks, columns, has_full, with_q),
        (batch, heads, touched.unique.size(1), columns) if several else None,
        per_row if several else None,
    )


def general_shapes(
    mask_shape: tuple[int, ...], has_full: bool, block_size: tuple[int, int], lengths: tuple[int, int], local: int,
    with_q: bool,
) -> tuple[tuple[int, ...] | None, ...]:  # fmt: skip
    """Those of `general` tables of `local` queries, whose blocks may lie anywhere."""
    (q_blocks, columns), first = (-(-a // b) for a, b in zip(lengths, block_size, strict=True)), mask_shape[:2]
    return (
        *_shapes_of_pairs(first, -(-local // block_size[0]), columns, has_full, with_q),
        (*first, q_blocks, columns),
        (local,),
    )


def aligned_shapes(
    mask_shape: tuple[int, ...], has_full: bool, q_block: int, local: int, with_q: bool
) -> tuple[tuple[int, ...] | None, ...]:
    """Those of `local` queries, whose blocks lie in one global block each, wherever."""
    return *_shapes_of_pairs(mask_shape[:2], -(-local // q_block), mask_shape[3], has_full, with_q), None, None


def _shapes_of_pairs(
    first: tuple[int, ...], blocks: int, columns: int, has_full: bool, with_q: bool
) -> list[tuple[int, ...] | None]:
    of_keys, of_queries = ([(*first, a), (*first, a, b)] for a, b in ((blocks, columns), (columns, blocks)))
    needed = ((of_keys, True), (of_keys, has_full), (of_queries, with_q), (of_queries, with_q and has_full))
    return [shape if there else None for pair, there in needed for shape in pair]


class _TableCache:
    """What has been made of masks, as long as these exist and nobody has written to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_indices = WeakIdKeyDictionary()

    def __len__(self) -> int:
        """Of how many masks something is remembered."""
        return len(self._by_indices)

    def made_of(self, mask: Tables) -> dict[object, Tables]:
        """What has been made of a mask so far; to be added to."""
        tables = [table for table in mask[:4] if table is not None]
        versions = [_torch.version_of(table) for table in tables]
        if None in versions:  # nobody counts what is written
            return {}
        with self._lock:
            refs, seen, made = self._by_indices.get(mask.kv_indices, ((), (), {}))
            same = len(refs) == len(tables) and all(weak() is table for weak, table in zip(refs, tables, strict=True))
            if not same or seen != versions:
                made = {}
                self._by_indices[mask.kv_indices] = ([ref(table) for table in tables], versions, made)
        return made


cache = _TableCache()


def _touched(rows: LocalRows, block: int, device: torch.device) -> _Touched:
    of_groups, cpu = [], torch.device("cpu")
    for positions in rows.group_positions(cpu):
        unique, row = torch.unique(positions // block, return_inverse=True)
        local = torch.arange(rows.count, device=cpu) // block
        pairs = torch.unique(local * unique.numel() + row)
        local, which = pairs // unique.numel(), pairs % unique.numel()
        counts = torch.bincount(local)
        first = counts.cumsum(0) - counts
        slot = torch.arange(int(counts.max()), device=cpu)
        blocks = unique[which[first[:, None] + torch.where(slot < counts[:, None], slot, 0)]]
        of_groups.append((blocks, unique, row.int()))
    several, unique_count = (max(group[i].size(-1) for group in of_groups) for i in (0, 1))
    touched = (
        torch.stack([torch.cat([b, b[:, :1].expand(-1, several - b.size(1))], 1) for b, _, _ in of_groups]),
        torch.stack([torch.cat([u, u[:1].expand(unique_count - u.numel())]) for _, u, _ in of_groups]),
        torch.stack([row for *_, row in of_groups]),
    )
    return _Touched(*(tensor.to(device) for tensor in touched))


def local_tables(
    mask: Tables, block_size: tuple[int, int], kv_len: int, rows: LocalRows, with_q: bool, general: bool = False
) -> Tables:
    """The tables of one rank's mask, int32 but for `kinds`.

    Args:
        mask: those of keys, of the whole sequence.
        block_size: how many queries and keys a block has.
        kv_len: global number of keys.
        rows: the queries, one at least.
        with_q: also those of queries, which backward needs.
        general: in shapes that are the same for all layouts that divide batch rows alike (`general_shapes`).
    """
    assert mask.kv_indices is not None
    rows.check_batch_size(mask.kv_indices.size(0))
    device = mask.kv_indices.device
    touched = kept(_touched, rows, block_size[0], device)
    if general:
        touched = _among_all(touched, -(-rows.seq_len // block_size[0]))
    several, columns = general or touched.blocks.size(2) > 1, -(-kv_len // block_size[1])
    parts = []
    for (start, stop), blocks, unique in zip(rows.groups, *touched[:2], strict=True):
        whole = Tables(*(_of_batch(table, start, stop, rows) for table in mask[:4]))
        parts.append(_united(whole, blocks, unique, columns) if several else _selected(whole, blocks[:, 0]))
    made = Tables(*map(_joined, *parts))
    if with_q:
        made = made._replace(**_transposed(made.kv_num_blocks, made.kv_indices, ""))
        made = made._replace(**_transposed(made.full_kv_num_blocks, made.full_kv_indices, "full_"))
    if several:
        lines = zip(touched.row, rows.groups, strict=True)
        row = torch.cat([line.expand(stop - start, -1) for line, (start, stop) in lines])
        made = made._replace(kinds_row=row if len(rows.groups) > 1 else row[0].contiguous())
    return made


def _among_all(touched: _Touched, blocks: int) -> _Touched:
    """The same, with all global blocks for those in which there is a local row."""
    row = torch.stack([unique[of_group] for unique, of_group in zip(touched.unique, touched.row, strict=True)])
    unique = torch.arange(blocks, device=row.device).expand(touched.unique.size(0), blocks)
    return _Touched(touched.blocks, unique, row.int())


def _of_batch(table: torch.Tensor | None, start: int, stop: int, rows: LocalRows) -> torch.Tensor | None:
    """The batch rows of a table that share their positions."""
    if table is None or len(rows.groups) == 1:
        return table
    return table.expand(stop - start, *table.shape[1:]) if table.size(0) == 1 else table[start:stop]


def _joined(*parts: torch.Tensor | None) -> torch.Tensor | None:
    tables = [part for part in parts if part is not None]
    return None if not tables else tables[0] if len(tables) == 1 else torch.cat(tables)


def _selected(whole: Tables, blocks: torch.Tensor) -> Tables:
    return Tables(*(None if table is None else table.index_select(2, blocks) for table in whole[:4]))


def _united(whole: Tables, blocks: torch.Tensor, unique: torch.Tensor, columns: int) -> Tables:
    """Of local blocks that lie in several global ones."""
    partial = _dense(whole.kv_num_blocks, whole.kv_indices, columns)
    full = _dense(whole.full_kv_num_blocks, whole.full_kv_indices, columns)
    assert partial is not None
    seen = partial if full is None else partial | full
    any_seen, all_full = seen.index_select(2, blocks[:, 0]), full
    if full is not None:
        all_full = full.index_select(2, blocks[:, 0])
    for others in blocks[:, 1:].unbind(1):
        any_seen |= seen.index_select(2, others)
        if full is not None and all_full is not None:
            all_full &= full.index_select(2, others)
    # Bytes, of which kernels do not keep several stages in shared memory, as they do of wider numbers.
    kinds = seen.to(torch.int8) if full is None else seen.to(torch.int8) + full.to(torch.int8)
    kinds = kinds.index_select(2, unique)
    if all_full is None:
        return Tables(*_ordered(any_seen), kinds=kinds)
    return Tables(*_ordered(any_seen & ~all_full), *_ordered(all_full), kinds=kinds)


def _transposed(counts: torch.Tensor | None, indices: torch.Tensor | None, prefix: str) -> dict[str, torch.Tensor]:
    """Which blocks of queries see each block of keys."""
    if indices is None:
        return {}
    dense = _dense(counts, indices, indices.size(-1))
    assert dense is not None
    by_keys = _ordered(dense.transpose(-2, -1))
    return {f"{prefix}q_num_blocks": by_keys[0], f"{prefix}q_indices": by_keys[1]}


def _dense(counts: torch.Tensor | None, indices: torch.Tensor | None, columns: int) -> torch.Tensor | None:
    """(..., blocks, columns) bool: which blocks of keys are listed."""
    if counts is None or indices is None:
        return None
    listed = torch.arange(indices.size(-1), device=indices.device) < counts.unsqueeze(-1)
    dense = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter_(-1, torch.where(listed, indices, columns).long(), True)[..., :columns]


def _ordered(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `_dense`."""
    order = torch.argsort(dense.to(torch.int8), dim=-1, descending=True, stable=True)
    # Row after row, whatever the order of `dense`: kernels take it for granted.
    return dense.sum(-1, dtype=torch.int32).contiguous(), order.int().contiguous()
