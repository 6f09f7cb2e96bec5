"""Masks that models of transformers ask for, as mask values of the whole sequence.

A model asks `transformers.masking_utils` for a mask by its position ids, its padding and the size of a window or chunk,
and gets a function of (batch row, head, query, key). Documents come from the position ids, which are gathered from all
ranks, as the padding is. A function that consists of transformers' own is known by their names. Another one is
evaluated at all pairs. What cannot be evaluated is refused.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_dtensor import Batched, Causal, Documents, Full, Mask, SlidingWindow
from cp_dtensor.api.extension import (
    Call,
    CallMask,
    OpenContext,
    gathered_shards,
    global_length,
    positions_of,
)
from cp_dtensor.integrations.transformers.private import MASKING_UTILS, PROVIDER, REMAP, implementation_of
from cp_dtensor.spec.layouts import Span
from cp_dtensor.spec.masks import interval_sets_of, mask_intersection
from cp_dtensor.spec.model_masks import Bands, Chunks, Keys

_MOST_PAIRS = 1 << 32
"""Pairs of positions up to which a function is evaluated: 65,536 squared."""
_MOST_RANGES = 64
"""Ranges of keys of one query up to which a function is a mask value."""
_DEEPEST = 8
"""Functions inside of functions that are looked at."""
NO_CACHE = (
    "context-parallel attention takes no cache of keys that has tokens, or room for tokens, of other calls: pass "
    "use_cache=False, and decode outside of the context, each rank with all keys"
)
MaskFunction = Callable[..., Any]


class Gathered(NamedTuple):
    """Facts about the tokens of all ranks."""

    lengths: Span  # global numbers of queries and keys
    queries: list[int]  # numbers of queries of each rank
    keys: list[int]
    kept: list[list[Span]] | None  # by batch row: the ranges of keys that are no padding; None if there is none
    positions: torch.Tensor | None  # (B, S) position ids on the CPU


@dataclass(eq=False)
class ModelMask:
    """A mask that a model asked for: first the facts that are known before its function is, of this rank's tokens."""

    config: Any = None  # of the model
    positions: torch.Tensor | None = None  # (B or 1, queries) position ids; None: unknown
    padding: torch.Tensor | None = None  # (B, keys) boolean, False for padding: of this rank's keys, or whole
    has_cache: bool = False  # then position ids do not tell which tokens are a document
    is_cached: bool = False  # there are keys of other calls, which only attention of one process takes
    context: OpenContext | None = None  # which remembers its latest position ids
    is_whole: bool = False  # all facts are those of the whole sequence
    function: MaskFunction = lambda *_: None  # of (batch row, head, query, key), without padding
    batch_size: int = 1
    local: Span = (0, 0)  # this rank's numbers of queries and keys
    device: Any = "cpu"  # of the model's tensors
    use_vmap: bool = False  # the function takes single numbers only
    alone: Callable[[], Any] = lambda: None  # makes the tensor that one process uses
    _found: dict[Any, tuple[Mask, Gathered]] = field(default_factory=dict)

    def of_call(self, call: Call) -> CallMask:
        return CallMask(self.found(call)[0])

    def found(self, call: Call) -> tuple[Mask, Gathered]:
        """Return the mask of the whole sequence; the first call with some ranks and layout is a collective."""
        if self.is_cached:
            raise NotImplementedError(NO_CACHE)
        key = (call.ranks, call.layout)
        if key not in self._found:
            gathered = _gathered(self, call)
            rows = [*_rows(self, gathered)]
            self._found[key] = rows[0] if len({*rows}) == 1 else Batched(rows), gathered
        return self._found[key]


