"""Attention layers of long-context-attention (yunchang, USP): change the import and pass the mesh.

    mesh = set_seq_parallel_pg(ulysses_degree, ring_degree, rank, world_size)
    attention = LongContextAttention(ring_impl_type="zigzag", mesh=mesh)
    out = attention(q, k, v, causal=True)  # this rank's shards, (batch, sequence, heads, head_dim)

The one difference in calls: the process groups are a mesh that layers take, not state of the process. The layout of the
ring divides the sequence over the ring ranks (`ring_impl_type` "basic": `Contiguous()`, "zigzag": `HeadTail()`,
"strip": `Striped(1)`), and the Ulysses axis divides the tokens of each into adjacent parts. `layout_of` has both, for
`cp_dtensor.context_parallel_shard` and `context_parallel_unshard`.

Source: USP (arXiv 2405.07719).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, Striped
from cp_dtensor.api.extension import Mesh, Segment, take_shard
from cp_dtensor.integrations.ring_flash_attn import attention_of, group_or_default, unpacked
from cp_dtensor.spec.layouts import chunk

__all__ = [
    "AttnType", "LongContextAttention", "LongContextAttentionQKVPacked", "UlyssesAttention", "UlyssesCut",
    "basic_extract_local", "layout_of", "set_seq_parallel_pg", "stripe_extract_local", "zigzag_extract_local",
]  # fmt: skip


class AttnType(Enum):
    """Names of the exact kernels of yunchang 0.6.4, and TORCH of 0.6.3 and before."""

    AITER = "aiter"
    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH = "torch"
    TORCH_MATH = "torch_math"
    TORCH_FLASH = "torch_flash"
    TORCH_EFFICIENT = "torch_efficient"
    TORCH_CUDNN = "torch_cudnn"

    @classmethod
    def from_string(cls, s: str) -> AttnType:
        """Return the member with a value such as "fa"; raise ValueError if there is none."""
        return cls(s)


class _Attention(nn.Module):
    """Attention over the ranks of a mesh; arguments of the layers are those of yunchang.

    `use_pack_qkv` and `use_sync` have no effect: q, k and v always travel together, and events order CUDA streams.
    `torch.nn.attention.sdpa_kernel` chooses the backend; `attn_type` is any exact kernel, as yunchang's enum,
    `AttnType` or a name. Other kernels are refused, and other dims of heads and of the sequence than the defaults.
    """

    def __init__(
        self, mesh: Mesh, method: str, layout: Layout, attn_type: Enum | str, dims: tuple[int, int], heads_dim: int = 2
    ) -> None:
        super().__init__()
        if dims != (heads_dim, 1):
            raise ValueError(
                f"expected scatter_idx={heads_dim} and gather_idx=1, the dims of heads and of the sequence; got "
                f"scatter_idx={dims[0]} and gather_idx={dims[1]}"
            )
        exact = [each.value for each in AttnType]
        if (attn_type.value if isinstance(attn_type, Enum) else attn_type) not in exact:
            raise NotImplementedError(f"expected attn_type to be one of the exact kernels {exact}; got {attn_type!r}")
        self.mesh, self.method, self.layout = mesh, method, layout

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
        *args: Any, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Return the output of `ring_flash_attn_func` with these arguments, never the log-sum-exp, as yunchang does.

        Neither number of heads has to be a multiple of the Ulysses degree.
        """
        result = attention_of(self.layout, self.method)(
            query, key, value, dropout_p, softmax_scale, causal, window_size, *args, group=self.mesh, softcap=softcap,
            **options,
        )  # fmt: skip
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    def extra_repr(self) -> str:
        return f"layout={self.layout}, mesh={self.mesh}"


class LongContextAttention(_Attention):
    """Attention by Ulysses over one axis and a ring over the other.

    `mesh` is the result of `set_seq_parallel_pg`, or another mesh with the axes "ring" and "ulysses".
    """

    def __init__(
        self, scatter_idx: int = 2, gather_idx: int = 1, ring_impl_type: str = "basic", use_pack_qkv: bool = False,
        use_sync: bool = False, attn_type: Enum | str = AttnType.FA, attn_processor: nn.Module | None = None, *,
        mesh: DeviceMesh,
    ) -> None:  # fmt: skip
        if attn_processor is not None:
            raise NotImplementedError(
                f"expected attn_processor=None, since kernels here are torch's own; got {type(attn_processor).__name__}"
            )
        super().__init__(mesh, "hybrid", layout_of(ring_impl_type, mesh), attn_type, (scatter_idx, gather_idx))


