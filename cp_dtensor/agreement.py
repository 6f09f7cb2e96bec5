"""What the ranks of an axis tell each other before a call: their lengths, and in debug mode everything that must agree.

A rank knows only the length of its own shard, which does not determine the global length: a shard of 5 tokens out of
2 ranks may belong to 9 or to 10. Where the global length is not known from buffers, from DTensor or from the caller,
one small all-gather on the host finds it.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from cp_dtensor import _torch_private
from cp_dtensor.layouts import Layout


@dataclass(frozen=True)
class CallFacts:
    """What one rank says of a call. All but the local lengths must be equal on every rank."""

    q_length: int
    kv_length: int
    batch_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    is_causal: bool
    scale: float
    layout: str
    rotate_method: str
    requires_grad: bool

    def encoded(self) -> list[int]:
        """One int64 a field; text by checksum, floats by their bits."""
        return [_encode(getattr(self, field.name)) for field in fields(self)]


_LOCAL_FIELDS = ("q_length", "kv_length")


def exchange(facts: CallFacts, group: dist.ProcessGroup, device: torch.device) -> list[tuple[int, int]]:
    """Tells all ranks of the group what each one says; returns the local (q, kv) lengths of every rank.

    Runs on the host where the group has a CPU backend; otherwise on `device`, which it waits for.

    Raises:
        ValueError: on every rank alike, if the ranks disagree; names the ranks and what they say.
    """
    mine = torch.tensor(facts.encoded(), dtype=torch.int64)
    if not _torch_private.has_cpu_backend(group):
        mine = mine.to(device)
    everyone = mine.new_empty(dist.get_world_size(group) * mine.numel())
    _torch_private.all_gather_single(everyone, mine, group=group)
    table: list[list[int]] = everyone.view(-1, mine.numel()).tolist()
    _refuse_disagreement(facts, table)
    return [(row[0], row[1]) for row in table]


def global_length(lengths: list[int], layout: Layout, what: str) -> int:
    """The global length whose division over the ranks gives `lengths`.

    Raises:
        ValueError: on every rank alike, if the layout divides no length so.
    """
    world_size = len(lengths)
    total = sum(lengths)
    expected = [layout.local_length(total, rank, world_size) for rank in range(world_size)]
    if lengths != expected:
        raise ValueError(
            f"the ranks' {what} lengths are not those of {layout}: got {lengths} on ranks 0 to {world_size - 1}, "
            f"expected {expected} for {total} tokens in all"
        )
    return total


def known_length(
    local_length: int, declared: tuple[int, ...], layout: Layout, rank: int, world_size: int
) -> int | None:
    """The declared global length that this rank's shard belongs to, or None if the ranks have to exchange lengths.

    The answer depends on the declared lengths alone and not on this rank where the declared lengths could be confused
    on any rank: then all ranks exchange.
    """
    for other in range(world_size):
        local = [layout.local_length(length, other, world_size) for length in declared]
        if len(set(local)) < len(local):
            return None
    matches = [length for length in declared if layout.local_length(length, rank, world_size) == local_length]
    return matches[0] if matches else None


def _refuse_disagreement(facts: CallFacts, table: list[list[int]]) -> None:
    names = [field.name for field in fields(CallFacts)]
    for column, name in enumerate(names):
        if name in _LOCAL_FIELDS:
            continue
        said = [row[column] for row in table]
        usual = max(set(said), key=lambda value: (said.count(value), -said.index(value)))
        odd = [rank for rank, value in enumerate(said) if value != usual]
        if odd:
            raise ValueError(
                f"the ranks of the context-parallel axis disagree about {name}: rank "
                + ", ".join(f"{rank} says {_decode(name, said[rank])}" for rank in odd)
                + f", the others {_decode(name, usual)}; this rank has {getattr(facts, name)!r}"
            )


def _encode(value: object) -> int:
    if isinstance(value, float):
        return struct.unpack("q", struct.pack("d", value))[0]
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    assert isinstance(value, int)
    return int(value)


def _decode(name: str, value: int) -> str:
    kind = CallFacts.__annotations__[name]
    if kind == "float":
        return repr(struct.unpack("d", struct.pack("q", value))[0])
    if kind == "bool":
        return repr(bool(value))
    return "otherwise" if kind == "str" else repr(value)
