"""Gathering K/V for FlexAttention, bit by bit: dtypes, head dims, strides, layouts and transports."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from support.gathered_kv import IN_RANGES, IN_STRIPES, LENGTH, WIDTHS, Stored, check, kv_gather
from support.ranks import run_ranks
from support.shared_memory import shared_memory

from cp_dtensor import Contiguous, HeadTail, Layout, Striped
from cp_dtensor.comm.collective import AllGather
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.transports import ROTATE_METHODS

RANKS = 3
each_layout = pytest.mark.parametrize("layout", [*IN_RANGES, *IN_STRIPES], ids=repr)
MEMORY: dict[str, Stored] = {
    "contiguous": lambda x: x,
    "token after token": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "column after column": lambda x: x.mT.contiguous().mT,
    "from the second element": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "with gaps": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "signs for later": lambda x: torch._neg_view(-x),
}
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("shares_memory", [False, True])
@each_layout
def test_kv_are_gathered_and_gradients_summed(layout: Layout, shares_memory: bool) -> None:
    """Strides may differ between ranks: collectives depend on shapes only, not on strides or offsets."""

    def body(rank: int) -> None:
        orders = [*MEMORY]
        for turn, dtype, widths in product(range(len(orders)), DTYPES, WIDTHS):
            name = orders[(turn + rank) % len(orders)]
            if name == "signs for later" and dtype.itemsize == 1:
                name = "with gaps"  # torch has no minus for one byte
            check(rank, layout, MEMORY[name], dtype, widths, SymmetricMemory() if shares_memory else AllGather())

    with shared_memory() if shares_memory else nullcontext() as machine:
        run_ranks(RANKS, body)
    assert machine is None or bool(machine.copies) == (layout in IN_RANGES)


@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("rotate_method", ROTATE_METHODS)
def test_lengths_below_the_number_of_ranks_by_every_method(rotate_method: str, shares_memory: bool) -> None:
    def body(rank: int) -> None:
        for length, layout in product([0, 1, 2, 3, 7], [Contiguous(), HeadTail(), Striped(1)]):
            check(rank, layout, lambda x: x, torch.float32, (4, 4), ROTATE_METHODS[rotate_method], length)

    with shared_memory() if shares_memory else nullcontext():
        run_ranks(RANKS, body)


@each_layout
def test_no_batch_rows(layout: Layout) -> None:
    def body(rank: int) -> None:
        keys = kv_gather(layout, LENGTH, AllGather())
        local = layout.local_length(LENGTH, rank, RANKS)
        k, v = keys.gather(torch.empty(0, 2, local, 8), torch.empty(0, 2, local, 4))
        assert (k.shape, v.shape) == ((0, 2, LENGTH, 8), (0, 2, LENGTH, 4))
        grad_k, grad_v = keys.reduce_gradients(k, v, local)
        assert (grad_k.shape, grad_v.shape) == ((0, 2, local, 8), (0, 2, local, 4))

    run_ranks(RANKS, body)