class LongContextAttentionQKVPacked(_Attention):
    """`LongContextAttention` of packed queries, keys and values (B, S, 3, H, D); `scatter_idx` is 3."""

    def __init__(
        self, scatter_idx: int = 3, gather_idx: int = 1, ring_impl_type: str = "basic", use_sync: bool = False,
        attn_type: Enum | str = AttnType.FA, *, mesh: DeviceMesh,
    ) -> None:  # fmt: skip
        super().__init__(mesh, "hybrid", layout_of(ring_impl_type, mesh), attn_type, (scatter_idx, gather_idx), 3)

    def forward(self, qkv: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        """Compute the layer's attention of q, k and v from qkv, this rank's shard."""
        return super().forward(*unpacked("qkv", qkv, 3), *args, **options)


class UlyssesAttention(_Attention):
    """Attention by Ulysses over one process group, whose ranks have adjacent parts of the sequence."""

    def __init__(
        self, sequence_process_group: Mesh | None = None, scatter_idx: int = 2, gather_idx: int = 1,
        use_sync: bool = False, attn_type: Enum | str = AttnType.FA,
    ) -> None:  # fmt: skip
        mesh = group_or_default(sequence_process_group)
        super().__init__(mesh, "ulysses", Contiguous(), attn_type, (scatter_idx, gather_idx))


_RING_LAYOUTS: dict[str, Layout] = {"basic": Contiguous(), "zigzag": HeadTail(), "strip": Striped(1)}


@dataclass(frozen=True)
class UlyssesCut(Layout):
    """Adjacent parts of each ring rank's tokens, one for each Ulysses rank; rank = ring rank * degree + Ulysses rank.

    Args:
        ring_layout: layout of the ring, with contiguous segments or `Striped(1)`.
        ulysses_degree: number of ranks of the Ulysses axis.

    >>> layout = UlyssesCut(HeadTail(), ulysses_degree=2)
    >>> [[p for s in layout.segments(8, rank, 4) for p in s.positions()] for rank in range(4)]
    [[0, 1], [6, 7], [2, 3], [4, 5]]
    """

    ring_layout: Layout
    ulysses_degree: int

    def __post_init__(self) -> None:
        if self.ring_layout not in _RING_LAYOUTS.values():
            expected = [*_RING_LAYOUTS.values()]
            raise NotImplementedError(f"expected ring_layout to be one of {expected}, got {self.ring_layout!r}")

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        ring_rank, part = divmod(rank, self.ulysses_degree)
        whole = self.ring_layout.segments(seq_len, ring_rank, world_size // self.ulysses_degree, group)
        start, stop = chunk((0, sum(segment.length for segment in whole)), self.ulysses_degree, part)
        cut = []
        for segment in whole:
            first, last = (min(max(index, 0), segment.length) for index in (start, stop))
            # Of a contiguous segment, or of blocks of one token: tokens follow at the same distance.
            cut.append(segment._replace(start=segment.position(first), length=last - first))
            start, stop = start - segment.length, stop - segment.length
        return tuple(cut)


def _ulysses_cut(ring_impl_type: str, ulysses_degree: int) -> UlyssesCut:
    if ring_impl_type not in _RING_LAYOUTS:
        raise ValueError(f"expected ring_impl_type to be one of {[*_RING_LAYOUTS]}; got {ring_impl_type!r}")
    return UlyssesCut(_RING_LAYOUTS[ring_impl_type], ulysses_degree)


def layout_of(ring_impl_type: str, mesh: DeviceMesh) -> UlyssesCut:
    """Return the layout of a mesh's ranks."""
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else mesh
    if not isinstance(mesh, DeviceMesh) or sorted(mesh.mesh_dim_names or ()) != ["ring", "ulysses"]:
        raise ValueError(
            'expected mesh to be a DeviceMesh with the axes "ring" and "ulysses", as from set_seq_parallel_pg; got '
            f"{names or 'one without names'}"
        )
    return _ulysses_cut(ring_impl_type, mesh["ulysses"].size())


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True, *,
    device_type: str | None = None,
) -> DeviceMesh:  # fmt: skip
    """Return this rank's mesh with the axes "ring" and "ulysses". A collective over all ranks.

    Each ulysses * ring consecutive ranks share a sequence; with a larger world there are several such groups (data
    parallelism). With `use_ulysses_low`, adjacent ranks, often of one node, are adjacent on the Ulysses axis.
    `device_type` is "cuda" if None and there is a GPU.
    """
    actual = (dist.get_rank(), dist.get_world_size())
    if (rank, world_size) != actual:
        raise ValueError(f"expected the default group's rank and world size {actual}, got {(rank, world_size)}")
    sizes = {"ring": sp_ring_degree, "ulysses": sp_ulysses_degree}
    if min(sizes.values()) < 1 or world_size % (sp_ulysses_degree * sp_ring_degree):
        raise ValueError(
            f"expected sp_ulysses_degree * sp_ring_degree to divide the world size {world_size}; got "
            f"{(sp_ulysses_degree, sp_ring_degree)}"
        )
    axes = ("ring", "ulysses") if use_ulysses_low else ("ulysses", "ring")
    shape = (world_size // (sp_ulysses_degree * sp_ring_degree), *(sizes[axis] for axis in axes))
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicas", *axes))[axes]


def _extract_local(
    ring_impl_type: str, value: torch.Tensor, rank: int, world_size: int, rd: int | None = None, ud: int | None = None,
    dim: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Return a rank's shard of a whole tensor, whose sequence dim is `dim`, for layers of a `ring_impl_type`.

    `rank` is ring rank * ud + Ulysses rank: the global rank with `use_ulysses_low` only. rd and ud are the ring and
    Ulysses degrees, which "basic" does not need.
    """
    if (rd, ud, ring_impl_type) == (None, None, "basic"):
        rd, ud = world_size, 1
    if rd is None or ud is None or rd * ud != world_size:
        raise ValueError(f"expected rd * ud to be the world size {world_size}, got rd={rd} and ud={ud}")
    return take_shard(value, dim, _ulysses_cut(ring_impl_type, ud), rank, world_size)


basic_extract_local = partial(_extract_local, "basic")
zigzag_extract_local = partial(_extract_local, "zigzag")
stripe_extract_local = partial(_extract_local, "strip")
