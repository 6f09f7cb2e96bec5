"""Launches: each form of a kernel is compiled by Triton once, then launched by the launcher of the form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

launching = pytest.importorskip("cp_dtensor._torch.triton_launch")


class Form:
    """Stand-in for a compiled form of a kernel."""

    def __init__(self, events: list[Any]) -> None:
        self.events, self.name = events, f"form {len(events)}"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, stream: int) -> None:
            self.events.append((self.name, grid, stream, arguments))

        return run


class Kernel:
    """Stand-in for a kernel."""

    arg_names = ("x", "y", "rows", "factor", "BLOCK")

    def __init__(self, events: list[Any], compiles: bool) -> None:
        self.events, self.compiles = events, compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Form | None:
            self.events.append(("kernel", grid, arguments, constants))
            return Form(self.events) if self.compiles else None

        return run


@dataclass(frozen=True)
class Tensor:
    """Stand-in for a tensor on a GPU."""

    address: int
    index: int = 0

    def data_ptr(self) -> int:
        return self.address

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the current stream of each device a handle."""
    monkeypatch.setattr(launching, "current_stream_handle", lambda device: 700 + device.index)


def launch_of(events: list[Any], programs: int = 3, compiles: bool = True) -> Any:
    return launching.Launch(Kernel(events, compiles), programs, (5, 0.5), {"num_warps": 4, "BLOCK": 16})


def test_the_compiled_form_takes_addresses_and_all_other_arguments_in_order() -> None:
    events: list[Any] = []
    launch = launch_of(events)
    launch(Tensor(32), Tensor(64))
    launch(Tensor(48), Tensor(80))
    assert events == [
        ("kernel", (3, 1, 1), (Tensor(32), Tensor(64), 5, 0.5), {"num_warps": 4, "BLOCK": 16}),
        ("form 1", (3, 1, 1), 700, (48, 80, 5, 0.5, 16)),
    ]


def test_each_alignment_and_device_has_a_form() -> None:
    events: list[Any] = []
    launch = launch_of(events)
    kinds = [(32, 64, 0), (32, 72, 0), (40, 64, 0), (40, 72, 0), (32, 64, 1)]
    for first, second, device in kinds:
        launch(Tensor(first, device), Tensor(second, device))
    assert [event[0] for event in events] == ["kernel"] * 5
    events.clear()
    for first, second, device in kinds:
        launch(Tensor(first + 160, device), Tensor(second + 320, device))
    assert [event[0] for event in events] == [f"form {number}" for number in range(1, 6)]
    assert [event[2] for event in events] == [700, 700, 700, 700, 701]


def test_the_interpreter_compiles_nothing() -> None:
    events: list[Any] = []
    launch = launch_of(events, compiles=False)
    for _ in range(3):
        launch(Tensor(32), Tensor(64))
    assert [event[0] for event in events] == ["kernel"] * 3


def test_no_programs() -> None:
    events: list[Any] = []
    launch_of(events, 0)(Tensor(32), Tensor(64))
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
