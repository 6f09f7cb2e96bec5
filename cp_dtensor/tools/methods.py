"""The methods of the benchmarks by name: one GPU as the ideal, this library's, and torch's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor import context_parallel, context_parallel_attention, context_parallel_flex_attention
from cp_dtensor.comm.symm_mem_workspace import p2p_obstacle
from cp_dtensor.tools.cases import BLOCK, WHOLE, Attention, Case, Method, block_mask, require
from cp_dtensor.tools.parsing import LAYOUTS
from cp_dtensor.tools.torch_methods import (
    allowed_backend,
    compiled_flex,
    mesh_of_ranks,
    sdpa,
    torch_methods,
    varlen,
)

IDEAL, OURS = "ideal", "ours-"
"""Beginnings of the names of methods: of one GPU with the whole sequence, and of this library."""
_SPLITS: dict[str, tuple[str, str, int | None]] = {
    **{name: ("ring", name, None) for name in ("allgather", "alltoall", "symm_mem")},
    "ulysses": ("ulysses", "auto", None),
    "hybrid-2": ("hybrid", "auto", 2),
    "hybrid-4": ("hybrid", "auto", 4),
    "nested-2": ("ring", "auto", 2),
    "nested-4": ("ring", "auto", 4),
    "auto": ("auto", "auto", None),
    "auto-2": ("auto", "auto", 2),
    "auto-4": ("auto", "auto", 4),
}
"""Method, KV transport and number of ranks of the inner mesh axis (None for one axis) of this library's ways."""


def methods_by_name(
    names: Sequence[str] | None = None, *, graph: bool = False, compiled: str | None = None
) -> list[Method]:
    """Return the methods of names such as "ours-auto Balanced"; with None, those that are measured by default.

    With `graph`, this library's methods are added as CUDA graphs; with `compiled`, those whose names begin so under
    torch.compile.

    Raises:
        ValueError: no method has one of the names.
    """
    known = {method.name: method for method in _all_methods()}
    by_default = [name for name, each in known.items() if each.by_default]
    if unknown := [name for name in names or () if name not in known]:
        listed = ", ".join(name for name in known if name in by_default or not name.startswith(OURS))
        with_layout = f"ours also with a layout, such as '{OURS}auto Balanced'"
        raise ValueError(f"unknown method {unknown[0]!r}: expected some of {listed}; {with_layout}")
    result = []
    for name in by_default if names is None else dict.fromkeys(names):
        result.append(known[name])
        if compiled is not None and name.startswith(compiled):
            result.append(replace(known[name], name=f"{name} compiled", compiled=True))
        if graph and name.startswith(OURS):
            result.append(replace(known[name], name=f"{name} graph", captured=True))
    return result


def _all_methods() -> list[Method]:
    one_gpu = [
        Method(IDEAL, sdpa, WHOLE, context=allowed_backend),
        Method(f"{IDEAL}-installed", _by_installed_kernels, WHOLE, context=_backend),
        Method(f"{IDEAL}-varlen", partial(varlen, True), WHOLE, by_default=False),
    ]
    ours = [_ours(split, layout) for layout in ("", *LAYOUTS) for split in _SPLITS]
    flex = [_ours_flex(layout) for layout in ("", *LAYOUTS, "BalancedBlocks")]
    return [*one_gpu, *ours, *flex, *torch_methods()]


def _backend(case: Case, device: torch.device) -> AbstractContextManager[object]:
    """Allow the backend of the case only; with "auto", the library chooses."""
    return nullcontext() if case.backend == "auto" else allowed_backend(case, device)


# One GPU: the time of the whole sequence, to be divided by the number of ranks


def _by_installed_kernels(case: Case, device: torch.device) -> Attention:
    """Return attention over one rank, by the kernels that this library chooses of those that are installed."""
    return _attention(case, mesh=_group_of_this_rank())


@cache
def _group_of_this_rank() -> dist.ProcessGroup:
    # NCCL would split the default group, for which every rank has to call.
    group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


# This library


def _attention(case: Case, **options: Any) -> Attention:
    options |= {"seq_len": case.seq_len, "mask": case.mask_value, "enable_gqa": True}
    compute: Any = context_parallel_attention  # which returns out alone
    return lambda q, k, v: compute(q, k, v, **options)


def _ours(split: str, layout: str) -> Method:
    """Return a way of splitting attention over the ranks, in the layout of a name; "" for the default one."""
    method, rotate_method, inner = _SPLITS[split]
    given, layout = layout, layout or "HeadTail"

    def options(case: Case, device: torch.device) -> dict[str, Any]:
        world_size = dist.get_world_size()
        fits = inner is None or (world_size % inner == 0 and inner < world_size)
        require(fits, f"it needs several times {inner} ranks")
        mesh = mesh_of_ranks(device.type, inner)
        if rotate_method == "symm_mem" and (obstacle := p2p_obstacle(mesh.get_group(), device)):
            raise NotImplementedError(obstacle)
        return {"mesh": mesh, "layout": case.layout(layout), "rotate_method": rotate_method}

    def attention(case: Case, device: torch.device) -> Attention:
        return _attention(case, method=method, **options(case, device))

    def shards(case: Case, device: torch.device, buffers: list[torch.Tensor]) -> AbstractContextManager[object]:
        return context_parallel(  # `is_causal` of the calls is the mask of the case "causal"
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=buffers, method=method,
            mask=None if case.is_plain else case.mask_value, **options(case, device),
        )  # fmt: skip

    name = f"{OURS}{split} {given}".rstrip()
    by_default = not given and not split.startswith("auto-")
    return Method(name, attention, layout, context=_backend, shards=shards, by_default=by_default)


def _ours_flex(layout: str) -> Method:
    """Return context parallel of FlexAttention, compiled, in the layout of a name; "" for the default one."""
    given, layout = layout, layout or "HeadTail"

    @lru_cache(maxsize=1)  # compiled once for both passes, and for this length alone
    def attention(case: Case, device: torch.device) -> Attention:
        require(case.mask != "full", "the method is for masks")
        require(case.seq_len % BLOCK == 0, f"the length is not a multiple of {BLOCK}")
        options: dict[str, Any] = {"mesh": mesh_of_ranks(device.type), "layout": case.layout(layout, device)}
        options |= {"block_mask": block_mask(case, device), "enable_gqa": True, "seq_len": case.seq_len}
        compute: Any = context_parallel_flex_attention  # which returns out alone
        return compiled_flex(lambda q, k, v: compute(q, k, v, compiled=True, **options), device)

    return Method(f"{OURS}flex {given}".rstrip(), attention, layout, by_default=False)
