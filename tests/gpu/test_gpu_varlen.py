"""torch's `varlen_attn` on two GPUs, inside of a context, against the same call on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compile_checks import fresh
from support.gpu_checks import WORLD_SIZE
from support.packed_calls import packed_attention
from support.problems import shard
from support.processes import Processes

from cp_dtensor import HeadTail, context_parallel

pytestmark = pytest.mark.gpu(WORLD_SIZE)
BATCH, LENGTH = 2, 515
STEPS = (
    [0, 100, 100, 400, LENGTH, LENGTH + 1, 2 * LENGTH],
    [0, 7, LENGTH, LENGTH + 200, 2 * LENGTH],
    [0, LENGTH, 2 * LENGTH],
)
WINDOWS = [(-1, -1), (-1, 0), (64, 0)]


def _errors(rank: int, ways: list[dict[str, Any]], window: tuple[int, int], compiles: bool) -> list[float]:
    """The largest ratios of errors (against float32) to those of torch on one GPU."""
    fresh()

    def attend(q: Any, k: Any, v: Any, edges: Any) -> Any:
        return packed_attention(q, k, v, edges, edges, window)[0] * 1.0

    function: Any = torch.compile(attend, fullgraph=True) if compiles else attend
    worst = []
    for step, edges_list in enumerate(STEPS):
        generator = torch.Generator("cuda").manual_seed(step)
        whole = [
            torch.randn(BATCH, heads, LENGTH, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
            for heads in (8, 2, 2, 8)
        ]
        edges = torch.tensor(edges_list, dtype=torch.int32, device="cuda")
        leaves = [each.clone().requires_grad_() for each in whole[:3]]
        torchs = attend(*leaves, edges)
        torchs = [torchs, *torch.autograd.grad(torchs, leaves, whole[3])]
        exact = _exact(whole, edges_list, window)
        for way in ways:
            q, k, v, grad_out = (shard(each, HeadTail(), rank, WORLD_SIZE) for each in whole)
            leaves = [each.clone().requires_grad_() for each in (q, k, v)]
            with context_parallel(dist.group.WORLD, seq_len=LENGTH, **way):
                out = function(*leaves, edges)
            got = [out, *torch.autograd.grad(out, leaves, grad_out)]
            for ours, one, precise in zip(got, torchs, exact, strict=True):
                mine, theirs = (shard(each, HeadTail(), rank, WORLD_SIZE).double() for each in (precise, one))
                error, of_torch = ((each.double() - mine).norm() for each in (ours, theirs))
                worst.append((error / of_torch.clamp_min(1e-6 * mine.norm())).item())
    return worst


def _exact(whole: list[torch.Tensor], edges: list[int], window: tuple[int, int]) -> list[torch.Tensor]:
    leaves = [each.double().requires_grad_() for each in whole[:3]]
    position = torch.arange(BATCH * LENGTH, device="cuda")
    document = torch.bucketize(position, torch.tensor(edges[1:], device="cuda"), right=True)
    seen = document[:, None] == document
    left, right = (end if end >= 0 else position.numel() for end in window)
    ahead = position - position[:, None]
    seen = (seen & (ahead >= -left) & (ahead <= right)).view(BATCH, LENGTH, BATCH, LENGTH)
    mask = torch.stack([seen[row, :, row] for row in range(BATCH)])[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, whole[3].double())]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_documents_of_batch_rows(gpus: Processes, window: tuple[int, int]) -> None:
    ways: list[dict[str, Any]] = [{"rotate_method": name} for name in ("symm_mem", "allgather", "alltoall")]
    for errors in gpus.run(
        _errors, [{"method": "ring", **way} for way in ways] + [{"method": "ulysses"}], window, False
    ):
        assert all(each < 1.5 for each in errors), errors


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_compiled(gpus: Processes, method: str) -> None:
    for errors in gpus.run(_errors, [{"method": method}], (-1, 0), True):
        assert all(each < 1.5 for each in errors), errors
