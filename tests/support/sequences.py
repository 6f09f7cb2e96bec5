"""Sequences that are sharded over ranks, and references of sequence operations, on one process."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from cp_dtensor import Causal, Contiguous, Documents, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.spec.balanced_layouts import Balanced
from cp_dtensor.spec.layouts import Segment
from support.problems import shard

LAYOUTS: tuple[Layout, ...] = (Contiguous(), HeadTail(), MirroredBatch(), Striped(1), Striped(3))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers in float64, equal in every call."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class GivenSegments(Layout):
    """A layout of one length, as users write it: the segments of each rank."""

    by_rank: tuple[tuple[Segment, ...], ...]

    @classmethod
    def of(cls, layout: Layout, length: int, ranks: int) -> GivenSegments:
        """The segments of a layout."""
        return cls(tuple(layout.segments(length, rank, ranks) for rank in range(ranks)))

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        return self.by_rank[rank]


@dataclass(frozen=True)
class Sequence:
    """A sequence of documents in a layout."""

    length: int
    ranks: int
    layout: Layout
    batch: int = 1
    edges: tuple[int, ...] | None = None

    def shard(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's rows of dim 1."""
        return shard(whole.unsqueeze(1), self.layout, rank, self.ranks).squeeze(1).contiguous()

    def documents(self) -> list[tuple[int, int]]:
        """Ranges of all documents; tokens outside of them make one more on each side."""
        return list(pairwise([0, *(self.edges or ()), self.length]))

    def options(self) -> dict[str, object]:
        """Arguments of a call."""
        return {"layout": self.layout, "cu_seqlens": self.edges, "seq_len": self.length}

    def runs(self, rank: int, group: int = 0) -> list[tuple[int, int]]:
        """Ranges of positions, found one position at a time."""
        segments = self.layout.segments(self.length, rank, self.ranks, group)
        runs: list[tuple[int, int]] = []
        for position in (each for segment in segments for each in segment.positions()):
            if runs and runs[-1][1] == position:
                runs[-1] = runs[-1][0], position + 1
            else:
                runs.append((position, position + 1))
        return runs or [(0, 0)]


@st.composite
def sequences(
    draw: st.DrawFn, longest: int = 24, layouts: tuple[Layout, ...] = LAYOUTS, most_ranks: int = 8
) -> Sequence:
    """Any sequence, also shorter than the number of ranks."""
    length, ranks = draw(st.integers(0, longest)), draw(st.integers(1, most_ranks))
    edges = draw(st.one_of(st.none(), st.lists(st.integers(0, length), min_size=1, max_size=4)))
    cu_seqlens = None if edges is None else tuple(sorted({*edges}))
    if cu_seqlens is not None and not _is_taken_for_positions(cu_seqlens, length):
        cu_seqlens = (0, length)
    layout = draw(st.sampled_from(layouts))
    if length and draw(st.integers(0, 5)) == 0:
        layout = Balanced(Documents(cu_seqlens or (0, length), within=Causal()), length)
    return Sequence(length, ranks, layout, draw(st.integers(1, 3)), cu_seqlens)


def _is_taken_for_positions(edges: tuple[int, ...], length: int) -> bool:
    """False for edges that look like lengths or ids, which calls refuse."""
    total = sum(edges)
    as_lengths = edges[0] > 0 and (total == length or (edges[0] == edges[-1] and total < length))
    return not as_lengths and len(edges) != length


def shifted(sequence: Sequence, x: torch.Tensor, n: int) -> torch.Tensor:
    """Shift of whole sequences (B, S, ...)."""
    out = x * 0
    for start, stop in sequence.documents():
        for position in range(start, stop):
            if start <= position - n < stop:
                out[:, position] = x[:, position - n]
    return out


def halos(sequence: Sequence, x: torch.Tensor, left: int, rank: int) -> torch.Tensor:
    """Halos of a rank, from whole sequences (B, S, ...)."""
    edges = (0, *(sequence.edges or ()))
    parts = []
    for group, (first, last) in enumerate(sequence.layout.batch_groups(x.size(0))):
        rows = x[first:last]
        for start, _ in sequence.runs(rank, group):
            begin = max(edge for edge in edges if edge <= start)
            before = rows[:, max(begin, start - left) : start]
            parts.append(F.pad(before, (0, 0, left - before.size(1), 0)))
    by_group = len(sequence.layout.batch_groups(x.size(0)))
    runs = len(parts) // by_group
    return torch.cat([torch.cat(parts[index * runs : (index + 1) * runs], 1) for index in range(by_group)])


def convolved(
    sequence: Sequence, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Causal depthwise convolution of whole sequences (B, S, C), document by document."""
    parts = []
    for start, stop in sequence.documents():
        if start < stop:
            padded = F.pad(x[:, start:stop].transpose(1, 2), (weight.size(1) - 1, 0))
            parts.append(F.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.size(0)).transpose(1, 2))
    out = torch.cat(parts, 1) if parts else x * 1
    return F.silu(out) if activation else out


def recurrence(
    sequence: Sequence, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
    beta: torch.Tensor | None, scale: float, initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Linear attention or a delta rule, token by token: the output and the state at the end of each document.

    States are (documents, B, H, K, V).
    """
    group = v.size(2) // q.size(2)
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    decay = torch.ones_like(k) if g is None else (g if g.dim() == 4 else g.unsqueeze(-1)).exp().expand_as(k)
    outs, finals, edges = [], [], sequence.edges or (0, sequence.length)
    for start, stop in sequence.documents():
        index = edges.index(start) if start in edges and stop > start else None
        inside = index is not None and edges[0] <= start < edges[-1]
        state = torch.zeros(v.size(0), v.size(2), k.size(3), v.size(3), dtype=v.dtype)
        if inside and initial is not None:
            state = initial[max(each for each, edge in enumerate(edges) if edge <= start)]
        for t in range(start, stop):
            state = decay[:, t].unsqueeze(-1) * state
            value = (
                v[:, t]
                if beta is None
                else beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
            )
            state = state + k[:, t].unsqueeze(-1) * value.unsqueeze(-2)
            outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        if inside:
            finals.append(state)
    out = torch.stack(outs, 1) if outs else v * 0
    return out, torch.stack(finals) if finals else v.new_zeros(0)
