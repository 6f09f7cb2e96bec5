"""Attention layers of long-context-attention (yunchang, USP): change the import and pass the mesh.

    mesh = set_seq_parallel_pg(ulysses_degree, ring_degree, rank, world_size)
    attention = LongContextAttention(ring_impl_type="zigzag", mesh=mesh)
    out = attention(q, k, v, causal=True)  # this rank's shards, (batch, sequence, heads, head_dim)

The one difference in calls: the process groups are a mesh that layers take, not state of the process. The layout of the
ring divides the sequence over the ring ranks, and the Ulysses axis divides the tokens of each into adjacent parts:

| `ring_impl_type` | layout of the ring |
|---|---|
| `"basic"` | `Contiguous()` |
| `"zigzag"` | `HeadTail()` |
| `"strip"` | `Striped(1)` |

Source: USP (arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import (
    Contiguous,
    HeadTail,
    Layout,
    Striped,
    context_parallel_attention,
    context_parallel_shard,
    context_parallel_unshard,
)
from cp_dtensor.api.extension import Mesh, Segment, bottom_right_mask, heads_before_rows, take_shard
from cp_dtensor.integrations.ring_flash_attn import (
    group_or_default,
    ring_flash_attn_func,
    ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_func,
    stripe_flash_attn_qkvpacked_func,
    unpacked,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_qkvpacked_func,
)

__all__ = [
    "EXTRACT_FUNC_DICT",
    "RING_IMPL_DICT",
    "RING_IMPL_QKVPACKED_DICT",
    "AsyncLongContextAttention",
    "AttnType",
    "LongContextAttention",
    "LongContextAttentionQKVPacked",
    "UlyssesAttention",
    "UlyssesCut",
    "basic_extract_local",
    "set_seq_parallel_pg",
    "shard",
    "stripe_extract_local",
    "unshard",
    "zigzag_extract_local",
]


class AttnType(Enum):
    """Names of kernels in yunchang 0.6.4, and TORCH of 0.6.3 and before."""

    AITER = "aiter"
    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH = "torch"
    TORCH_MATH = "torch_math"
    TORCH_FLASH = "torch_flash"
    TORCH_EFFICIENT = "torch_efficient"
    TORCH_CUDNN = "torch_cudnn"
    SAGE_AUTO = "sage_auto"
    SAGE_FP16 = "sage_fp16"
    SAGE_FP16_TRITON = "sage_fp16_triton"
    SAGE_FP8 = "sage_fp8"
    SAGE_FP8_SM90 = "sage_fp8_sm90"
    SPARSE_SAGE = "sparse_sage"
    NPU = "npu"

    @classmethod
    def from_string(cls, s: str) -> AttnType:
        """The member with a value such as "fa".

        Raises:
            ValueError: no such member.
        """
        return cls(s)


_EXACT = (
    "aiter", "fa", "fa3", "flashinfer", "torch", "torch_math", "torch_flash", "torch_efficient", "torch_cudnn",
)  # fmt: skip


def _check_kernel(attn_type: Enum | str) -> None:
    name = attn_type.value if isinstance(attn_type, Enum) else attn_type
    if name not in _EXACT:
        expected = ", ".join(map(repr, _EXACT))
        raise NotImplementedError(f"expected attn_type to be one of the exact kernels {expected}; got {attn_type!r}")


class _Attention(nn.Module):
    """Attention over the ranks of `mesh`, by `method`, of shards in `layout`."""

    mesh: Mesh
    method: str
    layout: Layout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *,
        seq_len: int | tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """This rank's rows of softmax(softmax_scale q k^T + mask) v over the whole sequence; differentiable.

        Args:
            query: (B, S, H, D), this rank's queries.
            key: (B, T, Hkv, D), this rank's keys. H may be a multiple of Hkv (GQA, MQA); neither has to be a multiple
                of the Ulysses degree.
            value: (B, T, Hkv, Dv), this rank's values.
            dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, seq_len: as for
                `cp_dtensor.integrations.ring_flash_attn.ring_flash_attn_func`.
            return_attn_probs: no effect: yunchang's layer returns the output alone too.

        Returns:
            (B, S, H, Dv), contiguous.

        Raises:
            TypeError, ValueError: arguments that do not fit.
            NotImplementedError: options refused above, before any collective.
        """
        shapes = "q, k and v of four dims (batch, sequence, heads, head_dim)"
        q, k, v = heads_before_rows(query, key, value, 1, shapes)
        if alibi_slopes is not None:
            raise NotImplementedError(
                f"ALiBi is not supported on sequence shards yet: got alibi_slopes, a tensor of shape "
                f"{tuple(alibi_slopes.shape)}, expected None"
            )
        mask = bottom_right_mask(causal, window_size)
        out = context_parallel_attention(
            q, k, v, mesh=self.mesh, method=self.method, mask=mask, enable_gqa=True, layout=self.layout,
            dropout_p=dropout_p, scale=softmax_scale, deterministic=deterministic, seq_len=seq_len, softcap=softcap,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2).contiguous()

    def extra_repr(self) -> str:
        return f"layout={self.layout}, mesh={self.mesh}"


class LongContextAttention(_Attention):
    """Attention by Ulysses over one axis and a ring over the other.

    Args:
        scatter_idx, gather_idx: 2 and 1, the dims of heads and of the sequence.
        ring_impl_type: layout of the ring, "basic", "zigzag" or "strip" (the table above).
        use_pack_qkv: no effect: q, k and v always travel together.
        use_sync: no effect: CUDA streams are ordered by events, and the host does not wait.
        attn_type: an exact kernel, as yunchang's enum, `AttnType` or a name; `torch.nn.attention.sdpa_kernel` chooses
            the backend. Quantized and sparse kernels are refused.
        attn_processor: None; other values are refused.
        mesh: the result of `set_seq_parallel_pg`, or another mesh with the axes "ring" and "ulysses".

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: options refused above.

    Source: USP (arXiv 2405.07719).
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: Enum | str = AttnType.FA,
        attn_processor: nn.Module | None = None,
        *,
        mesh: DeviceMesh,
    ) -> None:
        super().__init__()
        _check_dims(scatter_idx, gather_idx, heads_dim=2)
        _check_kernel(attn_type)
        if attn_processor is not None:
            raise NotImplementedError(
                f"expected attn_processor=None, since kernels here are torch's own; got {type(attn_processor).__name__}"
            )
        self.mesh, self.method, self.layout = mesh, "hybrid", layout_of(ring_impl_type, mesh)


