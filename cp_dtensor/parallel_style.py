"""Context parallelism as a property of a module."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from cp_dtensor import _torch_private
from cp_dtensor.arguments import group_of
from cp_dtensor.functional import RingSettings, checked_layout, checked_seq_len
from cp_dtensor.layouts import Layout
from cp_dtensor.region import Region
from cp_dtensor.rotation.choice import rotation_by_name


class ContextParallel(ParallelStyle):
    """`parallelize_module(attention, mesh["cp"], ContextParallel())`: SDPA inside of `attention` is ring attention.

    The module form of `context_parallel`. It belongs to the module, so it holds whenever and wherever its forward
    runs: in a recompute under any activation checkpointing, after any context, in any thread. It does not shard
    inputs; pass it shards, from `context_parallel_shard` say.

    Args:
        layout: which rank owns which tokens, `HeadTail()` if None.
        rotate_method: "allgather" or "alltoall", the process default (at the time of parallelize_module) if None.
        seq_len: global number of tokens, if it is always the same. Otherwise the ranks exchange their local lengths
            in one small collective per call.
        debug: at every attention call, let the ranks compare what must agree; a disagreement names the rank.

    Raises:
        TypeError, ValueError: arguments that do not fit; a mesh of several dims; a module that has the style already.
    """

    def __init__(
        self,
        *,
        layout: Layout | None = None,
        rotate_method: str | None = None,
        seq_len: int | None = None,
        debug: bool = False,
    ) -> None:
        super().__init__()
        self._layout = checked_layout(layout)
        self._rotate_method = rotate_method
        rotation_by_name(rotate_method)  # refuses unknown names here already
        self._lengths = None if seq_len is None else (checked_seq_len(seq_len)[0],)
        self._debug = debug

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | dist.ProcessGroup) -> nn.Module:
        if getattr(module.forward, "is_context_parallel", False):
            raise ValueError(f"{type(module).__name__} is context parallel already")
        rotation = rotation_by_name(self._rotate_method)
        region = Region(RingSettings(group_of(device_mesh), self._layout, rotation, self._lengths, self._debug))
        forward = module.forward

        @functools.wraps(forward)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with region.entered():
                return forward(*args, **kwargs)

        in_region.is_context_parallel = True  # type: ignore[attr-defined]
        module.forward = _torch_private.never_compiled(in_region)
        return module
