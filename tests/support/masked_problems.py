"""Masked problems: definitions of masks pair by pair, and results of dense attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import and_, or_
from typing import Any

import torch
from hypothesis import strategies as st

from cp_dtensor import context_parallel_attention
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import (
    Batched,
    Causal,
    Full,
    Intersection,
    Mask,
    PrefixLM,
    SlidingWindow,
    Union,
    interval_sets_of,
)
from cp_dtensor.spec.model_masks import Keys
from support.problems import dense, normals, shard

Tensors = tuple[torch.Tensor, ...]


def _shows(mask: Mask, query: torch.Tensor, key: torch.Tensor, q_len: int, kv_len: int) -> torch.Tensor:
    """Returns whether queries (S, 1) see keys (1, S) by the mask's definition; shares no code with `interval_sets`."""
    every = torch.ones(len(query), key.size(1), dtype=torch.bool)
    match mask:
        case Full():
            return every
        case Causal(alignment):
            return key <= query + _ahead(alignment, q_len, kv_len)
        case SlidingWindow(left, right, alignment):
            at = query + _ahead(alignment, q_len, kv_len)
            after = every if left is None else key >= at - left
            return after if right is None else after & (key <= at + right)
        case PrefixLM(length):
            return (key <= query) | (key < length)
        case Documents():
            seen = ~every
            for (q0, q1), (k0, k1) in zip(pairwise(mask.cu_seqlens), pairwise(mask.cu_seqlens_k), strict=True):
                inside = (q0 <= query) & (query < q1) & (k0 <= key) & (key < k1)
                seen |= inside & _shows(mask.within, query - q0, key - k0, q1 - q0, k1 - k0)
            return seen
        case Keys(ranges):
            return reduce(or_, [(start <= key) & (key < stop) for start, stop in ranges], ~every)
        case Intersection(masks) | Union(masks):
            combined = and_ if isinstance(mask, Intersection) else or_
            return reduce(combined, [_shows(each, query, key, q_len, kv_len) for each in masks])
    raise AssertionError(f"what does {mask} mean?")


def shown(mask: Mask, q_len: int, kv_len: int, batch: int) -> torch.Tensor:
    """Returns the allowed pairs, boolean (B, 1, q_len, kv_len)."""
    query, key = torch.arange(q_len)[:, None], torch.arange(kv_len)[None]
    rows = [_shows(mask.of_batch_row(b), query, key, q_len, kv_len) for b in range(batch if mask.batch_size else 1)]
    return torch.stack(rows)[:, None].expand(batch, -1, -1, -1)


def _ahead(alignment: str, q_len: int, kv_len: int) -> int:
    return kv_len - q_len if alignment == "bottom_right" else 0


alignments = st.sampled_from(["top_left", "bottom_right"])
_ends = st.one_of(st.none(), st.integers(0, 8))


@st.composite
def documents(draw: st.DrawFn, q_len: int, kv_len: int, within: st.SearchStrategy[Mask]) -> Mask:
    count = draw(st.integers(1, 5))
    edges = [sorted(draw(st.lists(st.integers(0, n), min_size=count, max_size=count))) for n in (q_len, kv_len)]
    if q_len == kv_len and draw(st.booleans()):
        return Documents(edges[0], within=draw(within))
    return Documents(*edges, within=draw(within))


def masks(q_len: int, kv_len: int, depth: int = 2) -> st.SearchStrategy[Mask]:
    """Draws a mask for these numbers of queries and keys."""
    simple = st.one_of(
        st.just(Full()),
        st.builds(Causal, alignments),
        st.builds(SlidingWindow, _ends, _ends, alignments),
        st.builds(PrefixLM, st.integers(0, q_len + 2)),
    )
    if not depth:
        return st.one_of(simple, documents(q_len, kv_len, simple))
    inner = masks(q_len, kv_len, depth - 1)
    return st.one_of(
        inner,
        documents(q_len, kv_len, simple),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
    )


@st.composite
def any_mask(draw: st.DrawFn, q_len: int, kv_len: int, batch: int) -> Mask:
    """Draws a mask, possibly a different one for each batch row."""
    of_one = masks(q_len, kv_len)
    if batch > 1 and draw(st.booleans()):
        return Batched(draw(st.lists(of_one, min_size=batch, max_size=batch)))
    return draw(of_one)


