"""The block mask of local rows, made of the tables of a whole sequence's `BlockMask` without a call of `mask_mod`.

The tables list, for each block of queries, the blocks of keys that `mask_mod` decides (partial) and those that every
query of the block sees (full). A block of local queries lists as full what all global blocks that it spans see fully,
and as partial all other blocks that any of them sees. Where it spans several (chunks that do not begin at a block,
stripes), `mask_mod` looks up the entry of the query's own global block, since tables may leave out keys that `mask_mod`
allows: block-sparse attention has no `mask_mod` at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

import torch
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from cp_dtensor import _torch
from cp_dtensor._torch.cache import capturing
from cp_dtensor.api.buffers import positions_of_batch
from cp_dtensor.engine.gather_kv import cached
from cp_dtensor.spec.cache import lru_cached
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


def _positions(device: torch.device, rows: LocalRows) -> torch.Tensor:
    return positions_of_batch(rows.layout, rows.seq_len, rows.rank, rows.world_size, rows.batch_size, device).int()


@lru_cached
def has_unaligned_blocks(rows: LocalRows, q_block: int) -> bool:
    """Return whether a local block of this many queries spans several global blocks."""
    device = torch.device("cpu")
    with _torch.no_modes():
        blocks = _positions(device, rows) // q_block
        first_rows = torch.arange(blocks.size(-1), device=device) // q_block * q_block
        return bool((blocks != blocks[..., first_rows]).any())


# Block masks

_PARTIAL, _FULL = 1, 2
"""Kinds of blocks; 0 for blocks that are not listed."""
_TABLES = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
"""Attributes of a block mask, and arguments of `BlockMask` in this order."""


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


def local_block_mask(whole: BlockMask, kv_len: int, positions: torch.Tensor, unaligned: bool) -> BlockMask:
    """Return the block mask of one rank's rows. Dynamo may trace it.

    Args:
        whole: of the whole sequence.
        kv_len: global number of keys.
        positions: of the local queries, one at least, as `LocalRows.positions`.
        unaligned: True if a local block may span several global blocks.
    """
    mod, (q_block, kv_block) = whole.mask_mod, whole.BLOCK_SIZE
    all_kinds = _kinds(whole, -(-kv_len // kv_block))
    full, partial = (_spanned if unaligned else _selected)(all_kinds, positions, q_block)
    kinds = all_kinds if unaligned else None
    dense = [partial, None if whole.full_kv_indices is None else full]
    by_keys = whole.q_indices is not None  # backward reads tables by blocks of keys
    dense += [each.mT if by_keys and each is not None else None for each in dense]
    tables = [table for each in dense for table in (_listed(each) if each is not None else (None, None))]

    def of_rows(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        position = position_of(positions, b, q)
        visible = mod(b, h, position, kv)
        if kinds is not None:
            mask_b, mask_h = b if kinds.size(0) > 1 else b * 0, h if kinds.size(1) > 1 else h * 0
            kind = kinds[mask_b, mask_h, position // q_block, kv // kv_block]
            visible = (kind == _FULL) | ((kind == _PARTIAL) & visible)
        return visible

    lengths, is_noop = (index(positions.size(-1)), index(kv_len)), mod is noop_mask and kinds is None
    mask = BlockMask(lengths, *tables, whole.BLOCK_SIZE, mod if is_noop else of_rows)  # type: ignore[arg-type, call-arg]
    return _torch.with_write_order_like(mask, whole)


def position_of(positions: torch.Tensor, b: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the global position of a local row, in functions of FlexAttention."""
    return positions[b, q] if positions.dim() > 1 else positions[q]


def _kinds(mask: BlockMask, columns: int) -> torch.Tensor:
    """Return the kinds of all blocks, (B, H, blocks of queries, blocks of keys)."""
    # Bytes: Triton keeps lookups of wider integers in several stages of shared memory, where they do not fit.
    kinds = _dense(mask.kv_num_blocks, mask.kv_indices, columns).to(torch.int8) * _PARTIAL
    counts, indices = mask.full_kv_num_blocks, mask.full_kv_indices
    if counts is None or indices is None:
        return kinds
    return kinds.masked_fill(_dense(counts, indices, columns), _FULL)


def _selected(kinds: torch.Tensor, positions: torch.Tensor, q_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which blocks local ones see fully and in part, where each lies inside of one global block."""
    blocks = (positions[..., ::q_block] // q_block).long()
    chosen = torch.take_along_dim(kinds, blocks.view(-1, 1, blocks.size(-1), 1), 2)
    return chosen == _FULL, chosen == _PARTIAL


def _spanned(kinds: torch.Tensor, positions: torch.Tensor, q_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which blocks local ones see fully and in part, where they may span several global blocks."""
    q_blocks, local_blocks = kinds.size(2), -(-positions.size(-1) // q_block)
    rows = torch.arange(positions.size(-1), device=positions.device) // q_block
    # 1 where a local block spans a global one. Its products are counts, of which only zeros matter: any dtype will do.
    spans = torch.zeros(*positions.shape[:-1], local_blocks * q_blocks, dtype=torch.bfloat16, device=positions.device)
    spans = spans.scatter(-1, rows * q_blocks + positions // q_block, 1.0).unflatten(-1, (local_blocks, q_blocks))
    spans = spans if spans.dim() == 2 else spans.unsqueeze(1)
    full = spans @ (kinds != _FULL).bfloat16() == 0
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


_LOCAL_MASKS = "cp_dtensor_local_masks"
"""Attribute of a block mask: its tables, their ids and versions, and the local masks made of these."""


def cached_block_mask(whole: BlockMask, kv_len: int, rows: LocalRows) -> BlockMask:
    """Return `local_block_mask` of some rows, kept with the whole mask as long as nothing is written to its tables.

    Not for compiled code: it writes the masks of later steps to the same tensors without changing their version.
    """
    tables = [table for name in _TABLES if (table := getattr(whole, name)) is not None]
    state = [(id(table), _torch.version_of(table)) for table in tables]
    _, seen, made = vars(whole).get(_LOCAL_MASKS, (None, None, {}))
    if seen != state:
        made = {}
        setattr(whole, _LOCAL_MASKS, (tables, state, made))  # with the tables, whose ids would be those of others
    local: BlockMask | None = made.get((kv_len, rows))
    if local is None or any(version is None for _, version in state):  # writes to these are not counted
        positions, unaligned = rows.positions(whole.kv_indices.device), has_unaligned_blocks(rows, whole.BLOCK_SIZE[0])
        local = _torch.prepared(lambda: local_block_mask(whole, kv_len, positions, unaligned))
        if not capturing():
            made[kv_len, rows] = local
    return local
