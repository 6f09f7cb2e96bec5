"""Time learned sparse attention: ours, the packages' kernels alone on one GPU, dense attention, and what travels.

    torchrun --nproc-per-node 2 docs/scripts/sparse.py --heads 128 64 --seq-lens 65536 --output run.csv
    torchrun --nproc-per-node 2 docs/scripts/sparse.py --heads 64 --passes "blocks fwd" "blocks fwdbwd" --output run.csv

A layer of DeepSeek-V3.2: indexer of 64 heads, 2,048 keys of each query, latents of 512 values and rotary keys of 64.
Passes: "select" is the indexer, "fwd" and "fwdbwd" attention over what it selects, "keys fwd" and "keys fwdbwd" what
becomes of hidden states of 7,168 values before both: latents, rotary keys and index keys of all tokens on every rank.
"blocks fwd" and "blocks fwdbwd" are attention of 4 key heads of 128 over chosen blocks of 128 keys, as in MiniMax M3.
Methods: "ideal-kernels" are the packages' kernels alone, without projections, "ideal-one-rank" our functions, both on
one GPU and divided by the number of ranks; "dense" is `context_parallel_mla`; "hidden-states" all-gathers hidden states
and projects all of them on every rank. Notes have the time of the packages' kernels in a call of rank 0. Columns and
options are those of `python -m cp_dtensor bench`. The CSV file is for docs/scripts/measured.py.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor import (
    block_attention,
    context_parallel_mla,
    context_parallel_unshard,
    indexed_attention,
    local_positions,
    select_keys,
)
from cp_dtensor.tools.command import measure_all
from cp_dtensor.tools.measure import Suite, compare
from cp_dtensor.tools.ranks import Device
from cp_dtensor.tools.report import Row

PLAIN, ROTARY, VALUES, RANK, INDEX, INDEX_HEADS, HIDDEN = 128, 64, 128, 512, 128, 64, 7168
BLOCK, PART = 4096, 65536
"""Queries of a block of the indexer, and of a call of attention, where the packages' kernels run alone."""
PASSES = ("select", "fwd", "fwdbwd", "keys fwd", "keys fwdbwd", "blocks fwd", "blocks fwdbwd")
KEY_HEADS, DIM, BLOCK_SIZE = 4, 128, 128
PACKAGES = {"sparse_attn_fwd": "sgl-flash-mla", "cudnndeepseek_sparse": "cuDNN", "parallel_nsa": "fla-core"}
"""Packages by a part of their kernels' names."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """A layer of all ranks together."""

    seq_len: int
    heads: int
    topk: int

    @property
    def title(self) -> str:
        return f"{self.seq_len:,} tokens, {self.heads} heads, {self.topk} keys"

    def columns(self, pass_name: str = "") -> dict[str, object]:
        keys, head_dim = (KEY_HEADS, DIM) if pass_name.startswith("blocks") else (1, f"{PLAIN + ROTARY}/{VALUES}")
        mask = f"causal, {self.topk} keys"
        return {"tokens": self.seq_len, "mask": mask, "q_heads": self.heads, "kv_heads": keys, "head_dim": head_dim}

    def flops(self, pass_name: str) -> float:
        """Return the operations of attention in absorbed form, and of the indexer's triangle."""
        if pass_name == "select":
            return self.seq_len * (self.seq_len + 1) * INDEX * INDEX_HEADS
        few = min(self.topk, self.seq_len)
        pairs = few * (few + 1) / 2 + (self.seq_len - few) * few
        dims = 2 * RANK + ROTARY
        return 2.0 * self.heads * pairs * (dims + (pass_name == "fwdbwd") * (3 * (RANK + ROTARY) + 2 * RANK))


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, scale)


def index_inputs(tokens: int) -> list[torch.Tensor]:
    return [normal(1, tokens, INDEX_HEADS, INDEX), normal(1, tokens, INDEX), normal(1, tokens, INDEX_HEADS)]


def training(forward: Call, leaves: list[torch.Tensor], grad_out: torch.Tensor, pass_name: str) -> Call:
    """Return a call of forward, and of backward in a pass of that name."""
    has_backward = pass_name.endswith("bwd")
    for leaf in leaves:
        leaf.requires_grad_(has_backward)

    def call() -> None:
        for leaf in leaves:
            leaf.grad = None
        out: Any = forward()
        if has_backward:
            out.backward(grad_out)

    return call


