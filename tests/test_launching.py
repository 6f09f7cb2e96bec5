"""What a launch remembers, with a kernel, a driver and tensors that only say what is asked of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

launching = pytest.importorskip("cp_dtensor.kernels.launching")
direct_launch = pytest.importorskip("cp_dtensor.kernels.direct_launch")
import triton  # noqa: E402

Parameters, Described, MapFormat = direct_launch.Parameters, direct_launch.Described, direct_launch.MapFormat
Unknown = direct_launch.Unknown
FORMAT = MapFormat(element_type=9, element_bytes=2, block=(1, 1, 64, 64), swizzle=3)


class Kernel(triton.runtime.JITFunction):  # type: ignore[misc]
    """Is called as a kernel is, and compiles nothing."""

    def __init__(self, events: list[Any]) -> None:
        self.events, self.pre_run_hooks = events, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> str:
            self.events.append(("triton", grid, arguments, constants))
            return "compiled"

        return run


@dataclass(frozen=True)
class Address:
    """A tensor on a GPU."""

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


def test_the_first_is_tritons_and_the_others_are_direct(world: World) -> None:
    launch = launch_of(world)
    launch(Address(32), Address(64))
    assert world.events == [("triton", (3, 2, 1), (Address(32), Address(64), 5, 0.5), {"BLOCK": 16})]
    launch(Address(48), Address(80))
    assert world.events[1:] == [("made", "compiled", (None, None, 5, 0.5)), ("direct", (3, 2, 1), 70, [48, 80])]
    world.kinds()
    launch(Address(16), Address(32))
    assert world.events == [("direct", (3, 2, 1), 70, [16, 32])]


def test_what_is_compiled_anew_is_another_launch(world: World) -> None:
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


def test_whoever_wants_to_be_told_is(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_cannot_be_launched_is_left_to_triton(world: World) -> None:
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


def test_launches_are_kept_by_what_they_are_made_of() -> None:
    made = []

    @launching.kept
    def make(*values: object) -> int:
        made.append(values)
        return len(made)

    x = torch.zeros(4, 6)
    of = launching.facts
    others = [x.T, x[:, :3], x[:2], x.half(), x.view(2, 12)]
    assert make(of(x), 1.0) == make(of(x.clone()), 1.0) == 1
    assert [make(of(other), 1.0) for other in others] == [2, 3, 4, 5, 6]
    assert make(of(x), 2.0) == 7


def test_parameters_are_where_a_compiler_has_them() -> None:
    signature = ["*bf16", "*fp32", "tensordesc<bf16[1,1,64,64]>", "i32", "constexpr", "fp32", "i64", "i32", "constexpr"]
    described = Described((2, 8, 100, 64), (51200, 6400, 64, 1))
    parameters = Parameters(signature, [None, None, described, 3, 1, 0.5, 2**40, -1], [FORMAT])
    sizes = [(192 + 4 * i, 4) for i in range(4)]
    strides = [(208 + 8 * i, 8) for i in range(4)]
    last = [(240, 4), (244, 4), (248, 8), (256, 4), (264, 8), (272, 8)]
    assert parameters.places == [(0, 8), (8, 8), (64, 128), *sizes, *strides, *last]
    assert parameters.bytes == 280


def test_numbers_are_packed_as_their_types_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def tensor_map(*arguments: object) -> bytes:
        asked.append(arguments)
        return b"m" * 128

    monkeypatch.setattr(direct_launch, "_tensor_map", tensor_map)
    described = Described((7,), (1,))
    parameters = Parameters(
        ["*i8", "tensordesc<i8[16]>", "*i8", "i32", "fp32"], [None, described, None, -2, 0.5], [FORMAT]
    )
    expected = struct.pack("<Q56x128siq", 4096, b"m" * 128, 7, 1)
    assert asked == []
    packed = parameters.packed([4096, 512, 8192])
    assert asked == [(512, described, FORMAT)]
    assert packed[: 64 + 128 + 4] == expected[: 64 + 128 + 4]
    assert packed[200:] == struct.pack("<qQif2Q", 1, 8192, -2, 0.5, 0, 0)
    with pytest.raises(ValueError, match="zip"):
        parameters.packed([4096, 512])


@pytest.mark.parametrize(
    ("signature", "arguments", "maps"),
    [
        pytest.param(["fp16"], [0.5], [], id="a type that is packed in another way"),
        pytest.param(["i1"], [True], [], id="a boolean"),
        pytest.param([("i32", "i32")], [(1, 2)], [], id="a tuple"),
        pytest.param(["*fp32"], [3], [], id="a number for a pointer"),
        pytest.param(["i32"], [None], [], id="a pointer for a number"),
        pytest.param(["tensordesc<bf16[64]>"], [Described((1,), (1,))], [], id="a descriptor that is not one"),
        pytest.param(["*fp32"], [None], [FORMAT], id="a pointer that is a descriptor"),
        pytest.param(["i64"] * 600, [0] * 600, [], id="more than there may be"),
    ],
)
def test_what_is_not_known_is_refused(signature: list[Any], arguments: list[Any], maps: list[Any]) -> None:
    with pytest.raises((Unknown, AttributeError)):
        Parameters(signature, arguments, maps)
