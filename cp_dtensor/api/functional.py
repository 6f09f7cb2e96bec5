"""Context-parallel attention as functions of local shards."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor.api.dtensor_attention import dtensor_attention, refuse_other_place, sequence_ranks_of
from cp_dtensor.comm.groups import Mesh
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.engine.arguments import check_qkv, refuse_dtensors, tensors_of
from cp_dtensor.engine.attend import attend
from cp_dtensor.engine.base import Tensors
from cp_dtensor.engine.call import (
    Call,
    checked_bool,
    checked_dropout_p,
    checked_mask,
    checked_method,
    checked_pair,
    checked_softcap,
    softmax_scale,
)
from cp_dtensor.engine.compiled import Constants, attend_traced, constants_of
from cp_dtensor.engine.contexts import around, inherited
from cp_dtensor.engine.handles import Parts, made_of, parts_of
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask


def context_parallel_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mesh: Mesh | None = None, method: str = "auto",
    is_causal: bool = False, mask: Mask | None = None, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    sinks: torch.Tensor | None = None, softcap: float = 0.0, scale: float | None = None, enable_gqa: bool = False,
    layout: Layout | None = None, rotate_method: str | None = None, deterministic: bool = False,
    return_lse: bool = False, seq_len: int | tuple[int, int] | None = None, replay: bool = False, debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
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
        method: "ring": K/V travel, over two axes in a nested ring; "ulysses": ranks exchange rows for heads; "hybrid":
            Ulysses over the inner axis, a ring over the outer one; "auto": the one with the lowest predicted time (see
            `explain`).
        is_causal: True: query i sees keys j <= i, by global position, also where q and k have different lengths.
        mask: the keys that each query sees, by global position, such as `Documents(cu_seqlens)`. A key is seen if the
            mask, `is_causal` and `attn_mask` all allow it. None takes the mask of the context (or module) around the
            call, if that is over these ranks; `Full()` takes none.
        attn_mask: boolean (True: seen) or floating (added to the scaled logits, differentiable), broadcasting to
            (B, H, S, keys of the whole sequence): this rank's query rows in `layout` order, all key columns in the
            order of their positions. `context_parallel_shard(mesh, [attn_mask], [-2])` shards a whole one.
        dropout_p: probability that a weight of the softmax is dropped (others grow by 1 / (1 - dropout_p)). The seed is
            drawn from torch's generator of q's device. The pattern depends on the seed, global positions, heads and
            batch rows only: ranks with equal generators give what one rank alone gives, with any method and layout.
        sinks: (H,), any floating dtype, equal on every rank: a logit of each of this rank's query heads that counts in
            the softmax denominator alone and is neither scaled nor dropped. Its gradient is the share of this rank's
            queries; the sum over the ranks is the whole gradient. The sinks of a context do not apply here.
        softcap: 0.0 for none, or c > 0: scaled logits x become c tanh(x / c), as in Gemma 2, before a floating
            `attn_mask` is added; sinks are not capped. Our own kernels compute it, which are slower than cuDNN's.
        scale: factor of the logits; None is 1 / sqrt(D).
        enable_gqa: True allows H to be a multiple of Hkv; query head h reads key head h // (H / Hkv). One key head is
            for all query heads without it too, as for `F.scaled_dot_product_attention`.
        layout: the tokens of each rank. None takes the layout of the context (or module) around the call, if that
            is over these ranks, else `HeadTail()`.
        rotate_method: the KV transport of rings: "auto", "symm_mem", "allgather" or "alltoall" (see
            `set_rotate_method`); None is the process default.
        deterministic: True: equal inputs give equal bits on GPUs too, forward and backward, as under
            `torch.use_deterministic_algorithms(True)`. Plain masks then run on FlashAttention-4 where it is
            installed, else on our own kernels, which are slower than cuDNN's (docs/kernels.md).
        return_lse: True also returns the log-sum-exp.
        seq_len: the global number of tokens, or a pair of those of queries and keys. If None, all ranks
            have equally many tokens; other shards are refused.
        replay: True: forward and backward passes run eagerly twice, and are then replayed as CUDA graphs, which keep
            their memory; those with other shapes, strides, dtypes or options have graphs of their own. This is faster
            for shards of up to about 4,096 tokens, where the host's launches take longer than the GPU
            (docs/cuda_graphs.md). It is refused with attn_mask, dropout, packed documents and padding, and where ranks
            share no GPU memory; compiled code ignores it.
        debug: True: in every call the ranks exchange and compare everything that must agree; a disagreement names the
            rank. False: in the first call of each kind (docs/limits.md).

    Returns:
        out: (B, H, S, Dv) in q's dtype. With `return_lse`, also lse: (B, H, S), natural log of the softmax denominator
        in float32 (float64 for float64 inputs), -inf for a query that sees no key (with sinks: the sink); not
        differentiable.

    Raises:
        TypeError, ValueError: arguments that do not fit, before any collective; local lengths that the layout gives to
            no global length, on every rank alike. (A `seq_len` that is wrong on some ranks only is refused there only;
            with `debug=True`, on all.)
        NotImplementedError: no enabled SDPA backend can compute it; in compiled code, a context whose mask or layout
            cannot be taken over.
        RuntimeError: a backward inside of a context, which the call may belong to or not.

    Two ranks with two tokens each, `HeadTail()`: rank 0 has the tokens 0 and 3, rank 1 the tokens 1 and 2. Queries of
    zeros weigh all keys alike, so with the positions as values the outputs are the means of the positions up to each:

        v = torch.tensor([[0.0, 3.0], [1.0, 2.0]][rank]).view(1, 1, 2, 1)
        out = context_parallel_attention(v * 0, v, v, mesh=mesh, is_causal=True)  # 0, 1.5 and 0.5, 1

    Source: Ring Attention (arXiv 2310.01889), DeepSpeed-Ulysses (arXiv 2309.14509), USP (arXiv 2405.07719).
    """
    q, k, v = cast_by_autocast(q), cast_by_autocast(k), cast_by_autocast(v)
    check_qkv(q, k, v, enable_gqa)
    options = Options(
        mesh, method, is_causal, mask, dropout_p, softcap, scale, layout, rotate_method, deterministic, seq_len, replay,
        debug,
    )  # fmt: skip
    if isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor):
        out, lse = attend_dtensors(q, k, v, attn_mask, sinks, options, return_lse)
    else:
        refuse_dtensors(q=q, k=k, v=v, attn_mask=attn_mask, sinks=sinks)
        out, lse = attend_shards(
            "context_parallel_attention", tensors_of(q, k, v, attn_mask, sinks), options, return_lse
        )  # fmt: skip
    return (out, lse) if return_lse else out


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mesh: Mesh | None = None, is_causal: bool = False,
    mask: Mask | None = None,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, sinks: torch.Tensor | None = None,
    softcap: float = 0.0, scale: float | None = None, enable_gqa: bool = False, layout: Layout | None = None,
    rotate_method: str | None = None, deterministic: bool = False, return_lse: bool = False,
    seq_len: int | tuple[int, int] | None = None, replay: bool = False, debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`context_parallel_attention` with method "ring": queries stay, keys and values travel.

    Over a mesh of two dims it is a nested ring: K/V cross the outer axis (between nodes) once and then travel around
    the inner one (within a node). Arguments, results and errors are those of `context_parallel_attention`.

    Source: Ring Attention (arXiv 2310.01889).
    """
    return context_parallel_attention(
        q, k, v, mesh=mesh, method="ring", is_causal=is_causal, mask=mask, attn_mask=attn_mask, dropout_p=dropout_p,
        sinks=sinks, softcap=softcap, scale=scale, enable_gqa=enable_gqa, layout=layout, rotate_method=rotate_method,
        deterministic=deterministic, return_lse=return_lse, seq_len=seq_len, replay=replay, debug=debug,
    )  # fmt: skip


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mesh: Mesh | None = None, is_causal: bool = False,
    mask: Mask | None = None,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, sinks: torch.Tensor | None = None,
    softcap: float = 0.0, scale: float | None = None, enable_gqa: bool = False, layout: Layout | None = None,
    deterministic: bool = False, return_lse: bool = False, seq_len: int | tuple[int, int] | None = None,
    replay: bool = False, debug: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`context_parallel_attention` with method "ulysses": ranks exchange rows for heads, attend, and exchange back.

    If there are fewer key heads than ranks, they are replicated by the smallest factor that works. If the number of
    query heads is no multiple of the ranks, some ranks have fewer heads, or none. Arguments, results and errors are
    those of `context_parallel_attention`.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """
    return context_parallel_attention(
        q, k, v, mesh=mesh, method="ulysses", is_causal=is_causal, mask=mask, attn_mask=attn_mask, dropout_p=dropout_p,
        sinks=sinks, softcap=softcap, scale=scale, enable_gqa=enable_gqa, layout=layout, deterministic=deterministic,
        return_lse=return_lse, seq_len=seq_len, replay=replay, debug=debug,
    )  # fmt: skip


