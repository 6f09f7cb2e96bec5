"""Does carrying float32 state through a Triton attention kernel beat cuDNN and a merge of its results?

python -m cp_dtensor.tools.carried_state --output docs/benchmarks/carried_state.md

On one GPU: the forward pass of one rank of 8 under head-tail causal, as if all keys and values had arrived already.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from triton.runtime.errors import TritonError

from cp_dtensor.kernels.attention_forward import ForwardConfig
from cp_dtensor.local_attention.cudnn import CudnnAttention
from cp_dtensor.rotation.allgather import AllGather
from cp_dtensor.rotation.alltoall import AllToAll
from cp_dtensor.rotation.base import Rotation
from cp_dtensor.tools.carried_tiles import Partial, RankShape, RankTiles
from cp_dtensor.tools.report import environment, markdown_table

WORLD_SIZE, Q_HEADS, KV_HEADS, HEAD_DIM = 8, 32, 8, 128
LENGTHS = (8192, 32768, 65536, 131072)
RANKS = (0, 3, 7)
SWEPT_RANK = 3
ROTATIONS: dict[str, Rotation] = {"allgather": AllGather(), "alltoall": AllToAll()}
CONFIGS = (
    ForwardConfig(128, 128, 8, 2, tma=True),
    ForwardConfig(128, 128, 8, 3, tma=True),
    ForwardConfig(128, 64, 8, 3, tma=True),
    ForwardConfig(64, 64, 4, 3, tma=True),
    ForwardConfig(64, 128, 4, 2, tma=True),
    ForwardConfig(128, 32, 4, 3, tma=True),
    ForwardConfig(128, 128, 8, 2),
    ForwardConfig(128, 64, 8, 3),
)
_MAX_ERROR = 0.02
"""Relative, of bfloat16 results: beyond that a kernel is wrong, not imprecise."""
_LONGEST_IN_A_GRAPH_MS = 10.0
"""Above it the time of launches does not count, and a graph of repeated calls would take long."""


class _Failed(Exception):
    """A contestant that does not run, or computes something else; the message is short enough for a table."""


def main() -> None:
    """Measures, prints and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    parser.add_argument("--rotation", choices=ROTATIONS, default="allgather", help="whose tiles are computed")
    parser.add_argument("--seq-len", type=int, nargs="+", default=LENGTHS, help="global lengths")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, choices=range(WORLD_SIZE))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("carried_state measures a GPU, and torch sees none")
    rotation = ROTATIONS[arguments.rotation]
    columns: list[list[str]] = []
    rows: list[list[str]] = []
    for length in arguments.seq_len:
        best, column = _sweep(_tiles(length, SWEPT_RANK, rotation))
        columns.append(column)
        for rank in arguments.ranks:
            rows += _compare(_tiles(length, rank, rotation), best)
    names = [_name(config) for config in CONFIGS]
    text = _report(
        arguments.rotation,
        markdown_table(
            ("config of the kernel", *(f"S = {length}" for length in arguments.seq_len)),
            [[name, *(column[index] for column in columns)] for index, name in enumerate(names)],
        ),
        markdown_table(("S", "rank", "how", "ms", "of cuDNN + merge", "GPU ms", "TFLOP/s", "extra MiB", "error"), rows),
    )
    print("\n" + text)
    if arguments.output:
        arguments.output.write_text(text)


def _tiles(length: int, rank: int, rotation: Rotation) -> RankTiles:
    torch.cuda.empty_cache()  # of the last case
    shape = RankShape(length, rank, WORLD_SIZE, Q_HEADS, KV_HEADS, HEAD_DIM)
    return RankTiles(shape, rotation, torch.device("cuda"), torch.bfloat16)


def _sweep(tiles: RankTiles) -> tuple[ForwardConfig | None, list[str]]:
    """The fastest config in the fewest launches, None if none runs, and a table entry for each."""
    speeds: dict[ForwardConfig, float] = {}
    column = []
    for config in CONFIGS:
        call = partial(tiles.in_few_launches, config)
        try:
            _checked_error(tiles, call)
            speeds[config] = tiles.flops / _median_ms(call) / 1e9
            column.append(f"{speeds[config]:.0f} TFLOP/s")
        except _Failed as failure:
            column.append(str(failure))
        print(f"S = {tiles.shape.length}, {_name(config)}: {column[-1]}", flush=True)
    return max(speeds, key=lambda config: speeds[config], default=None), column


