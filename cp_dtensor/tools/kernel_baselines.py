"""Problems for attention kernels under masks, and the kernels of one GPU that can compute them."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from cp_dtensor.attention.backends.aten import CudnnAttention, FlashAttention
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.masked import Dropout, RowMask, attention_backward, attention_forward
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE
from cp_dtensor.tools.row_masks import documents, prefix, window

MASKS = ("causal", "full", "window 4096", "documents", "prefix")
_WINDOW = 4096
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

Pass = Callable[[], tuple[torch.Tensor, ...]]
Passes = tuple[Pass, Pass]
"""Forward and backward."""
Ways = dict[str, Callable[[], Passes]]
"""What makes those of each kernel."""


@dataclass(frozen=True)
class Case:
    """A mask and a length."""

    mask: str
    length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dropout_p: float = 0.0


@dataclass(frozen=True)
class Problem:
    """A case with its tensors."""

    case: Case
    mask: RowMask
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor

    @classmethod
    def random(cls, case: Case) -> Problem:
        """Of normally distributed numbers."""
        shape = (1, case.q_heads, case.length, case.head_dim)
        q, grad_out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(1, case.kv_heads, *shape[2:], device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return cls(case, row_mask(case), q, k, v, grad_out)

    @property
    def scale(self) -> float:
        """Of the logits."""
        return self.case.head_dim**-0.5

    @cached_property
    def dropout(self) -> Dropout | None:
        """As the ring has it of a rank whose positions are in runs."""
        if not self.case.dropout_p:
            return None
        position = torch.arange(self.case.length, device="cuda", dtype=torch.int32)
        return Dropout(self.case.dropout_p, torch.tensor(7, device="cuda"), position, position, in_runs=True)

    def with_autograd(self, attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Passes:
        """The passes of a differentiable function."""
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        out = attention(*leaves)
        return (
            lambda: (attention(self.q, self.k, self.v),),
            lambda: torch.autograd.grad(out, leaves, self.grad_out, retain_graph=True),
        )


def row_mask(case: Case) -> RowMask:
    """The mask of a case, as the Triton kernels take it."""
    position = torch.arange(case.length, device="cuda")
    if case.dropout_p and case.mask in ("causal", "full"):  # tiles of calls with dropout have intervals
        return window(position, None, 0 if case.mask == "causal" else None)
    if case.mask == "full":
        return RowMask()
    if case.mask == "causal":
        return RowMask(causal_offset=0)
    if case.mask == "window 4096":
        return window(position, _WINDOW - 1, 0)
    if case.mask == "prefix":
        return prefix(position, case.length // 4)
    return documents(position, torch.tensor(document_edges(case.length), device="cuda"), is_causal=True)


def document_edges(length: int) -> list[int]:
    """Documents of lognormal lengths, median 2048, that fill `length`."""
    random_state = random.Random(0)
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, edges[-1] + max(16, int(random_state.lognormvariate(7.6, 1.2)))))
    return edges


def seen_pairs(mask: RowMask, length: int) -> int:
    """Pairs of a query and a key that it sees."""
    if mask.lo is not None and mask.hi is not None:
        return int((mask.hi.clamp(max=length) - mask.lo.clamp(min=0)).clamp(min=0).sum().item())
    return length * length if mask.causal_offset is None else length * (length + 1) // 2


def ready_ways(problem: Problem) -> Ways:
    """The Triton kernels, and those of torch that have the mask."""
    q, k, v, mask, scale, dropout = problem.q, problem.k, problem.v, problem.mask, problem.scale, problem.dropout

    def triton() -> Passes:
        out, lse = attention_forward(q, k, v, mask, scale, dropout=dropout)
        return (
            lambda: attention_forward(q, k, v, mask, scale, dropout=dropout),
            lambda: attention_backward(problem.grad_out, q, k, v, out, lse, mask, scale, dropout=dropout)[:3],
        )

    ways: Ways = {"Triton": triton}
    if dropout is not None:
        if problem.case.mask in ("causal", "full"):
            ways["FlashAttention-2"] = lambda: _of_torch(SDPBackend.FLASH_ATTENTION, problem)
            ways["cuDNN"] = lambda: _of_torch(SDPBackend.CUDNN_ATTENTION, problem)
    elif problem.case.mask in ("causal", "full"):
        ways["FlashAttention-2"] = lambda: _of_backend(FlashAttention(), problem)
        ways["cuDNN"] = lambda: _of_backend(CudnnAttention(), problem)
    elif problem.case.mask != "prefix":
        ways["FlashAttention-2"] = lambda: _packed_flash(problem)
    return ways


def flex_ways(problem: Problem) -> Ways:
    """FlexAttention."""
    return {"FlexAttention": lambda: _flex(problem)}


def _of_backend(backend: AttentionBackend, problem: Problem) -> Passes:
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    tile = CAUSAL_TILE if problem.case.mask == "causal" else FULL_TILE
    out, lse = backend.forward(q, k, v, tile, scale)
    return (
        lambda: backend.forward(q, k, v, tile, scale),
        lambda: backend.backward(problem.grad_out, q, k, v, out, lse, tile, scale),
    )


def _of_torch(backend: SDPBackend, problem: Problem) -> Passes:
    """torch's function, with dropout."""
    case = problem.case

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=case.dropout_p, is_causal=case.mask == "causal", enable_gqa=True
            )

    return problem.with_autograd(attention)


def _packed_flash(problem: Problem) -> Passes:
    """torch's function of packed sequences."""
    case = problem.case
    is_packed = case.mask == "documents"
    edges = document_edges(case.length) if is_packed else [0, case.length]
    cu_seqlens = torch.tensor(edges, device="cuda", dtype=torch.int32)
    longest = max(stop - start for start, stop in pairwise(edges))
    window_size = (-1, 0) if is_packed else (_WINDOW - 1, 0)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=window_size, **_GQA)
        assert isinstance(out, torch.Tensor)
        return out.transpose(0, 1).unsqueeze(0)

    return problem.with_autograd(attention)


def _flex(problem: Problem) -> Passes:
    case = problem.case
    blocks = create_block_mask(_mask_mod(case), None, None, case.length, case.length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return problem.with_autograd(lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=True))


def _mask_mod(case: Case) -> Callable[[Any, Any, Any, Any], Any]:
    if case.mask == "full":
        return lambda batch, head, row, column: column >= 0
    if case.mask == "causal":
        return lambda batch, head, row, column: column <= row
    if case.mask == "window 4096":
        return lambda batch, head, row, column: (column <= row) & (row - column < _WINDOW)
    if case.mask == "prefix":
        prefix_length = case.length // 4
        return lambda batch, head, row, column: (column <= row) | (column < prefix_length)
    edges = torch.tensor(document_edges(case.length), device="cuda")
    ids = torch.searchsorted(edges, torch.arange(case.length, device="cuda"), right=True)
    return lambda batch, head, row, column: (column <= row) & (ids[row] == ids[column])
