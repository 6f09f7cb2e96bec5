"""Attention sinks: dropout, dtypes, collectives and disagreement of ranks (`masked_checks` has the random cases)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import errors_by_rank, recorded_collectives
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from cp_dtensor import Documents, HeadTail, context_parallel_attention

LENGTH, RANKS = 12, 3
Tensors = tuple[torch.Tensor, ...]


def drawn(heads: tuple[int, ...] = (4, 2, 2), dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, each, LENGTH // RANKS, 4, generator=generator, dtype=torch.float64).to(dtype) for each in heads
    )


def attend(sinks: torch.Tensor | None, **options: Any) -> Any:
    q, k, v = (tensor.requires_grad_() for tensor in drawn())
    return context_parallel_attention(
        q, k, v, sinks=sinks, **{"mesh": dist.group.WORLD, "enable_gqa": True, "seq_len": LENGTH, **options}
    )


def test_gradients_beside_dropout() -> None:
    """Finite differences, with the seed of every evaluation the same."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)

    def fixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(11)
        options = {"mesh": dist.group.WORLD, "dropout_p": 0.4, "is_causal": True, "enable_gqa": True}
        return context_parallel_attention(q, k, v, sinks=sinks, **options)  # type: ignore[return-value]

    leaves = tuple(tensor.requires_grad_() for tensor in drawn())
    run_ranks(1, lambda _: torch.autograd.gradcheck(fixed, (*leaves, sinks)))


def test_a_row_that_sees_nothing_has_the_sink_as_its_lse() -> None:
    sinks = torch.tensor([0.5, -1.0, float("-inf"), 3.0], dtype=torch.float32)  # of another dtype than q

    def body(_rank: int) -> Tensors:
        leaf = sinks.clone().requires_grad_()
        out, lse = attend(leaf, mask=Documents([0, 0]), return_lse=True)  # nothing but padding
        out.sum().backward()
        return out, lse, leaf.grad

    for out, lse, grad in run_ranks(RANKS, body):
        assert not out.any()
        assert torch.equal(lse, sinks.double()[:, None].expand(1, 4, LENGTH // RANKS))
        assert torch.equal(grad, torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_sinks", [torch.bfloat16, torch.float64])
def test_each_keeps_its_dtype(dtype: torch.dtype, of_sinks: torch.dtype) -> None:
    def body(rank: int) -> tuple[torch.dtype, ...]:
        q, k, v = ((tensor + rank).requires_grad_() for tensor in drawn(dtype=dtype))
        sinks = torch.zeros(4, dtype=of_sinks, requires_grad=True)
        out, lse = context_parallel_attention(
            q, k, v, mesh=dist.group.WORLD, sinks=sinks, enable_gqa=True, return_lse=True, method="ulysses"
        )
        out.sum().backward()
        return out.dtype, lse.dtype, *(leaf.grad.dtype for leaf in (q, k, v, sinks))

    wide = torch.promote_types(dtype, torch.float32)
    assert set(run_ranks(2, body)) == {(dtype, wide, dtype, dtype, dtype, of_sinks)}


@pytest.mark.parametrize(
    ("method", "learned", "more"), [("ring", True, 0), ("ulysses", False, 0), ("ulysses", True, 4 * LENGTH)]
)
def test_nothing_travels_for_them_but_the_lse_of_learned_ones(method: str, learned: bool, more: int) -> None:
    """Of rows that other ranks have computed."""

    def travelling(sinks: torch.Tensor | None) -> int:
        with recorded_collectives() as recorded:
            run_ranks(RANKS, lambda _: attend(sinks, method=method).sum().backward())
        return sum(tensor.numel() for collective in recorded for tensor in collective.sent)

    assert travelling(torch.zeros(4, requires_grad=learned)) == travelling(None) + more


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_mask", "sinks"])
def test_dtensors_are_refused_before_any_collective(name: str) -> None:
    """A parameter of a tensor-parallel module is one."""

    def body(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        q, k, v = drawn((4, 4, 4))
        local = {"q": q, "k": k, "v": v, "attn_mask": torch.zeros(LENGTH), "sinks": torch.zeros(4)}
        local[name] = DTensor.from_local(local[name], mesh, [Replicate()], run_check=False)
        context_parallel_attention(**local, mesh=mesh, seq_len=LENGTH)

    message = rf"expected {name} to be a plain tensor, .* got a DTensor placed \(Replicate\(\),\)"
    with recorded_collectives() as collectives, pytest.raises(TypeError, match=message):
        run_ranks(RANKS, body)
    assert not collectives


OF_RANK_1: dict[str, tuple[dict[str, Any], torch.Tensor | None, str]] = {
    "none": ({"seq_len": None}, None, r"sinks: rank 1 says 'none', the others 'float32 \(4,\)'"),
    "frozen": ({"seq_len": None}, torch.zeros(4), "sinks requires_grad: rank 1 says False, the others True"),
    "other values": (
        {"debug": True}, torch.ones(4, requires_grad=True), r"sinks: rank 1 says 'float32 \(4,\) \w{8}', the others"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "odd", "message"), OF_RANK_1.values(), ids=OF_RANK_1)
def test_ranks_that_disagree_are_told_so(options: dict[str, Any], odd: torch.Tensor | None, message: str) -> None:
    usual = torch.zeros(4, requires_grad=True)
    errors = errors_by_rank(RANKS, lambda rank: attend(odd if rank == 1 else usual, layout=HeadTail(), **options))
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(ValueError, match=f"disagree about {message}"):
        raise errors[0] or AssertionError
