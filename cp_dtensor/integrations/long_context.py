"""Attention layers of long-context-attention (yunchang, USP): change the import and pass the mesh.

    mesh = set_seq_parallel_pg(ulysses_degree, ring_degree, rank, world_size)
    attention = LongContextAttention(ring_impl_type="zigzag", mesh=mesh)
    out = attention(q, k, v, causal=True)  # this rank's shards, (batch, sequence, heads, head_dim)

The one difference in calls: the process groups are a mesh that layers take, not state of the process. The layout of the
ring divides the sequence over the ring ranks (`ring_impl_type` "basic": `Contiguous()`, "zigzag": `HeadTail()`,
"strip": `Striped(1)`), and the Ulysses axis divides the tokens of each into adjacent parts.

Source: USP (arXiv 2405.07719).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, Striped, context_parallel_shard, context_parallel_unshard
from cp_dtensor.api.extension import Mesh, Segment, take_shard
from cp_dtensor.integrations.ring_flash_attn import attention_of, group_or_default, unpacked

__all__ = [
    "AttnType", "LongContextAttention", "LongContextAttentionQKVPacked", "UlyssesAttention", "UlyssesCut",
    "basic_extract_local", "set_seq_parallel_pg", "shard", "stripe_extract_local", "unshard", "zigzag_extract_local",
]  # fmt: skip


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
        """Return the member with a value such as "fa"; raise ValueError if there is none."""
        return cls(s)


_EXACT = [each.value for each in AttnType if not each.value.startswith(("sage", "sparse", "npu"))]


class _Attention(nn.Module):
    """Attention over the ranks of a mesh.

    Raises:
        ValueError: `dims`, the pair (scatter_idx, gather_idx), is not (2, 1).
        NotImplementedError: quantized and sparse kernels.
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
        if (attn_type.value if isinstance(attn_type, Enum) else attn_type) not in _EXACT:
            expected = ", ".join(map(repr, _EXACT))
            raise NotImplementedError(
                f"expected attn_type to be one of the exact kernels {expected}; got {attn_type!r}"
            )
        self.mesh, self.method, self.layout = mesh, method, layout

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
        *args: Any, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Return this rank's rows (B, S, H, Dv) of softmax(softmax_scale q k^T + mask) v over the whole sequence.

        Args:
            query, key, value: (B, S, H, D), (B, T, Hkv, D), (B, T, Hkv, Dv): this rank's shards. H may be a multiple of
                Hkv (GQA, MQA); neither has to be a multiple of the Ulysses degree.
            dropout_p, softmax_scale, causal, window_size, args, options: those of `ring_flash_attn_func`, and raises as
                it does. `return_attn_probs` has no effect: yunchang's layer returns the output alone too.
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

    Args:
        scatter_idx, gather_idx: 2 and 1, the dims of heads and of the sequence.
        ring_impl_type: layout of the ring, "basic", "zigzag" or "strip".
        use_pack_qkv: no effect: q, k and v always travel together.
        use_sync: no effect: CUDA streams are ordered by events, and the host does not wait.
        attn_type: an exact kernel, as yunchang's enum, `AttnType` or a name; `torch.nn.attention.sdpa_kernel` chooses
            the backend. Quantized and sparse kernels are refused.
        attn_processor: None; other values are refused.
        mesh: the result of `set_seq_parallel_pg`, or another mesh with the axes "ring" and "ulysses".
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
    """`LongContextAttention` of packed queries, keys and values; `scatter_idx` is 3."""

    def __init__(
        self, scatter_idx: int = 3, gather_idx: int = 1, ring_impl_type: str = "basic", use_sync: bool = False,
        attn_type: Enum | str = AttnType.FA, *, mesh: DeviceMesh,
    ) -> None:  # fmt: skip
        layout = layout_of(ring_impl_type, mesh)
        super().__init__(mesh, "hybrid", layout, attn_type, (scatter_idx, gather_idx), heads_dim=3)

    def forward(self, qkv: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        """Compute the layer's attention of q, k and v from qkv: (B, S, 3, H, D), this rank's shard."""
        return super().forward(*unpacked("qkv", qkv, 3), *args, **options)


class UlyssesAttention(_Attention):
    """Attention by Ulysses over one process group, whose ranks have adjacent parts of the sequence.

    Args:
        sequence_process_group: the ranks that share the sequence; None is the default group.
        scatter_idx, gather_idx, use_sync, attn_type: as for `LongContextAttention`.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """

    def __init__(
        self, sequence_process_group: Mesh | None = None, scatter_idx: int = 2, gather_idx: int = 1,
        use_sync: bool = False, attn_type: Enum | str = AttnType.FA,
    ) -> None:  # fmt: skip
        mesh = group_or_default(sequence_process_group)
        super().__init__(mesh, "ulysses", Contiguous(), attn_type, (scatter_idx, gather_idx))


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
    """Return the local tokens `start, ..., stop - 1` of a segment."""
    start, stop = (min(max(index, 0), segment.length) for index in (start, stop))
    if segment.block == 1:
        return Segment(segment.start + start * segment.period, stop - start, 1, segment.period)
    if not segment.is_contiguous:
        raise NotImplementedError(f"expected contiguous segments or blocks of 1 token, got {segment}")
    return Segment.contiguous(segment.start + start, segment.start + stop)


def _ulysses_cut(ring_impl_type: str, ulysses_degree: int) -> UlyssesCut:
    layouts: dict[str, Layout] = {"basic": Contiguous(), "zigzag": HeadTail(), "strip": Striped(1)}
    if ring_impl_type not in layouts:
        expected = ", ".join(map(repr, layouts))
        raise ValueError(f"expected ring_impl_type to be one of {expected}; got {ring_impl_type!r}")
    return UlyssesCut(layouts[ring_impl_type], ulysses_degree)


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True, *,
    device_type: str | None = None,
) -> DeviceMesh:  # fmt: skip
    """Make the mesh of the ranks that share a sequence. A collective over all ranks.

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
    shape = tuple(sizes[axis] for axis in axes)
    replicas = world_size // (sp_ulysses_degree * sp_ring_degree)
    if replicas == 1:
        return init_device_mesh(device_type, shape, mesh_dim_names=axes)
    return init_device_mesh(device_type, (replicas, *shape), mesh_dim_names=("replicas", *axes))[axes]


def layout_of(ring_impl_type: str, mesh: DeviceMesh) -> UlyssesCut:
    """Return the layout of a mesh's ranks."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected mesh to be a DeviceMesh, as from set_seq_parallel_pg; got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if sorted(names) != ["ring", "ulysses"]:
        raise ValueError(f'expected a mesh with the axes "ring" and "ulysses", got {names or "one without names"}')
    return _ulysses_cut(ring_impl_type, mesh.size(names.index("ulysses")))


