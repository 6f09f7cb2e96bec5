"""Drop-in functions of zhuzilin's ring-flash-attention: change the import and keep the calls.

Functions take this rank's shards. Names are `{kind}_flash_attn_func` for (batch, sequence, heads, head_dim) and
`{kind}_flash_attn_varlen_func` for packed documents (tokens, heads, head_dim). Each has the forms `_kvpacked_func` and
`_qkvpacked_func`, whose k and v, or q, k and v, are stacked before (heads, head_dim).

| kind | tokens of a rank | varlen: of each document |
|---|---|---|
| `ring` | `Contiguous()` | the rank-th of n equal chunks |
| `zigzag_ring` | `HeadTail()` | chunks rank and 2n-1-rank of 2n equal chunks |
| `stripe` | `Striped(1)` | |
| `step`, which ring-flash-attention has not | `MirroredBatch()` | |
| `llama3` | | `Contiguous()`: the packed sequence is cut regardless of documents |

K/V travel as `cp_dtensor.set_rotate_method` says. Unlike in ring-flash-attention, every kind computes attention that is
not causal, windows and dropout, for any length on any number of ranks, on CPUs, in float32 and float64.

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
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any, Literal

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
    context_parallel_shard,
    context_parallel_unshard,
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
from cp_dtensor.spec.balanced_layouts import OneLength
from cp_dtensor.spec.layouts import Span, chunk, joined_spans

__all__ = [  # noqa: RUF022, grouped by kind
    "ring_flash_attn_func", "ring_flash_attn_kvpacked_func", "ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_func", "zigzag_ring_flash_attn_kvpacked_func", "zigzag_ring_flash_attn_qkvpacked_func",
    "stripe_flash_attn_func", "stripe_flash_attn_kvpacked_func", "stripe_flash_attn_qkvpacked_func",
    "step_flash_attn_func", "step_flash_attn_kvpacked_func", "step_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func", "ring_flash_attn_varlen_kvpacked_func", "ring_flash_attn_varlen_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func", "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func", "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func", "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func", "shard", "unshard", "shard_varlen", "unshard_varlen",
]  # fmt: skip

Function = Callable[..., Any]


def flash_options(
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Mesh | None = None, **options: Any,
) -> tuple[bool, Any, bool, dict[str, Any]]:  # fmt: skip
    """Return causal, window_size, return_attn_probs and the options of `context_parallel_attention`.

    Args:
        causal: True for a causal mask by global position, aligned bottom-right: the last query sees all keys, the one
            before all but the last, and so on. Of documents: within each document.
        window_size: (left, right), numbers of keys to the left and right of its own position that a query sees, -1 for
            no limit; the last query is aligned with the last key. With `causal`, right is 0.
        alibi_slopes: None; other values are refused.
        return_attn_probs: True to return (out, lse, None); lse is (batch, heads, tokens) or (heads, tokens), natural
            log of the softmax denominator in float32 (float64 for float64 inputs); not differentiable.
        group: the context-parallel axis: a process group, a DeviceMesh of one dim, or one of two dims for a nested
            ring; the default group if None.
        dropout_p, softmax_scale, deterministic, options: as for `context_parallel_attention`, by keyword.
    """
    if alibi_slopes is not None:
        raise NotImplementedError(
            "ALiBi is not supported on sequence shards yet: got alibi_slopes, a tensor of shape "
            f"{tuple(alibi_slopes.shape)}, expected None"
        )
    mesh = group_or_default(group)
    # A call, unlike a dict display, refuses an option that is given twice.
    options = dict(mesh=mesh, scale=softmax_scale, dropout_p=dropout_p, deterministic=deterministic, **options)
    return causal, window_size, return_attn_probs, options


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
        """Return this rank's rows (B, S, H, Dv) of softmax(softmax_scale q k^T + mask) v over the whole sequence.

        q is (B, S, H, D), k (B, T, Hkv, D), v (B, T, Hkv, Dv); H may be a multiple of Hkv (GQA, MQA). Other arguments
        are in flash-attn's order; see `flash_options`. Differentiable. Raises as `context_parallel_attention`.
        """
        shapes = "q, k and v of four dims (batch, sequence, heads, head_dim)"
        q, k, v = heads_before_rows(q, k, v, 1, shapes)
        causal, window, needs_lse, options = flash_options(*args, **kwargs)
        mask = bottom_right_mask(causal, window)
        out, lse = context_parallel_attention(
            q, k, v, method=method, layout=layout, mask=mask, enable_gqa=True, return_lse=True, **options
        )
        out = out.transpose(1, 2).contiguous()
        return (out, lse, None) if needs_lse else out

    return function


def _varlen_of(kind: str) -> Function:
    """Return the function of documents that are divided over all ranks, each by itself."""
    name, chunks = f"{kind}_flash_attn_varlen_func", _CHUNKS[kind]

    def function(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Any, max_seqlen: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Return this rank's rows (T, H, Dv) of softmax(softmax_scale q k^T + mask) v within each document.

        Args:
            q, k, v: (T, H, D), (T, Hkv, D), (T, Hkv, Dv): this rank's chunks of the first document, of the second, ...
            cu_seqlens: (documents + 1,), first and last position of documents on this rank, equal on every rank;
                integers or a tensor (reading one on a GPU waits for the GPU). Tokens after the last document are
                padding: their output and gradients are zero.
            max_seqlen: the length of the longest document on this rank, or more.
            args, kwargs: in flash-attn's order; see `flash_options`.

        Arguments that do not fit are refused before any collective; with `debug`, documents that differ between ranks
        on every rank alike.
        """
        heads_first_of_packed(q, k, v)
        causal, window, needs_lse, options = flash_options(*args, **kwargs)
        ranks, tokens = sequence_ranks(options["mesh"]).size, q.size(0)
        edges = ascending(cu_seqlens, name, "cu_seqlens")
        if tokens != k.size(0):
            raise ValueError(
                f"{name} has one cu_seqlens for queries and keys and expects as many of both, got {tokens} queries and "
                f"{k.size(0)} keys"
            )
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
        return _varlen(
            q, k, v, causal, window, needs_lse, cu_seqlens=whole, layout=_per_document(kind, whole, seq_len),
            seq_len=seq_len, **options,
        )  # fmt: skip

    return function


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: Any, needs_lse: bool, **options: Any
) -> Any:
    result = varlen_attention(
        q, k, v, method="ring", is_causal=causal, window_size=window, return_lse=needs_lse, **options
    )
    return (*result, None) if isinstance(result, tuple) else result


