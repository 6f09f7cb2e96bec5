"""Copies and flags on CUDA streams, by the copy engines and the front end of the GPU: no multiprocessor takes part.

A flag is a 32-bit word in device memory, 0 or 1. One side raises it after its work on a stream; the other side's stream
waits until it is up and takes it down again. Streams of all ranks that use a flag this way in turns need no counter, so
a captured graph can be replayed.

Calls go straight to the CUDA driver: torch has no stream-ordered wait, and a call costs 1.5 us where a torch operation
costs 5.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2  # CUstreamBatchMemOpType
_WAIT_EQUAL, _DEFAULT = 1, 0  # flags of waits and of writes; a default write makes what came before it visible


class _MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams, as far as waits and writes use it."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class FlagOperations:
    """Waits for flags, or writes of flags, that are submitted together in one call into the driver."""

    def __init__(self, operations: Sequence[tuple[int, int, int, int]]) -> None:
        self._array = (_MemoryOperation * len(operations))(
            *(
                _MemoryOperation(operation, address, value, flags, 0, 0)
                for operation, address, value, flags in operations
            )
        )

    def submit(self, stream: int) -> None:
        """Appends the operations to a CUDA stream, in order."""
        if len(self._array):
            _check(_driver().cuStreamBatchMemOp_v2(stream, len(self._array), self._array, 0), "cuStreamBatchMemOp")


def await_flags(addresses: Sequence[int]) -> FlagOperations:
    """Makes the stream wait until all these local flags are up, and takes them down."""
    waits = [(_WAIT_VALUE_32, address, 1, _WAIT_EQUAL) for address in addresses]
    return FlagOperations([*waits, *((_WRITE_VALUE_32, address, 0, _DEFAULT) for address in addresses)])


def raise_flags(addresses: Sequence[int]) -> FlagOperations:
    """Sets flags, here or on peers, after everything before on the stream; what that wrote is visible by then."""
    return FlagOperations([(_WRITE_VALUE_32, address, 1, _DEFAULT) for address in addresses])


def copy_bytes(stream: int, target: int, source: int, count: int) -> None:
    """Copies device memory, a peer's too."""
    _check(_driver().cuMemcpyDtoDAsync_v2(target, source, count, stream), "cuMemcpyDtoDAsync")


def is_available() -> bool:
    """Whether the CUDA driver is here and has these calls."""
    try:
        _driver()
    except (OSError, AttributeError):
        return False
    return True


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    stream, address = ctypes.c_void_p, ctypes.c_uint64
    library.cuStreamBatchMemOp_v2.argtypes = [
        stream, ctypes.c_uint, ctypes.POINTER(_MemoryOperation), ctypes.c_uint
    ]  # fmt: skip
    library.cuMemcpyDtoDAsync_v2.argtypes = [address, address, ctypes.c_size_t, stream]
    return library


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} failed with CUDA error {code}")
