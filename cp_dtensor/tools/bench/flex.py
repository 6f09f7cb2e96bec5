"""torch's context parallel of FlexAttention: K/V are gathered in the order of a load balancer, masks are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cp_dtensor.documents import Documents
from cp_dtensor.masks import Causal, SlidingWindow
from cp_dtensor.tools.bench.cases import Case
from cp_dtensor.tools.bench.contestant import Contestant
from cp_dtensor.tools.bench.inputs import Select, Shards
from cp_dtensor.tools.bench.rows import TORCH_PREFIX
from cp_dtensor.tools.bench.work import Attention

if TYPE_CHECKING:
    from cp_dtensor._torch_private.experimental_flex import FlexBalancer

_BLOCK = 128
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def flex_contestants() -> list[Contestant]:
    """One for each of torch's load balancers."""
    return [
        Contestant(
            f"{TORCH_PREFIX}flex {name}", partial(_attention, name), partial(_refusal, name), shards=Rearranged(name),
            suits=suits, by_default=False, contiguous=True,
        )
        for name, suits in {
            "HeadTail": lambda case: case.mask != "full",
            "PerDocument": lambda case: isinstance(case.mask_value, Documents),
            "PTRR": lambda case: not case.is_plain,
        }.items()
    ]  # fmt: skip


@dataclass(frozen=True)
class Rearranged(Shards):
    """Contiguous parts of the sequence as a load balancer rearranges it."""

    balancer: str

    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        mine = _balancer(self.balancer, case, world_size, device).positions().tensor_split(world_size)[rank]
        return lambda tokens: tokens.index_select(1, mine)


@lru_cache
def _balancer(name: str, case: Case, world_size: int, device: torch.device) -> FlexBalancer:
    from cp_dtensor._torch_private.experimental_flex import FlexBalancer  # takes a second, and only we need it

    if device.type == "cpu":
        raise NotImplementedError("FlexAttention has no backward on CPUs")
    if name == "HeadTail":
        return FlexBalancer.head_tail(case.seq_len, world_size, device)
    if name == "PerDocument":
        return FlexBalancer.per_document(_lengths(case), world_size, device)
    return FlexBalancer.by_processing_time(_blocks(case, device), world_size)


def _blocks(case: Case, device: torch.device) -> BlockMask:
    """The whole mask in blocks: torch's own function for it would have to be compiled."""
    mask_mod, position = _mask_mod(case, device), torch.arange(case.seq_len, device=device)
    none = torch.zeros((), dtype=torch.int64, device=device)
    shown = [
        mask_mod(none, none, rows[:, None], position).unflatten(1, (-1, _BLOCK)).any((0, 2))
        for rows in position.split(_BLOCK)
    ]
    of_rows = torch.stack(shown)[None, None].to(torch.int32)
    by_column = of_rows.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(of_rows.sum(-1, dtype=torch.int32), by_column, BLOCK_SIZE=_BLOCK)


def _refusal(name: str, case: Case, world_size: int) -> str | None:
    if case.batch != 1:
        return "it is for one batch row"
    if case.seq_len % (_BLOCK * world_size):
        return f"the length is not a multiple of {_BLOCK} for each rank"
    if name == "PerDocument" and any(length % (2 * world_size) for length in _lengths(case)):
        return f"not all lengths of documents are multiples of {2 * world_size}"
    return None


def _lengths(case: Case) -> tuple[int, ...]:
    mask = case.mask_value
    assert isinstance(mask, Documents)
    return mask.lengths


@contextmanager
def _attention(name: str, case: Case, device: torch.device) -> Iterator[Attention]:
    yield _compiled(name, case, device)


@lru_cache(maxsize=1)  # compiled once for both passes; what has been compiled for others is forgotten
def _compiled(name: str, case: Case, device: torch.device) -> Attention:
    from cp_dtensor._torch_private.experimental_flex import flex_cp_allgather

    torch.compiler.reset()
    mesh = _mesh(device.type)
    group = mesh.get_group().group_name
    balancer = _balancer(name, case, mesh.size(), device)
    blocks = balancer.block_mask(_mask_mod(case, device), case.seq_len, mesh)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Without gradients it would be compiled once more.
        q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            k, v = flex_cp_allgather(k, v, 2, group)
            out = compiled(q, k, v, block_mask=blocks, enable_gqa=case.enable_gqa)
        assert isinstance(out, torch.Tensor)
        return out

    return attention


@lru_cache
def _mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _mask_mod(case: Case, device: torch.device) -> MaskMod:
    """The mask, as FlexAttention takes it."""
    match case.mask_value:
        case Documents(cu_seqlens, _, Causal()) as documents:
            lengths = torch.tensor(documents.lengths)
            document = torch.arange(len(cu_seqlens) - 1).repeat_interleave(lengths).to(device)
            return lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv])
        case SlidingWindow(left, 0) if left is not None:
            return lambda b, h, q, kv: (q >= kv) & (q - kv <= left)
        case Causal():
            return lambda b, h, q, kv: q >= kv
    raise NotImplementedError(f"no FlexAttention for {case.mask}")