def _check_longest(function: str, **longest: tuple[Any, int]) -> None:
    """Refuse a `max_seqlen` below the longest document, which flash-attn would truncate."""
    for name, (received, least) in longest.items():
        if not hasattr(received, "__index__"):
            raise TypeError(f"{function} expects {name} to be an integer, got {type(received).__name__}")
        if index(received) < least:
            raise ValueError(f"{function} expects {name} to be at least {least}, the longest document; got {received}")


@dataclass(frozen=True)
class ContiguousPerDocument(OneLength):
    """Rank r owns the r-th of n adjacent chunks of every document; chunk lengths differ by at most one.

    Tokens before the first and after the last document are divided in the same way.

    >>> ContiguousPerDocument((0, 2, 6), seq_len=6).blocks(2)
    [[(0, 1), (2, 4)], [(1, 2), (4, 6)]]
    """

    cu_seqlens: tuple[int, ...]
    seq_len: int

    def blocks(self, world_size: int) -> list[list[Span]]:
        documents = list(pairwise((0, *self.cu_seqlens, self.seq_len)))
        return [joined_spans([chunk(each, world_size, rank) for each in documents]) for rank in range(world_size)]


_CHUNKS = {"ring": 1, "zigzag_ring": 2}
"""Chunks of every document on each rank."""


