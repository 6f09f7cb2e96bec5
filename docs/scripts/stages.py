"""Milliseconds and memory of forward and backward by numbers of stages, in turns.

torchrun --nproc-per-node 8 docs/scripts/stages.py --seq-lens 32768 --stages 1,1 1,2 --ulysses 1 2 --json stages.json

A stage is a group of heads that travels while another one is computed. Of rings, "local,remote" are the numbers of
stages of backward for tiles against a rank's own keys and for those against other keys; of Ulysses, the number of
stages of both passes. "now" are those of the library. bfloat16, `HeadTail`, symmetric memory; the slowest rank's median
of eager calls and of CUDA graphs; the most memory of a rank above inputs, without symmetric memory. Without GPUs it
runs small eager cases by all-gather, which tests this program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shards import DIM, drawn
from turns import Call, finish, in_turns

from cp_dtensor import context_parallel_attention
from cp_dtensor.comm import transports
from cp_dtensor.comm.collective import AllGather, Staging
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.engine import planner
from cp_dtensor.plan.partition import CallSpec, partition_heads
from cp_dtensor.plan.plan import Stages
from cp_dtensor.tools.cases import Heads
from cp_dtensor.tools.parsing import MASK_HELP, mask_argument, mask_by_name, positive
from cp_dtensor.tools.ranks import Device, Ranks, start

GPU = torch.cuda.is_available()
HEADS, TOKENS = ("32:8:128", 32_768) if GPU else ("8:4:16", 256)
NOW, ULYSSES = "now", "ulysses "


@dataclass(frozen=True, kw_only=True)
class GivenStages(Staging):
    """Numbers of stages of backward that are given."""

    backward: Stages

    def stages(self, spec: CallSpec) -> tuple[Stages, Stages]:
        """The library's of forward, and the given ones."""
        return super().stages(spec)[0], self.backward


def stages_argument(text: str) -> str:
    """Reads "local,remote".

    Raises:
        ArgumentTypeError: the text is not two positive integers, the second a multiple of the first.
    """
    try:
        local, remote = map(int, text.split(","))
    except ValueError:
        local = remote = 0
    if local < 1 or remote < 1 or remote % local:
        raise argparse.ArgumentTypeError(
            f"expected two positive integers, the second a multiple of the first, got {text!r}"
        )
    return f"{local},{remote}"


def attention(heads: Heads, seq_len: int, mask: str, names: Sequence[str], device: torch.device) -> dict[str, Call]:
    """Forward and backward of the same inputs for each number of stages."""
    kind = SymmetricMemory if GPU else AllGather
    rings = [name for name in names if "," in name]
    ways = {name: kind(GivenStages(backward=Stages(*map(int, name.split(","))))) for name in rings} | {NOW: kind()}
    # Plans are kept by group, so that each number of stages of Ulysses needs a group of its own.
    groups = {name: dist.new_group() for name in names if name.startswith(ULYSSES)}
    leaves, grad_out = drawn(heads, seq_len, device)
    whole = mask_by_name(mask, seq_len)

    def call(name: str) -> None:
        if name in groups:
            count = name.removeprefix(ULYSSES)
            options: dict[str, Any] = {"mesh": groups[name], "method": "ulysses"}
            change: Any = nullcontext()
            if count != NOW:
                change = mock.patch.object(planner, "head_stages", return_value=int(count))
        else:
            options = {"mesh": dist.group.WORLD, "method": "ring", "rotate_method": name}
            change = mock.patch.dict(transports.ROTATE_METHODS, ways)
        with change:
            out = context_parallel_attention(*leaves, mask=whole, enable_gqa=True, seq_len=seq_len, **options)
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, leaves, grad_out)

    return {name: partial(call, name) for name in names}


def rows_of(
    heads: Heads, seq_len: int, mask: str, names: Sequence[str], ranks: Ranks, device: Device
) -> list[dict[str, object]]:
    """A row for each number of stages."""
    found = in_turns(attention(heads, seq_len, mask, names, device.torch_device), ranks, device)
    of_heads = f"{heads.q}:{heads.kv} of {heads.dim or DIM}" + (f"/{heads.v_dim}" if heads.v_dim else "")
    case = {"heads": of_heads, "mask": mask, "tokens": seq_len}
    return [case | {"stages": name} | measured for name, measured in found.items()]


def main(arguments: Sequence[str]) -> None:
    """Measures all cases; rank 0 prints and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Heads.parse, nargs="+", default=[Heads.parse(HEADS)], metavar="Q:KV:DIM")
    parser.add_argument("--seq-lens", type=positive, nargs="+", default=[TOKENS], metavar="N")
    parser.add_argument("--mask", type=mask_argument, nargs="+", default=["causal"], metavar="MASK", help=MASK_HELP)
    parser.add_argument("--stages", type=stages_argument, nargs="+", default=["1,1", "1,2"], metavar="LOCAL,REMOTE")
    parser.add_argument("--ulysses", type=positive, nargs="+", default=[], metavar="STAGES")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    most, fewest = max(int(each.split(",")[1]) for each in options.stages), min(heads.kv for heads in options.heads)
    if most > fewest:
        parser.error(f"expected at most as many stages as kv heads, got {most} stages and {fewest} kv heads")
    ranks, device, command = start("docs/scripts/stages.py", arguments, GPU, 300)
    asked, size = max(options.ulysses, default=1), ranks.world_size
    if any(partition_heads(heads.q, heads.kv, size, asked).stages < asked for heads in options.heads):
        parser.error(
            f"expected at most as many stages of Ulysses as a rank has kv heads, got {asked} stages, "
            f"{fewest} kv heads and {size} ranks"
        )
    of_ulysses = [f"{ULYSSES}{each}" for each in (NOW, *options.ulysses)] if options.ulysses else []
    names, rows = [NOW, *options.stages, *of_ulysses], []
    for heads, mask, seq_len in product(options.heads, options.mask, options.seq_lens):
        rows += rows_of(heads, seq_len, mask, names, ranks, device)
        device.free_unused()
    finish(rows, ranks, command, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
