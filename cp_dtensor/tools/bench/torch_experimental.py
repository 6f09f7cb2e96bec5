"""torch's experimental context parallel, of SDPA and of FlexAttention; the only tool that uses private torch names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

from cp_dtensor import Documents
from cp_dtensor.tools.bench.cases import Attention, Case, Method, Select, Shards
from cp_dtensor.tools.bench.flex import BLOCK, check_device, mask_mod, whole_mask, with_gradients
from cp_dtensor.tools.bench.results import TORCH_PREFIX

Backend = Callable[[Case, torch.device], AbstractContextManager[None]]
Sdpa = Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def torch_methods(backend: Backend, sdpa: Sdpa) -> tuple[list[Method], list[Method]]:
    """Returns a method for each rotation of torch's rings, and one for each load balancer of FlexAttention.

    Args:
        backend: allows the backend of a case only.
        sdpa: computes attention of a case.
    """
    # With q, k, v and grad_out as models have them, its backward with cuDNN fails on all ranks but the last: out is
    # contiguous wherever half of it was merged, and halves of differing strides trip an assertion.
    rings = [
        Method(
            TORCH_PREFIX + name, partial(_ring, backend, sdpa, name), _ring_refusal, suits=lambda case: case.is_plain,
            contiguous=True, may_expand_kv=True,
        )
        for name in ("allgather", "alltoall")
    ]  # fmt: skip
    flex = [
        Method(
            f"{TORCH_PREFIX}flex {name}", partial(_flex, name), partial(_flex_refusal, name),
            shards=Rearranged(name), suits=suits, by_default=False, contiguous=True,
        )
        for name, suits in {
            "HeadTail": lambda case: case.mask != "full",
            "PerDocument": lambda case: isinstance(case.mask_value, Documents),
            "PTRR": lambda case: not case.is_plain,
        }.items()
    ]  # fmt: skip
    return rings, flex


# SDPA


@contextmanager
def _ring(backend: Backend, sdpa: Sdpa, rotate_method: str, case: Case, device: torch.device) -> Iterator[Attention]:
    from torch.distributed.tensor.experimental import context_parallel  # takes a second

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # The context refuses to work without a buffer; the buffer's length tells whether the load can be balanced.
    buffer = torch.zeros(case.seq_len, device=device)
    balanced = case.mask == "causal" and case.layout == "HeadTail"
    with backend(case, device), _ring_settings(rotate_method, balanced):
        context = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])
        context.__enter__()
        try:
            yield partial(sdpa, case)
        finally:
            # With an exception as argument, the context of some versions leaves SDPA patched.
            context.__exit__(None, None, None)


@contextmanager
def _ring_settings(rotate_method: str, load_balance: bool) -> Iterator[None]:
    from torch.distributed.tensor.experimental import _attention

    options = _attention._cp_options
    before = options.rotate_method, options.enable_load_balance
    _attention.set_rotate_method(rotate_method)
    options.enable_load_balance = load_balance
    try:
        yield
    finally:
        options.rotate_method, options.enable_load_balance = before


def _ring_refusal(case: Case, world_size: int) -> str | None:
    if case.mask == "causal" and case.layout not in ("HeadTail", "Contiguous"):
        return f"torch has no layout like {case.layout}"
    pieces = 2 * world_size if case.layout == "HeadTail" else world_size
    if case.seq_len % pieces:
        return f"the length is not a multiple of {pieces}"
    return None


# FlexAttention


@dataclass(frozen=True)
class Rearranged(Shards):
    """Contiguous parts of the sequence as one of torch's load balancers rearranges it."""

    balancer: str

    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        indices = _balancer(self.balancer, case, world_size, device)._generate_indices(restore=False)[0]
        mine = indices.tensor_split(world_size)[rank]
        return lambda tokens: tokens.index_select(1, mine)


@lru_cache
def _balancer(name: str, case: Case, world_size: int, device: torch.device) -> Any:
    """Returns a load balancer: "HeadTail", "PerDocument" or "PTRR" (blocks by the number of keys that they see)."""
    from torch.distributed.tensor.experimental import _attention

    check_device(device)
    if name == "HeadTail":
        return _attention._HeadTailLoadBalancer(case.seq_len, world_size, device)
    if name == "PerDocument":
        return _attention._PerDocumentHeadTailLoadBalancer([list(_lengths(case))], world_size, device)
    return _attention._PTRRLoadBalancer(whole_mask(case, device), world_size)


def _flex_refusal(name: str, case: Case, world_size: int) -> str | None:
    if case.batch != 1:
        return "the method is for one batch row"
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
def _flex(name: str, case: Case, device: torch.device) -> Iterator[Attention]:
    yield _flex_compiled(name, case, device)


@lru_cache(maxsize=1)  # compiled once for both passes
def _flex_compiled(name: str, case: Case, device: torch.device) -> Attention:
    from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

    torch.compiler.reset()
    mesh = _mesh(device.type)
    group = mesh.get_group().group_name
    takes_block_size = "BLOCK_SIZE" in inspect.signature(_create_cp_block_mask).parameters  # from 2.15 on
    blocks = _create_cp_block_mask(
        mask_mod(case, device), 1, 1, case.seq_len, case.seq_len, device_mesh=mesh,
        load_balancer=_balancer(name, case, mesh.size(), device),
        **({"BLOCK_SIZE": (BLOCK, BLOCK)} if takes_block_size else {}),
    )  # fmt: skip
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = flex_cp_allgather(k, v, 2, group)
        out = compiled(q, k, v, block_mask=blocks, enable_gqa=case.enable_gqa)
        assert isinstance(out, torch.Tensor)
        return out

    return with_gradients(attention)


@lru_cache
def _mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),))
