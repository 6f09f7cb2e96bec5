"""Compiled autograd: torch compiles the backward of eager code. One thread of a process can do so at a time."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.processes import Processes

from cp_dtensor import context_parallel, context_parallel_shard, context_parallel_unshard


def _steps(rank: int, whole: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the whole input by three backwards, the first and the last one by compiled autograd."""
    from torch._dynamo import compiled_autograd

    found, compiler = [], torch.compile(backend="eager")
    for how in (True, False, True):
        x = whole.clone().requires_grad_()
        (mine,) = context_parallel_shard(dist.group.WORLD, [x], [2])
        weight = torch.ones((), dtype=x.dtype, requires_grad=True)
        with context_parallel(dist.group.WORLD, seq_len=whole.size(2)):
            out = F.scaled_dot_product_attention(mine * weight, mine, mine, is_causal=True)
        (out,) = context_parallel_unshard(dist.group.WORLD, [out], [2])
        loss = (out * grad).sum()
        if how:
            with compiled_autograd._enable(compiler), warnings.catch_warnings():
                # Torch's own, while it captures: it filters warnings when they are shown.
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                loss.backward()
        else:
            loss.backward()
        assert x.grad is not None
        dist.all_reduce(x.grad)
        found.append(x.grad)
    return found


def test_eager_attention_under_compiled_autograd(two_processes: Processes) -> None:
    whole, grad = torch.randn(2, 1, 4, 13, 8, dtype=torch.float64)
    alone = whole.clone().requires_grad_()
    F.scaled_dot_product_attention(alone, alone, alone, is_causal=True).backward(grad)
    for found in two_processes.run(_steps, whole, grad):
        for each in found:
            torch.testing.assert_close(each, alone.grad, rtol=1e-10, atol=1e-10)
