"""Seconds of imports, of the first calls of a process, in which kernels are compiled, and of captures of replays.

torchrun --nproc-per-node 2 docs/scripts/first_calls.py --json docs/benchmarks/first_calls.json

Forward and backward of 65,536 tokens, 64 query and 8 kv heads of 128, bfloat16, of the slowest rank: causal, packed
documents, other documents, and `replay=True`, whose second call captures both passes. Optional packages of kernels are
imported before; otherwise the first call that uses one would import it. A second run shows what they keep on disk
(docs/kernels.md). Without GPUs all is small: a test of this program.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

BEGIN = time.perf_counter()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from cp_dtensor import Balanced, Documents, context_parallel_attention  # noqa: E402
from cp_dtensor.attention.backends import cudnn_flex, flash4  # noqa: E402
from cp_dtensor.tools.parsing import lognormal_documents  # noqa: E402
from cp_dtensor.tools.ranks import Device, leave, start  # noqa: E402
from cp_dtensor.tools.report import table_of, write_json  # noqa: E402

IMPORTED = time.perf_counter()
GPU = torch.cuda.is_available()
TOKENS, HEADS, KV_HEADS, DIM, MEDIAN = (65_536, 64, 8, 128, 2048) if GPU else (256, 4, 2, 16, 40)


def seconds_of_packages() -> float:
    """The seconds to import the optional packages that are installed."""
    begin = time.perf_counter()
    for backend in (flash4, cudnn_flex):
        if backend.PACKAGE.version:
            backend._functions()
    return time.perf_counter() - begin


def calls() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and options of calls, in order."""
    causal = {"is_causal": True}
    yield from (("causal, first", causal), ("causal, second", causal))
    for name, seed in (("documents, first", 0), ("documents, second", 0), ("other documents", 1)):
        mask: Documents = lognormal_documents(TOKENS, MEDIAN, sigma=1.0, seed=seed)
        yield name, {"mask": mask, "layout": Balanced(mask, TOKENS)}
    if GPU:
        yield from ((f"causal, replay=True, call {number}", {**causal, "replay": True}) for number in range(1, 4))


def seconds_of(device: Device, **options: Any) -> float:
    """The seconds of forward and backward of a call, until the device has done both."""
    rows = TOKENS // dist.get_world_size()
    q, k, v, grad_out = (
        torch.randn(1, heads, rows, DIM, dtype=torch.bfloat16, device=device.torch_device)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    for x in (q, k, v):
        x.requires_grad_()
    device.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    out = context_parallel_attention(q, k, v, mesh=dist.group.WORLD, enable_gqa=True, seq_len=TOKENS, **options)
    assert isinstance(out, torch.Tensor)
    out.backward(grad_out)
    device.synchronize()
    return time.perf_counter() - begin


def main(arguments: Sequence[str]) -> None:
    """Measures all calls; rank 0 prints and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    ranks, device, _ = start("docs/scripts/first_calls.py", arguments, GPU, 300)
    rows = [
        {"what": "imports of torch and cp_dtensor", "seconds": max(ranks.gather(IMPORTED - BEGIN))},
        {"what": "imports of packages", "seconds": max(ranks.together(seconds_of_packages))},
    ]
    for name, of_call in calls():
        slowest = max(ranks.together(partial(seconds_of, device, **of_call)))
        rows.append({"what": name, "seconds": slowest})
    if ranks.rank == 0:
        print(table_of([{**row, "seconds": f"{row['seconds']:.3f}"} for row in rows]))
        if options.json:
            write_json(options.json, ranks.world_size, rows=rows)
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
