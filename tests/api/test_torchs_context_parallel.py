"""Torch's own context parallelism together with that of this package."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.problems import shard
from support.processes import Processes
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel as torchs_context
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

from cp_dtensor import Contiguous, HeadTail, Layout, context_parallel, enable_context_parallel_dispatcher

REFUSED = r"^torch's own context parallelism \(.*\) is in use together with cp_dtensor's.*redirect_imports"
LENGTH = 16


def drawn() -> torch.Tensor:
    return torch.randn(1, 2, LENGTH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def causal(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def state_of_torch() -> list[Any]:
    """What torch's context parallelism and this package change."""
    dispatcher: Any = DTensor._op_dispatcher
    style: Any = torchs._ContextParallel
    table = dispatcher._custom_op_handlers
    return [F.scaled_dot_product_attention, id(table), dict(table), "seq_dim" in vars(style)]


def open_together(rank: int, order: str) -> None:
    mesh, x, y, z = init_device_mesh("cpu", (2,)), drawn(), drawn(), drawn()
    kept, reference, before = x.clone(), causal(x), state_of_torch()
    for use in (open_and_attend, open_and_attend):  # a refusal leaves nothing behind
        with pytest.raises(RuntimeError, match=REFUSED):
            use(mesh, order, x, y)
        assert torch.equal(x, kept)
        assert torch.equal(y, kept)
        assert state_of_torch() == before
    with context_parallel(mesh, buffers=[z, reference], buffer_seq_dims=[2, 2]):
        torch.testing.assert_close(causal(z), reference, rtol=1e-10, atol=1e-10)


def open_and_attend(mesh: DeviceMesh, order: str, x: torch.Tensor, y: torch.Tensor) -> None:
    with ExitStack() as stack:
        for name in order.split():
            if name == "torch":
                stack.enter_context(torchs_context(mesh, buffers=[x], buffer_seq_dims=[2]))
            elif name == "torch's_dispatcher":
                torchs._enable_context_parallel_dispatcher()
                stack.callback(torchs._disable_context_parallel_dispatcher)
            elif name == "context":
                buffers = [y] if y.size(2) == LENGTH else []
                stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)))
            elif name == "dispatcher":
                stack.enter_context(enable_context_parallel_dispatcher())
        causal(DTensor.from_local(x[:, :, : LENGTH // 2], mesh, [Shard(2)], run_check=False) if "'s" in order else x)


@pytest.mark.parametrize(
    "order",
    [
        "torch context",
        "context torch",
        "context torch context",
        "torch dispatcher",
        "dispatcher torch",
        "torch's_dispatcher context",
        "context torch's_dispatcher",
        "torch's_dispatcher dispatcher",
        "dispatcher torch's_dispatcher",
    ],
)
def test_in_either_order_they_are_refused(two_processes: Processes, order: str) -> None:
    two_processes.run(open_together, order)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return causal(q)


@pytest.mark.parametrize("layout", [HeadTail(), Contiguous()], ids=repr)
def test_modules_with_torchs_style_are_refused_where_shards_are_not_contiguous(layout: Layout) -> None:
    """Torch's hooks make DTensors of shards, which are contiguous. The style may be older than the context."""
    whole = drawn()
    expected = causal(whole)
    before = state_of_torch()

    def styled(mesh: DeviceMesh) -> nn.Module:
        style: Any = torchs._ContextParallel
        module: nn.Module = style(2, style.AttentionType.SDPA)._apply(Attention(), mesh)
        return module

    def body(rank: int) -> None:
        mesh, x = init_device_mesh("cpu", (2,)), whole.clone()
        outside = styled(mesh)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], layout=layout):
            for module in (outside, styled(mesh)):
                if layout == HeadTail():
                    with pytest.raises(RuntimeError, match=REFUSED):
                        module(x)
                else:
                    torch.testing.assert_close(module(x), shard(expected, layout, rank, 2), rtol=1e-10, atol=1e-10)

    run_ranks(2, body)
    assert state_of_torch() == before
