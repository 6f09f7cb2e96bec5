"""Models under DistributedDataParallel, which broadcasts module buffers, with buffers of a context among them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.processes import Processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cp_dtensor import context_parallel

LENGTH, WIDTH, HEADS = 11, 16, 2


class Model(nn.Module):
    """A layer of attention with a table of positions, and a count that is the same for all tokens."""

    table: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("table", torch.randn(LENGTH, WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.project(x + self.table).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(*qkv.chunk(3, 1), is_causal=True).square()


def train(rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model, alone, whole = (
            Model(),
            Model(),
            torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)),
        )
        wrapped = DistributedDataParallel(model)
        for step in range(2):
            model.calls.fill_(10 * step + rank)
            x = whole.clone()
            with context_parallel(dist.group.WORLD, buffers=[x, model.table], buffer_seq_dims=[1, 0]):
                loss = wrapped(x).sum() * dist.get_world_size()  # gradients are averaged
                loss.backward()
            dist.all_reduce(loss)
            expected = alone(whole).sum()
            expected.backward()
            torch.testing.assert_close(loss / dist.get_world_size(), expected)
            assert model.calls == 10 * step  # which is no shard, and is rank 0's
            assert torch.equal(model.table, alone.table)
        for ours, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-10, atol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


def wrap_inside(rank: int) -> None:
    model, alone = Model(), Model()
    with torch.no_grad():
        model.calls.fill_(rank)
        model.project.bias.fill_(rank)
    with context_parallel(dist.group.WORLD, buffers=[model.table], buffer_seq_dims=[0]):
        shard = model.table.clone()
        DistributedDataParallel(model)
        assert torch.equal(model.table, shard)
    assert torch.equal(model.table, alone.table)
    assert model.calls == 0
    assert torch.equal(model.project.bias, torch.zeros(3 * WIDTH))


def test_shards_are_not_overwritten_by_those_of_rank_0(two_processes: Processes) -> None:
    two_processes.run(train)


def test_nor_where_the_module_is_wrapped_inside_of_the_context(two_processes: Processes) -> None:
    two_processes.run(wrap_inside)
