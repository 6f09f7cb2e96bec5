"""Problems of packed documents, and their results in float64, one document after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from cp_dtensor.engine import attend
from cp_dtensor.spec.layouts import Layout
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

    def reference(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor) -> Tensors:
        """Returns (out, dq, dk, dv, lse): zeros, and lse -inf, outside documents."""
        q, k, v = leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out, lse = torch.zeros_like(q), q.new_full((self.q_heads, q.size(0)), float("-inf"))
        for (q0, q1), (k0, k1) in zip(pairwise(self.cu_seqlens), pairwise(self.k_edges), strict=True):
            if q1 > q0 and k1 > k0:
                out[q0:q1], lse[:, q0:q1] = self._document(q[q0:q1], k[k0:k1], v[k0:k1])
        if out.requires_grad:
            out.backward(grad_out)
        grads = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
        return out.detach(), *grads, lse.detach()

    def _document(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(len(q)).unsqueeze(1) + len(k) - len(q)
        key = torch.arange(len(k))
        left, right = self.window
        hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
        if self.is_causal:
            hidden |= key > at
        if left is not None:
            hidden |= key < at - left
        if right is not None:
            hidden |= key > at + right
        heads_first = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        out, lse = dense(*heads_first, ~hidden, self.scale, softcap=self.softcap)
        return out[0].transpose(0, 1), lse[0]


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