def _compare(tiles: RankTiles, config: ForwardConfig | None) -> list[list[str]]:
    """A table row for each way to compute the rank's result."""
    cudnn = CudnnAttention()
    ways: dict[str, Callable[[], Partial | None]] = {
        "cuDNN + merge": partial(tiles.merged, cudnn),
        "cuDNN, no merge": partial(tiles.unmerged, cudnn),
    }
    if config is not None:
        ways[f"carried, {_name(config)}"] = partial(tiles.carried, config)
        ways[f"fewest launches, {_name(config)}"] = partial(tiles.in_few_launches, config)
    rows = []
    base_ms: float | None = None
    for way, call in ways.items():
        start = [str(tiles.shape.length), str(tiles.shape.rank), way]
        try:
            error = _checked_error(tiles, call)
            extra = _extra_bytes(call)
            ms = _median_ms(call)
        except _Failed as failure:
            row = [*start, str(failure), *[""] * 5]
        else:
            if way == "cuDNN + merge":
                base_ms = ms
            gpu_ms = _graph_ms(call) if ms < _LONGEST_IN_A_GRAPH_MS else ms
            speed = tiles.flops / ms / 1e9
            row = [
                *start,
                f"{ms:.3f}",
                "-" if base_ms is None else f"{ms / base_ms:.1%}",
                "-" if gpu_ms is None else f"{gpu_ms:.3f}",
                f"{speed:.0f}",
                f"{extra / 2**20:.1f}",
                "-" if error is None else f"{error:.2e}",
            ]
        rows.append(row)
        print(" | ".join(row), flush=True)
    return rows


def _checked_error(tiles: RankTiles, call: Callable[[], Partial | None]) -> float | None:
    """Runs a contestant once, and so compiles it. None: it has no result.

    Raises:
        _Failed: it does not compile or fit, or is wrong.
    """
    try:
        result = call()
        torch.cuda.synchronize()
    except (TritonError, RuntimeError) as failure:
        print(f"{type(failure).__name__}: {str(failure)[:2000]}", flush=True)  # a table has no room for that
        raise _Failed(type(failure).__name__) from failure
    if result is None:
        return None
    error = tiles.error(result)
    if not error < _MAX_ERROR:  # nor NaN
        raise _Failed(f"wrong: {error:.1e}")
    return error


def _extra_bytes(call: Callable[[], object]) -> int:
    """Peak memory above what is there before, results included."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _median_ms(call: Callable[[], object]) -> float:
    return triton.testing.do_bench(call, warmup=50, rep=150, return_mode="median")


def _graph_ms(call: Callable[[], object]) -> float | None:
    """As a CUDA graph, so without what the host takes to launch; None where it cannot be captured."""
    try:
        return triton.testing.do_bench_cudagraph(call, rep=20, return_mode="median")
    except RuntimeError as failure:
        print(f"not captured: {failure}", flush=True)
        return None


def _name(config: ForwardConfig) -> str:
    loads = "descriptors" if config.tma else "pointers"
    return f"{config.block_rows}x{config.block_columns}, {config.warps} warps, {config.stages} stages, {loads}"


def _report(rotation: str, sweep: str, comparison: str) -> str:
    return f"""# Carrying float32 state through a Triton attention kernel

Forward of one rank of {WORLD_SIZE}, head-tail causal, bfloat16, B = 1, {Q_HEADS} query and {KV_HEADS} kv heads,
d = {HEAD_DIM}, all keys and values in place already, in the tiles of `{rotation}`. One GPU.

{environment()}

`python -m cp_dtensor.tools.carried_state --rotation {rotation}`

- **cuDNN + merge**: what `ring_forward` does.
- **cuDNN, no merge**: the same tiles and nothing else: the least that any merge could come to.
- **carried**: the Triton kernel on the same tiles, each going on from the one before; the last one rounds.
- **fewest launches**: the Triton kernel on all keys of the first and of the second half of the rank's rows.

ms: median of calls, launches included. GPU ms: as a CUDA graph (of calls below {_LONGEST_IN_A_GRAPH_MS:.0f} ms).
Extra MiB: peak memory with the result. Error: relative, of 64 rows against float64.

{comparison}

The kernel's configs, in the fewest launches, on rank {SWEPT_RANK}; each length is compared with its best one:

{sweep}
"""


if __name__ == "__main__":
    main()
