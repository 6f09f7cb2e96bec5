"""Attention of packed documents, whose tokens follow one another without a batch dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cp_dtensor import _torch
from cp_dtensor.api.functional import context_parallel_attention, takes_options
from cp_dtensor.api.interception import refuse_wrapped
from cp_dtensor.engine.arguments import check_qkv, check_tensors, expect, refuse_beside
from cp_dtensor.engine.attend import attend
from cp_dtensor.engine.base import Tensors
from cp_dtensor.engine.call import Call, Options
from cp_dtensor.engine.contexts import current, queries_alone
from cp_dtensor.engine.handles import Keys, fake_handle, handle_of
from cp_dtensor.engine.run import CallMask
from cp_dtensor.spec.documents import Documents, ascending, checked_lengths, packed_mask
from cp_dtensor.spec.masks import Causal, Full, Mask, SlidingWindow

if TYPE_CHECKING:
    from typing_extensions import Unpack

Window = tuple[int | None, int | None]
"""Keys to the left and to the right of a query that it sees; -1 or None for no limit."""


@takes_options("mask")
def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens: Any, cu_seqlens_k: Any = None,
    window_size: Window = (-1, -1), within: Mask | None = None, sinks: torch.Tensor | None = None,
    return_lse: bool = False, **options: Unpack[Options],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute attention within packed documents that are sharded, as one sequence, over the ranks of `mesh`.

    Every rank passes its tokens and gets, for each, softmax(scale q k^T + mask) v over its document, as
    `flash_attn_varlen_func` of the whole sequence. Documents may be empty, shorter than the number of ranks, and lie
    across any number of ranks. Tokens outside of all documents have an output and gradients of zero. Differentiable;
    backward needs no context and may run in any thread.

    Args:
        q, k, v: (T, H, D), (U, Hkv, D) and (U, Hkv, Dv), this rank's tokens in `layout` order; T may differ between
            ranks, and be 0. H may be a multiple of Hkv; keys are not expanded.
        cu_seqlens: ascending positions in the whole sequence, one more than documents, equal on every rank: document d
            has the positions cu_seqlens[d] to cu_seqlens[d + 1] - 1. Integers, or a tensor; reading a tensor on a GPU
            waits for the GPU. Compiled code takes integers and is compiled for each list; where documents change with
            every batch, call `F.scaled_dot_product_attention` inside of `context_parallel(mesh, mask=...)`.
        cu_seqlens_k: those of the keys if they differ (cross-attention): queries of document d see keys of document d.
        is_causal: True: within a document, the last query sees all keys, the one before it all but the last, and so on
            ("bottom-right", which matters where a document has different numbers of queries and keys).
        window_size: (left, right), the numbers of keys before and after its own position that a query sees, -1 or None
            for all; the last query of a document is at its last key. With `is_causal`, right is 0. With (2, 0) a query
            sees its own position and two keys before it.
        within: a mask inside of each document, with positions counted from its start, such as `PrefixLM(8)`. A key is
            seen if it, `is_causal` and `window_size` all allow it.
        seq_len: tokens of the whole sequence, cu_seqlens[-1] or more (tokens after the last document are padding), or
            a pair of those of queries and keys. None: ranks have equally many tokens.
        mesh, sinks, return_lse, options: as for `context_parallel_attention`, without `mask`. The layouts
            `PerDocument(cu_seqlens)` and `Balanced(...)` balance the work of documents.

    Returns:
        out: (T, H, Dv) in q's dtype, contiguous. With `return_lse`, also lse: (H, T), as there.

    Raises:
        TypeError, ValueError: arguments that do not fit, before any collective; a sequence that is shorter than its
            documents, and shards of other lengths, on every rank at the first call of each kind.
        NotImplementedError: no enabled SDPA backend can compute it; a tensor `cu_seqlens` in compiled code.

    Documents of 2 and 3 tokens; rank 0 has three of the tokens and rank 1 two. Queries of zeros weigh all keys alike,
    so with the values 1, 3, 2 and 4, 6 the outputs are 1, 2, 2 and 3, 4:

        options = {"is_causal": True, "layout": Contiguous(), "seq_len": 5}
        out = varlen_attention(q, k, v, mesh=mesh, cu_seqlens=[0, 2, 5], **options)

    Source: FlashAttention (arXiv 2205.14135), whose `flash_attn_varlen_func` has these documents.
    """
    views = heads_first_of_packed(q, k, v)
    if torch.compiler.is_dynamo_compiling() and (
        isinstance(cu_seqlens, torch.Tensor) or isinstance(cu_seqlens_k, torch.Tensor)
    ):
        raise NotImplementedError(
            "varlen_attention, in compiled code, expects cu_seqlens to be integers, which are constants there; got a "
            "tensor: call torch's varlen_attn inside of context_parallel, which reads it when the code runs"
        )
    for name, given in options.items():
        if name in ("mask", "attn_mask") and given is not None:
            raise TypeError(f"varlen_attention takes no {name} beside cu_seqlens, got {given!r}: pass within=")
    window = bottom_right_mask(options.pop("is_causal", False), window_size)
    if isinstance(within, Mask) and window != Full():
        window = within & window
    elif within is not None:  # `Documents` refuses other than masks
        window = within
    options["mask"] = Documents(cu_seqlens, cu_seqlens_k, within=window)
    result = context_parallel_attention(*views, sinks=sinks, enable_gqa=True, return_lse=return_lse, **options)
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out.squeeze(0).transpose(0, 1).contiguous()
    return out if lse is None else (out, lse.squeeze(0))


