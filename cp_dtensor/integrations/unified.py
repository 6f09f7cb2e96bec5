"""Stretches of a region in which SDPA is left to each rank alone, since the keys are not sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import _torch
from cp_dtensor.api.active_context import LOCAL_STRETCH, ActiveContext, current_context, innermost_context
from cp_dtensor.api.context import context_parallel
from cp_dtensor.api.functional import context_parallel_attention
from cp_dtensor.api.interception import SdpaArguments, SharedInstallation, intercepted
from cp_dtensor.engine.validation import Mesh
from cp_dtensor.integrations.flash_attn_arguments import group_or_default
from cp_dtensor.spec.layouts import Contiguous, Layout

# The attention modes of chengzeyi's ParaAttention, by `context_parallel`: SDPA of a sequence that is sharded
# already. with UnifiedAttnMode(mesh): # axes "ring" and "ulysses" output = transformer(hidden_states) # this rank's
# tokens; F.scaled_dot_product_attention sees those of all Ranks own adjacent parts of the sequence, rank = ring
# rank * Ulysses size + Ulysses rank, as they do over a mesh that is flattened in the order ("ring", "ulysses"). If
# several sequences are joined, such as text and image, let each rank join its parts of them: without a causal mask,
# attention does not depend on the order of keys. Unlike there, gradients are right in every mode, under activation
# checkpointing too, and a mode belongs to the thread that enters it. Keys and values that every rank has whole,
# those of a text prompt in cross-attention say, look like shards. It takes a word to tell them apart: with
# UnifiedAttnMode.replicated_keys(): out = F.scaled_dot_product_attention(image_q, text_k, text_v,
# attn_mask=text_mask) Gradients of such keys are this rank's share, from its own queries: sum them over the ranks,
# as those of parameters. `disable()` is for attention that is whole on every rank, queries too, such as a text
# encoder's.

__all__ = [
    "RingAttnMode",
    "UlyssesAttnMode",
    "UnifiedAttnMode",
    "init_context_parallel_mesh",
    "ring_attn_func",
    "ulysses_attn_func",
]


class _AttnMode:
    """What the modes have in common: inside of the `with` block, SDPA attends to the keys of all ranks."""

    def __init__(
        self,
        mesh: Mesh,
        method: str,
        layout: Layout | None,
        rotate_method: str | None,
        seq_lens: Collection[int],
        debug: bool,
    ) -> None:
        layout = Contiguous() if layout is None else layout
        self._context = context_parallel(
            mesh, method=method, layout=layout, rotate_method=rotate_method, seq_len=tuple(seq_lens), debug=debug
        )

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)

    @staticmethod
    def replicated_keys() -> AbstractContextManager[None]:
        """A context in which queries are shards, and keys and values are whole on every rank: attention is local.

        It holds for the mode around it; outside of any it changes nothing. `attn_mask` has the rows of the local
        queries. Gradients of keys and values are this rank's share. `is_causal` is refused.
        """
        return local_sdpa(queries_are_shards=True)

    @staticmethod
    def disable() -> AbstractContextManager[None]:
        """A context in which queries, keys and values are whole: SDPA is torch's own.

        It holds for the mode around it; outside of any it changes nothing, and a mode that is entered inside is in
        force. FlexAttention, and what modes refuse, is refused in it.
        """
        return local_sdpa(queries_are_shards=False)


class UnifiedAttnMode(_AttnMode):
    """Ulysses over the axis "ulysses", a ring over the axis "ring", or both.

    Args:
        mesh: a DeviceMesh with one of the axes or both; other axes, such as "batch", are left alone. A process group,
            or the default group if None, is an axis of Ulysses.
        layout: which rank owns which tokens, `Contiguous()` if None.
        rotate_method: how keys and values travel in the ring (see `set_rotate_method`); the process default if None.
        seq_lens: global lengths that attention runs over, as for `context_parallel`; on GPUs, ranks exchange others at
            every call.
        debug: at every attention call, let the ranks compare what must agree.

    Raises:
        TypeError, ValueError: on creation, for arguments that do not fit, before any collective.
        RuntimeError: entered while it is entered already; left out of order.

    Inside, an `attn_mask` has this rank's query rows and the keys of the whole sequence, as in `context_parallel`.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        layout: Layout | None = None,
        rotate_method: str | None = None,
        seq_lens: Collection[int] = (),
        debug: bool = False,
    ) -> None:
        axes, method = _axes_and_method(group_or_default(mesh))
        super().__init__(axes, method, layout, rotate_method, seq_lens, debug)


