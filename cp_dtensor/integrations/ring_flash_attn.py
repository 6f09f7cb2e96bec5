"""Drop-in functions of zhuzilin's ring-flash-attention: change the import and keep the calls.

Functions take this rank's shards. Names are `{kind}_flash_attn_func` for (batch, sequence, heads, head_dim) and
`{kind}_flash_attn_varlen_func` for packed documents (tokens, heads, head_dim). Each has the forms `_kvpacked_func` and
`_qkvpacked_func`, whose k and v, or q, k and v, are stacked before (heads, head_dim).

| kind | layout | layout of packed documents | tokens of a rank |
|---|---|---|---|
| `ring` | `Contiguous()` | `ContiguousPerDocument` | the rank-th of n equal chunks (of each document) |
| `zigzag_ring` | `HeadTail()` | `PerDocument` | chunks rank and 2n-1-rank of 2n (of each document) |
| `stripe` | `Striped(1)` | | every n-th token |
| `step`, which ring-flash-attention has not | `MirroredBatch()` | | |
| `llama3` | | `Contiguous()` | the packed sequence is cut regardless of documents |

`cp_dtensor.context_parallel_shard(group, [x], [1], layout)` shards whole tensors. K/V travel as
`cp_dtensor.set_rotate_method` says. Unlike in ring-flash-attention, every kind computes attention that is not causal,
windows and dropout, for any length on any number of ranks, on CPUs, in float32 and float64.

`cu_seqlens` and `max_seqlen` of `ring` and `zigzag_ring` are those of one rank: those of the whole sequence, divided by
the number of ranks. Documents of 4 and 8 tokens on 2 ranks: `cu_seqlens` is [0, 2, 6] on both. With `ring`, rank 0 has
the positions 0 1 and 4 5 6 7, rank 1 has 2 3 and 8 9 10 11; with `zigzag_ring` they have 0 3 and 4 5 10 11, 1 2 and
6 7 8 9.

The tensors that `llama3_flash_attn_prepare_cu_seqlens` returns describe one rank's documents only, but a plan depends
on those of all ranks. So these tensors carry the whole `cu_seqlens` as an attribute: pass them on unchanged. In
compiled programs the llama3 functions run uncompiled, between graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor import (
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    PerDocument,
    Striped,
    context_parallel_attention,
    varlen_attention,
)
from cp_dtensor.api.extension import (
    Mesh,
    ascending,
    bottom_right_mask,
    heads_before_rows,
    heads_first_of_packed,
    is_integer,
    never_compiled,
    refuse_ids_and_lengths,
    sequence_ranks,
    version_of,
)
from cp_dtensor.spec.layouts import Span, chunk, joined_spans

Function = Callable[..., Any]

LAYOUTS: dict[str, Layout] = {
    "ring": Contiguous(), "zigzag_ring": HeadTail(), "stripe": Striped(1), "step": MirroredBatch(),
}  # fmt: skip
"""The tokens of each rank, by the kind of a function that is not for packed documents."""


def flash_options(
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Mesh | None = None, **options: Any,
) -> tuple[bool, dict[str, Any]]:  # fmt: skip
    """Return return_attn_probs and the options of `varlen_attention`; the names are those of flash-attn.

    Masks are aligned bottom-right: the last query sees the last key; of documents, within each document. With
    `return_attn_probs` a function returns (out, lse, None); lse, (batch, heads, tokens) or (heads, tokens), is not
    differentiable. `group` is a process group or a DeviceMesh, of several dims for a nested ring. `options` are keyword
    arguments of `context_parallel_attention`. ALiBi is refused.
    """
    if alibi_slopes is not None:
        raise NotImplementedError(
            "ALiBi is not supported on sequence shards yet: got alibi_slopes, a tensor of shape "
            f"{tuple(alibi_slopes.shape)}, expected None"
        )
    # A call, unlike a dict display, refuses an option that is given twice.
    return return_attn_probs, dict(
        mesh=group_or_default(group), scale=softmax_scale, dropout_p=dropout_p, deterministic=deterministic,
        is_causal=causal, window_size=window_size, **options,
    )  # fmt: skip


def group_or_default(group: Mesh | None) -> Mesh:
    """Return `group`, or the default process group if None."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        raise ValueError("expected a group, or torch.distributed.init_process_group() before; got group=None")
    return group


