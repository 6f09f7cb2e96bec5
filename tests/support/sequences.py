"""Sequences that are sharded over ranks, and references of sequence operations, on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Causal, Contiguous, Documents, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.spec.balanced_layouts import Balanced
from cp_dtensor.spec.layouts import Segment
from support.problems import dense, shard
from support.ranks import run_ranks

LAYOUTS: tuple[Layout, ...] = (Contiguous(), HeadTail(), MirroredBatch(), Striped(1), Striped(3))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers in float64, equal in every call."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Dense attention: q and out (B, S, H, D), k and v (B, H, S, D) of as many heads or fewer."""
    q = q.transpose(1, 2)
    of_rows = None if sinks is None else sinks[:, None].expand(q.shape[:3])
    return dense(q, k, v, seen, sinks=of_rows)[0].transpose(1, 2)


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

    @property
    def has_documents(self) -> bool:
        """True with edges of documents; `(0,)` says that there is one."""
        return len(self.edges or ()) > 1

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
    outs, finals, edges = [], [], sequence.edges if sequence.has_documents else (0, sequence.length)
    for index, (start, stop) in enumerate(pairwise([0, *edges, sequence.length])):
        inside = 0 < index < len(edges)  # the first and the last range are outside of all documents
        state = torch.zeros(v.size(0), v.size(2), k.size(3), v.size(3), dtype=v.dtype)
        if inside and initial is not None:
            state = initial[index - 1]
        for t in range(start, stop):
            state = decay[:, t].unsqueeze(-1) * state
            value = (
                v[:, t]
                if beta is None
                else beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
            )
            state = state + k[:, t].unsqueeze(-1) * value.unsqueeze(-2)
            outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        finals += [state] * inside
    return torch.stack(outs, 1) if outs else v * 0, torch.stack(finals)


def check_layer(
    sequence: Sequence, ours: Callable[..., Any], reference: Callable[..., Any], tokens: Iterable[torch.Tensor],
    others: Iterable[torch.Tensor] = (), *, mesh_shape: tuple[int, ...] = (), alone: int | None = None,
    tolerance: float = 1e-9,
) -> None:  # fmt: skip
    """Compare results and all gradients of a layer on every rank with a reference on whole sequences.

    Args:
        ours: takes the mesh, this rank's shards of `tokens`, and `others`; returns the output, or also final states.
        reference: takes whole tensors; returns likewise.
        others: equal on every rank; their gradients are summed over ranks.
        mesh_shape: of a mesh over several axes; () for the default group.
        alone: index of the only tensor that has a gradient; None for all.
    """
    tokens = list(tokens)
    whole = [x.detach().clone().requires_grad_(alone in (None, i)) for i, x in enumerate((*tokens, *others))]
    wanted = _results(reference(*whole))
    weights = [normal(*each.shape, seed=90 + i) for i, each in enumerate(wanted)]
    has_gradient = [x.requires_grad for x in whole]
    expected = torch.autograd.grad(wanted, [*compress(whole, has_gradient)], weights, materialize_grads=True)

    def body(rank: int) -> list[torch.Tensor]:
        mesh: Any = dist.group.WORLD
        if mesh_shape:
            mesh = init_device_mesh(
                "cpu", mesh_shape, mesh_dim_names=("ring_pod", "ring", "ulysses")[-len(mesh_shape) :]
            )
        mine = [sequence.shard(x, rank) if i < len(tokens) else x.clone() for i, x in enumerate(whole)]
        mine = [x.detach().requires_grad_(has) for x, has in zip(mine, has_gradient, strict=True)]
        out, *finals = _results(ours(mesh, *mine))
        of_rank = [sequence.shard(wanted[0], rank), *wanted[1:]]
        share = (rank + 1) / sum(range(sequence.ranks + 1))  # a loss of final states is the sum over ranks
        grads = [sequence.shard(weights[0], rank), *[share * weight for weight in weights[1:]]]
        found = torch.autograd.grad([out, *finals], [*compress(mine, has_gradient)], grads, materialize_grads=True)
        for got, each in zip((out, *finals), of_rank, strict=True):
            equal(got.detach().to(each.dtype), each.detach(), tolerance)
        return list(found)

    by_rank = run_ranks(sequence.ranks, body)
    for index, (place, of_whole) in enumerate(zip(compress(range(len(whole)), has_gradient), expected, strict=True)):
        grads = [each[index] for each in by_rank]
        if place >= len(tokens):
            equal(sum(grads, torch.zeros(())), of_whole, tolerance)
            continue
        for rank, grad in enumerate(grads):
            equal(grad, sequence.shard(of_whole, rank), tolerance)


def equal(got: object, expected: object, tolerance: float = 1e-9) -> None:
    """Compare results in float64."""
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def _results(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)
