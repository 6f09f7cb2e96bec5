"""Launches of kernels that Triton has compiled by the CUDA driver, without Triton's Python.

At every launch Triton inspects all arguments of a kernel (up to 60) to select a compiled form, 100 to 250 us of host
time. `triton_launch.Launch` has selected it already, so a launch is to write the parameters of the compiled function
into memory and to call the driver:

    a pointer                                  8 bytes
    a number                                   as in Triton's signature; nothing if it became a constant
    a tensor descriptor of n dims              a CUtensorMap (128 bytes, aligned to 64), n int32 sizes, n int64 strides
    memory for scratch and for profiling       8 bytes each, null: kernels that need such memory are not launched here

This is how Triton 3.6 to 3.9 compile kernels for NVIDIA GPUs, and no documented interface. So the size of each
parameter is compared with the driver's (CUDA 12.4 or newer). If anything differs, or for another version of Triton,
Triton launches the kernel.
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
"""First and last version whose sources match the description above."""
_NUMBERS = {"i32": ("i", 4), "i64": ("q", 8), "u32": ("I", 4), "u64": ("Q", 8), "fp32": ("f", 4)}
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAX_BYTES = 4096  # of all parameters, by CUDA
_NO_INTERLEAVE, _PROMOTE_TO_128_BYTES, _ZERO_OUTSIDE = 0, 2, 0  # of tensor maps


class Unknown(Exception):
    """The kernel has a property that a direct launch does not support."""


class Described(NamedTuple):
    """A tensor that a kernel reads by a descriptor of its blocks, without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class MapFormat(NamedTuple):
    """The fields of a CUtensorMap besides address, sizes and strides, as numbers of the driver."""

    element_type: int
    element_bytes: int
    block: tuple[int, ...]
    swizzle: int


class Parameters:
    """The parameters of a compiled kernel, in the memory layout of a C struct.

    Args:
        signature: types of the arguments, in order, in Triton's notation.
        arguments: their values; None for pointers, `Described` for descriptors. Constants at the end may be omitted.
        maps: the format of each descriptor, in order.

    Raises:
        Unknown: an argument of an unknown type.

    >>> parameters = Parameters(["*fp32", "i32", "constexpr", "i64"], [None, 7, 1, 9], [])
    >>> parameters.places
    [(0, 8), (8, 4), (16, 8), (24, 8), (32, 8)]
    >>> parameters.packed([4096])[:24] == struct.pack("<QixxxxQ", 4096, 7, 9)
    True
    """

    def __init__(self, signature: Sequence[str], arguments: Sequence[object], maps: Sequence[MapFormat]) -> None:
        self.places: list[tuple[int, int]] = []
        """Offset and size of each in this struct. (The driver copies them to offsets of its own on the device.)"""
        self._format = "<"
        self._end = 0
        self._values: list[Any] = []
        self._addresses: list[int] = []  # indices of the values that are addresses of tensors
        self._maps: list[tuple[int, int, Described, MapFormat]] = []  # index of the value, number of the tensor
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
        """Returns the parameters with these addresses of the tensors."""
        return self._struct.pack(*self._filled(addresses))

    def pack_into(self, buffer: ctypes.Array[ctypes.c_char], addresses: Sequence[int]) -> None:
        """Writes the parameters with these addresses to the start of a buffer."""
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
        """Prepares a launch, if `version_is_known()`.

        Args:
            compiled: the kernel.
            arguments: as of `Parameters`.

        Raises:
            Unknown: the kernel cannot be launched here.
        """
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
        self._keep = compiled  # its deletion may unload the function
        self._launch = _driver().cuLaunchKernel
        self._buffer, self._pointers = self._memory()
        self._lock = threading.Lock()  # held until the driver has read the buffer

    def __call__(self, grid: Grid, stream: int, addresses: Sequence[int]) -> bool:
        """Launches on a stream of the current device; returns False if the driver refuses and nothing is launched."""
        with self._lock:
            self._parameters.pack_into(self._buffer, addresses)
            return self._submitted(grid, stream, self._pointers)

    def fixed(self, grid: Grid, addresses: Sequence[int]) -> Callable[[int], bool]:
        """Returns a launch with this grid and these addresses, as a function of the stream."""
        buffer, pointers = self._memory()
        self._parameters.pack_into(buffer, addresses)

        def launch(stream: int, _keep: object = buffer) -> bool:
            return self._submitted(grid, stream, pointers)

        return launch

    def _memory(self) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_void_p]]:
        """Returns memory for the parameters, and a pointer to each of them."""
        buffer = ctypes.create_string_buffer(self._parameters.bytes)
        start, places = ctypes.addressof(buffer), self._parameters.places
        return buffer, (ctypes.c_void_p * len(places))(*(start + offset for offset, _ in places))

    def _submitted(self, grid: Grid, stream: int, pointers: ctypes.Array[ctypes.c_void_p]) -> bool:
        code: int = self._launch(self._function, *grid, self._threads, 1, 1, self._shared, stream, pointers, None)
        return code == 0


def version_is_known() -> bool:
    """Returns True if this version of Triton compiles kernels that may be launched here."""
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
    """Returns a CUtensorMap, whose sizes start with the innermost dim; cached, since models reuse their memory."""
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
    """Returns the bytes of each parameter of a compiled kernel's function."""
    ask, offset, size = _driver().cuFuncGetParamInfo, ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    while ask(compiled.function, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


@cache
def _driver() -> ctypes.CDLL:
    """Returns the driver; raises Unknown if it is too old for the calls that a launch needs."""
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
