"""Multi-head latent attention on two GPUs in bfloat16, with DeepSeek-V3's head dims, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.gpu_checks import WAYS, WORLD_SIZE, Tensors, captured, relative_norm, replayed_differences
from support.problems import shard
from support.processes import Processes

from cp_dtensor import Causal, Documents, HeadTail, Mask, context_parallel_mla
from cp_dtensor.engine import latent as latents

pytestmark = pytest.mark.gpu(WORLD_SIZE)
LENGTH, HEADS, PLAIN, ROTARY, VALUE, LATENT = 1237, 4, 128, 64, 128, 512
NAMES = ("out", "dq", "d latent", "d k_rope")
WITH_AUTO: dict[str, dict[str, str]] = {**WAYS, "auto": {"method": "auto"}}
MASKS: dict[str, Mask] = {"causal": Causal(), "documents": Documents([0, 500, 700, LENGTH], within=Causal())}


def _draw(seed: int, device: str = "cuda") -> Tensors:
    """q, latent, k_rope, up and the gradient of out, of the whole sequence and alike on both ranks."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    up = normal(HEADS * (PLAIN + VALUE), LATENT) * LATENT**-0.5
    q, grad_out = (normal(1, HEADS, LENGTH, dim) for dim in (PLAIN + ROTARY, VALUE))
    return q, normal(1, LENGTH, LATENT), normal(1, LENGTH, ROTARY), up, grad_out


def _on_one_device(whole: Tensors, mask: str, dtype: torch.dtype) -> Tensors:
    """out and all gradients, by torch."""
    *tensors, grad_out = (tensor.to(dtype) for tensor in whole)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    q, latent, k_rope, up = leaves
    kv = F.linear(latent, up).unflatten(2, (HEADS, -1)).transpose(1, 2)
    k = torch.cat((kv[..., :PLAIN], k_rope.unsqueeze(1).expand(-1, HEADS, -1, -1)), -1)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).tril()
    if mask == "documents":
        edges = torch.tensor([500, 700], device=q.device)
        document = torch.bucketize(torch.arange(LENGTH, device=q.device), edges, right=True)
        seen &= document[:, None] == document
    out = F.scaled_dot_product_attention(q, k, kv[..., PLAIN:], attn_mask=seen)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def _shards(whole: Tensors, rank: int) -> Tensors:
    """Of all but `up`, which every rank has."""
    dims = {4: 2, 3: 1}
    return tuple(shard(x, HeadTail(), rank, WORLD_SIZE, dims[x.dim()]) if x.dim() > 2 else x.clone() for x in whole)


def _attend(inputs: Tensors, mask: Mask, **options: Any) -> Tensors:
    """out and all gradients of shards."""
    *tensors, grad_out = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = context_parallel_mla(
        *leaves[:3], up=leaves[3], mesh=dist.group.WORLD, mask=mask, seq_len=LENGTH, **options
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def _complaints(rank: int, mask: str, most: int, device: str = "cuda") -> list[str]:
    """What is less precise than one device by more than half."""
    whole = _draw(5, device)
    truth, torchs = (_on_one_device(whole, mask, dtype) for dtype in (torch.float64, torch.bfloat16))
    exact, limits = _shards(truth[:4], rank), _shards(torchs[:4], rank)
    found = []
    usual, latents.EXPANDED_BYTES = latents.EXPANDED_BYTES, most
    try:
        for way, options in WITH_AUTO.items():
            *results, share = _attend(_shards(whole, rank), MASKS[mask], **options)
            total = share.double()
            dist.all_reduce(total)
            every = zip(
                (*NAMES, "d up"), (*results, total), (*exact, truth[4]), (*limits, torchs[4]), strict=True
            )  # fmt: skip
            for what, ours, wanted, theirs in every:
                error, limit = ((x.double() - wanted).norm().item() for x in (ours, theirs))
                if not error <= 1.5 * limit:
                    found.append(f"{way}, {what}: {error / wanted.norm().item():.1e} is {error / limit:.2f} of one")
    finally:
        latents.EXPANDED_BYTES = usual
    return found


@pytest.mark.parametrize("most", [1, latents.EXPANDED_BYTES], ids=["head by head", "all heads"])
@pytest.mark.parametrize("mask", MASKS)
def test_bf16_errors_are_near_those_of_one_gpu(gpus: Processes, mask: str, most: int) -> None:
    for complaints in gpus.run(_complaints, mask, most):
        assert not complaints, "\n".join(complaints)


def _graph(rank: int, way: str) -> list[float]:
    def call(inputs: Tensors) -> Tensors:
        return _attend(inputs, Causal(), **WAYS[way])

    return replayed_differences(rank, call, call, lambda seed: _shards(_draw(seed), rank), relative_norm)


@pytest.mark.parametrize("way", captured(["allgather", "ulysses"]))
def test_a_captured_call_takes_fresh_inputs(gpus: Processes, way: str) -> None:
    for worst in gpus.run(_graph, way):
        assert all(each < 1e-2 for each in worst), worst