def _rows(asked: ModelMask, whole: Gathered) -> Iterator[Mask]:
    """Yield the mask of each batch row."""
    kv_len, positions = whole.lengths[1], whole.positions
    if asked.has_cache or asked.padding is not None or (positions is not None and bool((positions.diff() == 1).all())):
        positions = None  # they tell no documents
    function = _without_documents(asked.function)
    for row in range(asked.batch_size):
        kept = [(0, kv_len)] if whole.kept is None else whole.kept[row]
        mask = _known(function, left_padding=kept[0][0] if kept else kv_len)
        if positions is not None and not (asked.is_whole and mask is None):
            mask = _inside_documents(function, mask, positions[row].tolist())
        elif mask is None:
            mask = _evaluated(asked, asked.function if asked.is_whole else function, row, whole)
        yield mask if kept == [(0, kv_len)] else mask_intersection(mask, Keys(tuple(kept)))


# What the ranks have


def _gathered(asked: ModelMask, call: Call) -> Gathered:
    """Gather the lengths, the padding and, where they are not known, the position ids of all ranks.

    Raises:
        ValueError: parts that are not of one batch; on every rank alike.
    """
    ranks, layout, padding, positions, context = call.ranks, call.layout, asked.padding, asked.positions, asked.context
    if asked.is_whole:
        positions = None if positions is None else positions.expand(asked.batch_size, -1).cpu()
        return Gathered(asked.local, [asked.local[0]], [asked.local[1]], _kept(padding), positions)
    latest, whole = (None, None) if context is None else _latest.get(context, (None, None))
    if positions is not None:
        if positions.dim() != 2:
            raise NotImplementedError(f"expected position_ids of shape (batch, tokens), got {tuple(positions.shape)}")
        positions = positions.expand(asked.batch_size, -1)
    known = -1 if positions is None else int(latest is not None and _are_equal(latest, positions))
    width = -1 if padding is None else padding.size(1)
    facts = ranks.gather_integers([*asked.local, width, asked.batch_size, known], asked.device)
    of_queries, of_keys, widths, rows, knows = map(list, zip(*facts, strict=True))
    if len({*rows}) > 1 or any(-1 in each and {*each} != {-1} for each in (widths, knows)):
        raise ValueError(
            f"the ranks of a sequence have other batches: {rows} batch rows, attention_mask of {widths} columns (-1: "
            f"none) and position_ids {[each != -1 for each in knows]} on ranks 0 to {len(rows) - 1}; every rank needs "
            "its part of the same batch"
        )
    q_len, kv_len = global_length(of_queries, layout, "query"), global_length(of_keys, layout, "key")
    kept = None
    if padding is not None:
        if widths == of_keys:
            padding = gathered_shards(padding, layout, ranks, "an attention_mask")
        elif {*widths} != {kv_len}:
            raise ValueError(
                f"attention_mask has {widths} columns on ranks 0 to {len(widths) - 1}, which have {of_keys} of "
                f"{kv_len} keys: make it one of the context's buffers (buffer_seq_dims 1), or pass the whole one on "
                "every rank"
            )
        kept = _kept(padding)
    if positions is not None:
        if whole is None or 0 in knows:
            whole = gathered_shards(positions.contiguous(), layout, ranks, "position_ids").cpu()
            _refuse_counted_positions(whole, positions, context, call)
            if context is not None:
                _latest[context] = positions.clone(), whole
        _check_positions(asked, whole)
    return Gathered((q_len, kv_len), of_queries, of_keys, kept, None if positions is None else whole)


_latest = WeakKeyDictionary[OpenContext, tuple[torch.Tensor, torch.Tensor]]()
"""By context: the latest position ids of this rank, and those of the whole sequence on the CPU, (B, tokens) each."""