def ours(problem: Problem, pass_name: str, group: Any, is_dense: bool = False) -> Call:
    """Return a call of our functions on the ranks of a group."""
    tokens = problem.seq_len // group.size()
    options: dict[str, Any] = {"mesh": group, "seq_len": problem.seq_len}
    given = index_inputs(tokens)
    if pass_name == "select":
        return lambda: select_keys(*given, topk=problem.topk, **options)
    indices = None if is_dense else select_keys(*given, topk=problem.topk, **options)
    given.clear()
    # In the memory order of models, (B, S, H, D).
    q = normal(1, tokens, problem.heads, PLAIN + ROTARY).transpose(1, 2)
    leaves = [q, normal(1, tokens, RANK), normal(1, tokens, ROTARY)]
    up = normal(problem.heads * (PLAIN + VALUES), RANK, scale=RANK**-0.5)

    def attend() -> Any:
        if is_dense:
            return context_parallel_mla(*leaves, up=up, is_causal=True, **options)
        assert indices is not None
        return indexed_attention(*leaves, up=up, indices=indices, **options)

    return training(attend, [*leaves, up], normal(1, tokens, problem.heads, VALUES).transpose(1, 2), pass_name)


def kernels_alone(problem: Problem, pass_name: str) -> Call:
    """Return a call of the packages' kernels on one GPU, on queries that are absorbed and outputs that stay so."""
    from cudnn import deepseek_sparse_attention as cudnn
    from flash_mla import flash_mla_sparse_fwd

    length, positions = problem.seq_len, torch.arange(problem.seq_len, dtype=torch.int32, device="cuda")

    def select(
        q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        found = []
        for start in range(0, length, BLOCK):
            at = slice(start, start + BLOCK)
            cudnn.indexer_forward_wrapper(
                q[:, at], k.unsqueeze(2), weights[:, at], ratio=1, out=scores, q_causal_offsets=positions[start:][:1]
            )  # fmt: skip
            options = {"return_val": False}
            found.append(cudnn.indexer_top_k_wrapper(scores[0], positions[at] + 1, problem.topk, **options)["indices"])
        return torch.cat(found)

    given = [*index_inputs(length), torch.empty(1, min(BLOCK, length), length, device="cuda")]
    if pass_name == "select":
        return partial(select, *given)
    indices, scale = select(*given), (PLAIN + ROTARY) ** -0.5
    given.clear()
    part = min(PART, length)
    q, rows = normal(part, problem.heads, RANK + ROTARY), normal(length, RANK + ROTARY)
    grad_out = normal(part, problem.heads, RANK)
    no_sink = torch.full((problem.heads,), float("-inf"), device="cuda")

    def attend() -> None:
        for index in indices.split(part):
            out, _, lse = flash_mla_sparse_fwd(
                q, rows.unsqueeze(1), index.unsqueeze(1), scale, RANK, use_legacy=True
            )  # fmt: skip
            if pass_name == "fwdbwd":
                cudnn.sparse_attention_backward_wrapper(
                    q, rows, out, grad_out, lse, no_sink, index, softmax_scale=scale
                )  # fmt: skip

    return attend


def keys_of_all(problem: Problem, pass_name: str, group: Any, gathers_hidden: bool) -> Call:
    """Return a call that brings latents, rotary keys and index keys of all tokens to every rank."""
    tokens = problem.seq_len // group.size()
    hidden = normal(1, tokens, HIDDEN)
    weight = normal(RANK + ROTARY + INDEX, HIDDEN, scale=HIDDEN**-0.5)

    def forward() -> torch.Tensor:
        (whole,) = context_parallel_unshard(
            group, [hidden if gathers_hidden else hidden @ weight.mT], [1], grad="partial"
        )  # fmt: skip
        return whole @ weight.mT if gathers_hidden else whole

    return training(forward, [hidden, weight], normal(1, problem.seq_len, RANK + ROTARY + INDEX), pass_name)


def chosen_blocks(problem: Problem, positions: torch.Tensor) -> torch.Tensor:
    """Return the own block of each query and random earlier ones, (1, T, key heads, blocks)."""
    own = (positions // BLOCK_SIZE).view(1, -1, 1, 1)
    count = problem.topk // BLOCK_SIZE
    steps = 1 + torch.rand(1, len(positions), KEY_HEADS, count, device=positions.device) * (2 * own / count - 1)
    earlier = own + 1 - steps.clamp(min=1).cumsum(3).floor().long()
    return torch.where(earlier < 0, -1, earlier).int()


def over_blocks(problem: Problem, pass_name: str, group: Any) -> Call:
    """Return a call of `block_attention` on the ranks of a group, or of fla-core's function for None."""
    ranks, options = 1 if group is None else group.size(), {"seq_len": problem.seq_len}
    tokens, device = problem.seq_len // ranks, "cuda" if torch.cuda.is_available() else "cpu"
    heads = (problem.heads, KEY_HEADS, KEY_HEADS)
    leaves = [normal(1, tokens, each, DIM) for each in heads]
    grad_out = normal(1, tokens, problem.heads, DIM)
    if group is None:
        from fla.ops.nsa.parallel import ParallelNSAFunction

        blocks = chosen_blocks(problem, torch.arange(tokens, device=device))
        rest = blocks.size(3), BLOCK_SIZE, DIM**-0.5, None
        return training(lambda: ParallelNSAFunction.apply(*leaves, blocks, *rest), leaves, grad_out, pass_name)
    blocks = chosen_blocks(problem, local_positions(group, problem.seq_len, device=device))
    chosen: dict[str, Any] = {"block_indices": blocks, "block_size": BLOCK_SIZE, "mesh": group, **options}

    def attend() -> torch.Tensor:
        return block_attention(*[x.transpose(1, 2) for x in leaves], **chosen).transpose(1, 2)

    return training(attend, leaves, grad_out, pass_name)


def of_packages(call: Call, device: Device) -> str | None:
    """Return the milliseconds of the packages' kernels in a call, added by package; None if there are none."""
    times: Counter[str] = Counter()
    for kernel, us in device.kernel_times(call).items():
        package = next((name for part, name in PACKAGES.items() if part in kernel), None)
        if package is not None:
            times[package] += us
    return ", ".join(f"{name} {us / 1e3:.4g} ms" for name, us in times.items()) or None


def measured(suite: Suite, problem: Problem, pass_name: str, prepare: Callable[[], Call], takes_part: bool) -> Row:
    """Return the numbers of a row."""
    torch.cuda.empty_cache()
    call: Any = suite.ranks.on_each(prepare, takes_part)
    for step in (lambda: call(), suite.device.synchronize):
        suite.ranks.together(step, takes_part)
    row = suite.measure(call, takes_part)
    note = suite.ranks.on_each(partial(of_packages, call, suite.device), takes_part)
    is_attention = pass_name in ("select", "fwd", "fwdbwd")
    flops = problem.flops(pass_name) / suite.ranks.world_size / row["median_ms"] / 1e9
    return {**row, "tflops": flops if is_attention else None, "note": note}


def measure(options: argparse.Namespace, problem: Problem, suite: Suite, rows: list[Row]) -> None:
    """Add the rows of a problem."""
    world, alone, first = dist.group.WORLD, dist.new_group([0]), len(rows)
    for pass_name in options.passes:
        prepared: dict[str, tuple[Callable[[], Call], bool]] = {
            "ideal-kernels": (partial(kernels_alone, problem, pass_name), False),
            "ideal-one-rank": (partial(ours, problem, pass_name, alone), False),
            "ours": (partial(ours, problem, pass_name, world), True),
            "dense": (partial(ours, problem, pass_name, world, is_dense=True), True),
        }
        if pass_name.startswith("keys"):
            prepared = {
                "ours": (partial(keys_of_all, problem, pass_name, world, False), True),
                "hidden-states": (partial(keys_of_all, problem, pass_name, world, True), True),
            }
        elif pass_name.startswith("blocks"):
            prepared = {
                "ideal-kernels": (partial(over_blocks, problem, pass_name, None), False),
                "ours": (partial(over_blocks, problem, pass_name, world), True),
            }
        for method, (prepare, is_shared) in prepared.items():
            if method not in options.methods or (method, pass_name) == ("dense", "select"):
                continue
            rows.append({**problem.columns(pass_name), "layout": "HeadTail", "pass": pass_name, "method": method})
            takes_part = is_shared or suite.ranks.rank == 0
            run = partial(measured, suite, problem, pass_name, prepare, takes_part)
            suite.attempt(problem.title, rows[-1], run)
    compare(rows[first:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seq-lens", type=int, nargs="+", default=[32768, 65536, 131072])
    add("--heads", type=int, nargs="+", default=[128, 64])
    add("--topk", type=int, default=2048)
    methods = ["ideal-kernels", "ideal-one-rank", "ours", "dense", "hidden-states"]
    add("--methods", nargs="+", choices=methods, default=methods)
    add("--passes", nargs="+", choices=PASSES, default=PASSES[:5])
    add("--repeats", type=int, default=10)
    add("--output", type=Path, help="CSV file of all rows")
    options = parser.parse_args()
    options.use_gpu, options.timeout, options.check_up_to = torch.cuda.is_available(), 300, 0
    problems = [Problem(tokens, heads, options.topk) for tokens in options.seq_lens for heads in options.heads]
    measure_all("docs/scripts/sparse.py", sys.argv[1:], options, problems, partial(measure, options))


if __name__ == "__main__":
    main()
