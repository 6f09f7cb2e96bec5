"""FlexAttention: this library's context parallel of it, compiled, and the benchmark's masks as block masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import BlockMask

from cp_dtensor import (
    BalancedBlocks,
    Causal,
    Documents,
    Full,
    Layout,
    PrefixLM,
    SlidingWindow,
    context_parallel_flex_attention,
)
from cp_dtensor.tools.cases import Attention, ByLayout, Case, Method, Select, shard_of
from cp_dtensor.tools.parsing import LAYOUTS
from cp_dtensor.tools.report import OURS_PREFIX

BLOCK = 128
"""Queries, and keys, of a block."""
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def flex_methods() -> list[Method]:
    """The methods of FlexAttention, in the layout of the case and in each other layout."""
    shards: dict[str, ByLayout] = {"flex": ByLayout(), "flex BalancedBlocks": InBlocks()}
    shards.update({f"flex {name}": ByLayout(name) for name in LAYOUTS})
    return [
        Method(
            OURS_PREFIX + name, partial(_compiled, each), partial(_refusal, each), shards=each,
            suits=lambda case: case.mask != "full", by_default=False,
        )
        for name, each in shards.items()
    ]  # fmt: skip


@dataclass(frozen=True)
class InBlocks(ByLayout):
    """Whole blocks of the mask."""

    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        return shard_of(_layout(self, case, device), case, rank, world_size, device)


@lru_cache
def _layout(shards: ByLayout, case: Case, device: torch.device) -> Layout:
    is_of_blocks = isinstance(shards, InBlocks)
    return BalancedBlocks(whole_mask(case, device)) if is_of_blocks else case.layout_value(shards.name)


@lru_cache(maxsize=1)  # compiled once for both passes, and for this length alone
def _compiled(shards: ByLayout, case: Case, device: torch.device) -> Attention:
    check_device(device)
    torch.compiler.reset()
    group = dist.group.WORLD
    assert group is not None
    layout, mask = _layout(shards, case, device), whole_mask(case, device)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = context_parallel_flex_attention(
            q, k, v, mesh=group, block_mask=mask, enable_gqa=case.enable_gqa, layout=layout, seq_len=case.seq_len,
            compiled=True,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    return with_gradients(attention)


def with_gradients(attention: Attention) -> Attention:
    """Wraps attention so that all inputs have gradients: without them, the forward pass would compile once more."""

    def wrapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            return attention(q, k, v)

    return wrapped


def check_device(device: torch.device) -> None:
    """Refuses CPUs."""
    if device.type == "cpu":
        raise NotImplementedError("FlexAttention has no backward on CPUs")


def _refusal(shards: ByLayout, case: Case, world_size: int) -> str | None:
    if case.seq_len % BLOCK:
        return f"the length is not a multiple of {BLOCK}"
    return None if isinstance(shards, InBlocks) else case.layout_refusal(shards.name)


# Masks


def mask_mod(case: Case, device: torch.device) -> MaskMod:
    """The mask of a case as a function of positions."""
    match case.mask_value:
        case Documents(cu_seqlens, _, Causal()) as documents:
            lengths = torch.tensor(documents.lengths)
            document = torch.arange(len(cu_seqlens) - 1).repeat_interleave(lengths).to(device)
            return lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv])
        case SlidingWindow(left, 0) if left is not None:
            return lambda b, h, q, kv: (q >= kv) & (q - kv <= left)
        case Causal():
            return lambda b, h, q, kv: q >= kv
        case PrefixLM(length):
            return lambda b, h, q, kv: (q >= kv) | (kv < length)
        case Full():
            return lambda b, h, q, kv: kv >= 0
    raise NotImplementedError(f"no FlexAttention for {case.mask}")


@lru_cache(maxsize=1)
def whole_mask(case: Case, device: torch.device) -> BlockMask:
    """The block mask of `create_block_mask`, which would hold all pairs in memory or have to be compiled.

    The length of the case is a multiple of `BLOCK`.
    """
    is_seen, position = mask_mod(case, device), torch.arange(case.seq_len, device=device)
    none = torch.zeros((), dtype=torch.int64, device=device)
    kinds = []
    for rows in position.split(BLOCK):
        seen = is_seen(none, none, rows[:, None], position).unflatten(1, (-1, BLOCK))
        kinds.append(torch.stack([seen.any(2).any(0), seen.all(2).all(0)]))
    some, every = torch.stack(kinds, 1)
    partial_blocks, full_blocks = (_listed(blocks) for blocks in (some & ~every, every))
    return BlockMask.from_kv_blocks(*partial_blocks, *full_blocks, BLOCK_SIZE=BLOCK, mask_mod=is_seen)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of blocks of each row, (1, 1, rows), and their columns first, (1, 1, rows, columns)."""
    listed = blocks[None, None].to(torch.int32)
    return listed.sum(-1, dtype=torch.int32), listed.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
