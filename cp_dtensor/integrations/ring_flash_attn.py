"""Arguments in flash-attn's style, (batch, sequence, heads, head dim): what the integrations that take them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cp_dtensor.api.functional import ring_attention
from cp_dtensor.api.sharding import context_parallel_shard, context_parallel_unshard
from cp_dtensor.engine.validation import Mesh
from cp_dtensor.integrations.flash_attn_arguments import (
    AttentionResult,
    FlashAttnOptions,
    flash_attn_result,
    group_or_default,
    heads_first,
    unpacked,
)
from cp_dtensor.integrations.llama3_flash_attn_varlen import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)
from cp_dtensor.integrations.ring_flash_attn_sharding import (
    shard_varlen,
    unshard_varlen,
)
from cp_dtensor.integrations.ring_flash_attn_varlen import (
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)
from cp_dtensor.spec.layouts import (
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
)

# The functions of zhuzilin's ring-flash-attention: change the import and keep the calls. They take this rank's
# shards as (batch, sequence, heads, head dim). Kinds differ in which tokens a rank has, and in how keys and values
# travel: | kind | layout | keys and values | |---|---|---| | `ring` | `Contiguous()` | as `set_rotate_method` says
# | | `zigzag_ring` | `HeadTail()` | as `set_rotate_method` says | | `stripe` | `Striped(1)` | as
# `set_rotate_method` says | | `step` | `MirroredBatch()` | as `set_rotate_method` says | | `llama3` |
# `Contiguous()` | gathered from all ranks | | `zigzag_llama3` | `HeadTail()` | gathered from all ranks | Each kind
# has `{kind}_flash_attn_func`, `{kind}_flash_attn_kvpacked_func` and `{kind}_flash_attn_qkvpacked_func`. They also
# do what that package does not: attention that is not causal in every kind, windows, dropout, any length on any
# number of ranks, CPUs, float32 and float64. That package has no `step`, and `llama3` for packed documents only.
# `shard` and `unshard` divide whole tensors as a kind expects, like the `extract_local` functions of its tests. For
# packed documents, `ring`, `zigzag_ring` and `llama3` have `{kind}_flash_attn_varlen_func` with its packed forms
# (`ring_flash_attn_varlen`, `llama3_flash_attn_varlen`), and `shard_varlen` and `unshard_varlen`.

__all__ = [
    "llama3_flash_attn_func",
    "llama3_flash_attn_kvpacked_func",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_qkvpacked_func",
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
    "zigzag_llama3_flash_attn_func",
    "zigzag_llama3_flash_attn_kvpacked_func",
    "zigzag_llama3_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]


@dataclass(frozen=True)
class AttentionKind:
    """Functions that differ in nothing but how the sequence is divided and how keys and values travel."""

    layout: Layout
    rotate_method: str | None = None

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
        """This rank's rows of softmax(softmax_scale q k^T + mask) v over the sequence of all ranks; differentiable.

        Args:
            q: (B, S, H, D), this rank's queries, in the order of the kind's layout (the table above).
            k: (B, T, Hkv, D), this rank's keys. H may be a multiple of Hkv (GQA, MQA).
            v: (B, T, Hkv, Dv), this rank's values.
            dropout_p: probability that a weight of the softmax is dropped, as for `context_parallel_attention`.
            softmax_scale: factor of the logits, 1 / sqrt(D) if None.
            causal: the last query sees all keys, the one before all but the last, and so on, by global position.
            window_size: (left, right), how many keys to the left and to the right of its own place a query sees, -1 for
                all of them; the last query stands at the last key. With `causal`, right is 0.
            alibi_slopes: None; others are refused.
            deterministic: equal inputs give equal bits on GPUs too, as for `context_parallel_attention`.
            return_attn_probs: also return the log-sum-exp.
            group: the context-parallel axis, a process group or a DeviceMesh of one dim, or of two for a nested ring;
                the default group if None.
            softcap: 0.0; other values are refused.
            seq_len: the global number of tokens, or a pair of those of queries and keys. If None, the ranks exchange
                their local lengths in one small collective (on the host where the group has a CPU backend).

        Returns:
            out: (B, S, H, Dv), contiguous. With `return_attn_probs`, (out, lse, None), where lse: (B, H, S) is the
            natural log of the softmax denominator in float32 (float64 for float64 inputs); not differentiable.

        Raises:
            TypeError, ValueError: arguments that do not fit, before keys and values travel; lengths that are no
                division of any global length in the layout, on every rank alike.
            NotImplementedError: what is refused above, before any collective.
        """
        options = FlashAttnOptions(window_size, softcap, alibi_slopes)
        heads_first_qkv = heads_first(q, k, v)
        options.check()
        out, lse = ring_attention(
            *heads_first_qkv, mesh=group_or_default(group), mask=options.mask(causal), dropout_p=dropout_p,
            scale=softmax_scale, enable_gqa=True, layout=self.layout, rotate_method=self.rotate_method,
            deterministic=deterministic, return_lse=True, seq_len=seq_len,
        )  # fmt: skip
        return flash_attn_result(out, lse, return_attn_probs)

    def kvpacked_func(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
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
        """`func` of q: (B, S, H, D) and kv: (B, T, 2, Hkv, D), this rank's keys and values; see there."""
        k, v = unpacked("kv", kv, 2)
        return self.func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs,
            group, softcap=softcap, seq_len=seq_len,
        )  # fmt: skip

    def qkvpacked_func(
        self,
        qkv: torch.Tensor,
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
        """`func` of qkv: (B, S, 3, H, D), this rank's queries, keys and values; see there."""
        q, k, v = unpacked("qkv", qkv, 3)
        return self.func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs,
            group, softcap=softcap, seq_len=seq_len,
        )  # fmt: skip


