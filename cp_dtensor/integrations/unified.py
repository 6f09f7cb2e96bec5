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
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Contiguous, Layout, context_parallel, ring_attention, ulysses_attention
from cp_dtensor.api.extension import Mesh, local_sdpa
from cp_dtensor.integrations.ring_flash_attn import group_or_default

__all__ = [
    "RingAttnMode",
    "UlyssesAttnMode",
    "UnifiedAttnMode",
    "in_batch_attn_func",
    "init_context_parallel_mesh",
    "ring_attn_func",
    "ulysses_attn_func",
]


class _AttnMode(context_parallel):
    """Base of the modes."""

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        layout: Layout | None = None,
        rotate_method: str | None = None,
        seq_len: int | tuple[int, ...] | None = None,
        debug: bool = False,
    ) -> None:
        axes, method = self._axes_and_method(group_or_default(mesh))
        super().__init__(
            axes, method=method, layout=layout or Contiguous(), rotate_method=rotate_method, seq_len=seq_len,
            debug=debug,
        )  # fmt: skip

    @staticmethod
    @abstractmethod
    def _axes_and_method(mesh: Mesh) -> tuple[Mesh, str]:
        """The axes of a mode and its method, an argument of `context_parallel`."""

    @staticmethod
    def replicated_keys() -> AbstractContextManager[None]:
        """A context manager for queries that are shards and keys and values that every rank has whole.

        Attention inside is local. It holds for the mode around it; outside of modes it changes nothing. `attn_mask` has
        the rows of the local queries. Gradients of keys and values are the share of this rank's queries: sum them over
        the ranks, like gradients of parameters. `is_causal=True` is refused.
        """
        return local_sdpa(queries_are_shards=True)

    @staticmethod
    def disable() -> AbstractContextManager[None]:
        """A context manager in which q, k and v are whole, and SDPA is torch's own: for a text encoder, say.

        It holds for the mode around it; outside of modes it changes nothing. Modes entered inside hold there.
        FlexAttention, and calls that modes refuse, are refused.
        """
        return local_sdpa(queries_are_shards=False)


class UnifiedAttnMode(_AttnMode):
    """Ulysses over the axis "ulysses", a ring over the axis "ring", or both.

    Args:
        mesh: a DeviceMesh with one of the axes or both; other axes, such as "batch", are not used. A process group is
            a Ulysses axis; the default group if None.
        layout: the tokens of each rank, `Contiguous()` if None.
        rotate_method: KV transport of the ring (see `set_rotate_method`); the process default if None.
        seq_len: a global length or a tuple of several, as for `context_parallel`. Of others, all ranks have equally
            many tokens.
        debug: True to compare, at every attention call, the arguments that must agree between ranks.

    Raises:
        TypeError, ValueError: on creation, arguments that do not fit; before any collective.
        RuntimeError: entered twice, or left out of order.

    Inside, an `attn_mask` has this rank's query rows and the key columns of the whole sequence.
    """

    @staticmethod
    def _axes_and_method(mesh: Mesh) -> tuple[Mesh, str]:
        if not isinstance(mesh, DeviceMesh):
            return mesh, "ulysses"
        axes = tuple(axis for axis in ("ring", "ulysses") if axis in (mesh.mesh_dim_names or ()))
        if not axes:
            raise ValueError(
                'expected a mesh with an axis called "ulysses", "ring" or both; got '
                f"{mesh.mesh_dim_names or 'one without names'}"
            )
        if len(axes) == 2:
            # DeviceMesh slices keep the mesh's own order of axes; context_parallel finds the inner axis by its name.
            names = tuple(name for name in mesh.mesh_dim_names or () if name in axes)
            return (mesh if len(names) == mesh.ndim else mesh[names]), "hybrid"
        return (mesh if mesh.ndim == 1 else mesh[axes[0]]), axes[0]


class RingAttnMode(_AttnMode):
    """Ring attention over one axis.

    Args:
        mesh: a DeviceMesh of one dim or a process group, the default group if None.
        layout, rotate_method, seq_len, debug: as for `UnifiedAttnMode`. Raises as well.
    """

    @staticmethod
    def _axes_and_method(mesh: Mesh) -> tuple[Mesh, str]:
        return mesh, "ring"


class UlyssesAttnMode(_AttnMode):
    """Ulysses over one axis. The number of heads need not be a multiple of the number of ranks.

    Args:
        mesh: a DeviceMesh of one dim or a process group, the default group if None.
        layout, seq_len, debug: as for `UnifiedAttnMode`. Raises as well.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        layout: Layout | None = None,
        seq_len: int | tuple[int, ...] | None = None,
        debug: bool = False,
    ) -> None:
        super().__init__(mesh, layout=layout, seq_len=seq_len, debug=debug)

    @staticmethod
    def _axes_and_method(mesh: Mesh) -> tuple[Mesh, str]:
        return mesh, "ulysses"


@dataclass(frozen=True)
class _AttnFunc:
    attention: Callable[..., Any]

    def func(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        mesh: Mesh | None = None,
        layout: Layout | None = None,
        seq_len: int | tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """`cp_dtensor.ulysses_attention` or `ring_attention` with the arguments of `F.scaled_dot_product_attention`.

        Args:
            query, key, value: (B, H, S, D), this rank's shards.
            attn_mask: this rank's query rows in `layout` order, key columns of the whole sequence by position.
            dropout_p, is_causal, scale, enable_gqa: as for `F.scaled_dot_product_attention`, of the whole sequence.
            mesh: the context-parallel axis, the default group if None.
            layout: the tokens of each rank, `Contiguous()` if None.
            seq_len: as for `context_parallel_attention`.

        Returns:
            (B, H, S, Dv).

        Raises:
            TypeError, ValueError, NotImplementedError: as `context_parallel_attention`.
        """
        return self.attention(
            query, key, value, mesh=group_or_default(mesh), is_causal=is_causal, attn_mask=attn_mask,
            dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa, layout=layout or Contiguous(),
            seq_len=seq_len,
        )  # fmt: skip


ring_attn_func = _AttnFunc(ring_attention).func
ulysses_attn_func = _AttnFunc(ulysses_attention).func


def in_batch_attn_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention in which the queries of every batch row see the keys of all rows; inside of modes, of all ranks too.

    Args:
        query, key, value: (B, H, S, D), this rank's shards inside of modes.
        attn_mask, is_causal: None and False; others are refused.
        dropout_p, scale: as for `F.scaled_dot_product_attention`.

    Returns:
        (B, H, S, Dv).

    Raises:
        NotImplementedError: a mask, which would need positions across rows.
    """
    if attn_mask is not None or is_causal:
        raise NotImplementedError("in_batch_attn_func takes neither attn_mask nor is_causal=True, got one of them")
    rows = query.size(0)
    q, k, v = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, scale=scale)
    return out[0].unflatten(1, (rows, -1)).transpose(0, 1)


def init_context_parallel_mesh(
    device_type: str | None = None,
    *,
    mesh: DeviceMesh | None = None,
    max_batch_dim_size: int | None = None,
    max_ring_dim_size: int | None = None,
    max_ulysses_dim_size: int | None = None,
) -> DeviceMesh:
    """Makes a mesh of all ranks with the axes "batch", "ring" and "ulysses". A collective over all ranks.

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
