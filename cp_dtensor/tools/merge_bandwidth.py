"""Bandwidth of the LSE merge against a plain copy of as many bytes.

python -m cp_dtensor.tools.merge_bandwidth --output docs/benchmarks/merge.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import triton

from cp_dtensor.merge import merge, merge_reference
from cp_dtensor.tools.report import environment, markdown_table

# (batch, heads, rows, head_dim, rows are the second half of twice as many)
CASES = [
    (1, 32, 16384, 128, False),
    (1, 32, 16384, 128, True),
    (1, 32, 8192, 128, False),
    (2, 16, 8192, 64, False),
    (1, 16, 8192, 256, False),
    (1, 32, 1024, 128, False),
]


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("merge_bandwidth measures a GPU, and torch sees none")
    rows = [_measure(*case) for case in CASES]
    table = markdown_table(
        ("B, H, S, D", "rows", "bytes moved", "merge us", "merge GB/s", "copy GB/s", "of copy", "plain torch us"), rows
    )
    text = (
        "# LSE merge kernel\n\nMerging a bfloat16 tile into float32 state, in place. Bytes moved: state read and "
        "written, tile read, LSE of both. The copy moves as many bytes (half read, half written). Medians.\n\n"
        f"{environment()}\n\n`python -m cp_dtensor.tools.merge_bandwidth`\n\n{table}\n"
    )
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


def _measure(batch: int, heads: int, length: int, head_dim: int, half: bool) -> tuple[str, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = 2 * length if half else length
    out = torch.randn(batch, heads, rows, head_dim, device="cuda", generator=generator)[:, :, rows - length :]
    lse = torch.randn(batch, heads, rows, device="cuda", generator=generator)[:, :, rows - length :]
    tile_out = torch.randn(out.shape, device="cuda", generator=generator).bfloat16()
    tile_lse = torch.randn(lse.shape, device="cuda", generator=generator)
    moved = out.numel() * (4 + 4 + 2) + lse.numel() * (4 + 4 + 4)
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def median_ms(function) -> float:  # type: ignore[no-untyped-def]
        return triton.testing.do_bench(function, warmup=50, rep=200, return_mode="median")

    parts = [((0, length), tile_out, tile_lse)]
    merge_ms = median_ms(lambda: merge(out, lse, out, lse, parts))
    copy_ms = median_ms(lambda: target.copy_(source))
    torch_ms = median_ms(lambda: merge_reference(out, lse, out, lse, parts))
    return (
        f"{batch}, {heads}, {length}, {head_dim}",
        "second half" if half else "all",
        f"{moved / 2**20:.0f} MiB",
        f"{merge_ms * 1e3:.1f}",
        f"{moved / merge_ms / 1e6:.0f}",
        f"{moved / copy_ms / 1e6:.0f}",
        f"{copy_ms / merge_ms:.0%}",
        f"{torch_ms * 1e3:.1f}",
    )


if __name__ == "__main__":
    main()