_RING = AttentionKind(Contiguous())
_ZIGZAG_RING = AttentionKind(HeadTail())
_STRIPE = AttentionKind(Striped(1))
_STEP = AttentionKind(MirroredBatch())
_LLAMA3 = AttentionKind(Contiguous(), "allgather")
_ZIGZAG_LLAMA3 = AttentionKind(HeadTail(), "allgather")

ring_flash_attn_func = _RING.func
ring_flash_attn_kvpacked_func = _RING.kvpacked_func
ring_flash_attn_qkvpacked_func = _RING.qkvpacked_func
zigzag_ring_flash_attn_func = _ZIGZAG_RING.func
zigzag_ring_flash_attn_kvpacked_func = _ZIGZAG_RING.kvpacked_func
zigzag_ring_flash_attn_qkvpacked_func = _ZIGZAG_RING.qkvpacked_func
stripe_flash_attn_func = _STRIPE.func
stripe_flash_attn_kvpacked_func = _STRIPE.kvpacked_func
stripe_flash_attn_qkvpacked_func = _STRIPE.qkvpacked_func
step_flash_attn_func = _STEP.func
step_flash_attn_kvpacked_func = _STEP.kvpacked_func
step_flash_attn_qkvpacked_func = _STEP.qkvpacked_func
llama3_flash_attn_func = _LLAMA3.func
llama3_flash_attn_kvpacked_func = _LLAMA3.kvpacked_func
llama3_flash_attn_qkvpacked_func = _LLAMA3.qkvpacked_func
zigzag_llama3_flash_attn_func = _ZIGZAG_LLAMA3.func
zigzag_llama3_flash_attn_kvpacked_func = _ZIGZAG_LLAMA3.kvpacked_func
zigzag_llama3_flash_attn_qkvpacked_func = _ZIGZAG_LLAMA3.qkvpacked_func


def shard(tensor: torch.Tensor, kind: str, group: Mesh | None = None, dim: int = 1) -> torch.Tensor:
    """This rank's shard, as functions of `kind` expect it, of a tensor that every rank has whole.

    Args:
        tensor: of any dtype and shape: q, k, v, packed ones, token ids. `"step"` takes dim 0 as the batch.
        kind: "ring", "zigzag_ring", "stripe", "step", "llama3" or "zigzag_llama3".
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
    """The whole tensor, on every rank, from the ranks' shards: the inverse of `shard`.

    Args:
        tensor: this rank's shard.
        kind, group, dim: as for `shard`.
        grad: "replicated" if all ranks compute the same from the result, "partial" if each computes its own share of
            the loss (see `context_parallel_unshard`).

    Returns:
        a new tensor, differentiable.

    Raises:
        TypeError, ValueError: arguments that do not fit; shards whose lengths are not the layout's, on all ranks alike.
    """
    (whole,) = context_parallel_unshard(group_or_default(group), [tensor], [dim], _layout(kind), grad=grad)
    return whole


def _layout(kind: str) -> Layout:
    kinds = {
        "ring": _RING,
        "zigzag_ring": _ZIGZAG_RING,
        "stripe": _STRIPE,
        "step": _STEP,
        "llama3": _LLAMA3,
        "zigzag_llama3": _ZIGZAG_LLAMA3,
    }
    if kind not in kinds:
        raise ValueError(f"expected kind to be one of {', '.join(map(repr, kinds))}; got {kind!r}")
    return kinds[kind].layout


# How ring-flash-attention divides packed documents over the ranks, and whole tensors for its varlen functions.
