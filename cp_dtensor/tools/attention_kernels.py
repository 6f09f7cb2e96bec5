"""How fast are the Triton attention kernels, beside what torch has, under each mask?

python -m cp_dtensor.tools.attention_kernels --output docs/benchmarks/attention_kernels.md

On one GPU, bfloat16, batch 1. TFLOP/s count useful work: 4 D flops for each pair of a query and a key that it sees, and
2.5 times that in backward, whatever a kernel really computes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.runtime.errors import TritonError

from cp_dtensor.kernels.attention_twin import attention_forward_twin
from cp_dtensor.local_attention.base import LocalAttention
from cp_dtensor.local_attention.cudnn import CudnnAttention
from cp_dtensor.local_attention.flash import FlashAttention
from cp_dtensor.masked_attention import RowMask, attention_backward, attention_forward, documents, prefix, window
from cp_dtensor.tile_masks import CAUSAL_TILE, FULL_TILE
from cp_dtensor.tools.report import environment, markdown_table

MASKS = ("causal", "full", "window 4096", "documents", "prefix")
LENGTHS = (16384, 65536)
_WARM_UP_S, _REPEATED_S = 0.4, 0.25
_CHECKED_ROWS = 128
_MAX_ERROR = 0.02
"""Relative, of bfloat16 results: beyond that a kernel is wrong, not imprecise."""


@dataclass(frozen=True)
class Case:
    """A mask and a length."""

    mask: str
    length: int
    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Measured:
    """One row of the table; TFLOP/s of useful work."""

    case: Case
    kernel: str
    forward_ms: float
    forward_tflops: float
    backward_ms: float
    backward_tflops: float
    error: float
    """Of the first rows of out, against float64."""


Pass = Callable[[], tuple[torch.Tensor, ...]]
Ways = dict[str, tuple[Pass, Pass]]
"""Forward and backward of each kernel."""


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    parser.add_argument("--seq-len", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--masks", nargs="+", default=MASKS, choices=MASKS)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("Q", "KV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, whose compilation takes a minute")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("attention_kernels measures a GPU, and torch sees none")
    measured: list[Measured] = []
    for length in arguments.seq_len:
        for mask in arguments.masks:
            case = Case(mask, length, arguments.heads[0], arguments.heads[1], arguments.head_dim)
            for row in measure(case, arguments.flex):
                measured.append(row)
                print(" | ".join(_cells(row)), flush=True)
    text = _report(measured)
    print("\n" + text)
    if arguments.output:
        arguments.output.write_text(text)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in measured], indent=1))


def row_mask(case: Case) -> RowMask:
    """The mask of a case, as the Triton kernels take it."""
    position = torch.arange(case.length, device="cuda")
    if case.mask == "full":
        return RowMask()
    if case.mask == "causal":
        return RowMask(causal_offset=0)
    if case.mask == "window 4096":
        return window(position, 4095, 0)
    if case.mask == "prefix":
        return prefix(position, case.length // 4)
    return documents(position, torch.tensor(document_edges(case.length), device="cuda")) & window(position, None, 0)


def document_edges(length: int) -> list[int]:
    """Documents of lognormal lengths, median 2048, that fill `length`."""
    random_state = random.Random(0)
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, edges[-1] + max(16, int(random_state.lognormvariate(7.6, 1.2)))))
    return edges


def seen_pairs(mask: RowMask, length: int) -> int:
    """Pairs of a query and a key that it sees."""
    if mask.lo is not None and mask.hi is not None:
        return int((mask.hi.clamp(max=length) - mask.lo.clamp(min=0)).clamp(min=0).sum().item())
    return length * length if mask.causal_offset is None else length * (length + 1) // 2


def measure(case: Case, with_flex: bool) -> Iterator[Measured]:
    """A row for each kernel that can compute the case."""
    torch.cuda.empty_cache()
    shape = (1, case.q_heads, case.length, case.head_dim)
    q, grad_out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, case.kv_heads, *shape[2:], device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask = row_mask(case)
    flops = 4 * case.head_dim * case.q_heads * seen_pairs(mask, case.length)
    for name, (forward, backward) in _ways(case, mask, q, k, v, grad_out, with_flex).items():
        try:
            error = _error(case, mask, q, k, v, forward()[0])
            if not error < _MAX_ERROR:
                print(f"{case}, {name}: wrong, error {error:.1e}", flush=True)
                continue
            forward_ms, backward_ms = _median_ms(forward), _median_ms(backward)
        except (TritonError, RuntimeError) as failure:
            print(f"{case}, {name}: {type(failure).__name__}: {str(failure)[:500]}", flush=True)
            continue
        yield Measured(
            case, name, forward_ms, flops / forward_ms / 1e9, backward_ms, 2.5 * flops / backward_ms / 1e9, error
        )


def _ways(
    case: Case,
    mask: RowMask,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    with_flex: bool,
) -> Ways:
    scale = case.head_dim**-0.5
    out, lse = attention_forward(q, k, v, mask, scale)
    ways: Ways = {
        "Triton": (
            lambda: attention_forward(q, k, v, mask, scale),
            lambda: attention_backward(grad_out, q, k, v, out, lse, mask, scale)[:3],
        )
    }
    if case.mask in ("causal", "full"):
        tile = CAUSAL_TILE if case.mask == "causal" else FULL_TILE

        def of_backend(backend: LocalAttention) -> tuple[Pass, Pass]:
            return (
                lambda: backend.forward(q, k, v, tile, scale),
                lambda: backend.backward(grad_out, q, k, v, out, lse, tile, scale),
            )

        ways["FlashAttention-2"] = of_backend(FlashAttention())
        ways["cuDNN"] = of_backend(CudnnAttention())
    if with_flex:
        ways["FlexAttention"] = _flex(case, mask, q, k, v, grad_out)
    return ways


def _flex(
    case: Case, mask: RowMask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor
) -> tuple[Pass, Pass]:
    lo, hi = mask.lo, mask.hi

    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        if lo is not None and hi is not None:
            return (lo[row] <= column) & (column < hi[row])
        return column <= row if case.mask == "causal" else column >= 0

    blocks = torch.compile(create_block_mask)(seen, None, None, case.length, case.length, device="cuda")
    attention = torch.compile(flex_attention, dynamic=False)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(leaves[0], leaves[1], leaves[2], block_mask=blocks, enable_gqa=True)
    return (
        lambda: (attention(q, k, v, block_mask=blocks, enable_gqa=True),),
        lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True),
    )


def _error(case: Case, mask: RowMask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> float:
    """Relative, of the last rows of the first head."""
    rows = slice(case.length - _CHECKED_ROWS, case.length)
    last_q, k, v = (x[:, :1].double() for x in (q[:, :, rows], k, v))
    exact = torch.empty_like(last_q)
    tile = mask.tile(rows.start, rows.stop, 0).arguments()
    attention_forward_twin(exact, exact.new_empty(exact.shape[:3]), last_q, k, v, case.head_dim**-0.5, **tile)
    return ((out[:, :1, rows].double() - exact).norm() / exact.norm()).item()


def _median_ms(call: Pass) -> float:
    """After the clocks have settled."""
    start = time.perf_counter()
    calls = 0
    while calls == 0 or time.perf_counter() - start < _WARM_UP_S:
        call()
        torch.cuda.synchronize()
        calls += 1
    calls = max(3, int(_REPEATED_S * calls / (time.perf_counter() - start)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in pairwise(events))


def _cells(row: Measured) -> list[str]:
    case = row.case
    return [
        case.mask,
        str(case.length),
        row.kernel,
        f"{row.forward_ms:.3f}",
        f"{row.forward_tflops:.0f}",
        f"{row.backward_ms:.3f}",
        f"{row.backward_tflops:.0f}",
        f"{row.error:.1e}",
    ]


def _report(measured: list[Measured]) -> str:
    case = measured[0].case
    header = ("mask", "S", "kernel", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "error")
    return f"""# The Triton attention kernels under each mask

Batch 1, {case.q_heads} query and {case.kv_heads} kv heads, d = {case.head_dim}, bfloat16, one GPU.

{environment()}

`python -m cp_dtensor.tools.attention_kernels`

TFLOP/s of useful work: 4 d flops for each pair of a query and a key that it sees, 2.5 times that in backward.
"Documents": packed, of lognormal lengths (median 2000), causal. "Prefix": all see the first quarter, else causal.
ms: median, launches included. Error: relative, of the last {_CHECKED_ROWS} rows of out, against float64.

{markdown_table(header, [_cells(row) for row in measured])}
"""


if __name__ == "__main__":
    main()
