"""Speed of each attention kernel on the tiles of rings, on one GPU, and of small tiles under masks.

python docs/scripts/tile_speed.py --json docs/benchmarks/tile_speed.json

bfloat16, batch 1. First full and causal tiles: TFLOP/s forward / backward of CUDA graphs, which take turns; backward
counts as 2.5 times the operations of forward. Then a rank's largest tile of packed documents, a window and a prefix in
a ring of 2 (`HeadTail`): TFLOP/s of CUDA graphs, and microseconds of eager calls in a row. A kernel that does not
compute a tile has no figure. Without a GPU all is small: a test of this program.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from shards import DIM

from cp_dtensor import Causal, Contiguous, Full, HeadTail, Layout, Mask
from cp_dtensor.attention.backends import select
from cp_dtensor.attention.backends.aten import MathAttention
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention
from cp_dtensor.attention.backends.interval import IntervalAttention, WideGradients
from cp_dtensor.plan.partition import BACKWARD_FLOPS, CallSpec, LayoutPartition
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE, IntervalMask, TileMask
from cp_dtensor.plan.tiling import Masking, tiling_of
from cp_dtensor.tools.cases import Heads, Inputs
from cp_dtensor.tools.parsing import mask_by_name
from cp_dtensor.tools.ranks import Call, Device
from cp_dtensor.tools.report import table_of, write_json

GPU = torch.cuda.is_available()
ROUNDS, CALLS = (9, 10) if GPU else (1, 1)
Passes = dict[str, Call]
"""Forward and backward of a tile, those that a kernel computes."""
Served = dict[str, tuple[AttentionBackend, TileMask]]

if GPU:
    SHAPED = [
        ("32:8:128", 512, 512, True), ("32:8:128", 2048, 2048, True), ("32:8:128", 16384, 16384, True),
        ("32:8:128", 16384, 8192, False), ("8:2:128", 16384, 8192, False), ("32:8:128", 4096, 28672, False),
        ("32:8:64", 16384, 16384, True), ("16:4:64", 16384, 8192, False),
        ("16:16:192/128", 8192, 8192, True), ("16:16:192/128", 16384, 8192, False),
        ("16:4:192/128", 8192, 8192, True), ("16:4:192/128", 16384, 8192, False),
        ("16:4:256", 2048, 2048, True), ("16:4:256", 16384, 16384, True), ("16:4:256", 4096, 16384, False),
        ("4:1:256", 16384, 8192, False), ("16:16:256", 8192, 8192, True), ("16:16:256", 8192, 8192, False),
    ]  # fmt: skip
    MASKED = [
        ("32:8:128", 1024, "documents 300"), ("32:8:128", 2048, "documents 700"), ("32:8:128", 4096, "documents 700"),
        ("32:8:128", 8192, "documents 700"), ("64:8:128", 65536, "documents 2048"), ("64:8:128", 65536, "window 4096"),
        ("32:8:128", 32768, "prefix:8192"), ("32:8:64", 32768, "documents 2048"),
        ("16:16:192/128", 32768, "documents 2048"), ("16:4:256", 32768, "documents 2048"),
    ]  # fmt: skip
else:
    SHAPED = [("4:2:16", 32, 32, True), ("2:2:16/8", 32, 16, False)]
    MASKED = [("4:2:16", 64, "documents 20"), ("4:2:16", 64, "window 8"), ("4:2:16", 64, "prefix:9")]


def drawn(heads: Heads, rows: int, columns: int, device: torch.device) -> Inputs:
    """Random tensors of a tile."""
    dim, v_dim = heads.dims(DIM)
    shapes = (rows, heads.q, dim), (columns, heads.kv, dim), (columns, heads.kv, v_dim), (rows, heads.q, v_dim)
    return Inputs(*(torch.randn(1, *each, dtype=torch.bfloat16, device=device).transpose(1, 2) for each in shapes))


def passes_of(inputs: Inputs, backend: AttentionBackend, mask: TileMask) -> Passes:
    """The passes that a backend computes by its own kernels."""
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.q.size(3) ** -0.5
    out, lse = backend.forward(q, k, v, mask, scale)
    out, lse = out.to(q.dtype), lse.masked_fill(lse == -torch.inf, 0.0)  # final ones, of rows that see some keys
    calls: Passes = {
        "forward": partial(backend.forward, q, k, v, mask, scale),
        "backward": partial(backend.backward, inputs.grad_out, q, k, v, out, lse, mask, scale),
    }
    serves = getattr(backend, "_serves", lambda *tile: True)
    return {name: call for name, call in calls.items() if serves(name, q, k, v, mask)}


def tiles(mask: Mask, layout: Layout, rows: int, columns: int, ranks: int) -> Iterator[tuple[int, int, IntervalMask]]:
    """Rows, columns and mask of the tiles of rank 0 of a ring, masked by row."""
    partition = LayoutPartition(layout, rows, columns, 1, ranks)
    tiling = tiling_of(partition.groups(), mask, Masking.INTERVALS, partition.lengths)
    for source in range(ranks):
        for tile in tiling.tiles_against(0, source):
            assert isinstance(tile.mask, IntervalMask)
            yield tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0], tile.mask


def served(heads: Heads, rows: int, columns: int, device: torch.device, shape: TileMask, by_row: TileMask) -> Served:
    """The backends that compute tiles of a call, each with the kind of mask that it takes."""
    capability = torch.cuda.get_device_capability() if GPU else None
    partition = LayoutPartition(Contiguous(), rows, columns, 1, 1)
    spec = CallSpec(
        partition, Full(), 1, heads.q, heads.kv, *heads.dims(DIM), "bfloat16", device=str(device), capability=capability
    )
    kinds: Served = {
        "FlashAttention-4": (select._flash4(spec, MathAttention()), shape),
        "cuDNN": (select.backend_by_name("CUDNN_ATTENTION", device.type), shape),
        "torch's flash": (select.backend_by_name("FLASH_ATTENTION", device.type), shape),
        "cuDNN's FlexAttention": (CudnnFlexAttention(), by_row),
        "ours": (WideGradients(), shape),
    }
    return {name: kind for name, kind in kinds.items() if kind[0].refusal(spec) is None}


def milliseconds(passes: Mapping[str, Passes], device: Device) -> dict[tuple[str, str], float]:
    """Medians of each kernel and pass, as CUDA graphs if there is a GPU, in turns."""
    calls = {(name, of): call for name, both in passes.items() for of, call in both.items()}
    if GPU:
        calls = {key: device.captured(call) for key, call in calls.items()}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(1 + ROUNDS):
        for key, call in calls.items():
            found[key].append(device.time_ms(call))
    return {key: statistics.median(times[1:]) for key, times in found.items()}


def speeds(passes: Mapping[str, Passes], teraflop: float, device: Device) -> dict[str, str]:
    """TFLOP/s of each kernel, forward / backward."""
    work = {"forward": 1e3 * teraflop, "backward": 1e3 * teraflop * BACKWARD_FLOPS}
    found = {key: work[key[1]] / ms for key, ms in milliseconds(passes, device).items()}
    return {name: pair(found.get((name, "forward")), found.get((name, "backward"))) for name in passes}


def pair(forward: float | None, backward: float | None) -> str:
    """Both figures, "-" for one that is missing.

    >>> pair(12.3, None)
    '12 / -'
    """
    return " / ".join("-" if x is None else f"{x:.0f}" for x in (forward, backward))


def microseconds_in_a_row(call: Call, device: Device) -> float:
    """The time of an eager call among calls without waits, on the host or on the GPU, whichever takes longer."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    return statistics.median(device.time_ms(calls) for _ in range(1 + ROUNDS)) / CALLS * 1e3


