"""Parameters of compiled kernels, and direct launches, with a stand-in for the driver."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

direct_launch = pytest.importorskip("cp_dtensor._torch.direct_launch")

DirectLaunch, Parameters, Unknown = direct_launch.DirectLaunch, direct_launch.Parameters, direct_launch.Unknown
Described, MapFormat = direct_launch.Described, direct_launch.MapFormat
FORMAT = MapFormat(element_type=9, element_bytes=2, block=(1, 1, 64, 64), swizzle=3)


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


class Driver:
    """Stand-in for the driver, with one function that has the parameters of `compiled`."""

    def __init__(self) -> None:
        self.sizes, self.code = [8, 8, 4, 8, 8], 0
        self.launched: list[Any] = []

    def cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:
        assert function == 77
        if index == len(self.sizes):
            return 1
        size._obj.value = self.sizes[index]
        return 0

    def cuLaunchKernel(self, *arguments: Any) -> int:
        *first, pointers, extra = arguments
        assert extra is None
        values = [ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes, strict=True)]
        self.launched.append((first, values))
        return self.code


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(direct_launch, "_driver", lambda: driver)
    return driver


class Compiled:
    """Returns a stand-in for a compiled kernel with two pointers, a constant and an integer."""

    def __init__(self, backend: str = "cuda", **changes: Any) -> None:
        metadata = {
            "target": SimpleNamespace(backend=backend), "num_ctas": 1, "launch_cooperative_grid": False,
            "launch_pdl": False, "global_scratch_size": 0, "profile_scratch_size": 0, "num_warps": 4, "shared": 1024,
        }  # fmt: skip
        self.metadata = SimpleNamespace(**(metadata | changes))
        self.src = SimpleNamespace(
            signature={"a": "*fp32", "b": "*bf16", "one": "constexpr", "n": "i32", "C": "constexpr"}
        )
        self.function = 77


ARGUMENTS = [None, None, 1, 5]


def test_the_arguments_of_the_driver_call(driver: Driver) -> None:
    launch = DirectLaunch(Compiled(), ARGUMENTS)
    for addresses in ([4096, 8192], [16, 32]):
        assert launch((3, 2, 1), 9, addresses)
        first, values = driver.launched.pop()
        assert first == [77, 3, 2, 1, 128, 1, 1, 1024, 9]
        zero = struct.pack("<Q", 0)
        assert values == [
            struct.pack("<Q", addresses[0]),
            struct.pack("<Q", addresses[1]),
            struct.pack("<i", 5),
            zero,
            zero,
        ]
    driver.code = 201
    assert not launch((3, 2, 1), 9, [16, 32])


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "hip"},
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"global_scratch_size": 128},
        {"profile_scratch_size": 128},
    ],
    ids=str,
)
def test_kernels_with_something_else_are_left_to_triton(driver: Driver, changes: dict[str, Any]) -> None:
    with pytest.raises(Unknown):
        DirectLaunch(Compiled(**changes), ARGUMENTS)


@pytest.mark.parametrize("sizes", [[8, 8, 4, 8], [8, 8, 8, 8, 8], [8, 8, 4, 8, 8, 8], []], ids=str)
def test_a_function_with_other_parameters_is_left_to_triton(driver: Driver, sizes: list[int]) -> None:
    driver.sizes = sizes
    with pytest.raises(Unknown, match="other parameters"):
        DirectLaunch(Compiled(), ARGUMENTS)


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("3.6.0+git1", True), ("3.9.1", True), ("3.5.1", False), ("3.10.0", False), ("4.0.0", False), ("unknown", False)],
)
def test_versions_that_somebody_has_read(version: str, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_launch.triton, "__version__", version)
    assert direct_launch.version_is_known() == is_known


def test_where_there_is_no_driver() -> None:
    direct_launch._driver.cache_clear()
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(Unknown):
            direct_launch._driver()
