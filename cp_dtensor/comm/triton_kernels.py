"""Triton kernels of transfers through symmetric memory: strided copies of a head exchange, and flags."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from cp_dtensor._torch.triton_launch import Launch, cached_launch
from cp_dtensor.spec.layouts import Span

PIECE_FIELDS = 7
"""Address of the source; number of the target tensor, byte offset in it; rows, bytes of a row; pitch of both sides."""
MAX_TARGETS = 3
_BLOCK_BYTES = 16384
_WORD = 4


@triton.jit(do_not_specialize=["count", "tasks_per_piece"])
def copy_pieces_kernel(
    pieces_ptr, target0, target1, target2, count, tasks_per_piece,
    BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Copy pieces, each some rows of equal length with a pitch in the source and another in the target.

    Programs take blocks of BLOCK_ROWS rows in turns. Neighbouring programs work on different pieces, which come over
    different links. Sizes, offsets and pitches are in bytes, multiples of 16.

    Example: a piece of 2 rows of 16 bytes with a pitch of 32 in the source and of 16 in the target copies bytes 0-15 to
    0-15 and bytes 32-47 to 16-31.
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
    """Copy all pieces in one launch on the current stream.

    Args:
        pieces: (pieces, PIECE_FIELDS) int64, on the device.
        most_rows: rows of the longest piece.
        most_row_bytes: bytes of the widest row.
        targets: one to MAX_TARGETS tensors.
        programs: limit on the programs of the launch, and so on the multiprocessors that take part.
    """
    assert len(targets) <= MAX_TARGETS
    assert targets
    launch = _copy_launch(pieces.size(0), most_rows, most_row_bytes, programs, tuple(x.dtype for x in targets))
    launch(pieces, *targets, *targets[:1] * (MAX_TARGETS - len(targets)))


@cached_launch
def _copy_launch(
    count: int, most_rows: int, most_row_bytes: int, programs: int, _targets: tuple[torch.dtype, ...]
) -> Launch:
    block_words = min(triton.next_power_of_2(max(most_row_bytes // _WORD, 1)), _BLOCK_BYTES // _WORD)
    block_rows = _BLOCK_BYTES // _WORD // block_words
    tasks = triton.cdiv(most_rows, block_rows)
    constants = {"BLOCK_ROWS": block_rows, "BLOCK_WORDS": block_words, "num_warps": 8}
    return Launch(copy_pieces_kernel, max(1, min(programs, tasks * count)), (count, tasks), constants)


@triton.jit(do_not_specialize=["first_row", "rows", "pitch", "heads"])
def write_rows_kernel(
    k_ptr, v_ptr, rows_ptr, first_row, rows, pitch, batch, heads, stage_heads, k_dim, v_dim,
    k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Write, in one program, BLOCK_ROWS rows of one head of K and V, from `first_row` on, to their places in stages.

    A stage is (pitch, width) and has `stage_heads` heads of all batch rows: `[heads of K | heads of V]`.

    Example: one batch row, two heads of dim 1, stages of one head, pitch 2. K [[1, 2], [3, 4]] and V [[5, 6], [7, 8]]
    (by head, then by row) become 1 5 2 6 3 7 4 8.
    """
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    head_of_all = tl.program_id(0) // blocks
    row = (tl.program_id(0) % blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    of_batch, head = (head_of_all // heads).to(tl.int64), head_of_all % heads
    stage, unit = (head // stage_heads).to(tl.int64), head % stage_heads
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    in_rows = (row < rows)[:, None]
    row = (first_row + row).to(tl.int64)[:, None]
    head = head.to(tl.int64)
    columns = batch * stage_heads * (k_dim + v_dim)
    target = rows_ptr + (stage * pitch + row) * columns
    k = k_ptr + of_batch * k_stride_b + head * k_stride_h + row * k_stride_s + dim
    v = v_ptr + of_batch * v_stride_b + head * v_stride_h + row * v_stride_s + dim
    k_target = target + (of_batch * stage_heads + unit) * k_dim + dim
    v_target = target + batch * stage_heads * k_dim + (of_batch * stage_heads + unit) * v_dim + dim
    in_k, in_v = in_rows & (dim < k_dim), in_rows & (dim < v_dim)
    tl.store(k_target, tl.load(k, mask=in_k), mask=in_k)
    tl.store(v_target, tl.load(v, mask=in_v), mask=in_v)


def launch_rows(k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, span: Span, pitch: int, stage_heads: int) -> None:
    """Write some rows of K and V for other ranks, in one launch on the current stream.

    Args:
        k: (B, Hkv, T, D), the last dim contiguous.
        v: (B, Hkv, T, Dv), the last dim contiguous.
        rows: flat memory in their dtype: a (pitch, B * stage_heads * (D + Dv)) for each stage, one after the other.
        span: rows to write.
        pitch: rows of a stage.
        stage_heads: heads of each stage.
    """
    _rows_launch(k.shape, v.size(3), k.dtype, k.stride(), v.stride(), span, pitch, stage_heads)(k, v, rows)


@cached_launch
def _rows_launch(
    k_shape: tuple[int, ...], v_dim: int, _dtype: torch.dtype, k_strides: tuple[int, ...], v_strides: tuple[int, ...],
    span: Span, pitch: int, stage_heads: int,
) -> Launch:  # fmt: skip
    batch, heads, _, k_dim = k_shape
    count, block_dim = span[1] - span[0], triton.next_power_of_2(max(k_dim, v_dim))
    block_rows = max(1, min(64, 8192 // block_dim))
    numbers = (span[0], count, pitch, batch, heads, stage_heads, k_dim, v_dim, *k_strides[:3], *v_strides[:3])
    constants = {"BLOCK_ROWS": block_rows, "BLOCK_DIM": block_dim, "num_warps": 4}
    return Launch(write_rows_kernel, triton.cdiv(count, block_rows) * batch * heads, numbers, constants)


# Flags
#
# A kernel of one warp sets flags in the memory of other GPUs and waits for flags in its own. The front end of a GPU
# can do so without a multiprocessor (`_torch.cuda_driver`), at 0.75 us for each flag: with 8 ranks it takes 19 us to
# set a flag and wait for those of the others, this kernel 3.3 us (H200, in a CUDA graph). A kernel has to get a place
# on a multiprocessor and keeps it while it waits, so it is for streams on which attention comes next, not for streams
# that run beside attention.

_WARP = 32


_STORE = """{
.reg .pred is_address;
setp.ne.s64 is_address, $1, 0;
@is_address st.%s.sys.global.b32 [$1], $2;
mov.b32 $0, 0;
}"""
_RELEASED = tl.constexpr(_STORE % "release")
_RELAXED = tl.constexpr(_STORE % "relaxed")


@triton.jit
def _store_int32(addresses, value, ASM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Store an int32 at each address but 0. `_RELEASED` makes earlier writes visible to a GPU that sees the value.

    It is a store, in assembly: not all GPUs that can write to each other's memory have atomics there.
    """
    if INTERPRETED:
        tl.atomic_xchg(addresses.to(tl.pointer_type(tl.int32)), value, mask=addresses != 0, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(ASM, "=r,l,r", [addresses, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["value"])
def pass_flags_kernel(addresses_ptr, value, PLACES: tl.constexpr, INTERPRETED: tl.constexpr):
    """Set the flags at the first PLACES addresses to a value, wait until those at the next have it; set these to 0.

    The last two addresses are those of the status, words of host memory: one has the value while the kernel waits, the
    other changes when it has waited. An address of 0 is skipped. Few arguments, since each takes the host time in a
    launch.

    Example: value 7, addresses [0x10, 0, 0x20, 0x24, 0, 0]: the word at 0x10 becomes 7; when the words at 0x20 and 0x24
    are 7, they become 0.
    """
    place = tl.arange(0, PLACES)
    zero = tl.full((PLACES,), 0, tl.int32)
    values = zero + value
    # Earlier kernels on the stream have ended, so the peer that sees the flag sees what they wrote.
    _store_int32(tl.load(addresses_ptr + place), values, _RELEASED, INTERPRETED)
    awaited = tl.load(addresses_ptr + PLACES + place)
    first = place == 0
    waits = tl.where(first, tl.load(addresses_ptr + 2 * PLACES), 0)
    passes = tl.where(first, tl.load(addresses_ptr + 2 * PLACES + 1), 0)
    _store_int32(waits, values, _RELAXED, INTERPRETED)
    flags, is_flag = awaited.to(tl.pointer_type(tl.int32)), awaited != 0
    missing = 1
    while missing > 0:
        seen = tl.atomic_add(flags, 0, mask=is_flag, sem="acquire", scope="sys")
        missing = tl.sum(tl.where(is_flag & (seen != values), 1, 0))
    tl.store(flags, 0, mask=is_flag)
    _store_int32(waits, zero, _RELAXED, INTERPRETED)
    _store_int32(passes, zero + 1 if INTERPRETED else zero + globaltimer().to(tl.int32), _RELAXED, INTERPRETED)


def padded_count(count: int) -> int:
    """Return the length of the padded list of so many addresses: each lane of the warp has one or more of its own.

    >>> padded_count(6), padded_count(40)
    (32, 64)
    """
    return max(_WARP, triton.next_power_of_2(count))


def flag_addresses(signalled: list[int], awaited: list[int], status: list[int], ranks: int) -> list[int]:
    """Return the addresses of a launch that sets some flags and then waits for others.

    Args:
        signalled: of int32 words to set.
        awaited: of words in this device's memory to wait for.
        status: of two words in host memory: the value while the launch waits, and changed afterwards; 0 for no word.
        ranks: the most words to set or to wait for.
    """
    count = padded_count(ranks)
    return [word for words in (signalled, awaited) for word in words + [0] * (count - len(words))] + status


def flag_launch(addresses: torch.Tensor) -> Callable[[int], None]:
    """Return the launch of a value of flags with these `flag_addresses`, int64 on the device, on the current stream."""
    places = addresses.numel() // 2 - 1
    return lambda value: _flag_launch(places, value)(addresses)


@cached_launch
def _flag_launch(places: int, value: int) -> Launch:
    interpreted = not isinstance(pass_flags_kernel, triton.runtime.JITFunction)
    return Launch(pass_flags_kernel, 1, (value,), {"PLACES": places, "INTERPRETED": interpreted, "num_warps": 1})