class LongContextAttentionQKVPacked(nn.Module):
    """`LongContextAttention` of packed queries, keys and values.

    Args:
        scatter_idx, gather_idx: 3 and 1, the dims of heads and of the sequence.
        ring_impl_type, use_sync, attn_type, mesh: as for `LongContextAttention`.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: quantized and sparse kernels.
    """

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: Enum | str = AttnType.FA,
        *,
        mesh: DeviceMesh,
    ) -> None:
        super().__init__()
        _check_dims(scatter_idx, gather_idx, heads_dim=3)
        self.attention = LongContextAttention(
            ring_impl_type=ring_impl_type, use_sync=use_sync, attn_type=attn_type, mesh=mesh
        )

    def forward(self, qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Calls `LongContextAttention.forward` with q, k and v from qkv: (B, S, 3, H, D), this rank's shard."""
        return self.attention(*unpacked("qkv", qkv, 3), *args, **kwargs)


class AsyncLongContextAttention(LongContextAttention):
    """`LongContextAttention` with fewer arguments: transfers are hidden in both.

    Args:
        scatter_idx, gather_idx, ring_impl_type, mesh: as there. Raises as there.
    """

    def __init__(
        self, scatter_idx: int = 2, gather_idx: int = 1, ring_impl_type: str = "basic", *, mesh: DeviceMesh
    ) -> None:
        super().__init__(scatter_idx, gather_idx, ring_impl_type, mesh=mesh)


class UlyssesAttention(_Attention):
    """Attention by Ulysses over one process group, whose ranks have adjacent parts of the sequence.

    Args:
        sequence_process_group: the ranks that share the sequence; None is the default group.
        scatter_idx, gather_idx, use_sync, attn_type: as for `LongContextAttention`.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: quantized and sparse kernels.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """

    def __init__(
        self,
        sequence_process_group: Mesh | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: Enum | str = AttnType.FA,
    ) -> None:
        super().__init__()
        _check_dims(scatter_idx, gather_idx, heads_dim=2)
        _check_kernel(attn_type)
        self.mesh, self.method, self.layout = group_or_default(sequence_process_group), "ulysses", Contiguous()


def _check_dims(scatter_idx: int, gather_idx: int, heads_dim: int) -> None:
    if (scatter_idx, gather_idx) != (heads_dim, 1):
        raise ValueError(
            f"expected scatter_idx={heads_dim} and gather_idx=1, the dims of heads and of the sequence; got "
            f"scatter_idx={scatter_idx} and gather_idx={gather_idx}"
        )


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

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        ring_rank, part = divmod(rank, self.ulysses_degree)
        whole = self.ring_layout.segments(seq_len, ring_rank, world_size // self.ulysses_degree, group)
        rows = sum(segment.length for segment in whole)
        (chunk,) = Contiguous().segments(rows, part, self.ulysses_degree)
        start, stop = chunk.start, chunk.start + chunk.length
        cut = []
        for segment in whole:
            cut.append(_cut(segment, start, stop))
            start, stop = start - segment.length, stop - segment.length
        return tuple(cut)

    def batch_groups(self, batch_size: int) -> tuple[tuple[int, int], ...]:
        return self.ring_layout.batch_groups(batch_size)

    @property
    def only_length(self) -> int | None:
        return self.ring_layout.only_length


def _cut(segment: Segment, start: int, stop: int) -> Segment:
    """The local tokens `start, ..., stop - 1` of a segment."""
    start, stop = (min(max(index, 0), segment.length) for index in (start, stop))
    if segment.block == 1:
        return Segment(segment.start + start * segment.period, stop - start, 1, segment.period)
    if not segment.is_contiguous:
        raise NotImplementedError(f"expected contiguous segments or blocks of 1 token, got {segment}")
    return Segment.contiguous(segment.start + start, segment.start + stop)


_RING_LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"basic": Contiguous(), "zigzag": HeadTail(), "strip": Striped(1)}
)


