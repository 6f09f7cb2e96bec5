"""Flags in memory that GPUs share, raised and waited for by a kernel of one warp.

The front end of a GPU does the same without a multiprocessor (`rotation.device_streams`), at 0.75 us for each flag that
it sets or waits for: to raise a flag at 8 ranks and to wait for theirs takes it 19 us, and this kernel 3.3 (H200, in a
CUDA graph). A kernel has to get a multiprocessor first, so it belongs on a stream that computes nothing meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_dtensor.kernels.launching import Launch, kept


@triton.jit
def pass_flags_kernel(told_ptr, awaited_ptr, PLACES: tl.constexpr):
    """Raises flags at `told_ptr`, then waits until those at `awaited_ptr` are up and takes them down; 0 is no address.

    Example: told [0x10, 0], awaited [0x20, 0x24]: the word at 0x10 becomes 1, those at 0x20 and 0x24 were 1 and are 0.
    """
    place = tl.arange(0, PLACES)
    told = tl.load(told_ptr + place)
    # Kernels before this one have ended; "release" shows what they wrote to whoever sees the flag.
    tl.atomic_xchg(told.to(tl.pointer_type(tl.int32)), 1, mask=told != 0, sem="release", scope="sys")
    awaited = tl.load(awaited_ptr + place)
    flags, is_flag = awaited.to(tl.pointer_type(tl.int32)), awaited != 0
    missing = 1
    while missing > 0:
        seen = tl.atomic_add(flags, 0, mask=is_flag, sem="acquire", scope="sys")
        missing = tl.sum(tl.where(is_flag & (seen == 0), 1, 0))
    tl.store(flags, 0, mask=is_flag)


def padded_count(count: int) -> int:
    """Length of lists for so many addresses: a power of two, and a multiple of 16 bytes.

    >>> padded_count(1), padded_count(6)
    (2, 8)
    """
    return max(2, triton.next_power_of_2(count))


def launch_flags(told: torch.Tensor, awaited: torch.Tensor) -> None:
    """Raises some flags and then waits for others, on the current stream.

    Args:
        told: (`padded_count`,) int64, addresses of int32 words; 0 where there is none.
        awaited: as many, in this device's memory.
    """
    _launch(told.numel())(told, awaited)


@kept
def _launch(places: int) -> Launch:
    return Launch(pass_flags_kernel, (1, 1, 1), (), {"PLACES": places, "num_warps": 1})
