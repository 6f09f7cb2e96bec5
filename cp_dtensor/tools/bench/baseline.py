"""What the benchmark needs to know of somebody that computes attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from cp_dtensor.tools.bench.cases import Case
from cp_dtensor.tools.bench.inputs import ByLayout, Everything, Shards
from cp_dtensor.tools.bench.work import Attention


def never(case: Case, world_size: int) -> None:
    """Refuses nothing."""
    return None


def no_workspace(device: torch.device) -> int:
    """Keeps nothing."""
    return 0


@dataclass(frozen=True)
class Baseline:
    """Something that computes attention."""

    name: str
    attention: Callable[[Case, torch.device], AbstractContextManager[Attention]]
    """What computes a case, usable while open; forward and backward both happen in there."""
    refusal: Callable[[Case, int], str | None] = never
    """Why a case on so many ranks is not even tried; None: it is."""
    workspace_bytes: Callable[[torch.device], int] = no_workspace
    """Memory that it keeps outside of torch's allocator."""
    shards: Shards = field(default_factory=ByLayout)
    """Which tokens ranks hold; if it is everything, rank 0 works alone."""
    suits: Callable[[Case], bool] = lambda case: True
    """Whether a case is for it; of others there are no rows."""
    by_default: bool = True
    """Whether it takes part without having been asked to."""
    captured: bool = False
    """Measured as a CUDA graph."""
    contiguous: bool = False
    """Gets inputs in (B, H, S, D) memory."""
    may_expand_kv: bool = False
    """Where it fails with shared K/V heads, it is given repeated ones."""
    predicted_ms: Callable[[Case, str, torch.device], float | None] = lambda case, pass_name, device: None
    """What the library's cost model says of a case and pass, on the slowest rank."""

    @property
    def alone(self) -> bool:
        """Whether rank 0 computes the whole while the others wait."""
        return isinstance(self.shards, Everything)