def _ulysses_cut(ring_impl_type: str, ulysses_degree: int) -> UlyssesCut:
    if ring_impl_type not in _RING_LAYOUTS:
        expected = ", ".join(map(repr, _RING_LAYOUTS))
        raise ValueError(f"expected ring_impl_type to be one of {expected}; got {ring_impl_type!r}")
    return UlyssesCut(_RING_LAYOUTS[ring_impl_type], ulysses_degree)


def set_seq_parallel_pg(
    sp_ulysses_degree: int,
    sp_ring_degree: int,
    rank: int,
    world_size: int,
    use_ulysses_low: bool = True,
    *,
    device_type: str | None = None,
) -> DeviceMesh:
    """Makes the mesh of the ranks that share a sequence. A collective over all ranks.

    Args:
        sp_ulysses_degree: number of ranks of the Ulysses axis.
        sp_ring_degree: number of ranks of the ring. Each ulysses * ring consecutive ranks share a sequence; with a
            larger world there are several such groups (data parallelism).
        rank, world_size: those of the default process group.
        use_ulysses_low: True if adjacent ranks, which are often on one node, are adjacent on the Ulysses axis.
        device_type: "cuda" or "cpu"; if None, "cuda" if there is a GPU.

    Returns:
        this rank's mesh with the axes "ring" and "ulysses".

    Raises:
        ValueError: degrees whose product does not divide the world size; another rank or world size than the group's.
    """
    actual = (dist.get_rank(), dist.get_world_size())
    if (rank, world_size) != actual:
        raise ValueError(f"expected the default group's rank and world size {actual}, got {(rank, world_size)}")
    degrees = (sp_ulysses_degree, sp_ring_degree)
    if min(degrees) < 1 or world_size % (sp_ulysses_degree * sp_ring_degree):
        raise ValueError(
            f"expected sp_ulysses_degree * sp_ring_degree to divide the world size {world_size}; got {degrees}"
        )
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"ring": sp_ring_degree, "ulysses": sp_ulysses_degree}
    axes = ("ring", "ulysses") if use_ulysses_low else ("ulysses", "ring")
    replicas = world_size // (sp_ulysses_degree * sp_ring_degree)
    if replicas == 1:
        return init_device_mesh(device_type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes)
    shape = (replicas, *(sizes[axis] for axis in axes))
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicas", *axes))[axes]


