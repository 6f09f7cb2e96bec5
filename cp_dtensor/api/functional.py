"""Context-parallel attention as functions of local shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor.api.dtensor.attention import dtensor_attention, sequence_ranks_of
from cp_dtensor.api.left_out import refuse_left_out
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.engine.attend import attend, modifiers_of
from cp_dtensor.engine.compiled_spec import CompiledCallSpec, Parts, key_of, made_of, mask_keys, parts_of
from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.engine.custom_op import backends_key, traced_attention_by_keys
from cp_dtensor.engine.validation import (
    Mesh,
    check_qkv,
    checked_mask,
    checked_method,
    checked_seq_len,
    positive_scale,
    refuse_dtensors,
    softmax_scale,
)
from cp_dtensor.spec.layouts import Contiguous, Layout
from cp_dtensor.spec.masks import Mask


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Mesh | None = None,
    method: str = "auto",
    is_causal: bool = False,
    mask: Mask | None = None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: Layout | None = None,
    rotate_method: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    seq_len: int | tuple[int, int] | None = None,
    debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot product attention of a sequence that is sharded over the ranks of `mesh`.

    Every rank passes its shard and gets its rows of softmax(scale q k^T + mask) v over the whole sequence.
    Differentiable; backward needs no context and may run in any thread.

    q, k and v may be DTensors on one mesh instead, placed in any way: the result is that of their full tensors, a
    DTensor placed as q (and sharded along the sequence wherever q, k or v are). `attn_mask` and `sinks` are DTensors
    then, `mesh` is None, and layout None or `Contiguous()`.

    Args:
        q: (B, H, S, D), this rank's queries in `layout` order; S may differ between ranks, and be 0.
        k: (B, Hkv, T, D), this rank's keys. T may differ from S (cross-attention).
        v: (B, Hkv, T, Dv), this rank's values.
        mesh: the ranks that share the sequence: a DeviceMesh of one dim or a process group; or a DeviceMesh of two
            dims; None for that of DTensors. Of two dims the one whose name begins with "ulysses" is the inner axis,
            otherwise the second; rank in the sequence = outer rank * inner size + inner rank.
        method: "ring": K/V travel, over two axes as a ring of rings; "ulysses": ranks exchange rows for heads;
            "hybrid": by heads over the inner axis, as a ring over the outer one; "auto": what is predicted to be
            fastest (see `explain`).
        is_causal: query i sees keys j <= i, by global position (also where the global lengths differ).
        mask: which query may see which key, by global position, as a value such as `Documents(cu_seqlens)`; together
            with `is_causal` and `attn_mask`, what all of them show.
        attn_mask: boolean (True: may be seen) or floating (added to the scaled logits, differentiable), broadcasting
            to (B, H, S, keys of the whole sequence): this rank's query rows in `layout` order, all key columns in the
            order of their positions. `context_parallel_shard(mesh, [attn_mask], [-2])` makes it of a whole one.
        dropout_p: probability that a weight of the softmax is dropped (others grow by 1 / (1 - dropout_p)). The seed is
            drawn from torch's generator of q's device, and the pattern is a function of the seed and of global
            positions, heads and batch rows: ranks with equal generators give what one rank alone gives, however the
            work is spread.
        sinks: (H,), of this rank's query heads and alike on every rank, any floating dtype: a logit of each head that
            counts in the softmax denominator alone, neither scaled nor dropped (attention sinks as parameters). Its
            gradient is the share of this rank's queries, like that of any parameter: the sum over the ranks is whole.
        scale: factor of the logits, 1 / sqrt(D) if None.
        enable_gqa: allow H to be a multiple of Hkv; query head h reads key head h // (H / Hkv).
        layout: which rank owns which tokens, `HeadTail()` if None. Inside of a context over these ranks that has
            another layout, None is refused, as mask=None is if it has a mask (`Full()` says that it is not to hold).
        rotate_method: how K/V travel in rings: "auto", "symm_mem", "allgather" or "alltoall" (see
            `set_rotate_method`); the process default if None.
        deterministic: on GPUs too, equal inputs give equal bits, forward and backward: plain masks as well are computed
            by our own kernels then, slower than by cuDNN's (docs/masks.md). The same as
            `torch.use_deterministic_algorithms(True)` around forward, for this call alone.
        return_lse: also return the log-sum-exp.
        seq_len: the global number of tokens, or a pair of those of queries and keys. If None, the ranks exchange
            their local lengths in one small collective (on the host where the groups have a CPU backend).
        debug: let the ranks exchange and compare everything that must agree; a disagreement names the rank.

    Returns:
        out: (B, H, S, Dv) in q's dtype. With `return_lse`, also lse: (B, H, S), natural log of the softmax denominator
        in float32 (float64 for float64 inputs), -inf for a query that sees no key (with sinks: the sink); not
        differentiable.

    Raises:
        TypeError, ValueError: arguments that do not fit, before any collective; lengths that are no division of any
            global length in the layout, on every rank alike. (A `seq_len` that is wrong on some ranks only is found
            there only; `debug=True` finds it on all.)
        NotImplementedError: no allowed SDPA backend can compute it.

    Source: Ring Attention (arXiv 2310.01889), DeepSpeed-Ulysses (arXiv 2309.14509), USP (arXiv 2405.07719).
    """
    lengths = None if seq_len is None else checked_seq_len(seq_len)
    q, k, v = _as_autocast_says(q), _as_autocast_says(k), _as_autocast_says(v)
    check_qkv(q, k, v, enable_gqa)
    if torch.compiler.is_dynamo_compiling() and not isinstance(q, DTensor):
        rotate_method = transport_by_name(rotate_method).name  # the default is read here, and guarded
        token, backends, shown = _constants(
            mesh, method, parts_of(layout), rotate_method, debug, bool(deterministic), parts_of(mask), bool(is_causal)
        )
        q, scale = positive_scale(q, softmax_scale(q, scale))
        modifiers = modifiers_of(q, attn_mask, dropout_p, sinks).drawn(q.device)
        out, lse = traced_attention_by_keys(
            q, k, v, modifiers, token, backends, shown, scale, lengths, return_lse, reads_more=debug,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    if isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor):
        _refuse_of_shards_only(q, k, mesh, layout, lengths, debug)
        return _of_dtensors(
            q, k, v, mask, is_causal, return_lse, attn_mask=attn_mask, dropout_p=dropout_p, sinks=sinks, scale=scale,
            enable_gqa=enable_gqa, method=checked_method(method), rotate_method=rotate_method,
            deterministic=bool(deterministic),
        )  # fmt: skip
    refuse_dtensors(q=q, k=k, v=v, attn_mask=attn_mask, sinks=sinks)
    settings = AttentionConfig.of(mesh, method, layout, rotate_method, debug=debug, deterministic=deterministic)
    refuse_left_out("context_parallel_attention", settings.ranks, layout=layout is not None, mask=mask is not None)
    out, lse = attend(
        q, k, v, settings, mask=checked_mask(mask, is_causal), scale=scale,
        modifiers=modifiers_of(q, attn_mask, dropout_p, sinks), lengths=lengths, needs_lse=return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Mesh | None = None,
    is_causal: bool = False,
    mask: Mask | None = None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: Layout | None = None,
    rotate_method: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    seq_len: int | tuple[int, int] | None = None,
    debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`context_parallel_attention` with method "ring": queries stay, keys and values travel.

    Over a mesh of two dims it is a ring of rings: K/V travel around the outer axis (across nodes) once, and around the
    inner one (within a node) from there. Arguments, results and errors are those of `context_parallel_attention`.

    Source: Ring Attention (arXiv 2310.01889).
    """
    return context_parallel_attention(
        q, k, v, mesh=mesh, method="ring", is_causal=is_causal, mask=mask, attn_mask=attn_mask, dropout_p=dropout_p,
        sinks=sinks, scale=scale, enable_gqa=enable_gqa, layout=layout, rotate_method=rotate_method,
        deterministic=deterministic, return_lse=return_lse, seq_len=seq_len, debug=debug,
    )  # fmt: skip


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Mesh | None = None,
    is_causal: bool = False,
    mask: Mask | None = None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: Layout | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    seq_len: int | tuple[int, int] | None = None,
    debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`context_parallel_attention` with method "ulysses": ranks exchange rows for heads, attend, and exchange back.

    Key heads that are fewer than the ranks are copied by the smallest factor that works; query heads that do not divide
    by the ranks leave some ranks with fewer, or none. Arguments, results and errors are those of
    `context_parallel_attention`.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """
    return context_parallel_attention(
        q, k, v, mesh=mesh, method="ulysses", is_causal=is_causal, mask=mask, attn_mask=attn_mask, dropout_p=dropout_p,
        sinks=sinks, scale=scale, enable_gqa=enable_gqa, layout=layout, deterministic=deterministic,
        return_lse=return_lse, seq_len=seq_len, debug=debug,
    )  # fmt: skip


def _refuse_of_shards_only(
    q: DTensor, k: DTensor, mesh: Mesh | None, layout: Layout | None, lengths: tuple[int, int] | None, debug: bool
) -> None:  # fmt: skip
    """Refuses arguments that do not fit DTensors, which know their mesh, their layout and their lengths.

    Raises:
        ValueError, NotImplementedError: such arguments.
    """
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            "in compiled code, context_parallel_attention takes no DTensors: call F.scaled_dot_product_attention "
            "under enable_context_parallel_dispatcher()"
        )
    if mesh is not None and mesh != q.device_mesh:
        raise ValueError(
            f"expected mesh to be None or that of the DTensors, {q.device_mesh}, got {mesh}; pass their local tensors "
            "(to_local()) if these are shards of a sequence over another mesh"
        )
    if layout not in (None, Contiguous()):
        raise ValueError(
            f"expected layout to be None or Contiguous(), since DTensors are sharded in contiguous chunks, got {layout}"
        )
    if lengths not in (None, (q.size(2), k.size(2))):
        raise ValueError(
            f"expected seq_len to be None or that of the DTensors, {(q.size(2), k.size(2))}, got {lengths}"
        )
    if debug:
        raise NotImplementedError("debug=True compares the shards of the ranks, which DTensors need not: got DTensors")