def shard(tensor: torch.Tensor, ring_impl_type: str, mesh: DeviceMesh, dim: int = 1) -> torch.Tensor:
    """Return this rank's shard of a tensor that every rank has whole, as `context_parallel_shard` does."""
    return context_parallel_shard(mesh, [tensor], [dim], layout_of(ring_impl_type, mesh))[0]


def unshard(
    tensor: torch.Tensor, ring_impl_type: str, mesh: DeviceMesh, dim: int = 1, *,
    grad: Literal["replicated", "partial"] = "replicated",
) -> torch.Tensor:  # fmt: skip
    """Return the whole tensor on every rank from the ranks' shards, as `context_parallel_unshard` does."""
    return context_parallel_unshard(mesh, [tensor], [dim], layout_of(ring_impl_type, mesh), grad=grad)[0]


def _extract_local(
    ring_impl_type: str, value: torch.Tensor, rank: int, world_size: int, rd: int | None = None, ud: int | None = None,
    dim: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Return a rank's shard of a whole tensor (B, S, ...), for layers of a `ring_impl_type`.

    Args:
        rank: ring rank * ud + Ulysses rank: the global rank with `use_ulysses_low` only; else use `shard`.
        rd, ud: the ring and Ulysses degrees; their product is `world_size`, else ValueError. "basic" needs none.
        dim: of the sequence.
    """
    if (rd, ud, ring_impl_type) == (None, None, "basic"):
        rd, ud = world_size, 1
    if rd is None or ud is None or rd * ud != world_size:
        raise ValueError(f"expected rd * ud to be the world size {world_size}, got rd={rd} and ud={ud}")
    return take_shard(value, dim, _ulysses_cut(ring_impl_type, ud), rank, world_size)


basic_extract_local = partial(_extract_local, "basic")
zigzag_extract_local = partial(_extract_local, "zigzag")
stripe_extract_local = partial(_extract_local, "strip")
