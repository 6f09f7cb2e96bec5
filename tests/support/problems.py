"""Attention problems, and their float64 references."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cp_dtensor.spec.layouts import Layout


@dataclass(frozen=True)
class Problem:
    """An attention problem in global terms."""

    q_len: int
    kv_len: int
    batch: int = 1
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    is_causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    dtype: torch.dtype = torch.float64

    def draw(self, seed: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws q, k, v and gradient of out, equal on every rank."""
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int, length: int) -> torch.Tensor:
            shape = (self.batch, heads, length, self.head_dim)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype).to(device)

        return (
            normal(self.q_heads, self.q_len),
            normal(self.kv_heads, self.kv_len),
            normal(self.kv_heads, self.kv_len),
            normal(self.q_heads, self.q_len),
        )


def reference(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (out, dq, dk, dv) on one device by the textbook formula in float64."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (q, k, v))
    group = problem.q_heads // problem.kv_heads
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    logits = q @ k.repeat_interleave(group, 1).mT * scale
    if problem.softcap:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    if problem.is_causal:
        hidden = torch.ones(problem.q_len, problem.kv_len, dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    out = F.softmax(logits, dim=-1) @ v.repeat_interleave(group, 1)
    out.backward(grad_out.double())
    return out.detach(), q.grad, k.grad, v.grad


def shard(tensor: torch.Tensor, layout: Layout, rank: int, world_size: int, seq_dim: int = 2) -> torch.Tensor:
    """Returns a rank's shard by the layout's positions, row by row, independent of the library's sharding code."""
    rows = []
    for group, (start, stop) in enumerate(layout.batch_groups(tensor.size(0))):
        segments = layout.segments(tensor.size(seq_dim), rank, world_size, group)
        positions = [position for segment in segments for position in segment.positions()]
        index = torch.tensor(positions, dtype=torch.int64, device=tensor.device)
        rows.append(tensor[start:stop].index_select(seq_dim, index))
    return torch.cat(rows)


def assert_close(got: torch.Tensor | None, expected: torch.Tensor | None, what: object = "") -> None:
    """Checks a result in float64."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10, msg=lambda text: f"{what}: {text}" if what else text)
