"""FlexAttention in contexts on two GPUs, with a new block mask in every step of compiled code."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.compile_checks import fresh
from support.gpu_checks import WORLD_SIZE
from support.processes import Processes
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cp_dtensor import context_parallel, context_parallel_shard

pytestmark = pytest.mark.gpu(WORLD_SIZE)
LENGTH, APART = 1024, 256
STEPS = (100, 300, 200, 500, 60, 700)


def layers_with_masks(x: torch.Tensor, start: torch.Tensor, layers: int) -> torch.Tensor:
    """Each causal in two documents, of which the second begins at `start`, and APART later in the next layer."""
    for _ in range(layers):
        x = _attend(x, (torch.arange(LENGTH, device=x.device) >= start).int())
        start = start + APART + (x[0, 0, 0, 0] * 0).int()  # so that the next mask is made only now
    return x


def _attend(x: torch.Tensor, ids: torch.Tensor) -> Any:
    def one_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[i] == ids[j])

    mask = create_block_mask(one_document, None, None, LENGTH, LENGTH, device=x.device)
    return flex_attention(x, x, x, block_mask=mask)


def dense_layers(x: torch.Tensor, start: int, layers: int) -> torch.Tensor:
    """The same on one device."""
    i = torch.arange(LENGTH, device=x.device)
    for layer in range(layers):
        second = i >= start + layer * APART
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=(i[:, None] >= i) & (second[:, None] == second))
    return x


def errors(rank: int, layers: int, device_type: str, options: dict[str, Any]) -> list[float]:
    """Of all steps, relative."""
    fresh()
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # one of torch's own
    warnings.filterwarnings("ignore", ".*autograd.function.Function.* should not be instantiated")  # Dynamo does
    device = torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else 0)
    whole = torch.randn(1, 4, LENGTH, 64, device=device, generator=torch.Generator(device).manual_seed(1))
    compiled: Any = torch.compile(layers_with_masks, fullgraph=True, **options)
    found = []
    with torch.no_grad():
        for start in STEPS:
            x, expected = context_parallel_shard(dist.group.WORLD, [whole, dense_layers(whole, start, layers)], [2, 2])
            torch.compiler.cudagraph_mark_step_begin()
            with context_parallel(dist.group.WORLD, seq_len=LENGTH):
                out = compiled(x, torch.tensor(start, device=device, dtype=torch.int32), layers)
            found.append(((out - expected).norm() / expected.norm()).item())
    return found


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_every_step_has_its_own_mask(gpus: Processes, mode: str, layers: int) -> None:
    for found in gpus.run(errors, layers, "cuda", {"mode": mode}):
        assert all(each < 1e-2 for each in found), found