def fits(mask: Mask, q_len: int, kv_len: int, batch: int) -> bool:
    """Returns True if a mask fits these numbers of queries, keys and batch rows."""
    try:
        interval_sets_of(mask, q_len, kv_len, batch)
    except ValueError:  # documents that do not fit in the documents around them
        return False
    return True


@dataclass(frozen=True)
class MaskedProblem:
    """An attention problem in global terms, in float64."""

    q_len: int
    kv_len: int
    mask: Mask
    batch: int = 1
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 4
    is_causal: bool = False
    bias: str = ""
    """"boolean" or "additive", with its dims among "bhs", such as "additive hs"; the key dim is always there."""
    broadcast_keys: bool = False
    sinks: bool = False
    softcap: float = 0.0
    scale: float | None = None

    def draw(self, seed: int) -> Tensors:
        """Draws q, k, v, gradient of out, and the bias if there is one; equal on every rank."""
        normal = normals(seed)
        q = normal(self.batch, self.q_heads, self.q_len, self.head_dim)
        k, v = (normal(self.batch, self.kv_heads, self.kv_len, self.head_dim) for _ in range(2))
        grad_out = normal(*q.shape)
        if not self.bias:
            return q, k, v, grad_out
        kind, _, dims = self.bias.partition(" ")
        sizes = [size if dim in dims else 1 for dim, size in zip("bhs", q.shape[:3], strict=True)]
        bias = normal(*sizes, 1 if self.broadcast_keys else self.kv_len)
        return q, k, v, grad_out, bias > -0.5 if kind == "boolean" else bias

    def draw_sinks(self, seed: int) -> torch.Tensor | None:
        """Draws sinks (H,) if there are any, one of them -inf for some seeds; equal on every rank."""
        if not self.sinks:
            return None
        drawn = torch.randn(self.q_heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.index_fill(0, torch.tensor(seed % self.q_heads), float("-inf") if seed % 3 == 0 else 1.5)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors of `draw`."""
        return "q", "k", "v", "grad_out", "bias"

    def call(self, x: dict[str, torch.Tensor], **options: Any) -> Any:
        """Returns out and lse of this rank's tensors."""
        return context_parallel_attention(
            x["q"], x["k"], x["v"], enable_gqa=self.q_heads != self.kv_heads, **options
        )  # fmt: skip

    def expected(self, tensors: Tensors, sinks: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Returns out, lse, and gradients by name: of sinks by row (B, H, S)."""
        found = self.reference(*tensors, sinks=sinks)
        named = dict(zip(("out", "q", "k", "v", "lse"), found, strict=False))
        more = ["bias"] * self.bias.startswith("additive") + ["sinks"] * self.sinks
        return named | dict(zip(more, found[5:], strict=True))

    def reference(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor, *bias: Any,
        sinks: torch.Tensor | None = None,
    ) -> Tensors:  # fmt: skip
        """Returns out, dq, dk, dv, lse, the gradient of an additive bias, and that of sinks by row (B, H, S)."""
        leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in (q, k, v, *bias)]
        seen = shown(self.mask, self.q_len, self.kv_len, self.batch)
        if self.is_causal:
            seen = seen & torch.ones(self.q_len, self.kv_len, dtype=torch.bool).tril()
        options: dict[str, Any] = {"bias": leaves[3] if bias else None}
        if sinks is not None:
            leaves.append(sinks[:, None].expand(q.shape[:3]).clone().requires_grad_())
            options["sinks"] = leaves[-1]
        out, lse = dense(*leaves[:3], seen, self.scale, softcap=self.softcap, **options)
        grads = torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], grad_out)
        return out.detach(), *grads[:3], lse.detach(), *grads[3:]

    def shard(self, tensors: Tensors, layout: Layout, rank: int, size: int) -> Tensors:
        """Returns a rank's shards of the tensors of `draw`."""
        q, k, v, grad_out, *bias = tensors
        parts = [shard(tensor, layout, rank, size) for tensor in (q, k, v, grad_out)]
        return *parts, *(self.shard_bias(each, layout, rank, size) for each in bias)

    def shard_bias(self, bias: torch.Tensor, layout: Layout, rank: int, size: int) -> torch.Tensor:
        """Returns a rank's query rows of a bias, with all batch rows if the layout divides them differently."""
        if len(layout.batch_groups(self.batch)) > 1:
            bias = bias.expand(self.batch, -1, -1, -1)
        if bias.size(2) == 1 and self.q_len != 1:
            return bias
        return shard(bias, layout, rank, size)
