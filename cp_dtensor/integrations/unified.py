"""Attention modes with the names of ParaAttention: SDPA of a sequence that is sharded already.

    with UnifiedAttnMode(mesh):  # axes "ring" and "ulysses"
        output = transformer(hidden_states)  # this rank's tokens; SDPA attends to the tokens of all ranks

Ranks own adjacent parts of the sequence: rank = ring rank * Ulysses size + Ulysses rank. Where several sequences are
joined, such as text and image, each rank joins its parts of them; without a causal mask the order of keys does not
matter. Unlike in ParaAttention, gradients are right in every mode, under activation checkpointing too, and a mode
belongs to the thread that enters it.

Keys and values that every rank has whole, such as those of a text prompt in cross-attention, look like shards and must
be marked:

    with UnifiedAttnMode.replicated_keys():
        out = F.scaled_dot_product_attention(image_q, text_k, text_v, attn_mask=text_mask)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Contiguous, Layout, context_parallel, ring_attention, ulysses_attention
from cp_dtensor.api.extension import Mesh, local_sdpa
from cp_dtensor.integrations.ring_flash_attn import group_or_default

__all__ = [
    "RingAttnMode", "UlyssesAttnMode", "UnifiedAttnMode", "init_context_parallel_mesh", "ring_attn_func",
    "ulysses_attn_func",
]  # fmt: skip


def _refuse_of_theirs(skip_small_kv: bool, attn_func: Any) -> None:
    if skip_small_kv:
        raise NotImplementedError(
            "got skip_small_kv=True, which takes keys that are fewer than queries for whole ones: mark them, with "
            "UnifiedAttnMode.replicated_keys() around the call"
        )
    if attn_func is not None:
        raise NotImplementedError(
            f"expected attn_func=None, since torch.nn.attention.sdpa_kernel chooses the kernel; got {attn_func!r}"
        )


class UnifiedAttnMode(context_parallel):
    """Ulysses over the axis "ulysses", a ring over the axis "ring", or both.

    Args:
        mesh: a DeviceMesh with one of the axes or both; other axes, such as "batch", are not used. A process group is
            a Ulysses axis; the default group if None.
        skip_small_kv, attn_func: False and None; others are refused, with what to use instead.
        layout: the tokens of each rank, `Contiguous()` if None.
        options: those of `context_parallel`, such as `rotate_method`, `seq_len` and `debug`; raises as it does.

    Inside, an `attn_mask` has this rank's query rows and the key columns of the whole sequence.
    """

    _method: str | None = None
    """The method of one axis; None: the axes are found by their names."""

    def __init__(
        self, mesh: Mesh | None = None, *, skip_small_kv: bool = False, attn_func: Any = None,
        layout: Layout | None = None, **options: Any,
    ) -> None:  # fmt: skip
        _refuse_of_theirs(skip_small_kv, attn_func)
        axes, method = group_or_default(mesh), self._method
        if method is None and isinstance(axes, DeviceMesh):
            # DeviceMesh slices keep the mesh's own order of axes; context_parallel finds the inner axis by its name.
            names = tuple(name for name in axes.mesh_dim_names or () if name in ("ring", "ulysses"))
            if not names:
                raise ValueError(
                    'expected a mesh with an axis called "ulysses", "ring" or both; got '
                    f"{axes.mesh_dim_names or 'one without names'}"
                )
            method = "hybrid" if len(names) == 2 else names[0]
            axes = axes if len(names) == axes.ndim else axes[names]
        super().__init__(axes, method=method or "ulysses", layout=layout or Contiguous(), **options)

    @staticmethod
    def replicated_keys() -> AbstractContextManager[None]:
        """Return a context manager for queries that are shards and keys and values that every rank has whole.

        Attention inside is local. It holds for the mode around it; outside of modes it changes nothing. `attn_mask` has
        the rows of the local queries. Gradients of keys and values are the share of this rank's queries: sum them over
        the ranks, like gradients of parameters. `is_causal=True` is refused.
        """
        return local_sdpa(queries_are_shards=True)

    @staticmethod
    def disable() -> AbstractContextManager[None]:
        """Return a context manager in which q, k and v are whole, and SDPA is torch's own: for a text encoder, say.

        It holds for the mode around it; outside of modes it changes nothing. Modes entered inside hold there.
        FlexAttention, and calls that modes refuse, are refused.
        """
        return local_sdpa(queries_are_shards=False)


class RingAttnMode(UnifiedAttnMode):
    """Ring attention over one axis, a DeviceMesh of one dim or a process group; otherwise as `UnifiedAttnMode`."""

    _method = "ring"


class UlyssesAttnMode(UnifiedAttnMode):
    """Ulysses over one axis, as `RingAttnMode`. The number of heads need not be a multiple of the number of ranks."""

    _method = "ulysses"


def _function(attention: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def attn_func(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, mesh: Mesh | None = None,
        attn_func: Any = None, layout: Layout | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Compute `ring_attention` or `ulysses_attention` of arguments of `F.scaled_dot_product_attention`.

        Tensors are this rank's shards; `attn_mask` has this rank's query rows in `layout` order, and the key columns of
        the whole sequence by position. `layout` is `Contiguous()` if None, `mesh` the default group.
        """
        _refuse_of_theirs(False, attn_func)
        out: torch.Tensor = attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            mesh=group_or_default(mesh), layout=layout or Contiguous(), **options,
        )  # fmt: skip
        return out

    return attn_func


ring_attn_func = _function(ring_attention)
ulysses_attn_func = _function(ulysses_attention)


def init_context_parallel_mesh(
    device_type: str | None = None, *, mesh: DeviceMesh | None = None, max_batch_dim_size: int | None = None,
    max_ring_dim_size: int | None = None, max_ulysses_dim_size: int | None = None,
) -> DeviceMesh:  # fmt: skip
    """Make a mesh of all ranks with the axes "batch", "ring" and "ulysses". A collective over all ranks.

    The size of a limited axis is the greatest common divisor of its limit, 1 for the batch if None, and of the
    remaining ranks. One of the two other axes may be limited; the other has the remaining ranks, the Ulysses axis
    without limits. An existing `mesh` is returned unchanged.
    """
    if mesh is not None:
        return mesh
    limits = {"batch": max_batch_dim_size, "ring": max_ring_dim_size, "ulysses": max_ulysses_dim_size}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if device_type is None or min(given.values(), default=1) < 1 or {"ring", "ulysses"} <= given.keys():
        raise ValueError(
            "expected device_type where no mesh is given, and limits of at least 1, of one of the axes ring and "
            f"ulysses; got device_type={device_type!r} and the limits {given}"
        )
    world_size = dist.get_world_size()
    batch = math.gcd(world_size, given.get("batch", 1))
    ranks = world_size // batch
    ring = ranks // math.gcd(ranks, given["ulysses"]) if "ulysses" in given else math.gcd(ranks, given.get("ring", 1))
    return init_device_mesh(device_type, (batch, ring, ranks // ring), mesh_dim_names=("batch", "ring", "ulysses"))
