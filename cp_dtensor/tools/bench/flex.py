"""FlexAttention, compiled: torch's context parallel of it, and ours; both gather all K/V."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

from cp_dtensor.api.flex.attention import context_parallel_flex_attention
from cp_dtensor.api.sharding import take_shard
from cp_dtensor.comm.symm_mem_workspace import allocated_bytes
from cp_dtensor.spec.balanced_layouts import BalancedBlocks
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.tools.bench.baseline import Baseline
from cp_dtensor.tools.bench.cases import LAYOUTS, Case
from cp_dtensor.tools.bench.flex_masks import BLOCK, mask_mod, whole_mask
from cp_dtensor.tools.bench.inputs import ByLayout, Select, Shards
from cp_dtensor.tools.bench.rows import OURS_PREFIX, TORCH_PREFIX
from cp_dtensor.tools.bench.work import Attention

if TYPE_CHECKING:
    from cp_dtensor.tools.bench.torch_private import FlexBalancer


def flex_baselines() -> list[Baseline]:
    """Ours, in the layout of the case and in each other, and one for each of torch's load balancers."""
    partitions: dict[str, ByLayout | InBlocks] = {"flex": ByLayout(), "flex BalancedBlocks": InBlocks()}
    partitions.update({f"flex {name}": ByLayout(name) for name in LAYOUTS})
    ours = [
        Baseline(
            OURS_PREFIX + name, partial(_ours, shards), partial(_our_refusal, shards), allocated_bytes, shards=shards,
            suits=lambda case: case.mask != "full", by_default=False,
        )
        for name, shards in partitions.items()
    ]  # fmt: skip
    theirs = [
        Baseline(
            f"{TORCH_PREFIX}flex {name}", partial(_torchs, name), partial(_torch_refusal, name),
            shards=Rearranged(name), suits=suits, by_default=False, contiguous=True,
        )
        for name, suits in {
            "HeadTail": lambda case: case.mask != "full",
            "PerDocument": lambda case: isinstance(case.mask_value, Documents),
            "PTRR": lambda case: not case.is_plain,
        }.items()
    ]  # fmt: skip
    return [*ours, *theirs]


@dataclass(frozen=True)
class InBlocks(Shards):
    """Whole blocks of the mask."""

    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        layout = _layout(self, case, device)
        return lambda tokens: take_shard(tokens, 1, layout, rank, world_size)


@lru_cache
def _layout(shards: ByLayout | InBlocks, case: Case, device: torch.device) -> Layout:
    if isinstance(shards, ByLayout):
        return case.layout_value(shards.name)
    return BalancedBlocks(whole_mask(case, device))


@contextmanager
def _ours(shards: ByLayout | InBlocks, case: Case, device: torch.device) -> Iterator[Attention]:
    yield _ours_compiled(shards, case, device)


@lru_cache(maxsize=1)  # compiled once for both passes, and for this length alone
def _ours_compiled(shards: ByLayout | InBlocks, case: Case, device: torch.device) -> Attention:
    _check_device(device)
    torch.compiler.reset()
    group = dist.group.WORLD
    assert group is not None
    layout, mask = _layout(shards, case, device), whole_mask(case, device)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = context_parallel_flex_attention(
            q, k, v, mesh=group, block_mask=mask, enable_gqa=case.enable_gqa, layout=layout, seq_len=case.seq_len,
            compiled=True,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    return _with_gradients(attention)


def _our_refusal(shards: ByLayout | InBlocks, case: Case, world_size: int) -> str | None:
    if case.seq_len % BLOCK:
        return f"the length is not a multiple of {BLOCK}"
    if isinstance(shards, ByLayout):
        try:
            case.layout_value(shards.name)
        except ValueError as error:
            return str(error)
    return None


@dataclass(frozen=True)
class Rearranged(Shards):
    """Contiguous parts of the sequence as a load balancer rearranges it."""

    balancer: str

    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        mine = _balancer(self.balancer, case, world_size, device).positions().tensor_split(world_size)[rank]
        return lambda tokens: tokens.index_select(1, mine)


@lru_cache
def _balancer(name: str, case: Case, world_size: int, device: torch.device) -> FlexBalancer:
    from cp_dtensor.tools.bench.torch_private import FlexBalancer  # takes a second, and only we need it

    _check_device(device)
    if name == "HeadTail":
        return FlexBalancer.head_tail(case.seq_len, world_size, device)
    if name == "PerDocument":
        return FlexBalancer.per_document(_lengths(case), world_size, device)
    return FlexBalancer.by_processing_time(whole_mask(case, device), world_size)


def _torch_refusal(name: str, case: Case, world_size: int) -> str | None:
    if case.batch != 1:
        return "it is for one batch row"
    if case.seq_len % (BLOCK * world_size):
        return f"the length is not a multiple of {BLOCK} for each rank"
    if name == "PerDocument" and any(length % (2 * world_size) for length in _lengths(case)):
        return f"not all lengths of documents are multiples of {2 * world_size}"
    return None


def _lengths(case: Case) -> tuple[int, ...]:
    mask = case.mask_value
    assert isinstance(mask, Documents)
    return mask.lengths


@contextmanager
def _torchs(name: str, case: Case, device: torch.device) -> Iterator[Attention]:
    yield _torchs_compiled(name, case, device)


@lru_cache(maxsize=1)  # compiled once for both passes; what has been compiled for others is forgotten
def _torchs_compiled(name: str, case: Case, device: torch.device) -> Attention:
    from cp_dtensor.tools.bench.torch_private import flex_cp_allgather

    torch.compiler.reset()
    mesh = _mesh(device.type)
    group = mesh.get_group().group_name
    balancer = _balancer(name, case, mesh.size(), device)
    blocks = balancer.block_mask(mask_mod(case, device), case.seq_len, mesh)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = flex_cp_allgather(k, v, 2, group)
        out = compiled(q, k, v, block_mask=blocks, enable_gqa=case.enable_gqa)
        assert isinstance(out, torch.Tensor)
        return out

    return _with_gradients(attention)


def _with_gradients(attention: Attention) -> Attention:
    """The same, as if all inputs had gradients: without them it would be compiled once more."""

    def with_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            return attention(q, k, v)

    return with_gradients


def _check_device(device: torch.device) -> None:
    if device.type == "cpu":
        raise NotImplementedError("FlexAttention has no backward on CPUs")


@lru_cache
def _mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),))