def shaped_row(text: str, rows: int, columns: int, is_causal: bool, device: Device) -> dict[str, str]:
    """The speeds of a full or causal tile."""
    heads = Heads.parse(text)
    mask, shape = (Causal(), CAUSAL_TILE) if is_causal else (Full(), FULL_TILE)
    inputs = drawn(heads, rows, columns, device.torch_device)
    (_, _, by_row), *_ = tiles(mask, Contiguous(), rows, columns, 1)
    kinds = served(heads, rows, columns, device.torch_device, shape, by_row)
    passes = {name: passes_of(inputs, *kind) for name, kind in kinds.items()}
    pairs = rows * columns / (2 if is_causal else 1)
    return {
        "heads": text,
        "tile": f"{'causal' if is_causal else 'full'} {rows:,} x {columns:,}",
        **speeds(passes, teraflop(heads, pairs), device),
    }


def masked_row(text: str, tokens: int, mask: str, device: Device) -> dict[str, str]:
    """The speeds of the largest tile of a rank under a mask."""
    heads = Heads.parse(text)
    rows, columns, by_row = max(
        tiles(mask_by_name(mask, tokens), HeadTail(), tokens, tokens, 2), key=lambda tile: tile[2].pairs
    )
    inputs = drawn(heads, rows, columns, device.torch_device)
    kinds = served(heads, rows, columns, device.torch_device, FULL_TILE, by_row)
    kinds = {name: kind for name, kind in kinds.items() if kind[1] is by_row} | {"ours": (IntervalAttention(), by_row)}
    passes = {name: passes_of(inputs, *kind) for name, kind in kinds.items()}
    work = teraflop(heads, by_row.pairs)
    eager = {}
    for name, both in passes.items():
        us = {of: microseconds_in_a_row(call, device) for of, call in both.items()}
        eager[f"{name}, eager us"] = pair(us.get("forward"), us.get("backward"))
    return {
        "heads": text, "tokens": f"{tokens:,}", "mask": mask, "tile": f"{rows:,} x {columns:,}",
        "TFLOP": f"{work:.3f}", **speeds(passes, work, device), **eager,
    }  # fmt: skip


def teraflop(heads: Heads, pairs: float) -> float:
    """Operations of forward."""
    return 2 * heads.q * pairs * sum(heads.dims(DIM)) / 1e12


def equal_names(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows with the names of all of them, "-" where one has no value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, "-") for name in names} for row in rows]


def main() -> None:
    """Prints the tables, and writes them to a file if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    device = Device(GPU)
    shaped = equal_names([shaped_row(*each, device) for each in SHAPED])
    masked = equal_names([masked_row(*each, device) for each in MASKED])
    print(f"{table_of(shaped)}\n\n{table_of(masked)}")
    if arguments.json:
        write_json(arguments.json, 1, shaped=shaped, masked=masked)


if __name__ == "__main__":
    main()
