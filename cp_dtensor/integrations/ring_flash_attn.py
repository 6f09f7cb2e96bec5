"""Drop-in functions of zhuzilin's ring-flash-attention: change the import and keep the calls.

Functions take this rank's shards as (batch, sequence, heads, head_dim). The kinds differ in their layout:

| kind | layout |
|---|---|
| `ring` | `Contiguous()` |
| `zigzag_ring` | `HeadTail()` |
| `stripe` | `Striped(1)` |
| `step` | `MirroredBatch()`; ring-flash-attention has no such kind |

Each kind has `{kind}_flash_attn_func`, `{kind}_flash_attn_kvpacked_func` and `{kind}_flash_attn_qkvpacked_func`. K/V
travel as `cp_dtensor.set_rotate_method` says. Unlike in ring-flash-attention, every kind computes attention that is not
causal, windows and dropout, for any length on any number of ranks, on CPUs, in float32 and float64.

Packed documents: `ring` and `zigzag_ring` from `ring_flash_attn_varlen`, `llama3` from `llama3_flash_attn_varlen`.
`shard`, `unshard`, `shard_varlen` and `unshard_varlen` convert between whole tensors and shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cp_dtensor import (
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    context_parallel_shard,
    context_parallel_unshard,
    ring_attention,
)
from cp_dtensor.api.extension import Mesh, bottom_right_mask, heads_before_rows
from cp_dtensor.integrations.flash_attn_arguments import (
    AttentionResult,
    PackedForms,
    group_or_default,
    supported_window,
)
from cp_dtensor.integrations.llama3_flash_attn_varlen import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)
from cp_dtensor.integrations.ring_flash_attn_varlen import (
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    shard_varlen,
    unshard_varlen,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "shard",
    "shard_varlen",
    "step_flash_attn_func",
    "step_flash_attn_kvpacked_func",
    "step_flash_attn_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "unshard",
    "unshard_varlen",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]


@dataclass(frozen=True)
class _Kind(PackedForms):
    """The functions of one layout."""

    layout: Layout

    def func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Mesh | None = None,
        *,
        softcap: float = 0.0,
        seq_len: int | tuple[int, int] | None = None,
    ) -> AttentionResult:
        """This rank's rows of softmax(softmax_scale q k^T + mask) v over the whole sequence; differentiable.

        Args:
            q: (B, S, H, D), this rank's queries in the kind's layout (the table above).
            k: (B, T, Hkv, D), this rank's keys. H may be a multiple of Hkv (GQA, MQA).
            v: (B, T, Hkv, Dv), this rank's values.
            dropout_p: probability to drop a softmax weight, as for `context_parallel_attention`.
            softmax_scale: factor of the logits, 1 / sqrt(D) if None.
            causal: True for a causal mask by global position, aligned bottom-right: the last query sees all keys, the
                one before all but the last, and so on.
            window_size: (left, right), numbers of keys to the left and right of its own position that a query sees, -1
                for no limit; the last query is aligned with the last key. With `causal`, right is 0.
            alibi_slopes: None; other values are refused.
            deterministic: True for equal bits from equal inputs on GPUs too, as for `context_parallel_attention`.
            return_attn_probs: True to return the log-sum-exp too.
            group: the context-parallel axis: a process group, a DeviceMesh of one dim, or one of two dims for a nested
                ring; the default group if None.
            softcap: 0.0 for none, or the cap of the scaled logits, as for `context_parallel_attention`.
            seq_len: the global number of tokens, or the pair of those of queries and keys. If None, all ranks
                have equally many tokens; other shards are refused.

        Returns:
            out: (B, S, H, Dv), contiguous. With `return_attn_probs`, (out, lse, None), where lse: (B, H, S) is the
            natural log of the softmax denominator in float32 (float64 for float64 inputs); not differentiable.

        Raises:
            TypeError, ValueError: arguments that do not fit, before K/V travel; on every rank alike, local lengths
                that are not those of any global length in the layout.
            NotImplementedError: options refused above, before any collective.
        """
        shapes = "q, k and v of four dims (batch, sequence, heads, head_dim)"
        q, k, v = heads_before_rows(q, k, v, 1, shapes)
        mask = bottom_right_mask(causal, supported_window(window_size, alibi_slopes))
        out, lse = ring_attention(
            q, k, v, mesh=group_or_default(group), mask=mask, dropout_p=dropout_p, softcap=softcap, scale=softmax_scale,
            enable_gqa=True, layout=self.layout, deterministic=deterministic, return_lse=True, seq_len=seq_len,
        )  # fmt: skip
        out = out.transpose(1, 2).contiguous()
        return (out, lse, None) if return_attn_probs else out


_KINDS = {
    "ring": _Kind(Contiguous()),
    "zigzag_ring": _Kind(HeadTail()),
    "stripe": _Kind(Striped(1)),
    "step": _Kind(MirroredBatch()),
}

ring_flash_attn_func = _KINDS["ring"].func
ring_flash_attn_kvpacked_func = _KINDS["ring"].kvpacked_func
ring_flash_attn_qkvpacked_func = _KINDS["ring"].qkvpacked_func
zigzag_ring_flash_attn_func = _KINDS["zigzag_ring"].func
zigzag_ring_flash_attn_kvpacked_func = _KINDS["zigzag_ring"].kvpacked_func
zigzag_ring_flash_attn_qkvpacked_func = _KINDS["zigzag_ring"].qkvpacked_func
stripe_flash_attn_func = _KINDS["stripe"].func
stripe_flash_attn_kvpacked_func = _KINDS["stripe"].kvpacked_func
stripe_flash_attn_qkvpacked_func = _KINDS["stripe"].qkvpacked_func
step_flash_attn_func = _KINDS["step"].func
step_flash_attn_kvpacked_func = _KINDS["step"].kvpacked_func
step_flash_attn_qkvpacked_func = _KINDS["step"].qkvpacked_func


def shard(tensor: torch.Tensor, kind: str, group: Mesh | None = None, dim: int = 1) -> torch.Tensor:
    """This rank's shard of a tensor that every rank has whole, for the functions of `kind`.

    Args:
        tensor: of any dtype and shape: q, k, v, packed ones, token ids. `"step"` takes dim 0 as the batch.
        kind: "ring", "zigzag_ring", "stripe" or "step".
        group: as for the functions.
        dim: the sequence dim, negative counts from the end.

    Returns:
        a new tensor. Differentiable: gradients of other ranks' tokens are zero here, so that the sum over ranks is the
        gradient of the whole tensor.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    (local,) = context_parallel_shard(group_or_default(group), [tensor], [dim], _layout(kind))
    return local


def unshard(
    tensor: torch.Tensor,
    kind: str,
    group: Mesh | None = None,
    dim: int = 1,
    *,
    grad: Literal["replicated", "partial"] = "replicated",
) -> torch.Tensor:
    """The whole tensor on every rank from the ranks' shards: the inverse of `shard`.

    Args:
        tensor: this rank's shard.
        kind, group, dim: as for `shard`.
        grad: "replicated" if all ranks compute the same from the result, "partial" if each computes its own share of
            the loss (see `context_parallel_unshard`).

    Returns:
        a new tensor, differentiable.

    Raises:
        TypeError, ValueError: arguments that do not fit; on all ranks alike, shards of other lengths than the layout's.
    """
    (whole,) = context_parallel_unshard(group_or_default(group), [tensor], [dim], _layout(kind), grad=grad)
    return whole


def _layout(kind: str) -> Layout:
    if kind not in _KINDS:
        raise ValueError(f"expected kind to be one of {', '.join(map(repr, _KINDS))}; got {kind!r}")
    return _KINDS[kind].layout