def layout_of(ring_impl_type: str, mesh: DeviceMesh) -> UlyssesCut:
    """The layout of a mesh's ranks."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected mesh to be a DeviceMesh, as from set_seq_parallel_pg; got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if sorted(names) != ["ring", "ulysses"]:
        raise ValueError(f'expected a mesh with the axes "ring" and "ulysses", got {names or "one without names"}')
    return _ulysses_cut(ring_impl_type, mesh.size(names.index("ulysses")))


def shard(tensor: torch.Tensor, ring_impl_type: str, mesh: DeviceMesh, dim: int = 1) -> torch.Tensor:
    """This rank's shard of a tensor that every rank has whole.

    Args:
        ring_impl_type: "basic", "zigzag" or "strip".
        mesh: the result of `set_seq_parallel_pg`.
        tensor, dim, returns, raises: as for `cp_dtensor.integrations.ring_flash_attn.shard`.
    """
    (local,) = context_parallel_shard(mesh, [tensor], [dim], layout_of(ring_impl_type, mesh))
    return local


def unshard(
    tensor: torch.Tensor,
    ring_impl_type: str,
    mesh: DeviceMesh,
    dim: int = 1,
    *,
    grad: Literal["replicated", "partial"] = "replicated",
) -> torch.Tensor:
    """The whole tensor on every rank from the ranks' shards: the inverse of `shard`.

    Args:
        ring_impl_type, mesh: as for `shard`.
        tensor, dim, grad, returns, raises: as for `cp_dtensor.integrations.ring_flash_attn.unshard`.
    """
    (whole,) = context_parallel_unshard(mesh, [tensor], [dim], layout_of(ring_impl_type, mesh), grad=grad)
    return whole


@dataclass(frozen=True)
class _Extraction:
    ring_impl_type: str

    def extract_local(
        self, value: torch.Tensor, rank: int, world_size: int, rd: int | None = None, ud: int | None = None,
        dim: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        """A rank's shard of a whole tensor (B, S, ...), for layers of this `ring_impl_type`.

        Args:
            rank: ring rank * ud + Ulysses rank: the global rank with `use_ulysses_low` only; else use `shard`.
            rd, ud: the ring and Ulysses degrees; their product is `world_size`, else ValueError. "basic" needs none.
            dim: of the sequence.
        """
        if (rd, ud, self.ring_impl_type) == (None, None, "basic"):
            rd, ud = world_size, 1
        if rd is None or ud is None or rd * ud != world_size:
            raise ValueError(f"expected rd * ud to be the world size {world_size}, got rd={rd} and ud={ud}")
        return take_shard(value, dim, _ulysses_cut(self.ring_impl_type, ud), rank, world_size)


basic_extract_local = _Extraction("basic").extract_local
zigzag_extract_local = _Extraction("zigzag").extract_local
stripe_extract_local = _Extraction("strip").extract_local

EXTRACT_FUNC_DICT: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {"basic": basic_extract_local, "zigzag": zigzag_extract_local, "strip": stripe_extract_local}
)
"""Functions `(value, rank, world_size, rd, ud, dim=1)` to a rank's shard of a whole tensor, by `ring_impl_type`."""

RING_IMPL_DICT: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"basic": ring_flash_attn_func, "zigzag": zigzag_ring_flash_attn_func, "strip": stripe_flash_attn_func}
)
"""Ring attention of q, k and v (B, S, H, D), by `ring_impl_type`."""

RING_IMPL_QKVPACKED_DICT: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "basic": ring_flash_attn_qkvpacked_func,
        "zigzag": zigzag_ring_flash_attn_qkvpacked_func,
        "strip": stripe_flash_attn_qkvpacked_func,
    }
)
"""Ring attention of packed qkv (B, S, 3, H, D), by `ring_impl_type`."""
