"""Errors against float64 attention of the whole sequence, computed one head and one block of queries at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cp_dtensor.tools.cases import Case, head_of, rows_of
from cp_dtensor.tools.ranks import Ranks

ERRORS = ("out", "dq", "dk", "dv")
"""Names of the tensors whose errors are measured."""
_BLOCK_ELEMENTS = 2**25
"""Logits of a block, 8 bytes each; about six such arrays exist at once."""


class Outcome(NamedTuple):
    """Results of a method on this rank: (B, heads, S, D) each, the first of `ERRORS`, of (B, S) positions."""

    tensors: tuple[torch.Tensor, ...]
    positions: torch.Tensor


def relative_errors(
    case: Case, outcomes: Mapping[int, Outcome], ranks: Ranks, device: torch.device
) -> dict[int, dict[str, float]]:
    """Return relative Frobenius errors of the whole tensors, by number and name; a collective.

    `outcomes` are the results of this rank; ranks may have different numbers, for methods that run on some ranks only.
    The result has every number that any rank has.

    Raises:
        Failed: on every rank, for example out of memory.
    """
    by_rank = ranks.together(lambda: _relative_squares(case, outcomes, device))
    errors: dict[int, dict[str, float]] = {}
    for number, name in dict.fromkeys(chain(*by_rank)):
        errors.setdefault(number, {})[name] = sum(squares.get((number, name), 0.0) for squares in by_rank) ** 0.5
    return errors


def _relative_squares(
    case: Case, outcomes: Mapping[int, Outcome], device: torch.device
) -> dict[tuple[int, str], float]:  # fmt: skip
    """Sum squares of this rank's differences by number and name, relative to those of the whole reference."""
    squares, whole = defaultdict[tuple[int, str], float](float), defaultdict[str, float](float)
    for name, head, truth in _reference_heads(case, device):
        whole[name] += truth.square().sum().item()
        for number, (tensors, positions) in outcomes.items():
            if (index := ERRORS.index(name)) < len(tensors):
                difference = tensors[index][:, head].double() - rows_of(truth, positions)
                squares[number, name] += difference.square().sum().item()
    return {key: square / whole[key[1]] for key, square in squares.items()}


def _reference_heads(case: Case, device: torch.device) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield (name, head, (B, S, D) float64) of all heads of out, dq, dk and dv."""
    group, seen = case.heads.q // case.heads.kv, case.seen_keys()
    for kv_head in range(case.heads.kv):
        k, v = (head_of(case, name, kv_head, device).double() for name in ("k", "v"))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for head in range(kv_head * group, (kv_head + 1) * group):
            q, grad_out = (head_of(case, name, head, device).double() for name in ("q", "grad_out"))
            out, (dq, *more) = reference_head(q, k, v, grad_out, seen)
            yield "out", head, out
            yield "dq", head, dq
            dk, dv = dk + more[0], dv + more[1]
        yield "dk", kv_head, dk
        yield "dv", kv_head, dv


def reference_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor, seen: torch.Tensor,
    *, block_elements: int = _BLOCK_ELEMENTS,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:  # fmt: skip
    """Return attention of one head and the gradients of q, k and v; all tensors are (B, S, D or Dv) of one dtype.

    `seen` is the result of `Case.seen_keys`, `block_elements` the approximate number of logits of a block of queries,
    whose logits are computed again in backward.
    """
    key, seen = torch.arange(q.size(1), device=q.device), seen.to(q.device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> Any:
        allowed = (key >= first[:, None]) & (key < last[:, None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    rows = max(block_elements // (q.size(0) * q.size(1)), 1)
    blocks = zip(q.split(rows, 1), *(bound.split(rows) for bound in seen), strict=True)
    outs = [checkpoint(attend, block, k, v, *bounds, use_reentrant=False) for block, *bounds in blocks]
    out = torch.cat(outs, 1)
    return out.detach(), torch.autograd.grad(out, leaves, grad_out)
