"""Time and memory of causal attention by this version of the package and by another one, in turns in one process.

git worktree add ../COMMIT COMMIT
torchrun --nproc-per-node 2 docs/scripts/versions.py --before ../COMMIT --seq-lens 2048 8192 --json versions.json

Short eager calls take as long as the host needs to launch them. This time differs between starts of the same program by
up to a factor of two. So each rank loads both versions, and their calls take turns. The program copies the package of
the other version, renames it `cp_before` in the copy, and imports that. Tensors are bfloat16, the layout is `HeadTail`,
and transfers go through symmetric memory. Without GPUs it runs a small case, which tests this program.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shards import drawn
from turns import finish, in_turns

import cp_dtensor
from cp_dtensor.tools.cases import Heads
from cp_dtensor.tools.parsing import positive
from cp_dtensor.tools.ranks import start

GPU = torch.cuda.is_available()
HEADS, TOKENS = ("32:8:128", [2048, 8192, 32_768]) if GPU else ("4:2:16", [256])
METHODS = {
    "ring": {"method": "ring", "rotate_method": "symm_mem" if GPU else "allgather"},
    "ulysses": {"method": "ulysses"},
}
FORWARD, BOTH = "forward", "both"
Attention = Callable[..., Any]


def imported(checkout: Path, copies: Path) -> Attention:
    """Imports the package of a checkout as `cp_before`; returns its `context_parallel_attention`."""
    package = shutil.copytree(checkout / "cp_dtensor", copies / "cp_before")
    for file in package.rglob("*.py"):
        file.write_text(file.read_text().replace("cp_dtensor", "cp_before"))
    sys.path.append(str(copies))
    attention: Attention = importlib.import_module("cp_before").context_parallel_attention
    return attention


def calls_of(
    versions: dict[str, Attention], heads: Heads, seq_len: int, device: torch.device
) -> dict[tuple[str, str, str], Callable[[], tuple[torch.Tensor, ...]]]:
    """Functions that return out, and after both passes also the gradients, by method, passes and version."""
    leaves, grad_out = drawn(heads, seq_len, device)
    options: dict[str, Any] = {"mesh": dist.group.WORLD, "is_causal": True, "enable_gqa": True, "seq_len": seq_len}

    def call(method: str, passes: str, version: str) -> tuple[torch.Tensor, ...]:
        out = versions[version](*leaves, **options, **METHODS[method])
        return (out, *torch.autograd.grad(out, leaves, grad_out)) if passes == BOTH else (out,)

    return {key: partial(call, *key) for key in product(METHODS, (FORWARD, BOTH), versions)}


def main(arguments: Sequence[str]) -> None:
    """Measures all cases; rank 0 prints and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT", help="folder of the other version")
    parser.add_argument("--heads", type=Heads.parse, default=Heads.parse(HEADS), metavar="Q:KV:DIM")
    parser.add_argument("--seq-lens", type=positive, nargs="+", default=TOKENS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if not (options.before / "cp_dtensor").is_dir():
        parser.error(f"expected a checkout with the folder cp_dtensor, got {options.before}")
    ranks, device, command = start("docs/scripts/versions.py", arguments, GPU, 300)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as copies:  # until the end: Triton compiles kernels from their sources
        versions = {"before": imported(options.before, Path(copies)), "now": cp_dtensor.context_parallel_attention}
        for seq_len in options.seq_lens:
            calls = calls_of(versions, options.heads, seq_len, device.torch_device)
            for (method, passes, version), measured in in_turns(calls, ranks, device).items():
                what = {"tokens": seq_len, "method": method, "passes": passes, "version": version}
                rows.append(what | measured)
            device.free_unused()
    finish(rows, ranks, command, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