def attention_of(layout: Layout, method: str = "ring") -> Function:
    """Return the function of q, k and v (B, S, H, D) for shards in a layout."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's rows (B, S, H, Dv) of attention over the whole sequence; arguments as in flash-attn.

        q is (B, S, H, D), k (B, T, Hkv, D), v (B, T, Hkv, Dv); H may be a multiple of Hkv. Raises as
        `context_parallel_attention`.
        """
        shapes = "q, k and v of four dims (batch, sequence, heads, head_dim)"
        q, k, v = heads_before_rows(q, k, v, 1, shapes)
        needs_lse, options = flash_options(*args, **kwargs)
        mask = bottom_right_mask(options.pop("is_causal"), options.pop("window_size"))
        out, lse = context_parallel_attention(
            q, k, v, method=method, layout=layout, mask=mask, enable_gqa=True, return_lse=True, **options
        )
        out = out.transpose(1, 2).contiguous()
        return (out, lse, None) if needs_lse else out

    return function


# Packed documents


class ContiguousPerDocument(PerDocument):
    """Rank r owns the r-th of n adjacent chunks of every document; chunk lengths differ by at most one.

    Tokens before the first and after the last document are divided in the same way. Arguments are those of
    `PerDocument`.

    >>> ContiguousPerDocument((0, 2, 6)).blocks(2)
    [[(0, 1), (2, 4)], [(1, 2), (4, 6)]]
    """

    def blocks(self, world_size: int) -> list[list[Span]]:
        documents = list(pairwise((0, *self.cu_seqlens, self.seq_len)))
        return [joined_spans([chunk(each, world_size, rank) for each in documents]) for rank in range(world_size)]


_PER_DOCUMENT: dict[str, tuple[int, Callable[..., Layout]]] = {
    "ring": (1, ContiguousPerDocument), "zigzag_ring": (2, PerDocument),
}  # fmt: skip
"""Chunks of every document on each rank, and the layout of (cu_seqlens, seq_len)."""


