"""The attention layers of feifeibear's long-context-attention (yunchang, USP), by `context_parallel_attention`.

    mesh = set_seq_parallel_pg(ulysses_degree, ring_degree, rank, world_size)
    attention = LongContextAttention(ring_impl_type="zigzag", mesh=mesh)
    out = attention(q, k, v, causal=True)  # (batch, sequence, heads, head dim), this rank's shards

The one difference in calls: the process groups are a value that layers are given, and no state of the process.

Each ring rank has some tokens of the sequence, by the ring's layout; the Ulysses axis cuts these into adjacent parts:

| `ring_impl_type` | layout of the ring |
|---|---|
| `"basic"` | `Contiguous()` |
| `"zigzag"` | `HeadTail()` |
| `"strip"` | `Striped(1)` |

`shard` and `unshard` divide whole tensors so, and `EXTRACT_FUNC_DICT` too, which needs no process group. Source: USP
(arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor.functional import context_parallel_attention
from cp_dtensor.integrations.flash_attn_arguments import FlashAttnOptions, heads_first, unpacked
from cp_dtensor.integrations.long_context_sharding import (
    EXTRACT_FUNC_DICT,
    UlyssesCut,
    layout_of,
    set_seq_parallel_pg,
    shard,
    unshard,
)

__all__ = [
    "EXTRACT_FUNC_DICT",
    "AttnType",
    "LongContextAttention",
    "LongContextAttentionQKVPacked",
    "UlyssesCut",
    "set_seq_parallel_pg",
    "shard",
    "unshard",
]


class AttnType(Enum):
    """Kernels, by that package's names. The exact ones may be asked for; `sdpa_kernel` decides which one computes."""

    AITER = "aiter"
    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH = "torch"
    SAGE_AUTO = "sage_auto"
    SAGE_FP16 = "sage_fp16"
    SAGE_FP16_TRITON = "sage_fp16_triton"
    SAGE_FP8 = "sage_fp8"
    SAGE_FP8_SM90 = "sage_fp8_sm90"
    SPARSE_SAGE = "sparse_sage"

    @classmethod
    def from_string(cls, s: str) -> AttnType:
        """The member of a name such as "fa".

        Raises:
            ValueError: there is none.
        """
        return cls(s)


_EXACT = (AttnType.AITER, AttnType.FA, AttnType.FA3, AttnType.FLASHINFER, AttnType.TORCH)


class LongContextAttention(nn.Module):
    """Attention of this rank's queries to the keys of all ranks: Ulysses over one axis, a ring over the other.

    Args:
        scatter_idx, gather_idx: 2 and 1, the dims of heads and of the sequence.
        ring_impl_type: which tokens each rank has: "basic", "zigzag" or "strip" (the table above).
        use_pack_qkv: changes nothing: q, k and v travel together in any case.
        use_sync: changes nothing: streams are ordered where they must be, and the host does not wait.
        attn_type: an exact kernel, by that package's enum, by `AttnType` or by name; `torch.nn.attention.sdpa_kernel`
            decides which one computes. Quantized and sparse ones are refused.
        attn_processor: None; others are refused.
        mesh: as from `set_seq_parallel_pg`, of the axes "ring" and "ulysses".

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: what is refused above.

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
        _check_kernel(attn_type, attn_processor)
        self.layout = layout_of(ring_impl_type, mesh)
        self.mesh = mesh

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *,
        seq_len: int | tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """This rank's rows of softmax(softmax_scale q k^T + mask) v over the sequence of all ranks; differentiable.

        Args:
            query: (B, S, H, D), this rank's queries.
            key: (B, T, Hkv, D), this rank's keys. H may be a multiple of Hkv (GQA, MQA), and neither need be a
                multiple of the Ulysses degree.
            value: (B, T, Hkv, Dv), this rank's values.
            dropout_p: probability that a weight of the softmax is dropped, as for `context_parallel_attention`.
            softmax_scale: factor of the logits, 1 / sqrt(D) if None.
            causal: the last query sees all keys, the one before all but the last, and so on, by global position.
            window_size: (left, right), how many keys to the left and to the right of its own place a query sees, -1 for
                all of them; the last query stands at the last key. With `causal`, right is 0.
            softcap: 0.0; other values are refused.
            alibi_slopes: None; others are refused.
            deterministic: equal inputs give equal bits on GPUs too, as for `context_parallel_attention`.
            return_attn_probs: changes nothing: that package's layer returns the output alone, too.
            seq_len: the global number of tokens, or a pair of those of queries and keys. If None, the ranks exchange
                their local lengths.

        Returns:
            (B, S, H, Dv), contiguous.

        Raises:
            TypeError, ValueError: arguments that do not fit.
            NotImplementedError: what is refused above, before any collective.
        """
        options = FlashAttnOptions(window_size, softcap, alibi_slopes)
        q, k, v = heads_first(query, key, value)
        options.check()
        out = context_parallel_attention(
            q, k, v, mesh=self.mesh, method="hybrid", mask=options.mask(causal), dropout_p=dropout_p,
            scale=softmax_scale, enable_gqa=True, layout=self.layout, deterministic=deterministic, seq_len=seq_len,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2).contiguous()

    def extra_repr(self) -> str:
        return f"layout={self.layout}, mesh={self.mesh}"


class LongContextAttentionQKVPacked(nn.Module):
    """`LongContextAttention` of packed queries, keys and values.

    Args:
        scatter_idx, gather_idx: 3 and 1, the dims of heads and of the sequence.
        ring_impl_type, use_sync, attn_type, mesh: as for `LongContextAttention`.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: kernels that are not exact.
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

    def forward(
        self,
        qkv: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *,
        seq_len: int | None = None,
    ) -> torch.Tensor:
        """`LongContextAttention.forward` of qkv: (B, S, 3, H, D), this rank's queries, keys and values; see there."""
        q, k, v = unpacked("qkv", qkv, 3)
        return self.attention(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, seq_len=seq_len,
        )  # fmt: skip


def _check_dims(scatter_idx: int, gather_idx: int, heads_dim: int) -> None:
    if (scatter_idx, gather_idx) != (heads_dim, 1):
        raise ValueError(
            f"expected scatter_idx={heads_dim} and gather_idx=1, the dims of heads and of the sequence; got "
            f"scatter_idx={scatter_idx} and gather_idx={gather_idx}"
        )


def _check_kernel(attn_type: Enum | str, attn_processor: nn.Module | None) -> None:
    name = attn_type.value if isinstance(attn_type, Enum) else attn_type
    if name not in {kernel.value for kernel in _EXACT}:
        expected = ", ".join(repr(kernel.value) for kernel in _EXACT)
        raise NotImplementedError(f"expected attn_type to be one of the exact kernels {expected}; got {attn_type!r}")
    if attn_processor is not None:
        received = type(attn_processor).__name__
        raise NotImplementedError(f"expected attn_processor=None, since kernels here are torch's own; got {received}")
