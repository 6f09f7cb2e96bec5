"""Errors against float64 attention of the whole sequence, computed one head and one block of queries at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F

from cp_dtensor import Mask
from cp_dtensor.spec.masks import clipped_interval_sets
from cp_dtensor.tools.cases import Case, Select, Source
from cp_dtensor.tools.ranks import Ranks
from cp_dtensor.tools.report import ERRORS

K = TypeVar("K", bound=Hashable)
_BLOCK_ELEMENTS = 2**25
"""Logits of a block, 8 bytes each; about six such arrays exist at once."""
_MOST_ROWS = 1024
"""Most rows of a block: the more rows, the more keys that only some of them see."""


@dataclass(frozen=True)
class Outcome:
    """Results of a method on this rank."""

    tensors: tuple[torch.Tensor, ...]
    """(B, heads, S, D) each; the first of `ERRORS`."""
    select: Select
    """Selects the tokens of the results."""


def relative_errors(
    case: Case, source: Source, outcomes: Mapping[K, Outcome], ranks: Ranks
) -> dict[K, dict[str, float]]:
    """Relative Frobenius errors of the whole tensors, by name; a collective.

    `outcomes` are the results of this rank; ranks may have different keys, for methods that run on some ranks only. The
    result has every key that any rank has.

    Raises:
        Failed: on every rank, for example out of memory.
    """
    totals: dict[K, dict[str, float]] = {}
    by_rank = ranks.together(lambda: _squares(case, source, outcomes))
    _, truth_squares = by_rank[0]  # of the whole tensors, equal on every rank
    for of_rank, _ in by_rank:
        for (key, name), value in of_rank.items():
            errors = totals.setdefault(key, {})
            errors[name] = errors.get(name, 0.0) + value
    return {
        key: {name: (value / truth_squares[name]) ** 0.5 for name, value in errors.items()}
        for key, errors in totals.items()
    }


def _squares(
    case: Case, source: Source, outcomes: Mapping[K, Outcome]
) -> tuple[dict[tuple[K, str], float], dict[str, float]]:
    """Sums of squares: of this rank's differences by key and name, and of the whole reference by name."""
    differences: dict[tuple[K, str], float] = {}
    truths = dict.fromkeys(ERRORS, 0.0)
    for name, head, truth in _reference_heads(case, source):
        truths[name] += truth.square().sum().item()
        index = ERRORS.index(name)
        for key, outcome in outcomes.items():
            if index < len(outcome.tensors):
                difference = outcome.tensors[index][:, head].double() - outcome.select(truth)
                differences[key, name] = differences.get((key, name), 0.0) + difference.square().sum().item()
    return differences, truths


def _reference_heads(case: Case, source: Source) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yields (name, head, (B, S, D) float64) of all heads of out, dq, dk and dv."""
    group = case.heads.q // case.heads.kv
    seen = seen_keys(case.mask_value, case.seq_len)
    for kv_head in range(case.heads.kv):
        k, v = (source.head(case, name, kv_head).double() for name in ("k", "v"))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for head in range(kv_head * group, (kv_head + 1) * group):
            q, grad_out = (source.head(case, name, head).double() for name in ("q", "grad_out"))
            out, dq = reference_head(q, k, v, grad_out, dk, dv, seen)
            yield "out", head, out
            yield "dq", head, dq
        yield "dk", kv_head, dk
        yield "dv", kv_head, dv


def seen_keys(mask: Mask, seq_len: int) -> torch.Tensor:
    """(2, S) on the CPU: the first key that each query sees, and the key after the last one; equal if it sees none.

    >>> from cp_dtensor import SlidingWindow
    >>> seen_keys(SlidingWindow(1, 0), 3).tolist()
    [[0, 0, 1], [1, 2, 3]]

    Raises:
        ValueError: a query sees several intervals of keys.
    """
    interval_sets = clipped_interval_sets(mask, seq_len, seq_len)
    if len(interval_sets) > 1:
        raise ValueError(f"expected a mask with one interval of keys for each query, got {mask}")
    seen = torch.zeros(2, seq_len, dtype=torch.int64)
    for band in (band for interval_set in interval_sets for band in interval_set):
        query = torch.arange(band.first, band.last)
        seen[0, band.first : band.last] = (query - band.left).clamp(min=band.lo)
        seen[1, band.first : band.last] = (query + band.right + 1).clamp(max=band.hi)
    return seen


def reference_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    seen: torch.Tensor,
    *,
    block_elements: int = _BLOCK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of one head and its gradients; all tensors are (B, S, D or Dv) of one dtype.

    The gradients of keys and values are added to dk and dv. `seen` is the result of `seen_keys`, `block_elements` the
    approximate number of logits of a block. Returns out and dq.
    """
    batch, seq_len, _ = q.shape
    out, dq = torch.zeros_like(grad_out), torch.zeros_like(q)
    widest = max(int((seen[1] - seen[0]).max()), 1)
    rows = min(max(block_elements // (batch * widest), 1), _MOST_ROWS)
    for block in (slice(start, start + rows) for start in range(0, seq_len, rows)):
        lo, hi = seen[:, block]
        if not (lo < hi).any():
            continue
        first, last = int(lo[lo < hi].min()), int(hi[lo < hi].max())
        column = torch.arange(first, last)
        allowed = ((column >= lo[:, None]) & (column < hi[:, None])).to(q.device)
        leaves = [x.detach().requires_grad_() for x in (q[:, block], k[:, first:last], v[:, first:last])]
        out_block = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], attn_mask=allowed)
        dq_block, dk_block, dv_block = torch.autograd.grad(out_block, leaves, grad_out[:, block])
        out[:, block], dq[:, block] = out_block.detach(), dq_block
        dk[:, first:last] += dk_block
        dv[:, first:last] += dv_block
    return out, dq
