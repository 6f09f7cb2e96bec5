"""Problems of packed documents, and their results in float64."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from cp_dtensor import Causal, Documents, Mask, SlidingWindow
from cp_dtensor.engine import attend
from cp_dtensor.spec.layouts import Layout
from support.masked_problems import shown
from support.problems import dense, normals

Tensors = tuple[torch.Tensor, ...]
NAMES = ("out", "dq", "dk", "dv", "lse")


@dataclass(frozen=True)
class PackedProblem:
    """Problem of packed documents in global terms; tensors are (tokens, heads, head dim)."""

    cu_seqlens: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...] | None = None
    q_len: int = 0
    """Number of tokens with padding; if smaller than the end of the last document, there is no padding."""
    kv_len: int = 0
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 4
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float = 0.0

    @property
    def k_edges(self) -> tuple[int, ...]:
        return self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k

    @property
    def lengths(self) -> tuple[int, int]:
        q_len = max(self.q_len, self.cu_seqlens[-1])
        return q_len, q_len if self.cu_seqlens_k is None else max(self.kv_len, self.k_edges[-1])

    def draw(self, seed: int) -> Tensors:
        """Draws q, k, v and gradient of out, equal on every rank."""
        normal, (q_len, kv_len) = normals(seed), self.lengths
        shapes = ((q_len, self.q_heads), (kv_len, self.kv_heads), (kv_len, self.kv_heads), (q_len, self.q_heads))
        return tuple(normal(*each, self.head_dim) for each in shapes)

    @property
    def mask(self) -> Mask:
        """The documents, whose queries are aligned with their last keys."""
        within: Mask = SlidingWindow(*self.window, alignment="bottom_right")
        within = within & Causal("bottom_right") if self.is_causal else within
        return Documents(self.cu_seqlens, self.cu_seqlens_k, within=within)

    def reference(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor) -> Tensors:
        """Returns (out, dq, dk, dv, lse): zeros, and lse -inf, outside documents."""
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        heads_first = (leaf.transpose(0, 1)[None] for leaf in leaves)
        out, lse = dense(*heads_first, shown(self.mask, *self.lengths, 1), self.scale, softcap=self.softcap)
        out = out[0].transpose(0, 1)
        return out.detach(), *torch.autograd.grad(out, leaves, grad_out), lse[0].detach()


def shard_packed(tensor: torch.Tensor, layout: Layout, rank: int, size: int, dim: int = 0) -> torch.Tensor:
    """Returns a rank's tokens by the layout's positions."""
    segments = layout.segments(tensor.size(dim), rank, size)
    return tensor.index_select(dim, torch.tensor([p for each in segments for p in each.positions()], dtype=torch.int64))


@contextmanager
def equal_generators() -> Iterator[None]:
    """Makes all ranks draw equal seeds of dropout, like processes with equal generators; threads share one."""
    lock, original = threading.Lock(), attend.drawn_seed

    def seeded(*args: Any) -> Any:
        with lock:
            torch.manual_seed(7)
            return original(*args)

    with mock.patch.object(attend, "drawn_seed", seeded):
        yield
