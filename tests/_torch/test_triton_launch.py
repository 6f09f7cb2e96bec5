"""Launches through Triton and direct launches, with stand-ins for kernel, driver and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

launching = pytest.importorskip("cp_dtensor._torch.triton_launch")
direct_launch = pytest.importorskip("cp_dtensor._torch.direct_launch")
import triton  # noqa: E402

Unknown = direct_launch.Unknown


class Kernel(triton.runtime.JITFunction):  # type: ignore[misc]
    """Stand-in for a kernel, which compiles nothing."""

    __name__ = "kernel"

    def __init__(self, events: list[Any]) -> None:
        self.events, self.pre_run_hooks = events, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> str:
            self.events.append(("triton", grid, arguments, constants))
            return "compiled"

        return run


@dataclass(frozen=True)
class Address:
    """Stand-in for a tensor on a GPU."""

    at: int
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.at


@dataclass
class World:
    events: list[Any] = field(default_factory=list)
    device: int = 0
    refuses: bool = False
    unknown: bool = False

    def kinds(self) -> list[str]:
        kinds = [event[0] for event in self.events]
        self.events.clear()
        return kinds


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    class Direct:
        def __init__(self, compiled: Any, arguments: Sequence[object]) -> None:
            world.events.append(("made", compiled, tuple(arguments)))
            if world.unknown:
                raise Unknown("no such thing")

        def __call__(self, grid: tuple[int, ...], stream: int, addresses: list[int]) -> bool:
            world.events.append(("direct", grid, stream, addresses))
            return not world.refuses

    driver = SimpleNamespace(get_current_device=lambda: world.device, get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(launching, "DirectLaunch", Direct)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    return world


def launch_of(world: World) -> Any:
    return launching.Launch(Kernel(world.events), (3, 2, 1), (5, 0.5), {"BLOCK": 16})


def test_triton_launches_first_and_later_launches_are_direct(world: World) -> None:
    launch = launch_of(world)
    launch(Address(32), Address(64))
    assert world.events == [("triton", (3, 2, 1), (Address(32), Address(64), 5, 0.5), {"BLOCK": 16})]
    launch(Address(48), Address(80))
    assert world.events[1:] == [("made", "compiled", (None, None, 5, 0.5)), ("direct", (3, 2, 1), 70, [48, 80])]
    world.kinds()
    launch(Address(16), Address(32))
    assert world.events == [("direct", (3, 2, 1), 70, [16, 32])]


def test_each_compiled_form_is_launched_by_triton_first(world: World) -> None:
    launch = launch_of(world)
    for at in ((32, 64), (32, 72), (40, 64), (40, 72)):
        for expected in (["triton"], ["made", "direct"], ["direct"]):
            launch(*map(Address, at))
            assert world.kinds() == expected
    launch(Address(160), Address(320))
    launch(Address(168), Address(322))  # neither is a multiple of 16
    assert world.kinds() == ["direct", "direct"]
    world.device = 1
    for expected in (["triton"], ["made", "direct"], ["direct"]):
        launch(Address(32), Address(64))
        assert world.kinds() == expected


def test_hooks_get_launches_by_triton(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of(world)
    for _ in range(3):
        launch(Address(32))
    world.kinds()
    runtime = triton.knobs.runtime
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(runtime, name, lambda _: None)
            launch(Address(32))
            assert world.kinds() == ["triton"]
    launch(Address(32))
    assert world.kinds() == ["direct"]
    launch._kernel.pre_run_hooks.append(print)
    launch(Address(32))
    assert world.kinds() == ["triton"]


@pytest.mark.parametrize(
    ("knobs", "name", "value"),
    [
        ("runtime", "debug", True),
        ("compilation", "instrumentation_mode", "fpsan"),
        ("runtime", "add_stages_inspection_hook", lambda *_: ("key", "hash")),
    ],
)
def test_debugging_compiles_another_kernel(
    knobs: str, name: str, value: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither the cached kernel nor cached for later launches."""
    launch = launch_of(world)
    for at in (32, 40):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(triton.knobs, knobs), name, value)
            launch(Address(at))
            launch(Address(at))
            assert world.kinds() == ["triton", "triton"]
        for expected in (["triton"], ["made", "direct"], ["direct"]):
            launch(Address(at))
            assert world.kinds() == expected


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0", "unknown"])
def test_other_versions_of_triton_launch(version: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_launch.triton, "__version__", version)
    launch = launch_of(world)
    monkeypatch.delattr(triton, "knobs")
    monkeypatch.delattr(triton.runtime, "driver")
    for _ in range(3):
        launch(Address(32))
        assert world.kinds() == ["triton"]


def test_a_grid_without_programs(world: World) -> None:
    launching.Launch(Kernel(world.events), (0, 2, 1), (), {})(Address(32))
    assert world.kinds() == []


def test_triton_launches_what_cannot_be_launched_directly(world: World) -> None:
    launch = launch_of(world)
    launch(Address(32))
    world.refuses = True
    launch(Address(32))
    assert world.kinds() == ["triton", "made", "direct", "triton"]
    world.refuses = False
    launch(Address(32))
    assert world.kinds() == ["direct"]
    world.unknown, launch = True, launch_of(world)
    for expected in (["triton"], ["made", "triton"], ["triton"], ["triton"]):
        launch(Address(32))
        assert world.kinds() == expected


def test_tensors_without_a_gpu(world: World) -> None:
    launch = launch_of(world)
    for _ in range(3):
        launch(Address(32, is_cuda=False))
        assert world.kinds() == ["triton"]


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
