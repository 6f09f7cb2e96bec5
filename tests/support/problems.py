"""Attention problems, and dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cp_dtensor.spec.layouts import Layout


def normals(seed: int) -> Callable[..., torch.Tensor]:
    """Returns a function that draws float64 tensors of a shape, one after the other; they are equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


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
        normal, of_keys = normals(seed), (self.batch, self.kv_heads, self.kv_len, self.head_dim)
        of_queries = (self.batch, self.q_heads, self.q_len, self.head_dim)
        drawn = (normal(*shape) for shape in (of_queries, of_keys, of_keys, of_queries))
        q, k, v, grad_out = (each.to(self.dtype).to(device) for each in drawn)
        return q, k, v, grad_out


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None, scale: float | None = None, *,
    softcap: float = 0.0, bias: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None, kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns out and lse by the formula: 0 and -inf for queries that see nothing.

    Args:
        q, k, v: (B, H, S, D), with fewer heads of k and v if query heads share them.
        seen: allowed pairs; this and the next ones broadcast to (B, H, S, keys).
        scale: factor of the logits; None: 1 / sqrt(D).
        softcap: largest logit, 0 for no limit.
        bias: boolean or added to the logits.
        sinks: logits of one more key, whose value is 0: (B, H, S).
        change: function of the logits before any of them is hidden.
        kept: factors of the weights.
    """
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    logits = q @ k.mT * (q.size(3) ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if change is not None:
        logits = change(logits)
    if bias is not None and bias.dtype == torch.bool:
        seen = bias if seen is None else seen & bias
    elif bias is not None:
        logits = logits + bias
    if seen is not None:
        logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.unsqueeze(-1)], -1)
    nothing = (logits == float("-inf")).all(-1, keepdim=True)
    weights = logits.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)[..., : k.size(2)]
    out = (weights if kept is None else weights * kept) @ v
    return out, logits.logsumexp(-1) if logits.size(-1) else q.new_full(q.shape[:3], float("-inf"))


def reference(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (out, dq, dk, dv) on one device in float64."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (q, k, v))
    pairs = torch.ones(problem.q_len, problem.kv_len, dtype=torch.bool, device=q.device)
    seen = pairs.tril() if problem.is_causal else None
    out, _ = dense(q, k, v, seen, problem.scale, softcap=problem.softcap)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out.double())
    return out.detach(), dq, dk, dv


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