def whole_positions(context: OpenContext) -> torch.Tensor | None:
    """Return the latest position ids (B, tokens) of the whole sequence in a context, on the CPU; None if unknown."""
    return _latest[context][1] if context in _latest else None


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare by value, since collectives write to tensors uncounted."""
    return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)


def _refuse_counted_positions(
    whole: torch.Tensor, local: torch.Tensor, context: OpenContext | None, call: Call
) -> None:
    """Refuse position ids (B, S) that ranks counted in their shards, unless each rank has its own in a buffer."""
    length, size = whole.size(1), call.ranks.size
    if context is not None and "whole inputs" in context.seen:
        return
    by_rank = [call.layout.segments(length, rank, size, 0) for rank in range(size)]
    parts = [positions_of(segments, whole.device) for segments in by_rank if segments]
    # The first rank's part of arange(seq_len) is what its model would have counted.
    if len(parts) < 2 or not all(torch.equal(whole[0, part], torch.arange(len(part), device="cpu")) for part in parts):
        return
    tokens, buffers = local.size(1), [shard.buffer.tensor for shard in context.buffers] if context is not None else []
    is_given = not tokens or any(_are_equal(each.flatten()[:tokens], local[0]) for each in buffers)
    if not all(given for (given,) in call.ranks.gather_integers([int(is_given)], local.device)):
        raise ValueError(
            "the position ids of every rank begin with 0 and count its own tokens: the model has counted them in its "
            "shard. Make position_ids (torch.arange(seq_len) of the whole sequence), not a copy, one of the context's "
            "buffers and pass them to the model"
        )


def _check_positions(asked: ModelMask, whole: torch.Tensor) -> None:
    """Refuse position ids (B, S) of the whole sequence that a model's RoPE does not take; warn of joined documents."""
    config, context = asked.config, asked.context
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in (scaling, *[value for value in scaling.values() if isinstance(value, dict)]):
        kind = str(each.get("rope_type", each.get("type")))
        original = each.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        # The frequencies depend on the largest position of this rank's shard.
        if kind in ("longrope", "dynamic") and original and int(whole.max()) >= original:
            raise NotImplementedError(
                f"rope_type={kind!r} takes its frequencies from the largest position, which differs between ranks: got "
                f"position {int(whole.max())}, expected less than {original}"
            )
    if context is None or not asked.has_cache or asked.padding is not None:
        return
    # The caller may say which tokens see each other.
    is_said = implementation_of(config) == PROVIDER and "cu_seq_lens_q" in context.seen
    if context.call.mask is None and not is_said and (whole.diff(dim=1) != 1).any():
        warnings.warn(
            "position_ids are those of packed documents, and the model has a cache: documents attend to each other, as "
            "in transformers without context_parallel. Pass use_cache=False, which keeps them apart",
            stacklevel=2,
        )


def _kept(padding: torch.Tensor | None) -> list[list[Span]] | None:
    return None if padding is None or bool(padding.all()) else _kept_ranges(padding)


def _kept_ranges(rows: torch.Tensor) -> list[list[Span]]:
    """Return ranges of True in each row.

    >>> _kept_ranges(torch.tensor([[True, True, False, True], [False, False, False, False]]))
    [[(0, 2), (3, 4)], []]
    """
    ranges: list[list[Span]] = [[] for _ in rows]
    edges = F.pad(rows.to(torch.int8), (1, 1)).diff(dim=1).nonzero().tolist()
    for (row, start), (_, stop) in zip(edges[::2], edges[1::2], strict=True):
        ranges[row].append((start, stop))
    return ranges


# Functions as mask values


def _without_documents(function: MaskFunction) -> MaskFunction:
    """Return a mask function without the documents of this rank's position ids, which transformers has added."""
    parts = [value for _, value in _captured(function, _DEEPEST)]
    others = [each for each in parts if not _qualname(each).startswith("packed_sequence_mask_function")]
    if len(others) != 1 or len(parts) != 2:
        return function
    if _qualname(others[0]).startswith(REMAP):
        others = [value for _, value in _captured(others[0], _DEEPEST) if callable(value)]
    return others[0]


_VALUES: MappingProxyType[tuple[str, ...], Mask | Callable[[int, int], Mask]] = MappingProxyType({
    ("causal_mask_function",): Causal(),
    ("bidirectional_mask_function",): Full(),
    # A window of 0 tokens is one that no layer uses.
    ("causal_mask_function", "sliding_window_overlay"): lambda n, _: SlidingWindow(n - 1, 0) if n else Keys(()),
    ("bidirectional_mask_function", "sliding_window_bidirectional_overlay"): lambda n, _: SlidingWindow(n, n),
    ("causal_mask_function", "chunked_overlay"): lambda n, start: Chunks(n, start) & Causal(),
})  # fmt: skip
"""By the functions of `MASKING_UTILS` that hold together: the value, or a function of the tokens of a window or chunk
and of the first token of chunks."""


