"""Attention over three mesh axes (pods, nodes of a pod, ranks of a node), as `test_matrix` has it over one and two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.processes import Processes, started

from cp_dtensor import Balanced, Contiguous, Striped
from matrix.features import HEAD_TAIL
from matrix.fronts import Case, case_of
from matrix.worlds import World, check_all, run_threads

MESHES = {"2x2x2": (2, 2, 2), "2x1x3": (2, 1, 3), "1x2x2": (1, 2, 2), "3x2x1": (3, 2, 1)}
# Mesh, front, features, method, transport, layout (None: as the front has it, "balanced" by the documents of the case).
CELLS = [
    *(("2x2x2", "function", ("causal", "gqa", "uneven"), "ring", transport, HEAD_TAIL)
      for transport in ("allgather", "alltoall", "symm_mem")),
    ("2x2x2", "function", ("causal",), "hybrid", "alltoall", Striped(3)),
    ("2x2x2", "function", ("documents", "gqa", "lse"), "ring", "auto", "balanced"),
    ("2x2x2", "function", ("documents", "float_bias"), "hybrid", "auto", Contiguous()),
    ("2x2x2", "function", ("window", "sinks"), "ring", "allgather", HEAD_TAIL),
    ("2x2x2", "function", ("window", "mqa"), "hybrid", "alltoall", HEAD_TAIL),
    ("2x2x2", "function", ("cross", "float_bias", "dropout"), "ring", "allgather", Contiguous()),
    ("2x2x2", "context", ("documents", "backward_after_exit"), "ring", "alltoall", "balanced"),
    ("2x2x2", "context", ("causal", "checkpoint"), "auto", "auto", HEAD_TAIL),
    ("2x2x2", "dtensor", ("causal", "gqa"), "ring", "auto", None),
    ("2x2x2", "dtensor", ("window", "uneven"), "hybrid", "auto", None),
    ("2x2x2", "dtensor_sdpa", ("causal", "gqa"), "auto", "auto", None),
    ("2x2x2", "mla", ("causal",), "ring", "alltoall", HEAD_TAIL),
    ("2x2x2", "mla", ("documents",), "hybrid", "auto", HEAD_TAIL),
    ("2x2x2", "flex", ("documents",), "auto", "auto", HEAD_TAIL),
    *((mesh, "function", features, method, "auto", HEAD_TAIL)
      for mesh in [*MESHES][1:] for features, method in ((("documents",), "ring"), (("causal", "gqa"), "hybrid"))),
    ("2x1x3", "context", ("window",), "auto", "auto", HEAD_TAIL),
    ("1x2x2", "dtensor", ("causal",), "ring", "auto", None),
    ("3x2x1", "dtensor", ("causal",), "hybrid", "auto", None),
]  # fmt: skip


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_attention(cell: tuple[str, str, tuple[str, ...], str, str, object]) -> None:
    mesh, front, features, method, transport, layout = cell
    world = World(MESHES[mesh])
    case = case_of(front, features, world.size, Case(method=method, transport=transport))
    assert case is not None
    if layout == "balanced":
        case = replace(case, layout=Balanced(case.mask, case.lengths[0]))
    elif layout is not None:
        case = replace(case, layout=layout)
    run_threads(front, case, world)


@pytest.fixture(scope="module")
def eight_processes() -> Iterator[Processes]:
    yield from started(8, 120)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "features", "method"), [("function", ("causal", "gqa"), "ring"), ("context", ("documents",), "hybrid")]
)
def test_compiled(name: str, features: tuple[str, ...], method: str, eight_processes: Processes) -> None:
    case = case_of(name, features, 8, Case(method=method))
    assert case is not None
    world = World((2, 2, 2), "eight_processes", compiles=True)
    assert eight_processes.run(check_all, name, {features: case}, world) == [{}] * 8
