"""torch's FlashAttention-2 over packed documents: on one GPU, and on ranks that gather all K/V (Llama 3)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.varlen import varlen_attn

from cp_dtensor import Causal, Documents, SlidingWindow
from cp_dtensor.tools.bench.cases import AllTokens, Attention, ByLayout, Case, Method
from cp_dtensor.tools.bench.results import IDEAL

_STAGES = 4
"""Groups of K/V heads that are gathered one after the other, if there are as many heads."""
Span = tuple[int, int]
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_methods() -> tuple[Method, Method]:
    """Returns the method of one GPU and the method of all ranks."""
    return (
        Method(
            f"{IDEAL}-varlen", varlen_on_one_gpu, shards=AllTokens(), suits=lambda case: not case.is_plain,
            refusal=_refusal,
        ),
        Method(
            "llama3-varlen", _gathered, shards=ByLayout("Contiguous"), suits=lambda case: case.mask != "full",
            refusal=_refusal, by_default=False,
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class VarlenArguments:
    """Arguments of varlen attention for contiguous queries."""

    keys: Span
    """Range of the keys that are passed."""
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]

    @classmethod
    def of(cls, documents: Sequence[Span], queries: Span) -> VarlenArguments:
        """Pairs each document's queries with its keys up to the last query: the kernel aligns them at their ends.

        >>> VarlenArguments.of([(0, 4), (4, 9)], (2, 6))
        VarlenArguments(keys=(0, 6), cu_seqlens_q=(0, 2, 4), cu_seqlens_k=(0, 4, 6))
        """
        first, last = queries
        mine = [span for span in documents if max(span[0], first) < min(span[1], last)]
        q = [min(stop, last) - max(start, first) for start, stop in mine]
        k = [min(stop, last) - start for start, stop in mine]
        return cls((mine[0][0], last), tuple(accumulate(q, initial=0)), tuple(accumulate(k, initial=0)))


def _documents(case: Case) -> tuple[list[Span], tuple[int, int]]:
    """Returns the documents of a mask, and the window in each: keys before and after a query, -1 for all."""
    match case.mask_value:
        case Documents(cu_seqlens, _, Causal()):
            return list(pairwise(cu_seqlens)), (-1, 0)
        case SlidingWindow(left, 0) if left is not None:
            return [(0, case.seq_len)], (left, 0)
        case Causal():
            return [(0, case.seq_len)], (-1, 0)
    raise NotImplementedError(f"no varlen attention for {case.mask}")


def _refusal(case: Case, world_size: int) -> str | None:
    if case.batch != 1:
        return "the method is for one batch row"
    return f"the length is not a multiple of {world_size}" if case.seq_len % world_size else None


@contextmanager
def varlen_on_one_gpu(case: Case, device: torch.device) -> Iterator[Attention]:
    """Opens attention of a case with a batch of one, of documents or a window."""
    documents, window = _documents(case)
    attend = _Varlen(VarlenArguments.of(documents, (0, case.seq_len)), window, device)
    yield lambda q, k, v: _tokens_last(attend(*map(_tokens_first, (q, k, v))))


@contextmanager
def _gathered(case: Case, device: torch.device) -> Iterator[Attention]:
    documents, window = _documents(case)
    group = dist.group.WORLD
    assert group is not None
    length = case.seq_len // group.size()
    arguments = VarlenArguments.of(documents, (group.rank() * length, (group.rank() + 1) * length))
    attend = _Varlen(arguments, window, device)
    keys = slice(*arguments.keys)
    stages = min(_STAGES, case.heads.kv)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        by_stage = [torch.tensor_split(_tokens_first(x), stages, 1) for x in (q, k, v)]
        started = [_start(k, v, group) for k, v in zip(*by_stage[1:], strict=True)]
        outs = []
        for q, (k, v, works) in zip(by_stage[0], started, strict=True):
            for work in works:
                work.wait()
            outs.append(attend(q, k[keys], v[keys]))
        return _tokens_last(torch.cat(outs, 1))

    yield attention


class _Varlen:
    """Attention of (S, H, D) queries to (T, Hkv, D) keys and values."""

    def __init__(self, arguments: VarlenArguments, window: tuple[int, int], device: torch.device) -> None:
        edges = arguments.cu_seqlens_q, arguments.cu_seqlens_k
        self._cu_seqlens_q, self._cu_seqlens_k = (
            torch.tensor(each, dtype=torch.int32, device=device) for each in edges
        )
        self._longest_q, self._longest_k = (max(stop - start for start, stop in pairwise(each)) for each in edges)
        self._window = window

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = varlen_attn(
            q, k, v, self._cu_seqlens_q, self._cu_seqlens_k, self._longest_q, self._longest_k,
            window_size=self._window, **_GQA,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out


def _start(k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    works: list[Any] = []
    return _Gathered.apply(k, group, works), _Gathered.apply(v, group, works), works


class _Gathered(torch.autograd.Function):
    """All-gather of (S, heads, D), complete when the work is; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, works: list[Any]) -> torch.Tensor:
        ctx.group = group
        whole = x.new_empty((x.size(0) * group.size(), *x.shape[1:]))
        works.append(dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        mine = grad.new_empty((grad.size(0) // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None, None


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Returns (1, H, S, D) as (S, H, D)."""
    return x[0].transpose(0, 1)


def _tokens_last(x: torch.Tensor) -> torch.Tensor:
    """Returns (S, H, D) as (1, H, S, D)."""
    return x.transpose(0, 1).unsqueeze(0)
