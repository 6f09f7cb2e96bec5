"""Launching a kernel that Triton has compiled straight through the CUDA driver, without Triton's Python.

Triton takes a kernel's 60 arguments apart at every launch to find out which of its compiled forms they need, 100 to
250 us of the host. Whoever knows that (`launching.Launch`) needs only to write the compiled function's parameters into
memory, and to say go:

    a pointer                                  8 bytes
    a number                                   what Triton's signature says of it; those that became constants, nothing
    a tensor descriptor of n dims              a CUtensorMap (128 bytes, aligned to 64), n int32 sizes, n int64 strides
    memory for scratch and for profiling       8 bytes each, null: kernels that want such are not launched here

This is how Triton 3.6 to 3.9 compile kernels for NVIDIA GPUs, not an interface of theirs. So the driver is asked
for the size of each parameter of the function (CUDA 12.4 or newer says so), and wherever anything differs, or is of
another version, there is no direct launch and Triton's own is used.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import triton

Grid = tuple[int, int, int]
_KNOWN_VERSIONS = ((3, 6), (3, 9))
"""First and last whose sources say what the above says."""
_NUMBERS = {"i32": ("i", 4), "i64": ("q", 8), "u32": ("I", 4), "u64": ("Q", 8), "fp32": ("f", 4)}
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAX_BYTES = 4096  # of all parameters, by CUDA
_NO_INTERLEAVE, _PROMOTE_TO_128_BYTES, _ZERO_OUTSIDE = 0, 2, 0  # of tensor maps


class Unknown(Exception):
    """The kernel has something that is not launched here."""


class Described(NamedTuple):
    """A tensor that a kernel takes as a descriptor of its blocks; what matters of it besides its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class MapFormat(NamedTuple):
    """What a CUtensorMap says besides address, sizes and strides, in the driver's numbers."""

    element_type: int
    element_bytes: int
    block: tuple[int, ...]
    swizzle: int


class Parameters:
    """The parameters of a compiled kernel, in memory as C has them.

    Args:
        signature: types of the arguments, in order, as Triton writes them.
        arguments: their values; None for pointers, `Described` for descriptors. Constants at the end may be left out.
        maps: the format of each descriptor, in order.

    Raises:
        Unknown: an argument is of a type that is not known here.

    >>> parameters = Parameters(["*fp32", "i32", "constexpr", "i64"], [None, 7, 1, 9], [])
    >>> parameters.places
    [(0, 8), (8, 4), (16, 8), (24, 8), (32, 8)]
    >>> parameters.packed([4096])[:24] == struct.pack("<QixxxxQ", 4096, 7, 9)
    True
    """

    def __init__(self, signature: Sequence[str], arguments: Sequence[object], maps: Sequence[MapFormat]) -> None:
        self.places: list[tuple[int, int]] = []
        """Offset and size of each. (Offsets on the device may be others, which is the driver's business.)"""
        self._format = "<"
        self._end = 0
        self._values: list[Any] = []
        self._addresses: list[int] = []  # where in the values those of tensors belong
        self._maps: list[tuple[int, int, Described, MapFormat]] = []  # place in values, which tensor, what it is
        formats = iter(maps)
        tensors = 0
        for kind, argument in zip(signature, arguments, strict=False):
            if kind == "constexpr":
                pass
            elif kind.startswith("*") and argument is None:
                self._addresses.append(len(self._values))
                self._append("Q", 8, 0)
            elif kind.startswith("tensordesc<") and isinstance(argument, Described):
                self._addresses.append(len(self._values))
                self._maps.append((len(self._values), tensors, argument, _next(formats)))
                self._append(f"{_MAP_BYTES}s", _MAP_BYTES, b"", _MAP_ALIGNMENT)
                for size in argument.shape:
                    self._append("i", 4, size)
                for stride in argument.strides:
                    self._append("q", 8, stride)
            elif kind in _NUMBERS and argument is not None:
                self._append(*_NUMBERS[kind], argument)
            else:
                raise Unknown(f"argument {argument!r} of type {kind}")
            tensors += argument is None or isinstance(argument, Described)
        for _ in ("scratch", "profile"):
            self._append("Q", 8, 0)
        if next(formats, None) is not None or self._end > _MAX_BYTES:
            raise Unknown("more descriptors than arguments, or more bytes than there may be")
        self._struct = struct.Struct(self._format)
        self.bytes = self._struct.size

    def _append(self, code: str, size: int, value: object, alignment: int = 0) -> None:
        gap = -self._end % (alignment or size)
        self._format += "x" * gap + code
        self.places.append((self._end + gap, size))
        self._end += gap + size
        self._values.append(value)

    def packed(self, addresses: Sequence[int]) -> bytes:
        """The parameters with these addresses of the tensors."""
        return self._struct.pack(*self._filled(addresses))

    def pack_into(self, buffer: ctypes.Array[ctypes.c_char], addresses: Sequence[int]) -> None:
        """The same, to the start of a buffer."""
        self._struct.pack_into(buffer, 0, *self._filled(addresses))

    def _filled(self, addresses: Sequence[int]) -> list[Any]:
        values = self._values.copy()
        for place, address in zip(self._addresses, addresses, strict=True):
            values[place] = address
        for place, tensor, described, format in self._maps:
            values[place] = _tensor_map(addresses[tensor], described, format)
        return values


