"""Launches: each form of a kernel is compiled by Triton once, then launched by `compiled[grid]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

launching = pytest.importorskip("cp_dtensor._torch.triton_launch")


class Recorded:
    """Stand-in for a kernel or, with `compiled`, for one of its compiled forms."""

    arg_names = ("x", "y", "rows", "factor", "BLOCK")

    def __init__(self, events: list[Any], compiled: str | None = None, compiles: bool = True) -> None:
        self.events, self.compiled, self.compiles = events, compiled, compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Recorded | None:
            self.events.append((self.compiled or "kernel", grid, arguments, constants))
            return Recorded(self.events, f"form {len(self.events)}") if self.compiles and not self.compiled else None

        return run


@dataclass(frozen=True)
class Address:
    """Stand-in for a tensor on a GPU."""

    at: int
    device: int = 0

    def data_ptr(self) -> int:
        return self.at

    def get_device(self) -> int:
        return self.device


def launch_of(events: list[Any], programs: int = 3, compiles: bool = True) -> Any:
    return launching.Launch(Recorded(events, compiles=compiles), programs, (5, 0.5), {"num_warps": 4, "BLOCK": 16})


def test_the_compiled_form_takes_all_arguments_in_order() -> None:
    events: list[Any] = []
    launch = launch_of(events)
    launch(Address(32), Address(64))
    launch(Address(48), Address(80))
    assert events == [
        ("kernel", (3, 1, 1), (Address(32), Address(64), 5, 0.5), {"num_warps": 4, "BLOCK": 16}),
        ("form 1", (3, 1, 1), (Address(48), Address(80), 5, 0.5, 16), {}),
    ]


def test_each_alignment_and_device_has_a_form() -> None:
    events: list[Any] = []
    launch = launch_of(events)
    kinds = [(32, 64, 0), (32, 72, 0), (40, 64, 0), (40, 72, 0), (32, 64, 1)]
    for first, second, device in kinds:
        launch(Address(first, device), Address(second, device))
    assert [event[0] for event in events] == ["kernel"] * 5
    events.clear()
    for first, second, device in kinds:
        launch(Address(first + 160, device), Address(second + 320, device))
    assert [event[0] for event in events] == [f"form {number}" for number in range(1, 6)]


def test_the_interpreter_compiles_nothing() -> None:
    events: list[Any] = []
    launch = launch_of(events, compiles=False)
    for _ in range(3):
        launch(Address(32), Address(64))
    assert [event[0] for event in events] == ["kernel"] * 3


def test_no_programs() -> None:
    events: list[Any] = []
    launch_of(events, 0)(Address(32), Address(64))
    assert events == []


def test_launches_are_cached_by_their_arguments() -> None:
    made = []

    @launching.cached_launch
    def make(*values: object) -> int:
        made.append(values)
        return len(made)

    x = torch.zeros(4, 6)
    of = launching.facts
    others = [x.T, x[:, :3], x[:2], x.half(), x.view(2, 12)]
    assert make(of(x), 1.0) == make(of(x.clone()), 1.0) == 1
    assert [make(of(other), 1.0) for other in others] == [2, 3, 4, 5, 6]
    assert make(of(x), 2.0) == 7