def _varlen_of(kind: str) -> Function:
    """Return the function of documents that are divided over all ranks, each by itself."""
    name, (chunks, layout) = f"{kind}_flash_attn_varlen_func", _PER_DOCUMENT[kind]

    def function(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Any, max_seqlen: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Return this rank's rows (T, H, Dv) of attention within each document; arguments as in flash-attn.

        q is (T, H, D), k (T, Hkv, D), v (T, Hkv, Dv): this rank's chunks of the first document, of the second, ...
        `cu_seqlens` are integers or a tensor, equal on every rank; tokens after the last document are padding, whose
        output and gradients are zero. What does not fit is refused before any collective.
        """
        heads_first_of_packed(q, k, v)
        needs_lse, options = flash_options(*args, **kwargs)
        ranks, tokens = sequence_ranks(options["mesh"]).size, q.size(0)
        edges = ascending(cu_seqlens, name, "cu_seqlens")
        if edges[-1] > tokens:
            raise ValueError(
                f"{name} expects the cu_seqlens of one rank, those of the whole divided by the {ranks} ranks; got "
                f"documents that end at {edges[-1]} for {tokens} tokens of this rank"
            )
        refuse_ids_and_lengths(edges, tokens, name, "cu_seqlens")
        if any(edge % chunks for edge in edges):
            raise ValueError(
                f"{name} has {chunks} chunks of every document on each rank and expects cu_seqlens of one rank to be "
                f"multiples of {chunks}, got {list(edges)}"
            )
        _check_longest(name, max_seqlen=(max_seqlen, max([0, *[stop - start for start, stop in pairwise(edges)]])))
        whole, seq_len = tuple([ranks * edge for edge in edges]), ranks * tokens
        placed = layout(whole, seq_len=seq_len)
        return _varlen(q, k, v, needs_lse, cu_seqlens=whole, layout=placed, seq_len=seq_len, **options)

    return function


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needs_lse: bool, **options: Any) -> Any:
    result = varlen_attention(q, k, v, method="ring", return_lse=needs_lse, **options)
    return (*result, None) if isinstance(result, tuple) else result


def _check_longest(function: str, **longest: tuple[Any, int]) -> None:
    """Refuse a `max_seqlen` below the longest document, which flash-attn would truncate."""
    for name, (received, least) in longest.items():
        if not is_integer(received) or received < least:
            raise ValueError(
                f"{function} expects {name} to be an integer of at least {least}, the longest document; got {received}"
            )


_PREPARE = "llama3_flash_attn_prepare_cu_seqlens"
_LLAMA3 = "llama3_flash_attn_varlen_func"
_NOTE = "cp_dtensor_documents"
"""Attribute of prepared tensors: their `_Documents` and their version when prepared."""


class _Documents(NamedTuple):
    """The documents that one rank's tensors were prepared from."""

    cu_seqlens: tuple[int, ...]  # of the whole sequence, from 0 to its length
    place: dict[str, Any]  # what a call must have: rank, number of ranks, tokens of this rank, slice of its keys
    longest: tuple[int, int]  # most queries and most keys of one document
    causal: bool


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """Return the document arguments of `llama3_flash_attn_varlen_func` for one rank.

    `cu_seqlens` (documents + 1,) are positions in the whole packed sequence, from 0 to its length, which need not be a
    multiple of `world_size`. With `causal`, keys after this rank's part are left out.

    Returns:
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice): edges of documents in this rank's part,
        and in the keys that its queries see; the longest document in each; the positions of these keys.

    >>> cu_seqlens_q, cu_seqlens_k, *rest = llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 3, 8]), True, 1, 2)
    >>> cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), rest
    ([0, 4], [0, 5], [4, 5, slice(3, 8, None)])
    """
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"expected cu_seqlens to be a tensor, got {type(cu_seqlens).__name__}")
    edges = ascending(cu_seqlens, _PREPARE, "cu_seqlens")
    if edges[0]:
        raise ValueError(f"expected cu_seqlens to begin with 0, got {list(edges)}")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected a rank of world_size={world_size}, got rank={rank}")
    (part,) = Contiguous().segments(edges[-1], rank, world_size)
    start, stop = part.start, part.start + part.length
    # By document of this rank: the spans of its queries, and of the keys that these see.
    of_rank = [(first, last) for first, last in pairwise(edges) if first < stop and (last > start or first == start)]
    queries = [(max(first, start), min(last, stop)) for first, last in of_rank]
    keys = [(first, min(last, stop) if causal else last) for first, last in of_rank]
    local_k_slice = slice(keys[0][0], keys[-1][1]) if keys else slice(start, start)
    cu_seqlens_q = cu_seqlens.new_tensor([0, *[last - start for _, last in queries]])
    cu_seqlens_k = cu_seqlens.new_tensor([0, *[last - local_k_slice.start for _, last in keys]])
    longest_q, longest_k = (max([last - first for first, last in each], default=0) for each in (queries, keys))
    place = {"rank": rank, "ranks": world_size, "tokens": stop - start, "local_k_slice": local_k_slice}
    for tensor in (cu_seqlens_q, cu_seqlens_k):
        setattr(tensor, _NOTE, (_Documents(edges, place, (longest_q, longest_k), causal), version_of(tensor)))
    return cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, local_k_slice


