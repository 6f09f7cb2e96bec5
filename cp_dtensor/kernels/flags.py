"""Flags in memory that GPUs share, raised and waited for by a kernel of one warp.

The front end of a GPU does the same without a multiprocessor (`rotation.device_streams`), at 0.75 us for each flag that
it sets or waits for: to raise a flag at 8 ranks and to wait for theirs takes it 19 us, and this kernel 3.3 (H200, in a
CUDA graph). A kernel has to get a place on a multiprocessor first, and keeps it while it waits, so it is for streams
on which attention follows, not for those beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_dtensor.kernels.launching import BoundLaunch, Launch, kept

_WARP = 32


@triton.jit
def pass_flags_kernel(told_ptr, awaited_ptr, PLACES: tl.constexpr, INTERPRETED: tl.constexpr):
    """Raises flags at `told_ptr`, then waits until those at `awaited_ptr` are up and takes them down; 0 is no address.

    Example: told [0x10, 0], awaited [0x20, 0x24]: the word at 0x10 becomes 1, those at 0x20 and 0x24 were 1 and are 0.
    """
    place = tl.arange(0, PLACES)
    told = tl.load(told_ptr + place)
    # Kernels before this one have ended; "release" shows what they wrote to whoever sees the flag. A store, which only
    # assembly can say: not all GPUs that can write to each other's memory have atomics there.
    if INTERPRETED:
        tl.atomic_xchg(told.to(tl.pointer_type(tl.int32)), 1, mask=told != 0, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_flag;
            .reg .b32 up;
            setp.ne.s64 is_flag, $1, 0;
            mov.b32 up, 1;
            @is_flag st.release.sys.global.b32 [$1], up;
            mov.b32 $0, 0;
            }""",
            "=r,l", [told], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    awaited = tl.load(awaited_ptr + place)
    flags, is_flag = awaited.to(tl.pointer_type(tl.int32)), awaited != 0
    missing = 1
    while missing > 0:
        seen = tl.atomic_add(flags, 0, mask=is_flag, sem="acquire", scope="sys")
        missing = tl.sum(tl.where(is_flag & (seen == 0), 1, 0))
    tl.store(flags, 0, mask=is_flag)


def padded_count(count: int) -> int:
    """Length of lists for so many addresses: each lane of a warp has one or more, so that no two raise the same flag.

    >>> padded_count(6), padded_count(40)
    (32, 64)
    """
    return max(_WARP, triton.next_power_of_2(count))


def flag_launch(told: torch.Tensor, awaited: torch.Tensor) -> BoundLaunch:
    """What raises some flags and then waits for others, on the current stream.

    Args:
        told: (`padded_count`,) int64, addresses of int32 words; 0 where there is none.
        awaited: as many, in this device's memory.
    """
    return _launch(told.numel()).bound(told, awaited)


@kept
def _launch(places: int) -> Launch:
    interpreted = not isinstance(pass_flags_kernel, triton.runtime.JITFunction)
    return Launch(pass_flags_kernel, (1, 1, 1), (), {"PLACES": places, "INTERPRETED": interpreted, "num_warps": 1})