def heads_first_of_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views (1, H, T, D) of packed q, k and v (T, H, D), where H may be a multiple of k's heads."""
    q, k, v = heads_before_rows(q, k, v, 0, "packed q, k and v of three dims (tokens, heads, head_dim)")
    return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)


def heads_before_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int, expected_dims: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views (..., H, S, D) of q, k and v (..., S, H, D), whose dim `rows` is S; H may be more than k's.

    Raises:
        TypeError: not tensors.
        ValueError: shapes that do not fit; the message has all three, or `expected_dims` if there are more or fewer.
    """
    heads, width = rows + 1, rows + 2  # `attend` would name the dims of the views
    check_tensors(q=q, k=k, v=v)
    received = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    expect(q.dim() == k.dim() == v.dim() == width + 1, expected_dims, received)
    expect(q.shape[:rows] == k.shape[:rows] == v.shape[:rows], "one batch size (dim 0) for q, k and v", received)
    same_rows = k.shape[rows:width] == v.shape[rows:width]
    expect(same_rows, f"as many tokens (dim {rows}) and heads (dim {heads}) in v as in k", received)
    expect(q.size(width) == k.size(width), f"one head dim (dim {width}) for q and k", received)
    is_multiple = k.size(heads) > 0 and q.size(heads) % k.size(heads) == 0
    expect(is_multiple, f"query heads (dim {heads}) to be a multiple of key heads", received)
    return q.transpose(rows, heads), k.transpose(rows, heads), v.transpose(rows, heads)


def bottom_right_mask(is_causal: bool, window_size: Window) -> Mask:
    """Return a causal mask, a window or both, in which the last query is at the last key, as in FlashAttention.

    Raises:
        ValueError: a window that is no pair, or has other ends than numbers >= 0, -1 and None.

    >>> bottom_right_mask(True, (4, None))
    SlidingWindow(left=4, right=0, alignment='bottom_right')
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            "expected window_size to be a pair (left, right) of numbers of keys, -1 or None for no limit; got "
            f"{window_size!r}"
        )
    left, right = (None if end == -1 else end for end in window_size)
    window = SlidingWindow(left, right, "bottom_right")
    if is_causal:
        return Causal("bottom_right") if left is None else SlidingWindow(left, 0, "bottom_right")
    return Full() if (left, right) == (None, None) else window


# varlen_attn in contexts

