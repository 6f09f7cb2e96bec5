"""Attention sinks: dtypes, what travels, and refusals; results are those of tests/matrix and `test_masked_calls`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import recorded_collectives
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from cp_dtensor import Documents, context_parallel_attention

LENGTH, RANKS = 12, 3


def attend(sinks: torch.Tensor | None, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return the result of a call, and q, k and v."""
    qkv = [torch.ones(1, heads, LENGTH // RANKS, 4, dtype=dtype) * (1 + dist.get_rank()) for heads in (4, 2, 2)]
    leaves = [tensor.requires_grad_() for tensor in qkv]
    options = {"mesh": dist.group.WORLD, "enable_gqa": True, "seq_len": LENGTH, **options}
    return context_parallel_attention(*leaves, sinks=sinks, **options), leaves


def test_a_row_that_sees_nothing_has_the_sink_as_its_lse() -> None:
    sinks = torch.tensor([0.5, -1.0, float("-inf"), 3.0], dtype=torch.float32)  # of another dtype than q

    def body(_rank: int) -> tuple[torch.Tensor, ...]:
        leaf = sinks.clone().requires_grad_()
        (out, lse), _ = attend(leaf, mask=Documents([0, 0]), return_lse=True)  # nothing but padding
        out.sum().backward()
        return out, lse, leaf.grad

    for out, lse, grad in run_ranks(RANKS, body):
        assert not out.any()
        assert torch.equal(lse, sinks.double()[:, None].expand(1, 4, LENGTH // RANKS))
        assert torch.equal(grad, torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_sinks", [torch.bfloat16, torch.float64])
def test_each_keeps_its_dtype(dtype: torch.dtype, of_sinks: torch.dtype) -> None:
    def body(_rank: int) -> tuple[torch.dtype, ...]:
        sinks = torch.zeros(4, dtype=of_sinks, requires_grad=True)
        (out, lse), leaves = attend(sinks, dtype, return_lse=True, method="ulysses")
        out.sum().backward()
        return out.dtype, lse.dtype, *(leaf.grad.dtype for leaf in (*leaves, sinks))

    wide = torch.promote_types(dtype, torch.float32)
    assert set(run_ranks(RANKS, body)) == {(dtype, wide, dtype, dtype, dtype, of_sinks)}


@pytest.mark.parametrize(
    ("method", "learned", "more"), [("ring", True, 0), ("ulysses", False, 0), ("ulysses", True, 4 * LENGTH)]
)
def test_nothing_travels_for_them_but_the_lse_of_learned_ones(method: str, learned: bool, more: int) -> None:
    """Of rows that other ranks have computed."""

    def travelling(sinks: torch.Tensor | None) -> int:
        with recorded_collectives() as recorded:
            run_ranks(RANKS, lambda _: attend(sinks, method=method)[0].sum().backward())
        return sum(tensor.numel() for collective in recorded for tensor in collective.sent)

    assert travelling(torch.zeros(4, requires_grad=learned)) == travelling(None) + more


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_mask", "sinks"])
def test_dtensors_beside_plain_tensors_are_refused_before_any_collective(name: str) -> None:
    """A parameter of a tensor-parallel module is one."""

    def body(_rank: int) -> None:
        local = {each: torch.zeros(1, 4, LENGTH // RANKS, 4) for each in "qkv"}
        local |= {"attn_mask": torch.zeros(LENGTH), "sinks": torch.zeros(4)}
        mesh = init_device_mesh("cpu", (RANKS,))
        local[name] = DTensor.from_local(local[name], mesh, [Replicate()], run_check=False)
        context_parallel_attention(**local, mesh=mesh, seq_len=LENGTH)

    message = rf"expected {name} to be a plain tensor, .* got a DTensor placed \(Replicate\(\),\)"
    with recorded_collectives() as collectives, pytest.raises(TypeError, match=message):
        run_ranks(RANKS, body)
    assert not collectives
