"""Context-parallel attention as functions of local shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor.api.dtensor_attention import dtensor_attention, refuse_other_place, sequence_ranks_of
from cp_dtensor.comm.groups import Mesh
from cp_dtensor.comm.transports import transport_by_name
from cp_dtensor.engine.arguments import check_qkv, refuse_dtensors, tensors_of
from cp_dtensor.engine.attend import Constants, attend, attend_traced, constants_of
from cp_dtensor.engine.base import Tensors
from cp_dtensor.engine.call import FACTORS, Call, Options, checked_mask, checked_pair, factors_of, refuse_unknown
from cp_dtensor.engine.contexts import around, inherited
from cp_dtensor.engine.handles import made_of, parts_of
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


_OPTIONS = inspect.signature(Call.of).parameters


def takes_options(*left_out: str, of: Callable[..., Any] = Call.of) -> Callable[[F], F]:
    """Show the parameters of `of`, but for some, in the signature of a function that takes them as `**options`."""
    of_others = inspect.signature(of).parameters

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        named = {name: each for name, each in own.parameters.items() if each.kind is not each.VAR_KEYWORD}
        shown = [each for name, each in of_others.items() if name not in (*named, *left_out)]
        added = [each.replace(kind=each.KEYWORD_ONLY) for each in shown]
        vars(function)["__signature__"] = own.replace(parameters=[*named.values(), *added])
        return function

    return decorate


@takes_options()
def context_parallel_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, enable_gqa: bool = False, return_lse: bool = False,
    **options: Unpack[Options],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute scaled dot product attention of a sequence that is sharded over the ranks of `mesh`.

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
            or three dims; None for that of DTensors. Of several dims the one whose name begins with "ulysses" is the
            inner axis, otherwise the last; rank in the sequence = outer rank * inner size + inner rank.
        method: "ring": K/V travel, over several axes in a nested ring; "ulysses": ranks exchange rows for heads;
            "hybrid": Ulysses over the inner axis, a ring over the outer ones; "auto": the one with the lowest predicted
            time (see `explain`).
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
        return_lse: True also returns the log-sum-exp, differentiable: all ranks differentiate it, or none does.
        seq_len: the global number of tokens, or a pair of those of queries and keys. None: that of the layout or the
            context, if it has one, else ranks have equally many tokens; others are refused.
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
    q, k, v = cast_by_autocast(q, k, v)
    check_qkv(q, k, v, enable_gqa)
    if isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor):
        beside = {} if sinks is None else {"sinks": sinks}
        out, lse = _attend_dtensors(q, k, v, attn_mask, beside, return_lse, **options)
    else:
        refuse_dtensors(q=q, k=k, v=v, attn_mask=attn_mask, sinks=sinks)
        t = tensors_of(q, k, v, attn_mask, sinks)
        out, lse = attend_shards("context_parallel_attention", t, return_lse, options)
    return (out, lse) if return_lse else out


@takes_options("method")
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, enable_gqa: bool = False, return_lse: bool = False,
    **options: Unpack[Options],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute `context_parallel_attention` with method "ring": queries stay, keys and values travel.

    Over a mesh of two or three dims it is a nested ring: K/V cross the outer axis (between nodes) once and then travel
    around the inner ones (within a node). Arguments, results and errors are those of `context_parallel_attention`.

    Source: Ring Attention (arXiv 2310.01889).
    """
    if "method" in options:
        raise TypeError('ring_attention takes no method, which is "ring": call context_parallel_attention for others')
    options["method"] = "ring"
    return context_parallel_attention(
        q, k, v, attn_mask=attn_mask, sinks=sinks, enable_gqa=enable_gqa, return_lse=return_lse, **options
    )


