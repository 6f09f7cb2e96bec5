"""Keys and values of all ranks, for FlexAttention: every bit of them, whatever their dtype, widths and memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from problems import shard
from ranks import run_ranks

from cp_dtensor import BalancedBlocks, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.flex_keys import WholeKeys
from cp_dtensor.rotation.ranks import SequenceRanks

LENGTH, RANKS = 29, 3
# What travels in place (whole blocks with a short one, and ranks without tokens), and what is put in order.
LAYOUTS = [HeadTail(), BalancedBlocks((5, 1, 1, 4), 8, LENGTH), BalancedBlocks((1,), 32, LENGTH)]
each_layout = pytest.mark.parametrize("layout", [*LAYOUTS, Striped(2), MirroredBatch()], ids=repr)
WIDTHS = [(8, 8), (8, 12), (8, 5), (6, 4)]
Stored = Callable[[torch.Tensor], torch.Tensor]
MEMORY: dict[str, Stored] = {
    "contiguous": lambda x: x,
    "token after token": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "column after column": lambda x: x.mT.contiguous().mT,
    "from the second element": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "with gaps": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "signs for later": lambda x: torch._neg_view(-x),
}
each_memory = pytest.mark.parametrize("memory", MEMORY)


def drawn(seed: int, width: int, length: int, batch: int = 2) -> torch.Tensor:
    """Small integers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (batch, 2, length, width), generator=generator)


@each_memory
@each_layout
def test_keys_come_together_and_gradients_go_home(layout: Layout, memory: str) -> None:
    dtypes = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]
    if memory == "signs for later":
        dtypes = dtypes[1:]  # torch has no minus for one byte

    def body(rank: int) -> None:
        for dtype, widths in product(dtypes, WIDTHS):
            check(rank, layout, MEMORY[memory], dtype, widths)

    run_ranks(RANKS, body)


def check(rank: int, layout: Layout, stored: Stored, dtype: torch.dtype, widths: tuple[int, int]) -> None:
    what = f"{dtype}, {widths}"
    whole = [drawn(i, width, LENGTH).to(dtype) for i, width in enumerate(widths)]
    keys = WholeKeys(SequenceRanks.over([dist.group.WORLD]), layout, LENGTH, rows=LENGTH + 2)
    k, v = (stored(shard(x, layout, rank, RANKS)) for x in whole)
    for gathered, expected in zip(keys.gathered(k, v), whole, strict=True):
        assert gathered.is_contiguous()
        assert torch.equal(gathered[:, :, :LENGTH].double(), expected.double()), what
        assert not gathered[:, :, LENGTH:].double().any()
    if dtype.itemsize == 1:
        return  # nothing has gradients of one byte
    grads = [[drawn(10 * r + i, w, LENGTH + 2).to(dtype) for i, w in enumerate(widths)] for r in range(RANKS)]
    found = keys.gradients(*map(stored, grads[rank]), k.size(2))
    for got, of_ranks in zip(found, zip(*grads, strict=True), strict=True):
        total = torch.stack(of_ranks).sum(0)[:, :, :LENGTH]
        assert got.dtype == dtype
        assert torch.equal(got, shard(total, layout, rank, RANKS)), what


@each_layout
def test_no_batch_rows(layout: Layout) -> None:
    def body(rank: int) -> None:
        keys = WholeKeys(SequenceRanks.over([dist.group.WORLD]), layout, LENGTH, LENGTH)
        local = layout.local_length(LENGTH, rank, RANKS)
        k, v = keys.gathered(torch.empty(0, 2, local, 8), torch.empty(0, 2, local, 4))
        assert (k.shape, v.shape) == ((0, 2, LENGTH, 8), (0, 2, LENGTH, 4))
        grad_k, grad_v = keys.gradients(k, v, local)
        assert (grad_k.shape, grad_v.shape) == ((0, 2, local, 8), (0, 2, local, 4))

    run_ranks(RANKS, body)
