"""Keys and values of one rank after the other, for attention ops that programs bring themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor import _torch_private
from cp_dtensor.layouts import HeadTail, Layout


class Part(NamedTuple):
    """What of a rank's queries and of another's keys one call is about."""

    first_query: int
    """Queries from here on."""
    keys: int | None
    """That many of the first keys; None for all."""
    is_causal: bool


def part_of(rank: int, source: int, length: int, layout: Layout | None, world_size: int) -> Part | None:
    """What `rank` computes against the keys of `source`; None for nothing.

    Args:
        rank: of the queries.
        source: of the keys.
        length: global length.
        layout: `Contiguous()` or `HeadTail()` under a causal mask, None without a mask.
        world_size: number of ranks.
    """
    if layout is None:
        return Part(0, None, False)
    if rank == source:
        return Part(0, None, True)
    if layout != HeadTail():
        return Part(0, None, False) if source < rank else None
    if source < rank:  # all of our rows are behind its head, and none behind its tail
        return Part(0, layout.segments(length, source, world_size)[0].length, False)
    return Part(layout.segments(length, rank, world_size)[0].length, None, False)


class Shipment:
    """Tensors that go to one rank while others of the same shapes come from another; either may be nothing."""

    def __init__(
        self,
        outgoing: Sequence[torch.Tensor],
        to_rank: int | None,
        like: Sequence[torch.Tensor],
        from_rank: int | None,
        group: dist.ProcessGroup,
    ) -> None:
        self._like = like
        device = like[0].device
        # As bytes, since groups do not know every dtype.
        sent = [tensor.contiguous().flatten().view(torch.uint8) for tensor in outgoing]
        self._sent = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8, device=device)
        size = sum(tensor.numel() * tensor.element_size() for tensor in like) if from_rank is not None else 0
        self._received = torch.empty(size, dtype=torch.uint8, device=device)
        splits_in, splits_out = [0] * group.size(), [0] * group.size()
        if from_rank is not None:
            splits_in[from_rank] = size
        if to_rank is not None:
            splits_out[to_rank] = self._sent.numel()
        self._work = dist.all_to_all_single(
            self._received, self._sent, splits_in, splits_out, group=group, async_op=True
        )

    def arrived(self) -> list[torch.Tensor]:
        """Waits; the tensors that came, contiguous. None if none were to come."""
        self._work.wait()
        if not self._received.numel():
            return []
        sizes = [tensor.numel() * tensor.element_size() for tensor in self._like]
        pieces = self._received.split(sizes)
        return [piece.view(x.dtype).view(x.shape) for piece, x in zip(pieces, self._like, strict=True)]


def keys_and_values(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(source rank, its keys, its values), the own ones first and then rank - 1, ...; the next are always on their way.

    They go straight from their owner, not from rank to rank.
    """
    rank, world_size = group.rank(), group.size()
    own = key.contiguous(), value.contiguous()

    def start(hop: int) -> Shipment | None:
        if hop == world_size:
            return None
        return Shipment(own, (rank + hop) % world_size, own, (rank - hop) % world_size, group)

    on_its_way = start(1)
    yield rank, own[0], own[1]
    for hop in range(1, world_size):
        assert on_its_way is not None
        source_key, source_value = on_its_way.arrived()
        on_its_way = start(hop + 1)
        yield (rank - hop) % world_size, source_key, source_value


def refuse_different_shapes(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Refuses keys of different shapes on the ranks, where the group can compare them on the host.

    Raises:
        ValueError: on every rank alike.
    """
    # Elsewhere it would stall a GPU's launches.
    if group.size() == 1 or not (_torch_private.has_cpu_backend(group) or tensors[0].device.type == "cpu"):
        return
    mine = torch.tensor([size for tensor in tensors for size in tensor.shape], device="cpu")
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    said = [other.tolist() for other in everyone]
    if any(other != said[0] for other in said):
        raise ValueError(
            "expected tensors of the same shapes on every rank, got the sizes "
            + ", ".join(f"{sizes} on rank {rank}" for rank, sizes in enumerate(said))
        )
