"""The order in which ranks submit what is labelled in traces."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import pytest
import torch.distributed as dist


def record_labels(monkeypatch: pytest.MonkeyPatch, modules: Iterable[ModuleType]) -> dict[int, list[str]]:
    """Filled while the test runs: for each rank the labels of these modules, "tile" for tiles in either pass."""
    found: dict[int, list[str]] = {}

    def recorded(text: str, *values: object) -> AbstractContextManager[None]:
        found.setdefault(dist.get_rank(), []).append("tile" if "tile" in text else text)
        return nullcontext()

    for module in modules:
        monkeypatch.setattr(module, "label", recorded)
    return found