def _next(formats: Any) -> MapFormat:
    found = next(formats, None)
    if not isinstance(found, MapFormat):
        raise Unknown("a descriptor without a format")
    return found


class DirectLaunch:
    """A compiled kernel with all of its arguments but the addresses of tensors, on one device."""

    def __init__(self, compiled: Any, arguments: Sequence[object]) -> None:
        """Only where `version_is_known`. `arguments` as of `Parameters`; Unknown if this kernel cannot be launched."""
        metadata = compiled.metadata
        if metadata.target.backend != "cuda":
            raise Unknown("another backend")
        if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl:
            raise Unknown("launch attributes")
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise Unknown("memory for scratch")
        maps = [map_format(x) for x in getattr(metadata, "tensordesc_meta", None) or ()]
        self._parameters = Parameters(list(compiled.src.signature.values()), arguments, maps)
        sizes = [size for _, size in self._parameters.places]
        if _parameter_sizes(compiled) != sizes:
            raise Unknown("the compiled function has other parameters")
        self._function, self._shared = compiled.function, metadata.shared
        self._threads = 32 * metadata.num_warps
        self._keep = compiled  # whose end may unload the function
        self._launch = _driver().cuLaunchKernel
        self._buffer, self._pointers = self._memory()
        self._lock = threading.Lock()  # of the buffer, until the driver has read it

    def __call__(self, grid: Grid, stream: int, addresses: Sequence[int]) -> bool:
        """Launches on a stream of the current device; False if the driver refuses, and nothing was launched."""
        with self._lock:
            self._parameters.pack_into(self._buffer, addresses)
            return self._submitted(grid, stream, self._pointers)

    def fixed(self, grid: Grid, addresses: Sequence[int]) -> Callable[[int], bool]:
        """The same with grid and addresses, in memory of its own: a function of the stream."""
        buffer, pointers = self._memory()
        self._parameters.pack_into(buffer, addresses)

        def launch(stream: int, _keep: object = buffer) -> bool:
            return self._submitted(grid, stream, pointers)

        return launch

    def _memory(self) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_void_p]]:
        """For parameters, and where each of them is in there."""
        buffer = ctypes.create_string_buffer(self._parameters.bytes)
        start, places = ctypes.addressof(buffer), self._parameters.places
        return buffer, (ctypes.c_void_p * len(places))(*(start + offset for offset, _ in places))

    def _submitted(self, grid: Grid, stream: int, pointers: ctypes.Array[ctypes.c_void_p]) -> bool:
        code: int = self._launch(self._function, *grid, self._threads, 1, 1, self._shared, stream, pointers, None)
        return code == 0


def version_is_known() -> bool:
    """Whether this Triton is one whose kernels may be launched here."""
    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    first, last = _KNOWN_VERSIONS
    return found is not None and first <= (int(found[1]), int(found[2])) <= last


def map_format(metadata: dict[str, Any]) -> MapFormat:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if metadata["fp4_padded"] or metadata.get("is_im2col", False):
        raise Unknown("a descriptor of another kind")
    element_type = TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]]
    return MapFormat(element_type, metadata["elem_size"], tuple(metadata["block_size"]), metadata["swizzle"])


@lru_cache(maxsize=4096)
def _tensor_map(address: int, described: Described, format: MapFormat) -> bytes:
    """A CUtensorMap; sizes run from the innermost dim on there. Models use the same memory again and again."""
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    start = -ctypes.addressof(room) % _MAP_ALIGNMENT
    rank = len(described.shape)
    sizes, ones = (ctypes.c_uint64 * rank)(*described.shape[::-1]), (ctypes.c_uint32 * rank)(*[1] * rank)
    steps = [stride * format.element_bytes for stride in described.strides[-2::-1]]
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.addressof(room) + start, format.element_type, rank, address, sizes, (ctypes.c_uint64 * rank)(*steps, 0),
        (ctypes.c_uint32 * rank)(*format.block[::-1]), ones, _NO_INTERLEAVE, format.swizzle, _PROMOTE_TO_128_BYTES,
        _ZERO_OUTSIDE,
    )  # fmt: skip
    if code:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {code} for {described} at {address:#x}")
    return room.raw[start : start + _MAP_BYTES]


@lru_cache(maxsize=1024)
def _parameter_sizes(compiled: Any) -> list[int]:
    """Bytes of each parameter of a compiled kernel's function."""
    ask, offset, size = _driver().cuFuncGetParamInfo, ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    while ask(compiled.function, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


@cache
def _driver() -> ctypes.CDLL:
    """The driver, with the calls that are needed; Unknown if it is older."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        uint, pointer = ctypes.c_uint, ctypes.c_void_p
        library.cuLaunchKernel.argtypes = [pointer, *[uint] * 7, pointer, pointer, pointer]
        library.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
        library.cuTensorMapEncodeTiled.argtypes = [
            pointer, uint, uint, pointer, pointer, pointer, pointer, pointer, uint, uint, uint, uint
        ]  # fmt: skip
    except (OSError, AttributeError) as error:
        raise Unknown(str(error)) from error
    return library
