"""Checks of the K/V that FlexAttention gathers, and of their gradients, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from cp_dtensor import BalancedBlocks, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.transport import TransportMethod
from cp_dtensor.engine.call import Call
from cp_dtensor.engine.gather_kv import KVGather
from support.problems import shard

LENGTH = 29
# Layouts of a few contiguous ranges: even and uneven, and with ranks without tokens.
IN_RANGES: list[Layout] = [HeadTail(), BalancedBlocks((5, 1, 1, 4), 8, LENGTH), BalancedBlocks((1,), 32, LENGTH)]
IN_STRIPES: list[Layout] = [Striped(2), MirroredBatch()]
WIDTHS = [(8, 8), (8, 12), (8, 5), (6, 4)]
Stored = Callable[[torch.Tensor], torch.Tensor]


def drawn(seed: int, width: int, length: int, batch: int = 2) -> torch.Tensor:
    """Draws small integers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (batch, 2, length, width), generator=generator)


def kv_gather(layout: Layout, length: int, method: TransportMethod) -> KVGather:
    """Returns the gather of K/V over all ranks."""
    return KVGather(Call(SequenceRanks(dist.group.WORLD), layout, transport=method), length)


def check(
    rank: int, layout: Layout, stored: Stored, dtype: torch.dtype, widths: tuple[int, int], method: TransportMethod,
    length: int = LENGTH, device: str = "cpu",
) -> None:  # fmt: skip
    """Checks gathered K/V, and sums of gradients on the ranks that own the tokens."""
    what, ranks = f"{layout}, {length} tokens, {dtype}, {widths}", dist.get_world_size()
    whole = [drawn(i, width, length).to(device, dtype) for i, width in enumerate(widths)]
    keys = kv_gather(layout, length, method)
    k, v = (stored(shard(x, layout, rank, ranks)) for x in whole)
    for gathered, expected in zip(keys.gather(k, v), whole, strict=True):
        assert gathered.is_contiguous()
        assert torch.equal(gathered.double(), expected.double()), what
    if dtype.itemsize == 1:
        return  # no tensors of one byte have gradients
    grads = [[drawn(10 * r + i, w, length).to(device, dtype) for i, w in enumerate(widths)] for r in range(ranks)]
    found = keys.reduce_gradients(*map(stored, grads[rank]), k.size(2))
    for got, of_ranks in zip(found, zip(*grads, strict=True), strict=True):
        total = torch.stack(of_ranks).sum(0)
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert torch.equal(got, shard(total, layout, rank, ranks)), what
