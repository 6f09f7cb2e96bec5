"""Softcap in compiled code: out and gradients of dense attention, by every method."""

from __future__ import annotations

import torch
from support.compile_checks import compiled, fresh
from support.masked_problems import MaskedProblem
from support.problems import shard
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Causal, HeadTail, context_parallel_attention

PROBLEM = MaskedProblem(16, 16, Causal(), 2, 4, 2, softcap=0.6)


def body(rank: int) -> None:
    fresh()
    mesh = init_device_mesh("cpu", (2,))
    whole = PROBLEM.draw(4)
    out, *grads = PROBLEM.reference(*whole)[:4]
    q, k, v, grad_out = (shard(tensor, HeadTail(), rank, 2) for tensor in whole)
    for method in ("ring", "ulysses"):

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, method: str = method) -> torch.Tensor:
            return context_parallel_attention(
                q, k, v, mesh=mesh, method=method, is_causal=True, softcap=0.6, enable_gqa=True
            )  # type: ignore[return-value]

        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        got = compiled(attend)(*leaves)
        results = (got, *torch.autograd.grad(got, leaves, grad_out))
        for name, one, expected in zip(("out", "dq", "dk", "dv"), results, (out, *grads), strict=True):
            wanted = shard(expected, HeadTail(), rank, 2)
            torch.testing.assert_close(
                one.detach(), wanted, rtol=1e-10, atol=1e-10, msg=lambda text, of=f"{method} {name}": f"{of}: {text}"
            )


def test_softcap(two_processes: Processes) -> None:
    two_processes.run(body)