class Options(NamedTuple):
    """Arguments of public functions besides tensors, which `Call.of` checks."""

    mesh: Mesh | None
    method: str = "auto"
    is_causal: bool = False
    mask: Mask | None = None
    dropout_p: float = 0.0
    softcap: float = 0.0
    scale: float | None = None
    layout: Layout | None = None
    rotate_method: str | None = None
    deterministic: bool = False
    seq_len: int | tuple[int, int] | None = None
    replay: bool = False
    debug: bool = False

    def call(self) -> Call:
        """Return the call of these arguments."""
        return Call.of(**self._asdict())


def attend_shards(owner: str, t: Tensors, options: Options, needs_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(out, lse)` of local shards, by the arguments of a public function, `owner`."""
    if torch.compiler.is_dynamo_compiling():
        factors = [
            softmax_scale(t.q.size(3), options.scale), checked_softcap(options.softcap),
            checked_dropout_p(options.dropout_p),
        ]  # fmt: skip
        pair = checked_pair(options.seq_len) or (-1, -1)
        constants = _constants(
            owner, options.mesh, options.method, options.is_causal, parts_of(options.mask), parts_of(options.layout),
            # Dynamo guards the process default.
            transport_by_name(options.rotate_method).name, options.deterministic, options.debug,
        )  # fmt: skip
        return attend_traced(constants, t, factors, [*pair, 0, 0], needs_lse)
    call = inherited(owner, options.call(), layout=options.layout is None, mask=options.mask is None)
    return attend(call, t, needs_lse=needs_lse)


@_torch.constant_in_trace
def _constants(
    owner: str, mesh: Mesh | None, method: str, is_causal: bool, mask: Parts | None, layout: Parts | None,
    rotate_method: str, deterministic: bool, debug: bool,
) -> Constants:  # fmt: skip
    """Return the constants of a call in compiled code."""
    call = Call.of(
        mesh, method=method, is_causal=is_causal, mask=made_of(mask), layout=made_of(layout),
        rotate_method=rotate_method, deterministic=deterministic, debug=debug,
    )  # fmt: skip
    return constants_of(inherited(owner, call, layout=layout is None, mask=mask is None, traced=True))


def attend_dtensors(
    q: DTensor, k: DTensor, v: DTensor, attn_mask: torch.Tensor | None, sinks: torch.Tensor | None, options: Options,
    needs_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `(out, lse)` of DTensors, which know their mesh, their layout and their lengths.

    Raises:
        NotImplementedError: in compiled code, and with `debug`, which compares shards.
        ValueError: a mesh, a layout or lengths besides those of the DTensors.
    """
    owner = "context_parallel_attention"
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            f"in compiled code, {owner} takes no DTensors: call F.scaled_dot_product_attention under "
            "enable_context_parallel_dispatcher()"
        )
    lengths = q.size(2), k.size(2)
    refuse_other_place(owner, q, options.mesh, options.layout, checked_pair(options.seq_len), lengths)
    if options.debug:
        raise NotImplementedError("debug=True compares the shards of the ranks, which DTensors need not: got DTensors")
    checked_method(options.method)
    mask = options.mask
    if mask is None:
        context = around(owner, sequence_ranks_of(q, k, v), mask=True)
        mask = None if context is None else context.call.mask
    return dtensor_attention(
        q, k, v, mask=checked_mask(mask, options.is_causal), attn_mask=attn_mask, dropout_p=options.dropout_p,
        sinks=sinks, softcap=options.softcap, scale=options.scale, enable_gqa=True, method=options.method,
        rotate_method=options.rotate_method, deterministic=checked_bool("deterministic", options.deterministic),
        replay=checked_bool("replay", options.replay), needs_lse=needs_lse,
    )  # fmt: skip


def cast_by_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Casts as autocast does for `F.scaled_dot_product_attention`; float64 tensors stay float64."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type not in ("cpu", "cuda"):
        return tensor
    if not torch.is_autocast_enabled(tensor.device.type) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if tensor.is_floating_point() else tensor
