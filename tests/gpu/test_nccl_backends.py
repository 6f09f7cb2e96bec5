"""Detection of torch's NCCL backends, and the operations called on them, without GPUs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_dtensor import _torch


class _Group:
    """A process group that notes what it is asked to do."""

    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return SimpleNamespace(wait=lambda: self.calls.append(f"wait for {name}"))

        return call

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self._backend)


@pytest.mark.parametrize(
    ("backend", "is_nccl"), [("nccl", True), ("nccl2", True), ("nccl-lazy", True), ("gloo", False)]
)
def test_nccl_is_known_by_all_its_names(backend: str, is_nccl: bool) -> None:
    """Rows go straight to their places, and ranks may share memory; nccl2 is what torch 2.15 makes for "nccl"."""
    group: Any = _Group(backend)
    assert _torch.uses_nccl(group, torch.device("cuda", 0)) is is_nccl
    assert not _torch.uses_nccl(group, torch.device("cpu"))


def test_an_error_between_several_exchanges_ends_their_launch() -> None:
    """NCCL would queue all later collectives of the thread otherwise."""
    group: Any = _Group("nccl")

    def alltoall(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError

    group.alltoall = alltoall
    with pytest.raises(torch.OutOfMemoryError):
        _torch.start_all_to_all(*[[[torch.empty(0)]] * 2] * 2, group)
    assert group.calls == ["_start_coalescing", "_end_coalescing"]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_every_exchange_is_waited_for(backend: str, count: int) -> None:
    """Only torch's first NCCL backend makes one launch of several; of it, the end of the launch is waited for."""
    group: Any = _Group(backend)
    _torch.start_all_to_all(*[[[torch.empty(0)]] * count] * 2, group)()
    several = ["alltoall"] * count
    if backend == "nccl" and count > 1:
        assert group.calls == ["_start_coalescing", *several, "_end_coalescing", "wait for _end_coalescing"]
    else:
        assert group.calls == [*several, *["wait for alltoall"] * count]
