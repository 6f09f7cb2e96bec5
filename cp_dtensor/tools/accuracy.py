"""Error of ring attention on GPUs, against that of single-device SDPA on the same inputs.

    torchrun --nproc-per-node 4 -m cp_dtensor.tools.accuracy --output docs/benchmarks/accuracy-4-ranks.md

Every backend and rotation, forward and backward. References are computed in float64 from the same bfloat16 inputs.
Errors are relative Frobenius norms; the table has the worst rank's.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor.api.functional import ring_attention
from cp_dtensor.api.sharding import take_shard
from cp_dtensor.comm.select import TRANSPORTS
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Striped
from cp_dtensor.tools.report import environment, markdown_table

NAMES = ("out", "dq", "dk", "dv")
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
Results = tuple[Any, ...]


def main() -> None:
    """Measures and writes the table; exits with 1 if a ratio is beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--limit", type=float, default=1.5, help="largest ratio to single-device error")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ:
        raise SystemExit(
            "accuracy measures GPUs, one for each rank of torchrun: torch sees none, or there is no torchrun"
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = []
    worst = 0.0
    for seed, case in enumerate(_cases()):
        row, ratio = _measure(seed, arguments.seq_len, *case)
        rows.append(row)
        worst = max(worst, ratio)
    if dist.get_rank() == 0:
        _report(rows, worst, arguments)
    dist.destroy_process_group()
    sys.exit(worst > arguments.limit)


Case = tuple[str, str, Layout, bool, int, int, torch.dtype]
"""(backend, rotation, layout, causal, kv heads, head dim, dtype)"""


def _cases() -> list[Case]:
    transports = tuple(TRANSPORTS)
    half = torch.bfloat16
    cases: list[Case] = [
        (backend, transport, HeadTail(), causal, kv_heads, 128, half)
        for backend, transport, causal, kv_heads in itertools.product(BACKENDS, transports, (True, False), (8, 2))
    ]
    for layout, backend in itertools.product((Contiguous(), Striped(), MirroredBatch()), ("cuDNN", "flash")):
        cases.append((backend, "alltoall", layout, True, 2, 128, half))
    for transport in transports:
        cases.append(("efficient", transport, Striped(), True, 2, 128, half))
        cases.append(("efficient", transport, HeadTail(), True, 2, 128, torch.float32))
        cases.append(("flash", transport, HeadTail(), True, 2, 64, torch.float16))
        cases.append(("flash", transport, HeadTail(), True, 2, 256, half))
    return cases


def _measure(
    seed: int,
    seq_len: int,
    backend: str,
    transport: str,
    layout: Layout,
    causal: bool,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[tuple[str, ...], float]:
    group = dist.group.WORLD
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, seq_len, head_dim, device="cuda", generator=generator).to(dtype)

    inputs = (draw(8), draw(kv_heads), draw(kv_heads))
    grad_out = draw(8)
    assert group is not None

    def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = ring_attention(
            q, k, v, mesh=group, is_causal=causal, enable_gqa=True, layout=layout, rotate_method=transport,
            seq_len=seq_len,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    def single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if backend == "efficient":  # which has no GQA on one device
            k, v = (tensor.repeat_interleave(8 // kv_heads, 1) for tensor in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=backend != "efficient")

    def local(tensor: torch.Tensor) -> torch.Tensor:
        return take_shard(tensor, 2, layout, rank, world_size)

    with sdpa_kernel(BACKENDS[backend]):
        ours = _with_gradients(ring, [local(tensor) for tensor in inputs], local(grad_out))
        theirs = _with_gradients(single, inputs, grad_out)
    truth = _truth(inputs, grad_out, causal)
    errors = torch.stack(
        [_error(mine, local(true)) for mine, true in zip(ours, truth, strict=True)]
        + [_error(other, true) for other, true in zip(theirs, truth, strict=True)]
    )
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    mine, other = errors[:4].tolist(), errors[4:].tolist()
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    description = f"{'causal' if causal else 'full'}, {kv_heads} kv heads, d={head_dim}, {str(dtype)[6:]}"
    cells = [f"{a:.1e} ({ratio:.2f}x)" for a, ratio in zip(mine, ratios, strict=True)]
    return (backend, transport, repr(layout), description, *cells), max(ratios)


def _with_gradients(attention, inputs, grad_out: torch.Tensor) -> Results:  # type: ignore[no-untyped-def]
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    out.backward(grad_out)
    return (out.detach(), *(leaf.grad for leaf in leaves))


def _truth(inputs: tuple[torch.Tensor, ...], grad_out: torch.Tensor, causal: bool) -> Results:
    """Float64 attention, one query head at a time to bound memory."""
    q, k, v = (tensor.double().requires_grad_() for tensor in inputs)
    group = q.size(1) // k.size(1)
    outs = []
    for head in range(q.size(1)):
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q[:, head], k[:, head // group], v[:, head // group], is_causal=causal)
        out.backward(grad_out[:, head].double())
        outs.append(out.detach())
    return (torch.stack(outs, 1), *(tensor.grad for tensor in (q, k, v)))


def _error(ours: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return (ours.double() - truth).norm() / truth.norm()


def _report(rows: list[tuple[str, ...]], worst: float, arguments: argparse.Namespace) -> None:
    table = markdown_table(("backend", "rotation", "layout", "problem", *NAMES), rows)
    text = (
        f"# Error of ring attention, {dist.get_world_size()} ranks\n\n"
        f"Relative error (Frobenius) against float64 on the same inputs, worst rank; in parentheses, over the "
        f"error of `F.scaled_dot_product_attention` with the same backend on one GPU. Global length "
        f"{arguments.seq_len}, batch 2, 8 query heads. Largest ratio: {worst:.2f}.\n\n{environment()}\n\n"
        f"`torchrun --nproc-per-node {dist.get_world_size()} -m cp_dtensor.tools.accuracy`\n\n{table}\n"
    )
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
