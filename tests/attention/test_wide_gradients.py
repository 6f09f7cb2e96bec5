"""Float32 gradients of a rank's own keys, added to the contributions of other ranks before rounding."""

from __future__ import annotations

import pytest
import torch
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from support.ring_checks import attend, check_against_reference

from cp_dtensor import HeadTail, Layout, Striped
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.backends.select import backend_by_name, with_wide_gradients
from cp_dtensor.attention.latent import contract_gradients
from cp_dtensor.engine import planner as planning
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.spec.layouts import Contiguous
from cp_dtensor.spec.masks import Full

MATH = backend_by_name("MATH", "cpu")


def facts(capability: tuple[int, int] | None = (9, 0), dtype: str = "bfloat16", dim: int = 128) -> CallSpec:
    partition = LayoutPartition(Contiguous(), 8, 8, 1, 1)
    return CallSpec(partition, Full(), 1, 8, 2, dim, dim, dtype, device="cuda", capability=capability)


@pytest.mark.parametrize("name", ["CUDNN_ATTENTION", "FLASH_ATTENTION"])
def test_where_our_kernels_are_nearly_as_fast(name: str) -> None:
    pytest.importorskip("triton")
    assert with_wide_gradients(backend_by_name(name, "cuda"), facts()) == IntervalAttention(wide_gradients=True)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("CUDNN_ATTENTION", facts((8, 0))),
        ("CUDNN_ATTENTION", facts((10, 0))),
        ("CUDNN_ATTENTION", facts(None)),
        ("FLASH_ATTENTION", facts(dtype="float32")),
        ("FLASH_ATTENTION", facts(dim=512)),
        ("EFFICIENT_ATTENTION", facts()),
        ("MATH", facts()),
    ],
)
def test_others_keep_their_gradients(name: str, problem: CallSpec) -> None:
    assert with_wide_gradients(backend_by_name(name, "cuda"), problem) is None


@pytest.fixture
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(_backend: AttentionBackend, _spec: CallSpec) -> AttentionBackend:
        return IntervalAttention(wide_gradients=True)

    monkeypatch.setattr(planning, "with_wide_gradients", wide)


@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize("layout", [HeadTail(), Contiguous(), Striped(1)], ids=repr)
@pytest.mark.parametrize("is_causal", [True, False])
def test_equal_to_one_device(layout: Layout, is_causal: bool) -> None:
    problem = Problem(41, 41, batch=2, q_heads=4, kv_heads=2, is_causal=is_causal)
    check_against_reference(problem, 4, layout, rotate_method="allgather")


@pytest.mark.usefixtures("_everywhere")
def test_less_is_rounded() -> None:
    """All gradients of the all-gather transport with four or more ranks; others are unchanged."""
    problem = Problem(256, 256, q_heads=4, kv_heads=2, head_dim=16, is_causal=True, dtype=torch.bfloat16)
    tensors = problem.draw(0)
    truth = reference(problem, *tensors)

    def errors(ranks: int, transport: str) -> list[float]:
        results = run_ranks(ranks, attend, ranks, tensors, problem, HeadTail(), {"rotate_method": transport})
        found = []
        for index, whole in enumerate(truth):
            parts = [shard(whole, HeadTail(), rank, ranks) for rank in range(ranks)]
            square = sum(((results[rank][index] - part) ** 2).sum() for rank, part in enumerate(parts))
            found.append((square.sqrt() / whole.norm()).item())  # type: ignore[union-attr]
        return found

    gathered, ring, few = errors(4, "allgather"), errors(4, "alltoall"), errors(2, "allgather")
    assert all(wide < 0.93 * rounded for wide, rounded in zip(gathered[1:], ring[1:], strict=True)), (gathered, ring)
    assert few[1:] == pytest.approx(errors(2, "alltoall")[1:], rel=0.01)


def test_gradients_of_rotary_keys_are_summed_over_heads_in_float32() -> None:
    """256 + 1 is 256 in bfloat16."""
    grad_k = torch.zeros(1, 3, 1, 2, dtype=torch.bfloat16)
    grad_k[0, :, 0, 1] = torch.tensor([256.0, 1.0, 1.0])
    latent, up = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), torch.ones(3, 2, 1, dtype=torch.bfloat16)
    _, of_rotary = contract_gradients(grad_k, torch.zeros(1, 3, 1, 1, dtype=torch.bfloat16), latent, up, None)
    assert (of_rotary.dtype, of_rotary.item()) == (torch.float32, 258.0)
