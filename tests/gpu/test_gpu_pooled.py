"""The loss of an indexer, pooled blocks and attention over them on two GPUs, against one in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    HeadTail,
    context_parallel_shard,
    context_parallel_unshard,
    indexer_loss,
    local_positions,
    pool_blocks,
    pooled_attention,
    select_pooled,
)

LENGTH, DEVICE = 261, "cuda"


def _results(tensors: list[torch.Tensor], bias: torch.Tensor, sinks: torch.Tensor, mesh: Any) -> list[torch.Tensor]:
    """Of q (B, T, H, D), keys and gates (B, T, D), and weights (B, T, H); out (B, T, ...) of each function."""
    q, keys, gates, weights = tensors
    place: dict[str, Any] = {"mesh": mesh, "layout": HeadTail(), "seq_len": LENGTH}
    heads_first, blocks = q.transpose(1, 2), {"size": 4, **place}
    at = local_positions(mesh, LENGTH, HeadTail()).to(q.device)
    own = torch.stack((at, torch.where(at > 0, at // 2, -1)), 1).expand(q.size(0), -1, -1)
    target = heads_first.detach(), keys.detach().unsqueeze(1)
    pooled, positions = pool_blocks(keys, gates, bias, **blocks)
    assert torch.equal(positions, at[at % 4 == 3] - 3)
    last = ((at + 1) // 4 - 1).view(1, -1, 1).expand(q.size(0), -1, 1)
    both, _ = pool_blocks(torch.cat((keys, gates), 2), torch.cat((gates, keys), 2), overlap=True, **blocks)
    return [
        indexer_loss(q, keys, weights, *target, scale=0.2, indices=own, **place),
        indexer_loss(q, keys, weights, *target, scale=0.2, **place),
        pooled_attention(heads_first, keys, pooled, window=7, indices=last, sinks=sinks, **blocks).transpose(1, 2),
        pooled_attention(heads_first, keys, both, window=7, **blocks).transpose(1, 2),
    ]


def _compare(rank: int, dtype: torch.dtype, heads: int, width: int) -> None:
    mesh, alone = init_device_mesh(DEVICE, (2,)), init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("dp", "cp"))["cp"]
    random = torch.Generator().manual_seed(0)
    rows = 2, LENGTH
    shapes = (*rows, heads, width), (*rows, width), (*rows, width), (*rows, heads), (4, width), (heads,)
    whole, results = [torch.randn(*shape, generator=random) for shape in shapes], []
    for used, kind in ((mesh, dtype), (alone, torch.float64)):
        leaves = [x.to(dtype).to(DEVICE, kind).requires_grad_() for x in whole]
        here, found = context_parallel_shard(used, leaves[:4], [1] * 4, HeadTail()), []
        for out in _results(here, *leaves[4:], used):
            grads = torch.autograd.grad(
                out.double().square().sum(), leaves, retain_graph=True, materialize_grads=True, allow_unused=True
            )
            if used is mesh:
                for grad in grads:
                    torch.distributed.all_reduce(grad)
                (out,) = context_parallel_unshard(mesh, [out], [1], HeadTail())
            found.append([x.detach().double() for x in (out, *grads)])
        q, keys, _, weights = (x.detach() for x in here)
        place: dict[str, Any] = {"size": 4, "mesh": used, "layout": HeadTail(), "seq_len": LENGTH}
        pooled, _ = pool_blocks(keys, **place)
        chosen = select_pooled(q, pooled, weights, topk=3, **place)
        (chosen,) = context_parallel_unshard(used, [chosen], [1], HeadTail())
        found.append([chosen.double()] if dtype == torch.float64 else [])
        results.append(found)
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-9
    for function, (mine, wanted) in enumerate(zip(*results, strict=True)):
        for index, (got, expected) in enumerate(zip(mine, wanted, strict=True)):
            error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-2))
            assert error <= tolerance, f"function {function}, result {index}: {error}"


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("dtype", "heads", "width"),
    [(torch.float64, 4, 32), (torch.bfloat16, 4, 32), (torch.bfloat16, 16, 128)],  # packages' kernels take the last
    ids=str,
)
def test_two_ranks(two_gpus: Processes, dtype: torch.dtype, heads: int, width: int) -> None:
    two_gpus.run(_compare, dtype, heads, width)
