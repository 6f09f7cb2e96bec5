"""Packed documents in compiled code, on real processes: varlen_attention and the functions in flash-attn's style."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compile_checks import compiled, fresh
from support.packed_documents import PackedProblem, shard_packed
from support.problems import assert_close
from support.processes import Processes

from cp_dtensor import HeadTail, varlen_attention
from cp_dtensor.integrations import ring_flash_attn as functions

PROBLEM = PackedProblem((0, 5, 11), q_len=12)


def check(
    attend: Callable[..., Any], compiled_attend: Callable[..., Any], leaves: list[torch.Tensor], *args: Any
) -> None:
    """Equal outputs and gradients."""
    results = []
    for function in (attend, compiled_attend):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        out = function(*inputs, *args)
        results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    for wanted, got in zip(*results, strict=True):
        assert_close(got, wanted, str(args))


def by_documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: Any, left: int | None) -> torch.Tensor:
    return varlen_attention(
        q * 2, k, v, mesh=dist.group.WORLD, cu_seqlens=edges, is_causal=True, window_size=(left, None)
    )  # fmt: skip


def varlen(rank: int) -> None:
    fresh()
    whole = PROBLEM.draw(0)
    *qkv, grad_out = (shard_packed(tensor, HeadTail(), rank, 2) for tensor in whole)
    attend = compiled(by_documents)
    for edges, left in (((0, 5, 12), None), ([0, 4, 12], 3), ((0, 2, 11), 2), ((0, 3, 5), 1)):
        check(by_documents, attend, qkv, edges, left)
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    out = attend(q, k, v, PROBLEM.cu_seqlens, 4)
    problem = PackedProblem(PROBLEM.cu_seqlens, q_len=12, is_causal=True, window=(4, None), scale=1.0)
    expected = problem.reference(*whole)[0]
    assert_close(out, shard_packed(expected, HeadTail(), rank, 2), "one device")
    out.backward(grad_out)


def tensors_are_refused(rank: int) -> None:
    fresh()
    q = torch.randn(6, 2, 8, dtype=torch.float64)
    with pytest.raises(Exception, match="in compiled code, expects cu_seqlens to be integers"):
        compiled(by_documents)(q, q, q, torch.tensor([0, 5, 12]), None)


def windows(rank: int) -> None:
    """Of functions without documents, also between queries and keys of different lengths."""
    fresh()
    generator = torch.Generator().manual_seed(rank)
    q, k = (torch.randn(1, length, 2, 8, generator=generator, dtype=torch.float64) for length in (4, 7))

    def attend(q: torch.Tensor, k: torch.Tensor, window_size: tuple[int, int]) -> torch.Tensor:
        return functions.ring_flash_attn_func(q, k, k, causal=True, window_size=window_size)

    attend_compiled = compiled(attend)
    for window_size in ((-1, -1), (2, 0), (1, -1)):
        check(attend, attend_compiled, [q, k], window_size)
        check(attend, attend_compiled, [q, q.clone()], window_size)


def documents_on_all_ranks(rank: int) -> None:
    q = torch.randn(8, 2, 8, dtype=torch.float64)
    for name in ("ring", "zigzag_ring"):
        fresh()
        function = getattr(functions, f"{name}_flash_attn_varlen_func")
        for edges in ((0, 2, 8), (0, 4, 8)):
            check(function, compiled(function), [q, q, q], edges, 8)


def cut_documents(rank: int) -> None:
    """Run between graphs."""
    fresh()
    q = torch.randn(6, 2, 8, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 5, 12])
    *told, local_k_slice = functions.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, 2)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return functions.llama3_flash_attn_varlen_func(q * 2, q, q, *told, 1, local_k_slice, causal=True) * 2

    with warnings.catch_warnings():  # Dynamo looks at .grad of what goes from graph to graph
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        check(attend, torch.compile(attend, backend="eager"), [q])


@pytest.mark.parametrize("body", [varlen, tensors_are_refused, windows, documents_on_all_ranks, cut_documents])
def test_compiled(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(body)
