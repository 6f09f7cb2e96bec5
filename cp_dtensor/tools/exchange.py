"""Checks of several ranks together: bandwidth of exchanges, shared memory, and results of every method."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import (
    Causal,
    Documents,
    Hardware,
    Mask,
    context_parallel_attention,
    context_parallel_shard,
    local_positions,
)
from cp_dtensor.comm.links import link_speed
from cp_dtensor.tools.errors import seen_keys
from cp_dtensor.tools.machine import NOTE, OK, PROBLEM, Finding, gpu_name

_EXCHANGED = 4 << 20
"""Bytes of each rank in an all-gather."""
_LEAST_OF_LINK = 0.5
_HEAD_DIM, _TOKENS = 64, 128
"""Of the small calls; tokens of each rank."""
_TOLERANCE = {"cpu": 1e-9, "cuda": 2e-2}
"""Largest relative error: of float64 on CPUs, and of bfloat16 on GPUs, whose kernels reach 2e-3 to 8e-3."""
MASKS = ("causal", "documents")


def first_kernels(device: torch.device) -> Iterator[Finding]:
    """Compiles and runs the kernels of masks, on each rank alone; a collective."""
    began = time.monotonic()
    dtype = torch.float64 if device.type == "cpu" else torch.bfloat16
    q = torch.randn(1, 2, 256, _HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
    alone, _ = dist.new_subgroups(1)
    out = context_parallel_attention(q, q, q, mesh=alone, mask=Documents([0, 100, 256]))
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    what = "kernels compiled and ran" if device.type == "cuda" else "torch operations on CPUs"
    yield Finding("masks", OK, f"{what}, {time.monotonic() - began:.1f} s")


def bandwidth(group: dist.ProcessGroup, device: torch.device, hosts: int) -> Iterator[Finding]:
    """All-gathers bytes, checks them, and compares the bandwidth with that of the link; a collective."""
    world_size, rank = group.size(), group.rank()
    name = "gloo" if device.type == "cpu" else "NCCL"
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the former since torch 2.13
    rows = torch.full((_EXCHANGED,), rank + 1, dtype=torch.uint8, device=device)
    gathered = torch.zeros(world_size * _EXCHANGED, dtype=torch.uint8, device=device)
    gather(gathered, rows, group=group)
    # Before the check: a rank that finds a problem leaves, and others must not wait for it.
    if device.type == "cuda" and world_size > 1:
        gpu, per_second = gpu_name(), link_speed(group, device)
    else:
        gpu, best = None, float("inf")
        for _ in range(2):
            dist.barrier(group)
            began = time.perf_counter()
            gather(gathered, rows, group=group)
            best = min(best, time.perf_counter() - began)
        per_second = (world_size - 1) * _EXCHANGED / best
    if not torch.equal(gathered[::_EXCHANGED].cpu(), torch.arange(1, world_size + 1, dtype=torch.uint8)) or any(
        (each != each[0]).any() for each in gathered.view(world_size, -1)
    ):
        yield Finding(name, PROBLEM, f"an all-gather gave rank {rank} other bytes than were sent", "check the links")
        return
    if world_size == 1:
        yield Finding(name, OK, "works; one rank has nothing to exchange")
    else:
        yield link(name, gpu, world_size, hosts, per_second)


def link(name: str, gpu: str | None, world_size: int, hosts: int, per_second: float) -> Finding:
    """The finding about the measured bytes per second into a rank."""
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    text = f"all-gather over {world_size} ranks on {where}: {per_second / 1e9:.3g} GB/s into a rank"
    if gpu is None:
        return Finding(name, OK, text)
    if hosts > 1:
        expected = Hardware.of(f"{gpu}, InfiniBand NDR").link_speed
        return Finding(name, OK, f"{text}; with InfiniBand NDR for each GPU expect about {expected / 1e9:.3g}")
    expected = Hardware.of(gpu).link_speed
    slow = per_second < _LEAST_OF_LINK * expected
    remedy = "look for links that are down: nvidia-smi topo -m, nvidia-smi nvlink --status" if slow else ""
    text += f"; NVLink of {gpu}s gives about {expected / 1e9:.3g}"
    return Finding(name, PROBLEM if slow else OK, text, remedy)


def symmetric_memory(obstacle: str | None, world_size: int, hosts: int) -> Finding:
    """The finding about memory that ranks share; `obstacle` is the reason why they share none."""
    name = "symmetric memory"
    if world_size == 1:
        return Finding(name, NOTE, "not tried: it needs two ranks")
    if obstacle is None:
        return Finding(name, OK, "ranks read each other's memory")
    if hosts > 1:
        return Finding(name, NOTE, f"not over all ranks: {obstacle}; ranks of one host may share memory")
    remedy = "K/V travel by NCCL instead; containers need --ipc=host and all GPUs of the host"
    return Finding(name, PROBLEM if gpu_name() else NOTE, obstacle, remedy)  # other GPUs need not have NVLink


Way = tuple[str, DeviceMesh, str, str | None]
"""Name, mesh, method and KV transport."""


def methods(world_size: int, device: torch.device, shares_memory: bool) -> list[Way]:
    """Every method that this number of ranks allows."""
    flat = init_device_mesh(device.type, (world_size,), mesh_dim_names=("cp",))
    transports = ("allgather", "alltoall", *(("symm_mem",) if shares_memory else ()))
    found: list[Way] = [
        *((f"ring by {name}", flat, "ring", name) for name in transports),
        ("ulysses", flat, "ulysses", None),
    ]
    if world_size >= 4 and world_size % 2 == 0:
        shape, names = (2, world_size // 2), ("ring", "ulysses")
        nested = init_device_mesh(device.type, shape, mesh_dim_names=names)
        found += [("hybrid", nested, "hybrid", None), ("nested ring", nested, "ring", None)]
    return found


class Problem:
    """A small attention problem, whole on every rank, and its results in float64 on one device."""

    def __init__(self, mask_name: str, world_size: int, device: torch.device) -> None:
        length, heads = _TOKENS * world_size, max(4, world_size)
        cuts = [0, 50, length // 2 + 7, length]
        self._mask: Mask = Causal() if mask_name == "causal" else Documents(cuts, within=Causal())
        generator = torch.Generator().manual_seed(0)
        dtype = torch.float64 if device.type == "cpu" else torch.bfloat16
        self._inputs = [  # q, k, v and the gradient of out
            torch.randn(1, count, length, _HEAD_DIM, generator=generator, dtype=torch.float64).to(device, dtype)
            for count in (heads, heads // 2, heads // 2, heads)
        ]
        first, last = seen_keys(self._mask, length).to(device)
        column = torch.arange(length, device=device)
        allowed = (column >= first[:, None]) & (column < last[:, None])
        self._truth = _attention([each.double() for each in self._inputs], allowed)
        self._norms = [truth.norm() for truth in self._truth]
        self._limit = _TOLERANCE[device.type]

    def error(self, mesh: DeviceMesh, method: str, transport: str | None) -> float:
        """The largest error of out, dq, dk and dv of this rank, over the limit; a collective."""
        dims = [2] * 4
        q, k, v, grad = context_parallel_shard(mesh, self._inputs, dims)
        q, k, v = (each.requires_grad_() for each in (q, k, v))
        length = self._inputs[0].size(2)
        out = context_parallel_attention(
            q, k, v, mesh=mesh, method=method, rotate_method=transport, mask=self._mask, enable_gqa=True, seq_len=length
        )
        assert isinstance(out, torch.Tensor)
        out.backward(grad)
        mine = local_positions(mesh, length).to(q.device)
        results = zip((out.detach(), q.grad, k.grad, v.grad), self._truth, self._norms, strict=True)
        errors = [
            float((found.double() - truth[:, :, mine]).norm() / norm) / self._limit  # type: ignore[union-attr]
            for found, truth, norm in results
        ]
        return max(errors) if all(error == error for error in errors) else float("inf")


def _attention(inputs: Sequence[torch.Tensor], allowed: torch.Tensor) -> list[torch.Tensor]:
    """out, dq, dk and dv on one device, of q, k, v and the gradient of out."""
    q, k, v = leaves = [each.detach().requires_grad_() for each in inputs[:3]]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]
