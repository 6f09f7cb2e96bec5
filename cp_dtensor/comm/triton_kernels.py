"""Many strided copies as one Triton kernel: what an exchange of heads reads from the memory of other ranks.

A piece is some rows, as long as each other, with a pitch of their own on either side; so heads change places with rows
while they travel, and nothing has to be packed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_dtensor._torch.triton_launch import BoundLaunch, Launch, kept

PIECE_FIELDS = 7
"""Address of the source; number of the target tensor, byte offset in it; rows, bytes of a row; pitch of both sides."""
ALIGNMENT = 16
"""Bytes that addresses, offsets, lengths and pitches are multiples of."""
MAX_TARGETS = 3
_BLOCK_BYTES = 16384
_WORD = 4


@triton.jit(do_not_specialize=["count", "tasks_per_piece"])
def copy_pieces_kernel(
    pieces_ptr, target0, target1, target2, count, tasks_per_piece,
    BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Programs take blocks of BLOCK_ROWS rows in turns; neighbours work on different pieces, on different links.

    Example, a piece of 2 rows of 16 bytes, pitch 32 to 16: bytes 0-15 and 32-47 become neighbours.
    """
    word = tl.arange(0, BLOCK_WORDS)
    for task in range(tl.program_id(0), count * tasks_per_piece, tl.num_programs(0)):
        piece = pieces_ptr + (task % count) * 7
        rows = tl.load(piece + 3)
        first_row = (task // count) * BLOCK_ROWS
        if first_row < rows:
            words = tl.load(piece + 4) // 4
            which = tl.load(piece + 1)
            others = tl.where(which == 1, target1.to(tl.int64), target2.to(tl.int64))
            base = tl.where(which == 0, target0.to(tl.int64), others)
            row = first_row + tl.arange(0, BLOCK_ROWS).to(tl.int64)
            source = tl.multiple_of(tl.load(piece), 16) + row * tl.multiple_of(tl.load(piece + 5), 16)
            target = tl.multiple_of(base + tl.load(piece + 2), 16) + row * tl.multiple_of(tl.load(piece + 6), 16)
            source_ptrs = source.to(tl.pointer_type(tl.int32))[:, None]
            target_ptrs = target.to(tl.pointer_type(tl.int32))[:, None]
            for first_word in range(0, words, BLOCK_WORDS):
                column = first_word + word[None, :]
                mask = (row < rows)[:, None] & (column < words)
                tl.store(target_ptrs + column, tl.load(source_ptrs + column, mask=mask), mask=mask)


def launch_copies(
    pieces: torch.Tensor, most_rows: int, most_row_bytes: int, targets: list[torch.Tensor], programs: int
) -> None:
    """Copies all pieces, in one launch on the current stream.

    Args:
        pieces: (pieces, PIECE_FIELDS) int64, on the device.
        most_rows: rows of the longest piece.
        most_row_bytes: of the widest.
        targets: up to MAX_TARGETS tensors.
        programs: how many run at once, and so how many multiprocessors take part at most.
    """
    assert len(targets) <= MAX_TARGETS
    assert targets
    launch = _copy_launch(pieces.size(0), most_rows, most_row_bytes, programs, tuple(x.dtype for x in targets))
    launch(pieces, *targets, *targets[:1] * (MAX_TARGETS - len(targets)))


@kept
def _copy_launch(
    count: int, most_rows: int, most_row_bytes: int, programs: int, _targets: tuple[torch.dtype, ...]
) -> Launch:
    """For so many pieces, and targets of these dtypes."""
    block_words = min(triton.next_power_of_2(max(most_row_bytes // _WORD, 1)), _BLOCK_BYTES // _WORD)
    block_rows = _BLOCK_BYTES // _WORD // block_words
    tasks = triton.cdiv(most_rows, block_rows)
    constants = {"BLOCK_ROWS": block_rows, "BLOCK_WORDS": block_words, "num_warps": 8}
    return Launch(copy_pieces_kernel, (max(1, min(programs, tasks * count)), 1, 1), (count, tasks), constants)


# Flags in memory that GPUs share, raised and waited for by a kernel of one warp. The front end of a GPU does the
# same without a multiprocessor (`rotation.device_streams`), at 0.75 us for each flag that it sets or waits for: to
# raise a flag at 8 ranks and to wait for theirs takes it 19 us, and this kernel 3.3 (H200, in a CUDA graph). A
# kernel has to get a place on a multiprocessor first, and keeps it while it waits, so it is for streams on which
# attention follows, not for those beside it.

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
    return _flag_launch(told.numel()).bound(told, awaited)


@kept
def _flag_launch(places: int) -> Launch:
    interpreted = not isinstance(pass_flags_kernel, triton.runtime.JITFunction)
    return Launch(pass_flags_kernel, (1, 1, 1), (), {"PLACES": places, "INTERPRETED": interpreted, "num_warps": 1})