def _known(function: MaskFunction, left_padding: int) -> Mask | None:
    """Return the value of a function that consists of transformers' own, for a batch row; None for another function."""
    parts = [function]
    if _qualname(function) == "and_masks.<locals>.and_mask":
        parts = [value for _, value in _captured(function, _DEEPEST)]
    value = _VALUES.get(tuple(sorted(map(_own_name, parts))))
    return value if value is None or isinstance(value, Mask) else value(_size(function), left_padding)


def _own_name(function: MaskFunction) -> str:
    """Return the name of a function of transformers' own, "" of another."""
    return _qualname(function) if getattr(function, "__module__", None) == MASKING_UTILS else ""


def _size(function: MaskFunction) -> int:
    """Return the tokens of a function's window or chunk."""
    return next((value for name, value in _captured(function) if name in ("sliding_window", "chunk_size")), 0)


def _values(
    function: MaskFunction, asked: ModelMask, row: int, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Return the function's value at each pair, (queries, keys)."""
    zero = torch.zeros((), dtype=torch.int64, device=asked.device)
    if asked.use_vmap:
        for dims in ((None, None, None, 0), (None, None, 0, None)):
            function = torch.vmap(function, in_dims=dims)
        seen = function(zero + row, zero, queries, keys)
    else:
        seen = function(zero + row, zero, queries[:, None], keys[None])
    return torch.as_tensor(seen).expand(len(queries), len(keys))


def _inside_documents(function: MaskFunction, mask: Mask | None, positions: list[int]) -> Mask:
    """Return the mask of documents that the position ids of a row give, each with `mask` inside."""
    if mask is None:
        raise NotImplementedError(
            f"the mask function {_qualname(function)} inside of packed documents is not one of transformers' "
            "own: give the context a mask=, and the model position ids that do not begin again"
        )
    begins = [index for index, position in enumerate(positions) if not index or position != positions[index - 1] + 1]
    documents = Documents([*begins, len(positions)], within=mask)
    if isinstance(mask, (Causal, Full, SlidingWindow, Keys)):
        return documents
    if not hasattr(sys.modules[MASKING_UTILS], REMAP):  # earlier versions count chunks from the row's first token
        return mask_intersection(Documents(documents.cu_seqlens, within=Full()), mask)
    starts = [positions[begin] for begin in begins]
    if any(start % _size(function) for start in starts):
        raise NotImplementedError(f"chunked attention expects documents whose position ids begin with 0, got {starts}")
    return documents


def _evaluated(asked: ModelMask, function: MaskFunction, row: int, whole: Gathered) -> Mask:
    """Return the mask of a function by its value at each pair; refuse one that reads tensors of this rank only."""
    (q_len, kv_len), of_ranks = whole.lengths, {*whole.queries, *whole.keys}
    for name, value in _captured(function) if of_ranks != {*whole.lengths} else ():
        # A tensor of the batch's shape has each row's left padding, which another rank's shard does not have.
        if isinstance(value, torch.Tensor) and (
            {*value.shape} & of_ranks or (asked.padding is not None and value.shape == (asked.batch_size,))
        ):
            raise NotImplementedError(
                f"the mask function of this model reads {name}, a tensor of this rank's tokens {tuple(value.shape)}, "
                f"where context-parallel attention needs that of the whole sequence ({q_len} tokens)"
            )
    blocks = _of_blocks(function, asked, row, kv_len) if q_len == kv_len else None
    if blocks is not None:
        return blocks
    if q_len * kv_len > _MOST_PAIRS:
        raise NotImplementedError(
            f"the mask function of this model ({_qualname(function)}) is not one of transformers' own, and {q_len} x "
            f"{kv_len} pairs are too many to evaluate: give the context a mask="
        )
    keys = torch.arange(kv_len, device=asked.device)
    parts = torch.arange(q_len, device=asked.device).split(max((1 << 24) // max(kv_len, 1), 1))
    rows = [each for queries in parts for each in _kept_ranges(_values(function, asked, row, queries, keys))]
    most = max(map(len, rows), default=0)
    if most > _MOST_RANGES:
        raise NotImplementedError(
            f"the mask of this model ({_qualname(function)}) shows a query {most} ranges of keys, expected at most "
            f"{_MOST_RANGES}: use FlexAttention inside of the context"
        )
    return Bands.of_rows(rows, kv_len)


def _of_blocks(function: MaskFunction, asked: ModelMask, row: int, length: int) -> Mask | None:
    """Return the value of a causal function, or of a window, in which blocks of tokens (images) see each other.

    Each part of such a function shows a query one range of keys around its own position, or none, and so does a union
    or an intersection of parts. So it is enough to compare the ends of each query's range, which follow from its block,
    with the function. Return None for another function.
    """
    ids, size = None, length
    for name, value in _captured(function):
        if name == "block_sequence_ids" and value.shape == (asked.batch_size, length):
            ids = value[row]
        elif name == "sliding_window":
            size = value
        elif getattr(value, "__module__", None) != MASKING_UTILS:
            return None
    if ids is None or not length:
        return None
    at = torch.arange(length, device=ids.device)
    ids = torch.where(ids < 0, -1 - at, ids)  # a token of no block is one by itself
    blocks, run, lengths = torch.unique_consecutive(ids, return_inverse=True, return_counts=True)
    if len(blocks.unique()) < len(blocks):  # a block in several parts
        return None
    stop = lengths.cumsum(0)[run]
    window = (at - size + 1).clamp(min=0)  # a block may see what is before a window, too
    for first in (window, window.minimum(stop - lengths[run])):
        ends = ((first, True), (stop - 1, True), (first - 1, False), (stop, False))
        if all(
            ((function(row, 0, at, keys.clamp(0, length - 1)) == seen) | (keys < 0) | (keys == length)).all()
            for keys, seen in ends
        ):
            return Bands.of_rows([[span] for span in zip(first.tolist(), stop.tolist(), strict=True)], length)
    return None


def _qualname(function: MaskFunction) -> str:
    return getattr(function, "__qualname__", repr(function)).removesuffix(".<locals>.inner_mask")


def _captured(function: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the function, and names and values that it and the functions that it has captured have captured."""
    if depth == 0:
        yield _qualname(function), function
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(function.__code__.co_freevars if cells else (), cells, strict=True):
        value = cell.cell_contents
        for each in value if isinstance(value, (tuple, list)) else (value,):
            yield name, each
            if callable(each) and depth < _DEEPEST:
                yield from _captured(each, depth + 1)


# FlexAttention


def block_mask_of(mask: Mask, whole: Gathered, batch_size: int, device: torch.device) -> BlockMask:
    """Return the block mask of a model's mask, for the whole sequence."""
    q_len, kv_len = whole.lengths
    rows = interval_sets_of(mask, q_len, kv_len, batch_size)
    most = max(1, *map(len, rows))
    ends = torch.zeros(len(rows), 2, most, q_len, dtype=torch.int64, device="cpu")  # first and last + 1 key; 0: none
    for row, sets in enumerate(rows):
        for index, bands in enumerate(sets):
            for band in bands:
                queries = torch.arange(band.first, band.last, device="cpu")
                ends[row, 0, index, band.first : band.last] = (queries - band.left).clamp(min=band.lo)
                ends[row, 1, index, band.first : band.last] = (queries + band.right + 1).clamp(max=band.hi)
    ends, by_row = ends.to(device), len(rows) > 1

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        row = b if by_row else b * 0
        seen = (ends[row, 0, 0, q] <= kv) & (kv < ends[row, 1, 0, q])
        for index in range(1, most):
            seen = seen | ((ends[row, 0, index, q] <= kv) & (kv < ends[row, 1, index, q]))
        return seen

    rows_of_mask = batch_size if by_row else None
    return create_block_mask(mask_mod, rows_of_mask, None, q_len, kv_len, device=device, _compile=device.type == "cuda")