_REFUSED = {"seqused_k": "cache of keys", "block_table": "paged cache of keys", "num_splits": "batch-invariant results"}
"""Arguments of `varlen_attn` that sequence shards do not support, and their features."""


def varlen_attn_in_context(call: dict[str, Any]) -> Any:
    """Compute `torch.nn.attention.varlen.varlen_attn` in contexts: `(out, lse, random state)`; None outside of them.

    The documents are those of the whole sequences of the batch rows, one after another.
    """
    context = None if call["query"].is_meta else current()
    if context is None or queries_alone(context) is not None:
        return None
    if "out" in call:
        raise NotImplementedError(
            "varlen_attn_out is not supported inside of context_parallel, where results are new tensors: call "
            "varlen_attn"
        )
    tensors = q, _, _ = call["query"], call["key"], call["value"]
    refuse_wrapped("varlen_attn", *tensors)
    context.seen.add("attention")
    refuse_beside(context.beside, "varlen_attn", "varlen_attention")
    for name, feature in _REFUSED.items():
        if call.get(name) is not None:
            raise NotImplementedError(
                f"varlen_attn of sequence shards has no {feature}: got {name}={call[name]!r}, expected None"
            )
    if call["cu_seq_k"] is None:
        raise NotImplementedError("varlen_attn of sequence shards expects cu_seq_k to be a tensor, got None")
    within = bottom_right_mask(call["is_causal"], call["window_size"] or (-1, -1))
    traced, views = _torch.is_traced(q), heads_first_of_packed(*tensors)
    check_qkv(*views, enable_gqa=True)
    if traced:
        checked_lengths(context.call.lengths)
    documents = torch.ops.cp_dtensor.documents(call["cu_seq_q"], call["cu_seq_k"], _within.key_of(within))
    t = Tensors(*views, mask=documents)
    out, lse = attend(context.inside(scale=call["scale"], traced=traced), t, needs_lse=True)
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which varlen_attn does not have
    return out.squeeze(0).transpose(0, 1).contiguous(), lse.squeeze(0), random_state


@dataclass(frozen=True, eq=False)
class PackedDocuments:
    """Documents of whole sequences of batch rows, one after the other; arguments as of `packed_mask`."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    within: Mask

    def of_call(self, call: Call) -> CallMask:
        return CallMask(*packed_mask(self.queries, self.keys, call.lengths, self.within))


_within = Keys[Mask]("a mask,")
for _plain in (Full(), Causal("bottom_right")):  # code from disk may need these before this process has traced any
    _within.key_of(_plain)


def _documents(cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, within: str) -> torch.Tensor:
    # Positions are read in every call: collectives and compiled code may change a tensor without a trace.
    queries = ascending(cu_seq_q, "varlen_attn", "cu_seq_q")
    keys = queries if cu_seq_k is cu_seq_q else ascending(cu_seq_k, "varlen_attn", "cu_seq_k")
    return handle_of(PackedDocuments(queries, keys, _within.value_of(within)))


_torch.define_operator(
    "documents(Tensor cu_seq_q, Tensor cu_seq_k, str within) -> Tensor", _documents, lambda *_: fake_handle()
)

_OPS = torch.ops.cp_dtensor
ATTENTION_OPS = (
    _OPS.attention.default, _OPS.attention.live, _OPS.kept_forward.default, _OPS.documents.default,
    *_torch.FUSED_SDPA_OPS,
)  # fmt: skip
"""Operators whose results a policy of selective activation checkpointing saves, so that attention is not recomputed.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` takes them as a list, or a policy looks for them.
Attention of sharded sequences is one of the first two in compiled code, the third in eager code. It is saved whole, out
and log-sum-exp: a recompute does not compute it again, and only Ulysses exchanges rows again, in eager code. A policy
without the third saves the fused operators of eager code tile by tile; transfers and merges run again. A policy is
asked once about each call, in eager code before it is computed: `op_output` (torch 2.13) has its shapes, no values.
"""