@never_compiled
def _llama3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Return this rank's rows (T, H, Dv) of attention within each document.

    q is (T, H, D), k (T, Hkv, D), v (T, Hkv, Dv), this rank's adjacent part of the packed sequence. The arguments of
    documents are the very results of `llama3_flash_attn_prepare_cu_seqlens`; the maxima may be larger. The planner
    chooses the stages, so `heads_k_stride` is only checked to divide Hkv.
    """
    heads_first_of_packed(q, k, v)
    needs_lse, options = flash_options(*args, **kwargs)
    if heads_k_stride < 1 or k.size(1) % heads_k_stride:
        raise ValueError(f"expected heads_k_stride to divide the {k.size(1)} key heads, got {heads_k_stride}")
    documents: _Documents | None = None
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        found, version = getattr(tensor, _NOTE, (None, None))
        if found is None or version != version_of(tensor) or documents not in (None, found):
            raise ValueError(
                f"{_LLAMA3} expects {name} to be the tensor that {_PREPARE} returned, not a copy and not written to "
                f"since (call {_PREPARE} for each new cu_seqlens); got {tensor!r}"
            )
        documents = found
    assert documents is not None
    ranks = sequence_ranks(options["mesh"])
    here = {"rank": ranks.rank, "ranks": ranks.size, "tokens": q.size(0), "local_k_slice": local_k_slice}
    if here != documents.place:
        raise ValueError(f"{_LLAMA3} got documents that were prepared for {documents.place}, and here is {here}")
    if documents.causal and not options["is_causal"]:
        raise ValueError(
            f"{_LLAMA3} got causal=False with documents that were prepared for causal=True, which leaves out keys; "
            f"expected {_PREPARE}(..., causal=False)"
        )
    longest_q, longest_k = documents.longest
    _check_longest(_LLAMA3, max_seqlen_q=(max_seqlen_q, longest_q), max_seqlen_k=(max_seqlen_k, longest_k))
    whole = documents.cu_seqlens
    return _varlen(
        q, k, v, needs_lse, cu_seqlens=whole, layout=Contiguous(), rotate_method="allgather", seq_len=whole[-1],
        **options,
    )  # fmt: skip


# Forms and names


def unpacked(name: str, packed: torch.Tensor, count: int, leading_dims: str = "batch, sequence") -> tuple[Any, ...]:
    """Return `count` views (B, S, H, D) of `packed` (B, S, count, H, D), or of one with other leading dims."""
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor, got {type(packed).__name__}")
    dim = len(leading_dims.split(","))
    if packed.dim() != dim + 3 or packed.size(dim) != count:
        shape = f"({leading_dims}, {count}, heads, head_dim)"
        raise ValueError(f"expected {name} of shape {shape}, got {tuple(packed.shape)}")
    return packed.unbind(dim)


def _forms(name: str, function: Function, leading_dims: str = "batch, sequence") -> tuple[Function, Function, Function]:
    """Return `{name}_func`, `{name}_kvpacked_func` and `{name}_qkvpacked_func`."""

    def kvpacked(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(q, *unpacked("kv", kv, 2, leading_dims), *args, **kwargs)

    def qkvpacked(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(*unpacked("qkv", qkv, 3, leading_dims), *args, **kwargs)

    q, k, v, *documents = list(inspect.signature(function).parameters.values())[:-2]
    options = inspect.signature(flash_options).parameters.values()
    forms = function, kvpacked, qkvpacked
    shown = ("", [q, k, v]), ("kvpacked_", [q, k.replace(name="kv")]), ("qkvpacked_", [q.replace(name="qkv")])
    for form, (packing, tensors) in zip(forms, shown, strict=True):
        form.__name__ = form.__qualname__ = f"{name}_{packing}func"
        form.__doc__ = function.__doc__
        vars(form)["__signature__"] = inspect.Signature([*tensors, *documents, *options], return_annotation=Any)
    return forms


_FORMS = [
    *[_forms(f"{kind}_flash_attn", attention_of(layout)) for kind, layout in LAYOUTS.items()],
    *[_forms(f"{kind}_flash_attn_varlen", _varlen_of(kind), "tokens") for kind in _PER_DOCUMENT],
    _forms("llama3_flash_attn_varlen", _llama3, "tokens"),
]
_FUNCTIONS = {form.__name__: form for forms in _FORMS for form in forms}
globals().update(_FUNCTIONS)
if TYPE_CHECKING:  # the functions, which type checkers do not find in `globals()`

    def __getattr__(name: str) -> Function: ...


__all__ = ["LAYOUTS", "ContiguousPerDocument", "llama3_flash_attn_prepare_cu_seqlens", *_FUNCTIONS]
