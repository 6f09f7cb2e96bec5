"""Sequence operations over two mesh axes, whose process groups differ between ranks."""

from __future__ import annotations

import torch
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, shift


def _shifted(rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_node", "cp_gpu"))
    tokens = torch.arange(2) + 2 * rank
    return shift(tokens, -1, mesh=mesh, dim=0, layout=Contiguous()).tolist()


def test_undeclared_lengths(four_processes: Processes) -> None:
    assert four_processes.run(_shifted) == [[1, 2], [3, 4], [5, 6], [7, 0]]
