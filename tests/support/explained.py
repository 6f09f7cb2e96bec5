"""Meshes of a process that has no other ranks, and what `explain` says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from cp_dtensor import explain
from cp_dtensor.api.explain import Explanation


@contextmanager
def pretended(*sizes: int, names: tuple[str, ...] = ("ring", "ulysses")) -> Iterator[DeviceMesh]:
    """A mesh of one or two axes."""
    dist.init_process_group("fake", rank=0, world_size=prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names[: len(sizes)])
    finally:
        dist.destroy_process_group()


def explained(*sizes: int, names: tuple[str, ...] = ("ring", "ulysses"), **options: Any) -> Explanation:
    """Returns what `explain` says of ranks with names for their axes, or without names of the default group."""
    with pretended(*sizes, names=names or ("cp",)) as mesh:
        return explain(
            mesh if names else dist.group.WORLD, **{"seq_len": 65536, "q_heads": 16, "quiet": True, **options}
        )
