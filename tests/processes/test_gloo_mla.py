"""Multi-head latent attention on real processes with gloo between them, eager and compiled."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support.compile_checks import compiled, fresh, no_compilation
from support.latent_problems import LatentCase, LatentProblem, attend, check_results
from support.method_checks import RING_ULYSSES, place
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Causal, Documents, HeadTail, SlidingWindow, Striped, context_parallel, context_parallel_mla
from cp_dtensor.engine import planner
from cp_dtensor.engine.choose import EXPANDED

DOCUMENTS = Documents([0, 9, 26], within=Causal())
CASES = [
    LatentCase(
        LatentProblem(29, 29, mask, 2, 6, sinks=True), layout, (("method", method), ("rotate_method", transport))
    )
    for mask, layout in ((Causal(), HeadTail()), (DOCUMENTS, Striped(3)), (SlidingWindow(5, 0), HeadTail()))
    for method, transport in (("ring", "allgather"), ("ring", "alltoall"), ("ulysses", None), ("auto", None))
]
OF_TWO_AXES = [LatentCase(each.problem, each.layout, (("method", "hybrid"),)) for each in CASES[::4]] + CASES[::4]


def _attend(rank: int, cases: list[LatentCase], shape: tuple[int, ...], names: tuple[str, ...]) -> list[Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    here = place(list(mesh.get_coordinate() or []), names, shape)
    return [attend(mesh, here, case) for case in cases]


@pytest.mark.parametrize(
    ("cases", "shape", "names"), [(CASES, (4,), ("cp",)), (OF_TWO_AXES, (2, 2), RING_ULYSSES)], ids=["one", "two axes"]
)
def test_every_method(
    four_processes: Processes, cases: list[LatentCase], shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    by_rank = four_processes.run(_attend, cases, shape, names)
    for index, case in enumerate(cases):
        check_results(case, [of_rank[index] for of_rank in by_rank])


def _compiled(rank: int, method: str, in_context: bool) -> None:
    if method.startswith(EXPANDED):
        with mock.patch.object(planner, "_predicted_fastest", return_value=method):
            _compare(rank, "auto", in_context)
    else:
        _compare(rank, method, in_context)


def _compare(rank: int, method: str, in_context: bool) -> None:
    fresh()
    mesh = init_device_mesh("cpu", (2,))

    def attention(
        q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        masks: dict[str, Any] = {} if in_context else {"mask": DOCUMENTS, "layout": Striped(2)}
        out = context_parallel_mla(q * 2.0, latent, k_rope, up=up, sinks=sinks, mesh=mesh, method=method, **masks)
        return out * 3.0  # type: ignore[operator]

    results: list[tuple[torch.Tensor, ...]] = []
    for function in (attention, compiled(attention)):
        for seed in range(2):
            problem = LatentProblem(28 + 4 * seed, 28 + 4 * seed, DOCUMENTS, 2, 4)
            *tensors, grad_out = problem.shards(problem.draw(seed), Striped(2), rank, 2)
            leaves = [tensor.requires_grad_() for tensor in (*tensors, torch.ones(4, dtype=torch.float64))]
            if in_context:
                with context_parallel(mesh, layout=Striped(2), mask=DOCUMENTS, method=method):
                    out = function(*leaves)
            else:
                out = function(*leaves)
            results.append((out.detach(), *torch.autograd.grad(out, leaves, grad_out)))
        if function is not attention and not in_context:
            with no_compilation():
                function(*leaves)
    for eager, traced in zip(results[:2], results[2:], strict=True):
        for one, other in zip(eager, traced, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("in_context", [False, True], ids=["alone", "in a context"])
@pytest.mark.parametrize("method", ["ring", "ulysses", "auto", EXPANDED + "ring", EXPANDED + "ulysses"])
def test_compiled(two_processes: Processes, method: str, in_context: bool) -> None:
    two_processes.run(_compiled, method, in_context)