def _per_document(kind: str, cu_seqlens: tuple[int, ...], seq_len: int) -> Layout:
    if kind == "ring":
        return ContiguousPerDocument(cu_seqlens, seq_len)
    return PerDocument(cu_seqlens, seq_len=seq_len)


# llama3

_PREPARE = "llama3_flash_attn_prepare_cu_seqlens"
_LLAMA3 = "llama3_flash_attn_varlen_func"
_NOTE = "cp_dtensor_documents"
"""Attribute of prepared tensors: their `_Documents` and their version when prepared."""


@dataclass(frozen=True)
class _Documents:
    """The documents that one rank's tensors were prepared from."""

    cu_seqlens: tuple[int, ...]  # of the whole sequence, from 0 to its length
    place: str  # this rank, and the number of ranks
    tokens: int  # of this rank
    keys: tuple[int, int]  # positions of the keys that its queries see
    longest: tuple[int, int]  # most queries and most keys of one document
    leaves_out_keys: bool  # prepared for causal attention, with a document on several ranks


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """Return the document arguments of `llama3_flash_attn_varlen_func` for one rank.

    Args:
        cu_seqlens: (documents + 1,), positions where documents begin and end in the whole packed sequence, from 0 to
            its length. (ring-flash-attention requires a multiple of `world_size`; here parts may differ by one token.)
        causal: True if attention will be causal: keys after this rank's part are left out then.
        rank, world_size: this rank, and the number of ranks that share the sequence.

    Returns:
        cu_seqlens_q: edges of documents in this rank's part, in the dtype and on the device of `cu_seqlens`.
        cu_seqlens_k: edges of documents in the keys that this rank's queries see, which begin with its first document.
        max_seqlen_q, max_seqlen_k: the longest document in each.
        local_k_slice: the positions of these keys in the whole sequence.

    Raises:
        TypeError, ValueError: positions that do not ascend from 0; a rank outside of `world_size`.

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
    parts = [Contiguous().segments(edges[-1], each, world_size)[0] for each in range(world_size)]
    start, stop = parts[rank].start, parts[rank].start + parts[rank].length
    queries, keys = [], []  # spans of positions, by document of this rank
    for first, last in pairwise(edges):
        if first < stop and (last > start or first == start):
            queries.append((max(first, start), min(last, stop)))
            keys.append((first, min(last, stop) if causal else last))
    keys_of_rank = (keys[0][0], keys[-1][1]) if keys else (start, start)
    max_seqlen_q, max_seqlen_k = (max((last - first for first, last in each), default=0) for each in (queries, keys))
    documents = _Documents(
        edges, f"rank {rank} of {world_size}", stop - start, keys_of_rank, (max_seqlen_q, max_seqlen_k),
        leaves_out_keys=bool(causal) and not {part.start for part in parts} <= {*edges},
    )  # fmt: skip
    cu_seqlens_q = cu_seqlens.new_tensor([0, *(last - start for _, last in queries)])
    cu_seqlens_k = cu_seqlens.new_tensor([0, *(last - keys_of_rank[0] for _, last in keys)])
    for tensor in (cu_seqlens_q, cu_seqlens_k):
        setattr(tensor, _NOTE, (documents, version_of(tensor)))
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, slice(*keys_of_rank)


def _documents_of(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> _Documents:
    """Return the documents that two tensors were prepared from; refuse copies, and tensors written to since."""
    found: list[_Documents] = []
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        documents, version = getattr(tensor, _NOTE, (None, None))
        if documents is None or version != version_of(tensor) or documents not in (found or [documents]):
            raise ValueError(
                f"{_LLAMA3} expects {name} to be the tensor that {_PREPARE} returned, not a copy and not written to "
                f"since (call {_PREPARE} for each new cu_seqlens); got {tensor!r}"
            )
        found.append(documents)
    return found[0]


@never_compiled
def _llama3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Return this rank's rows (T, H, Dv) of softmax(softmax_scale q k^T + mask) v within each document.

    Args:
        q, k, v: (T, H, D), (T, Hkv, D), (T, Hkv, Dv), this rank's adjacent part of the packed sequence.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice: the results of
            `llama3_flash_attn_prepare_cu_seqlens`, the very tensors. The maxima may be larger.
        heads_k_stride: a divisor of Hkv, in ring-flash-attention the key heads to gather at a time. Not used here,
            since the planner chooses the stages.
        args, kwargs: in flash-attn's order; see `flash_options`.

    Documents prepared for causal attention in a call that is not are refused on every rank alike.
    """
    heads_first_of_packed(q, k, v)
    causal, window, needs_lse, options = flash_options(*args, **kwargs)
    if heads_k_stride < 1 or k.size(1) % heads_k_stride:
        raise ValueError(f"expected heads_k_stride to divide the {k.size(1)} key heads, got {heads_k_stride}")
    ranks = sequence_ranks(options["mesh"])
    documents = _documents_of(cu_seqlens_q, cu_seqlens_k)
    keys = local_k_slice
    if not (isinstance(keys, slice) and is_integer(keys.start) and is_integer(keys.stop) and keys.step in (None, 1)):
        raise TypeError(f"{_LLAMA3} expects local_k_slice to be a slice of two integers, got {keys!r}")
    for got, expected in (
        (f"rank {ranks.rank} of {ranks.size}", documents.place),
        (f"local_k_slice from {keys.start} to {keys.stop}", "local_k_slice from {} to {}".format(*documents.keys)),
        (f"{q.size(0)} tokens", f"{documents.tokens} tokens"),
    ):
        if got != expected:
            raise ValueError(f"{_LLAMA3} got documents that were prepared for {expected}, and here is {got}")
    if documents.leaves_out_keys and not causal:
        raise ValueError(
            f"{_LLAMA3} got causal=False with documents that were prepared for causal=True, which leaves out keys; "
            f"expected {_PREPARE}(..., causal=False)"
        )
    most_queries, most_keys = documents.longest
    _check_longest(_LLAMA3, max_seqlen_q=(max_seqlen_q, most_queries), max_seqlen_k=(max_seqlen_k, most_keys))
    whole = documents.cu_seqlens
    return _varlen(
        q, k, v, causal, window, needs_lse, cu_seqlens=whole, layout=Contiguous(), rotate_method="allgather",
        seq_len=whole[-1], **options,
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

    own = list(inspect.signature(function).parameters.values())[:-2]
    options = list(inspect.signature(flash_options).parameters.values())
    shown = {"": own, "kvpacked_": [own[0], own[1].replace(name="kv"), *own[3:]]}
    shown["qkvpacked_"] = [own[0].replace(name="qkv"), *own[3:]]
    forms = function, kvpacked, qkvpacked
    for form, (packing, parameters) in zip(forms, shown.items(), strict=True):
        signature = inspect.Signature([*parameters, *options], return_annotation=Any)
        named = {"__name__": f"{name}_{packing}func", "__qualname__": f"{name}_{packing}func"}
        for attribute, value in {**named, "__doc__": function.__doc__, "__signature__": signature}.items():
            setattr(form, attribute, value)
    return forms


_LAYOUTS: dict[str, Layout] = {
    "ring": Contiguous(), "zigzag_ring": HeadTail(), "stripe": Striped(1), "step": MirroredBatch(),
}  # fmt: skip
_DENSE = {kind: _forms(f"{kind}_flash_attn", attention_of(layout)) for kind, layout in _LAYOUTS.items()}
_VARLEN = {kind: _forms(f"{kind}_flash_attn_varlen", _varlen_of(kind), "tokens") for kind in _CHUNKS}

ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _DENSE["ring"]
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _DENSE["stripe"]
step_flash_attn_func, step_flash_attn_kvpacked_func, step_flash_attn_qkvpacked_func = _DENSE["step"]
(
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
) = _DENSE["zigzag_ring"]
(
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
) = _VARLEN["ring"]
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _VARLEN["zigzag_ring"]
(
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
) = _forms("llama3_flash_attn_varlen", _llama3, "tokens")


def shard(tensor: torch.Tensor, kind: str, group: Mesh | None = None, dim: int = 1) -> torch.Tensor:
    """Return this rank's shard of a tensor that every rank has whole, for the functions of `kind`.

    The tensor may have any dtype and shape: q, k, v, packed ones, token ids. `"step"` takes dim 0 as the batch. Results
    and errors are those of `context_parallel_shard`.
    """
    return context_parallel_shard(group_or_default(group), [tensor], [dim], _layout(kind))[0]


def unshard(
    tensor: torch.Tensor, kind: str, group: Mesh | None = None, dim: int = 1, *,
    grad: Literal["replicated", "partial"] = "replicated",
) -> torch.Tensor:  # fmt: skip
    """Return the whole tensor on every rank from the ranks' shards: the inverse of `shard`.

    `grad`, results and errors are those of `context_parallel_unshard`.
    """
    return context_parallel_unshard(group_or_default(group), [tensor], [dim], _layout(kind), grad=grad)[0]


def _layout(kind: str) -> Layout:
    if kind not in _LAYOUTS:
        raise ValueError(f"expected kind to be one of {', '.join(map(repr, _LAYOUTS))}; got {kind!r}")
    return _LAYOUTS[kind]


def shard_varlen(
    tensor: torch.Tensor, kind: str, cu_seqlens: Any, group: Mesh | None = None, dim: int = 0
) -> torch.Tensor:
    """Return this rank's shard of a packed tensor that every rank has whole, for the varlen functions of `kind`.

    `cu_seqlens` is that of the whole sequence ("ring" and "zigzag_ring" take cu_seqlens // ranks); its documents are
    multiples of the ranks, for "zigzag_ring" of twice as many. Tokens outside of them are divided like a document.
    """
    mesh = group_or_default(group)
    layout = _varlen_layout(kind, cu_seqlens, tensor.size(dim), mesh)
    return context_parallel_shard(mesh, [tensor], [dim], layout)[0]


def unshard_varlen(
    tensor: torch.Tensor, kind: str, cu_seqlens: Any, group: Mesh | None = None, dim: int = 0, *,
    grad: Literal["replicated", "partial"] = "replicated",
) -> torch.Tensor:  # fmt: skip
    """Return the whole packed tensor on every rank: the inverse of `shard_varlen`. `grad` is as for `unshard`."""
    mesh = group_or_default(group)
    layout = _varlen_layout(kind, cu_seqlens, tensor.size(dim) * sequence_ranks(mesh).size, mesh)
    return context_parallel_unshard(mesh, [tensor], [dim], layout, grad=grad)[0]


def _varlen_layout(kind: str, cu_seqlens: Any, seq_len: int, mesh: Mesh) -> Layout:
    if kind == "llama3":
        return Contiguous()
    if kind not in _CHUNKS:
        raise ValueError(f"expected kind to be one of {', '.join(map(repr, _CHUNKS))}, 'llama3'; got {kind!r}")
    edges = ascending(cu_seqlens, "shard_varlen", "cu_seqlens")
    ranks = sequence_ranks(mesh).size
    multiple = _CHUNKS[kind] * ranks
    if edges[-1] > seq_len or seq_len % ranks or any(edge % multiple for edge in edges):
        raise ValueError(
            f"{kind!r} expects cu_seqlens of the whole sequence, multiples of {multiple}, and a multiple of {ranks} "
            f"tokens; got {list(edges)} and {seq_len} tokens"
        )
    return _per_document(kind, edges, seq_len)