def _of_dtensors(
    q: DTensor, k: DTensor, v: DTensor, mask: Mask | None, is_causal: bool, return_lse: bool, **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of DTensors; inside of a context over their ranks, a mask must be passed if the context has one."""
    if mask is None:
        refuse_left_out("context_parallel_attention", sequence_ranks_of(q, k, v), layout=True, mask=False)
    out, lse = dtensor_attention(q, k, v, mask=checked_mask(mask, is_causal), needs_lse=return_lse, **options)
    return out if lse is None else (out, lse)


@_torch.constant_in_trace
def _constants(
    mesh: Mesh | None, method: str, layout: Parts | None, rotate_method: str, debug: bool, deterministic: bool,
    mask: Parts | None, is_causal: bool,
) -> tuple[str, str, str]:  # fmt: skip
    """The keys of call spec, backends and mask, for compiled code."""
    settings = AttentionConfig.of(
        mesh, method, made_of(layout), rotate_method, debug=debug, deterministic=deterministic
    )
    refuse_left_out("context_parallel_attention", settings.ranks, layout=layout is not None, mask=mask is not None)
    shown = checked_mask(made_of(mask), is_causal)
    return key_of(CompiledCallSpec.of(settings)), backends_key(), mask_keys.key_of(shown)


def _as_autocast_says(tensor: torch.Tensor) -> torch.Tensor:
    """Casts as autocast does for `F.scaled_dot_product_attention`; float64 is left alone."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type not in ("cpu", "cuda"):
        return tensor
    if not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