@takes_options("method", "rotate_method")
def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, enable_gqa: bool = False, return_lse: bool = False,
    **options: Unpack[Options],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute `context_parallel_attention` with method "ulysses": exchange rows for heads, attend, exchange back.

    If there are fewer key heads than ranks, they are replicated by the smallest factor that works. If the number of
    query heads is no multiple of the ranks, some ranks have fewer heads, or none. Arguments, results and errors are
    those of `context_parallel_attention`.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """
    for name in ("method", "rotate_method"):
        if name in options:
            raise TypeError(f'ulysses_attention takes no {name}: its method is "ulysses", in which nothing rotates')
    options["method"] = "ulysses"
    return context_parallel_attention(
        q, k, v, attn_mask=attn_mask, sinks=sinks, enable_gqa=enable_gqa, return_lse=return_lse, **options
    )


def attend_shards(owner: str, t: Tensors, needs_lse: bool, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(out, lse)` of local shards, by the options of a public function, `owner`."""
    inherits = {"layout": options.get("layout") is None, "mask": options.get("mask") is None}
    if torch.compiler.is_dynamo_compiling():
        numbers: dict[str, Any] = {name: value for name, value in options.items() if name in FACTORS}
        pair = checked_pair(options.get("seq_len")) or (-1, -1)
        constants = traced_constants(owner, options, **inherits)
        return attend_traced(constants, t, factors_of(t.q.size(3), **numbers), [*pair, 0, 0], needs_lse)
    refuse_unknown(owner, options, _OPTIONS.keys())
    return attend(inherited(owner, Call.of(**options), **inherits), t, needs_lse=needs_lse)


def traced_constants(owner: str, options: Options, *, layout: bool, mask: bool) -> Constants:
    """Return the constants of a call in compiled code: all options of its function, `owner`, but for numbers.

    Numbers may be symbols. `layout` and `mask` are as for `inherited`.
    """
    constants: dict[str, Any] = {
        name: parts_of(value) for name, value in options.items() if name not in ("mesh", "seq_len", *FACTORS)
    }
    constants["rotate_method"] = transport_by_name(options.get("rotate_method")).name  # Dynamo guards the default
    return _constants(owner, options.get("mesh"), tuple(constants), tuple(constants.values()), layout, mask)


@_torch.constant_in_trace
def _constants(
    owner: str, mesh: Mesh | None, names: tuple[str, ...], values: tuple[Any, ...], layout: bool, mask: bool
) -> Constants:
    options: Any = dict(zip(names, map(made_of, values), strict=True))
    call = Call.of(mesh, **options)
    return constants_of(inherited(owner, call, layout=layout, mask=mask, traced=True))


def _attend_dtensors(
    q: DTensor, k: DTensor, v: DTensor, attn_mask: torch.Tensor | None, beside: dict[str, torch.Tensor],
    needs_lse: bool, *, mesh: Mesh | None = None, layout: Layout | None = None,
    seq_len: int | tuple[int, int] | None = None, mask: Mask | None = None, is_causal: bool = False,
    debug: bool = False, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `(out, lse)` of DTensors, which know their mesh, their layout and their lengths."""
    owner = "context_parallel_attention"
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            f"in compiled code, {owner} takes no DTensors: call F.scaled_dot_product_attention under "
            "enable_context_parallel_dispatcher()"
        )
    refuse_unknown(owner, options, _OPTIONS.keys())
    refuse_other_place(owner, q, mesh, layout, checked_pair(seq_len), (q.size(2), k.size(2)))
    if debug:
        raise NotImplementedError("debug=True compares the shards of the ranks, which DTensors need not: got DTensors")
    if mask is None:
        context = around(owner, sequence_ranks_of(q, k, v), mask=True)
        mask = None if context is None else context.call.mask
    return dtensor_attention(
        q, k, v, mask=checked_mask(mask, is_causal), attn_mask=attn_mask, beside=beside, needs_lse=needs_lse, **options
    )


def cast_by_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast does for `F.scaled_dot_product_attention`; float64 tensors stay float64."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return tensors
    return tuple([_cast(each) for each in tensors])


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.device.type not in ("cpu", "cuda"):
        return tensor
    if not torch.is_autocast_enabled(tensor.device.type) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if tensor.is_floating_point() else tensor
