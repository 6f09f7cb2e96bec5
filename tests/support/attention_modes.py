"""Attention modes of every kind and mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor.integrations.unified import RingAttnMode, UlyssesAttnMode, UnifiedAttnMode

WORLD = 4
Mode = UnifiedAttnMode | UlyssesAttnMode | RingAttnMode


def named(*axes: str) -> Callable[[], DeviceMesh]:
    shape = (2, 2) if len(axes) == 2 else (WORLD,)
    return lambda: init_device_mesh("cpu", shape, mesh_dim_names=axes)


MODES: dict[str, Callable[..., Mode]] = {
    "unified, ring x ulysses": lambda **options: UnifiedAttnMode(named("ring", "ulysses")(), **options),
    "unified, ulysses x ring": lambda **options: UnifiedAttnMode(named("ulysses", "ring")(), **options),
    "unified, ulysses": lambda **options: UnifiedAttnMode(named("ulysses")(), **options),
    "unified, ring": lambda **options: UnifiedAttnMode(named("ring")(), **options),
    "unified, group": lambda **options: UnifiedAttnMode(dist.group.WORLD, **options),
    "unified, default": lambda **options: UnifiedAttnMode(**options),
    "ulysses": lambda **options: UlyssesAttnMode(init_device_mesh("cpu", (WORLD,)), **options),
    "ulysses, default": lambda **options: UlyssesAttnMode(**options),
    "ring": lambda **options: RingAttnMode(init_device_mesh("cpu", (WORLD,)), **options),
    "ring, default": lambda **options: RingAttnMode(**options),
}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def rank_in_sequence(mode: Callable[..., Mode], rank: int) -> int:
    """Returns ring rank * Ulysses size + Ulysses rank."""
    return rank // 2 + rank % 2 * 2 if mode is MODES["unified, ulysses x ring"] else rank
