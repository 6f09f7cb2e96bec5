"""What one rank of many computes if all transfers are free: how fast a call can be at best, measured on one GPU.

python -m cp_dtensor.tools.one_of_many --ranks 8 --heads 32:8 --seq-lens 8192 32768 65536 131072 --output FILE.md

The rank's own code runs, with its plan, tiles, merges and sums, as a CUDA graph, so that the host counts for nothing.
`ideal` is one GPU's attention over the whole sequence divided by the number of ranks.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor.attention_call import AttentionCall
from cp_dtensor.extras import NO_EXTRAS
from cp_dtensor.layouts import HeadTail
from cp_dtensor.masks import Causal
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.splitting import Splitting, decide_call
from cp_dtensor.tools.bench.devices import Call, Device, Gpu
from cp_dtensor.tools.bench.measure import Effort
from cp_dtensor.tools.delivered import DeliveredHeads, DeliveredRows, OneOfMany
from cp_dtensor.tools.report import environment, markdown_table
from cp_dtensor.ulysses import UlyssesCall

HEAD_DIM = 128
METHODS = ("ring", "ulysses")
_EFFORT = Effort(repeats=100, seconds=0.5, warm_ms=300.0)
HEADER = (
    "tokens",
    "method",
    "rank",
    "forward ms",
    "% of ideal",
    "forward + backward ms",
    "% of ideal",
    "ours, % of it",
)
_ATTENTION = ("cudnn", "flash", "fmha", "attention")
"""In the names of kernels that are a backend's."""


@dataclass(frozen=True)
class Problem:
    """Causal attention in bfloat16, batch size 1, divided by head-tail."""

    length: int
    ranks: int
    q_heads: int
    kv_heads: int
    head_dim: int = HEAD_DIM

    def tensors(self, length: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        """q, k, v and the gradient of out, (1, H, length, head_dim), row after row as models have them."""
        heads = (self.q_heads, self.kv_heads, self.kv_heads, self.q_heads)
        return [
            torch.randn(1, length, count, self.head_dim, device=device, dtype=dtype).transpose(1, 2) for count in heads
        ]


@dataclass(frozen=True)
class Passes:
    """Forward and backward of one call, each of which can be repeated."""

    forward: Call
    backward: Call


def whole_sequence(problem: Problem, device: torch.device, dtype: torch.dtype) -> Passes:
    """torch's attention over the whole sequence on one device."""
    *leaves, grad = problem.tensors(problem.length, device, dtype)
    q, k, v = (leaf.requires_grad_() for leaf in leaves)

    def forward() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    out = forward()
    return Passes(forward, lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))


def of_one_rank(problem: Problem, method: str, rank: int, device: torch.device, dtype: torch.dtype) -> Passes:
    """The share of one rank, with everything that it gets from others in place."""
    group: Any = OneOfMany(rank, problem.ranks)
    lengths = (problem.length, problem.length)
    local = HeadTail().local_length(problem.length, rank, problem.ranks)
    q, k, v, grad = problem.tensors(local, device, dtype)
    splitting = Splitting(HeadTail(), method, DeliveredRows())
    scale = problem.head_dim**-0.5
    call: AttentionCall = decide_call(q, k, v, splitting, lengths, Causal(), NO_EXTRAS, scale, SequenceRanks(group))
    if isinstance(call, UlyssesCall):
        call = replace(call, exchange=DeliveredHeads())
    saved = call.forward(q, k, v, NO_EXTRAS, needs_lse=False)[2]
    return Passes(
        lambda: call.forward(q, k, v, NO_EXTRAS, needs_lse=False), lambda: call.backward(grad, NO_EXTRAS, saved, None)
    )


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--heads", default="32:8", help="of queries : of keys and values")
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[8192, 32768, 65536, 131072], help="global lengths")
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("one_of_many measures a GPU, and torch sees none")
    torch.autograd.set_multithreading_enabled(False)  # backward is captured by the thread that calls it
    q_heads, kv_heads = map(int, arguments.heads.split(":"))
    device = Gpu()
    rows: list[tuple[str, ...]] = []
    for length in arguments.seq_lens:
        for row in measured(Problem(length, arguments.ranks, q_heads, kv_heads), device):
            rows.append(row)
            print(" ".join(row), flush=True)
    numbers = " ".join(map(str, arguments.seq_lens))
    command = f"--ranks {arguments.ranks} --heads {arguments.heads} --seq-lens {numbers}"
    text = report(command, arguments.ranks, rows)
    print("\n" + text)
    if arguments.output:
        arguments.output.write_text(text)


def measured(problem: Problem, device: Device) -> list[tuple[str, ...]]:
    """Rows of the table: `ideal`, then each method on the first rank, one in the middle and the last."""
    where = device.torch_device
    whole = whole_sequence(problem, where, torch.bfloat16)
    ideal = [_median_ms(call, device) / problem.ranks for call in (whole.forward, whole.backward)]
    del whole  # its memory is needed
    rows = [_row(problem.length, "ideal", "-", ideal, ideal, "-")]
    for method in METHODS:
        for rank in sorted({0, problem.ranks // 2, problem.ranks - 1}):
            share = of_one_rank(problem, method, rank, where, torch.bfloat16)
            calls = [device.captured(call) for call in (share.forward, share.backward)]
            times = [_median_ms(call, device) for call in calls]
            rows.append(_row(problem.length, method, str(rank), times, ideal, f"{_outside_of_attention(calls):.1%}"))
            del share, calls
            device.free_unused()
    return rows


def report(command: str, ranks: int, rows: Sequence[tuple[str, ...]]) -> str:
    """The page."""
    return (
        f"# One rank of {ranks}, transfers taken away\n\n"
        f"Upper bounds for {ranks} GPUs, measured on one: the code of one rank of a causal call in bfloat16 under "
        "`HeadTail`, captured as a CUDA graph, with all that it gets from others in place already. What is missing to "
        "100% is lost before anything travels: to smaller kernels, merges and sums. `ideal`: torch's cuDNN attention "
        f"over the whole sequence on this GPU, divided by {ranks}. Ours: the share of the GPU's time in forward + "
        "backward that is not in kernels of the backend (merges, sums, packing of gradients). Medians.\n\n"
        f"{environment()}\n\n`python -m cp_dtensor.tools.one_of_many {command}`\n\n{markdown_table(HEADER, rows)}\n"
    )


def _row(
    length: int, method: str, rank: str, times: Sequence[float], ideal: Sequence[float], ours: str
) -> tuple[str, ...]:
    numbers = []
    for ms, best in ((times[0], ideal[0]), (sum(times), sum(ideal))):
        numbers += [f"{ms:.3g}", f"{best / ms * 100:.1f}"]
    return (f"{length:,}", method, rank, *numbers, ours)


def _median_ms(call: Call, device: Device) -> float:
    once = device.time_ms(call)
    for _ in range(max(1, int(_EFFORT.warm_ms / once))):
        device.time_ms(call)
    return statistics.median(device.time_ms(call) for _ in range(_EFFORT.repeats_of(once)))


def _outside_of_attention(calls: Sequence[Call]) -> float:
    """The share of the GPU's time that is spent in other kernels than those of attention."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for call in calls:
            call()
        torch.cuda.synchronize()
    kernels = [(event.key.lower(), event.self_device_time_total) for event in profile.key_averages()]
    of_attention = sum(time for name, time in kernels if any(word in name for word in _ATTENTION))
    return 1.0 - of_attention / max(sum(time for _, time in kernels), 1e-9)


if __name__ == "__main__":
    main()