class UlyssesAttnMode(_AttnMode):
    """Ulysses over one axis: ranks exchange rows for heads. Numbers of heads need not divide by the ranks.

    Args:
        mesh: a DeviceMesh of one dim or a process group, the default group if None.
        layout, seq_lens, debug: as for `UnifiedAttnMode`, as are errors.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        layout: Layout | None = None,
        seq_lens: Collection[int] = (),
        debug: bool = False,
    ) -> None:
        super().__init__(group_or_default(mesh), "ulysses", layout, None, seq_lens, debug)


class RingAttnMode(_AttnMode):
    """A ring over one axis: keys and values travel.

    Args:
        mesh: a DeviceMesh of one dim or a process group, the default group if None.
        layout, rotate_method, seq_lens, debug: as for `UnifiedAttnMode`, as are errors.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        layout: Layout | None = None,
        rotate_method: str | None = None,
        seq_lens: Collection[int] = (),
        debug: bool = False,
    ) -> None:
        super().__init__(group_or_default(mesh), "ring", layout, rotate_method, seq_lens, debug)


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
        # A mesh is sliced in its own order of axes only; the library finds the inner one by name.
        names = tuple(name for name in mesh.mesh_dim_names or () if name in axes)
        return (mesh if len(names) == mesh.ndim else mesh[names]), "hybrid"
    return (mesh if mesh.ndim == 1 else mesh[axes[0]]), axes[0]


def ulysses_attn_func(
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
) -> torch.Tensor:
    """`context_parallel_attention` with method "ulysses", in the arguments of `F.scaled_dot_product_attention`.

    Args:
        query, key, value: (B, H, S, D), this rank's shards.
        attn_mask: of this rank's queries, in `layout` order, and all keys, in the order of their positions.
        dropout_p, is_causal, scale, enable_gqa: as for `F.scaled_dot_product_attention`, of the whole sequence.
        mesh: the context-parallel axis, the default group if None.
        layout: which rank owns which tokens, `Contiguous()` if None.

    Returns:
        (B, H, S, Dv).

    Raises:
        TypeError, ValueError, NotImplementedError: as `context_parallel_attention`.
    """
    return _attn_func("ulysses", query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, mesh, layout)


def ring_attn_func(
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
) -> torch.Tensor:
    """`context_parallel_attention` with method "ring"; otherwise as `ulysses_attn_func`."""
    return _attn_func("ring", query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, mesh, layout)


def _attn_func(
    method: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    mesh: Mesh | None,
    layout: Layout | None,
) -> torch.Tensor:
    out = context_parallel_attention(
        query, key, value, mesh=group_or_default(mesh), method=method, is_causal=is_causal, attn_mask=attn_mask,
        dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa, layout=Contiguous() if layout is None else layout,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


def init_context_parallel_mesh(
    device_type: str | None = None,
    *,
    mesh: DeviceMesh | None = None,
    max_batch_dim_size: int | None = None,
    max_ring_dim_size: int | None = None,
    max_ulysses_dim_size: int | None = None,
) -> DeviceMesh:
    """A mesh of all ranks with the axes "batch", "ring" and "ulysses". A collective over all ranks.

    Each limit gives an axis the greatest common divisor of it and of the ranks that are left. Without limits all ranks
    are an axis of Ulysses.

    Args:
        device_type: "cuda" or "cpu".
        mesh: returned as it is, if given.
        max_batch_dim_size: limit of the batch axis, 1 if None.
        max_ring_dim_size, max_ulysses_dim_size: limit of one of the two axes; the other gets the rest.

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


@dataclass(frozen=True)
class _LocalStretch:
    context: ActiveContext
    """The region in which it was opened; one that is opened inside of it has its own meaning of SDPA."""
    queries_are_shards: bool


@contextmanager
def local_sdpa(*, queries_are_shards: bool) -> Iterator[None]:
    """While open, SDPA in this thread is torch's own. Outside of regions, where it is so anyway, changes nothing.

    Functions under `torch.utils.checkpoint` are bound to it, as they are to regions.

    Args:
        queries_are_shards: refuse `is_causal`, since the positions of the queries are not known here.
    """
    context = innermost_context()
    if context is None:
        yield
        return
    # The installation is held for less long than that of regions always, so its parts come before those of regions.
    with _installation.held(), _torch.thread_state(LOCAL_STRETCH, _LocalStretch(context, queries_are_shards)):
        yield


def _current() -> _LocalStretch | None:
    stretch = _torch.get_thread_state(LOCAL_STRETCH)
    return stretch if stretch is not None and stretch.context is current_context() else None


def _sdpa(call: SdpaArguments) -> torch.Tensor | None:
    stretch = _current()
    if stretch is None:
        return None
    if stretch.queries_are_shards and call.is_causal:
        raise NotImplementedError(
            "is_causal is not supported between sharded queries and keys that every rank has whole: got "
            "is_causal=True, expected False (an attn_mask of the local queries is allowed)"
        )
    return _torch.original_sdpa(
        call.q, call.k, call.v, call.attn_mask, call.dropout_p, call.is_causal,
        scale=call.scale, enable_gqa=call.enable_gqa,
    )  # fmt: skip


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpointed function that runs in the present stretch, of the region that it is bound to as well."""
    stretch = _current()
    if stretch is None:
        return function

    def in_stretch(*args: Any, **kwargs: Any) -> Any:
        with local_sdpa(queries_are_shards=stretch.queries_are_shards):
            return function(*args, **kwargs)

    return in_stretch


def _parts() -> Iterator[AbstractContextManager[None]]:
    yield intercepted(_sdpa)
    yield _torch.checkpointed_functions_bound(_bound)


_installation = SharedInstallation(_parts)
