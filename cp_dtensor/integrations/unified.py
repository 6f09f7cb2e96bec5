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


class UnifiedAttnMode(context_parallel):
    """Ulysses over the axis "ulysses", a ring over the axis "ring", or both.

    Args:
        mesh: a DeviceMesh with one of the axes or both; other axes, such as "batch", are not used. A process group is
            a Ulysses axis; the default group if None.
        layout: the tokens of each rank, `Contiguous()` if None.
        options: those of `context_parallel`, such as `rotate_method`, `seq_len` and `debug`; raises as it does.

    Inside, an `attn_mask` has this rank's query rows and the key columns of the whole sequence.
    """

    def __init__(self, mesh: Mesh | None = None, *, layout: Layout | None = None, **options: Any) -> None:
        axes, method = self._axes_and_method(group_or_default(mesh))
        super().__init__(axes, method=method, layout=layout or Contiguous(), **options)

    @staticmethod
    def _axes_and_method(mesh: Mesh) -> tuple[Mesh, str]:
        if not isinstance(mesh, DeviceMesh):
            return mesh, "ulysses"
        # DeviceMesh slices keep the mesh's own order of axes; context_parallel finds the inner axis by its name.
        names = tuple(name for name in mesh.mesh_dim_names or () if name in ("ring", "ulysses"))
        if not names:
            raise ValueError(
                'expected a mesh with an axis called "ulysses", "ring" or both; got '
                f"{mesh.mesh_dim_names or 'one without names'}"
            )
        return (mesh if len(names) == mesh.ndim else mesh[names]), "hybrid" if len(names) == 2 else names[0]

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

    @staticmethod
    def _axes_and_method(mesh: Mesh) -> tuple[Mesh, str]:
        return mesh, "ring"


class UlyssesAttnMode(UnifiedAttnMode):
    """Ulysses over one axis, as `RingAttnMode`. The number of heads need not be a multiple of the number of ranks."""

    @staticmethod
    def _axes_and_method(mesh: Mesh) -> tuple[Mesh, str]:
        return mesh, "ulysses"


def _function(attention: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def attn_func(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, mesh: Mesh | None = None, layout: Layout | None = None,
        **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Compute `ring_attention` or `ulysses_attention` of arguments of `F.scaled_dot_product_attention`.

        Args:
            query, key, value: (B, H, S, D), this rank's shards.
            attn_mask: this rank's query rows in `layout` order, key columns of the whole sequence by position.
            mesh: the context-parallel axis, the default group if None.
            layout: the tokens of each rank, `Contiguous()` if None.
            dropout_p, is_causal, options, returns, raises: as for `context_parallel_attention`.
        """
        out: torch.Tensor = attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
            mesh=group_or_default(mesh), layout=layout or Contiguous(), **options,
        )  # fmt: skip
        return out

    return attn_func


ring_attn_func = _function(ring_attention)
ulysses_attn_func = _function(ulysses_attention)


def init_context_parallel_mesh(
    device_type: str | None = None,
    *,
    mesh: DeviceMesh | None = None,
    max_batch_dim_size: int | None = None,
    max_ring_dim_size: int | None = None,
    max_ulysses_dim_size: int | None = None,
) -> DeviceMesh:
    """Make a mesh of all ranks with the axes "batch", "ring" and "ulysses". A collective over all ranks.

    The size of a limited axis is the greatest common divisor of its limit and of the remaining ranks. Without limits
    all ranks form the Ulysses axis.

    Args:
        device_type: "cuda" or "cpu".
        mesh: an existing mesh, which is returned unchanged.
        max_batch_dim_size: limit of the batch axis, 1 if None.
        max_ring_dim_size, max_ulysses_dim_size: limit of one of the two axes; the other axis has the remaining ranks.

    Raises:
        ValueError: neither a device type nor a mesh; limits of both axes; a limit below 1.
    """
    if mesh is not None:
        return mesh
    if device_type is None:
        raise ValueError("expected device_type where no mesh is given, got None for both")
    limits = {
        "max_batch_dim_size": max_batch_dim_size,
        "max_ring_dim_size": max_ring_dim_size,
        "max_ulysses_dim_size": max_ulysses_dim_size,
    }
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ValueError(f"expected {name} to be at least 1, got {limit}")
    if max_ring_dim_size is not None and max_ulysses_dim_size is not None:
        raise ValueError(
            f"expected a limit of one axis, got max_ring_dim_size={max_ring_dim_size} and "
            f"max_ulysses_dim_size={max_ulysses_dim_size}"
        )
    world_size = dist.get_world_size()
    batch = math.gcd(world_size, max_batch_dim_size or 1)
    of_sequence = world_size // batch
    if max_ulysses_dim_size is not None:
        ring = of_sequence // math.gcd(of_sequence, max_ulysses_dim_size)
    else:
        ring = math.gcd(of_sequence, max_ring_dim_size or 1)
    shape = (batch, ring, of_sequence // ring)
    return init_device_mesh(device_type, shape, mesh_dim_names=("batch", "ring", "ulysses"))
