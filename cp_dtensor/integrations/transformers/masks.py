"""Masks that models of transformers ask for, as mask values of the whole sequence.

A model asks `transformers.masking_utils` for a mask by its position ids, its padding and the size of a window or chunk,
and gets a function of (batch row, head, query, key). Documents come from the position ids, which are gathered from all
ranks, as the padding is. Windows and chunks come from the size, and are checked by calling the function at sample
positions. A function that is none of these is evaluated at all pairs. What cannot be evaluated is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from cp_dtensor import Batched, Causal, Documents, Full, Mask, SlidingWindow
from cp_dtensor.api.extension import (
    Call,
    CallMask,
    NamedMask,
    OpenContext,
    gathered_shards,
    global_length,
    positions_of,
)
from cp_dtensor.integrations.transformers.private import MASKING_UTILS, REMAP
from cp_dtensor.spec.layouts import Span
from cp_dtensor.spec.masks import mask_intersection
from cp_dtensor.spec.model_masks import Bands, Chunks, Keys

_MOST_PAIRS = 1 << 32
"""Pairs of positions up to which a function is evaluated: 65,536 squared."""
_MOST_RANGES = 64
"""Ranges of keys of one query up to which a function is a mask value."""
NO_CACHE = (
    "context-parallel attention takes no cache of keys that has tokens, or room for tokens, of other calls: pass "
    "use_cache=False, and decode outside of the context, each rank with all keys"
)
MaskFunction = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class MaskRequest:
    """Arguments with which a model asked for a mask, of this rank's tokens.

    Args:
        positions: (B or 1, queries) position ids; None: unknown, or not needed.
        padding: (B, keys) boolean, False for padding: whole on every rank, or of this rank's keys. None: no padding.
        packed: (B, queries) documents that transformers found in this rank's position ids; None: one, or unknown.
        is_cached: True if there are keys of other calls, which only attention of one process takes.
        is_packed: True if `positions` tell which tokens are a document.
        context: the open context, which remembers its latest position ids.
        check: called with the position ids (B, S) of the whole sequence; it may refuse them.
    """

    positions: torch.Tensor | None
    padding: torch.Tensor | None
    packed: torch.Tensor | None
    is_cached: bool
    is_packed: bool = False
    context: OpenContext | None = None
    check: Callable[[torch.Tensor], None] = lambda whole: None

    def as_padding(self, like: torch.Tensor, kv_len: int) -> torch.Tensor:
        """Return a tensor that transformers passes on as the padding, and that `of_padding` knows again."""
        rows = like.size(0)
        tensor = (
            torch.ones(rows, kv_len, dtype=torch.bool, device=like.device) if self.padding is None else self.padding[:]
        )
        setattr(tensor, _REQUEST, self)
        return tensor

    @staticmethod
    def of_padding(padding: Any) -> MaskRequest | None:
        """Return the request that a padding carries; None for a tensor of another origin."""
        return getattr(padding, _REQUEST, None)


_REQUEST = "_cp_dtensor_request"


@dataclass(eq=False)
class ModelMask(NamedMask):
    """A mask that a model asked for.

    Args:
        function: of (batch row, head, query, key), without documents and padding.
        request: the other arguments of the model.
        batch_size: rows of the batch.
        local: this rank's numbers of queries and keys.
        device: of the model's tensors.
        size: tokens of a window or chunk; None if there is none.
        use_vmap: True if the function takes single numbers only.
        alone: makes the tensor that one process uses.
    """

    function: MaskFunction
    request: MaskRequest
    batch_size: int
    local: Span
    device: torch.device
    size: int | None = None
    use_vmap: bool = False
    alone: Callable[[], Any] = lambda: None
    whole: Span = (-1, -1)
    """Global numbers of queries and keys, once known."""
    fewest_queries: int = 0
    """The number of queries on the rank that has fewest, once known."""
    shards: set[int] = field(default_factory=set)
    """Numbers of queries and keys of all ranks, once known: the ranks decide alike by them."""
    _known: dict[Any, Mask] = field(default_factory=dict)

    def of_call(self, call: Call) -> CallMask:
        return CallMask(self.mask_for(call))

    def mask_for(self, call: Call) -> Mask:
        """Return the mask of the whole sequence; the first call with some ranks and layout is a collective."""
        if self.request.is_cached:
            raise NotImplementedError(NO_CACHE)
        key = (call.ranks, call.layout)
        if key not in self._known:
            self._known[key] = self._found(call)
        return self._known[key]

    def _found(self, call: Call) -> Mask:
        request, packed = self.request, None
        positions, whole, state = _state_of_positions(request, self.batch_size)
        q_len, kv_len, kept, states = self._whole_lengths(call, state)
        padding = None if kept is None else [_kept_ranges(row) for row in kept.tolist()]
        if positions is not None:
            if whole is None or max(states) > _KNOWN:
                whole = gathered_shards(positions.contiguous(), call.layout, call.ranks, "position_ids").cpu()
                if _NEW in states:
                    _refuse_counted_positions(whole, call)
                if request.context is not None:
                    _latest[request.context] = positions.clone(), whole
            request.check(whole)
            packed = whole if request.is_packed and bool((whole.diff(dim=1) != 1).any()) else None
        rows, found = [], dict[tuple[int, int], Mask | None]()
        for row in range(self.batch_size):
            left = 0 if not padding else (padding[row][0][0] if padding[row] else kv_len)
            # The function counts chunks from the left padding of this rank's tokens.
            local = None if self.size is None else self.request.padding
            here = 0 if local is None else int((local[row].cumsum(0) == 0).sum())
            if (here, left) not in found:
                found[here, left] = self._own(row, here, left)
            mask = found[here, left]
            if packed is not None:
                mask = self._inside_documents(mask, packed[row].tolist())
            elif mask is None:
                mask = self._evaluated(row, (q_len, kv_len))
            if padding and padding[row] != [(0, kv_len)]:
                mask = mask_intersection(mask, Keys(tuple(padding[row])))
            rows.append(mask)
        return rows[0] if len({*rows}) == 1 else Batched(rows)

    def _whole_lengths(self, call: Call, state: int) -> tuple[int, int, torch.Tensor | None, list[int]]:
        """Return global numbers of queries and keys, the whole padding, and every rank's `_state_of_positions`.

        Raises:
            ValueError: parts that are not of one batch; on every rank alike.
        """
        ranks, layout, padding = call.ranks, call.layout, self.request.padding
        given = -1 if padding is None else padding.size(1)
        gathered = ranks.gather_integers([*self.local, given, self.batch_size, state], self.device)
        of_queries, of_keys, widths, rows, states = map(list, zip(*gathered, strict=True))
        if len({*rows}) > 1 or any(-1 in each and {*each} != {-1} for each in (widths, states)):
            raise ValueError(
                f"the ranks of a sequence have other batches: {rows} batch rows, attention_mask of {widths} columns "
                f"(-1: none) and position_ids {[each != _NONE for each in states]} on ranks 0 to {len(rows) - 1}; "
                "every rank needs its part of the same batch"
            )
        q_len, kv_len = global_length(of_queries, layout, "query"), global_length(of_keys, layout, "key")
        self.whole, self.fewest_queries = (q_len, kv_len), min(of_queries)
        self.shards = {*of_queries, *of_keys}
        if padding is None:
            return q_len, kv_len, None, states
        if widths == of_keys:
            whole = gathered_shards(padding, layout, ranks, "an attention_mask")
        elif {*widths} == {kv_len}:
            whole = padding
        else:
            raise ValueError(
                f"attention_mask has {widths} columns on ranks 0 to {len(widths) - 1}, which have {of_keys} of "
                f"{kv_len} keys: make it one of the context's buffers (buffer_seq_dims 1), or pass the whole one on "
                "every rank"
            )
        return q_len, kv_len, None if bool(whole.all()) else whole.cpu(), states

    def _own(self, row: int, here: int, left_padding: int) -> Mask | None:
        """Return the value of a mask of transformers' own for one batch row; None for another function.

        Args:
            row: the batch row.
            here: tokens of left padding that the function counts chunks from.
            left_padding: the same of the whole row.
        """
        if self.use_vmap or not self._is_made_by_transformers():
            return None
        for seen, whole in _candidates(self.size, here, left_padding):
            if self._agrees(row, seen, here):
                return whole
        return None

    def _agrees(self, row: int, mask: Mask, left_padding: int) -> bool:
        """Return whether the function has the pairs of a mask at the edges of windows and chunks, and far from them."""
        size = self.size or 0
        edges = [0, size // 2, size, 2 * size, left_padding, left_padding + size, left_padding + 2 * size]
        positions = sorted({max(edge + step, 0) for edge in edges for step in (-1, 0, 1, 2)} | {2 * max(edges) + 8})
        at = torch.tensor(positions, device=self.device)
        found = self.function(torch.full_like(at, row), torch.zeros_like(at), at[:, None], at[None])
        expected = _pairs_at(mask, tuple(positions))
        return bool((found.expand(len(at), len(at)).cpu() == torch.tensor(expected, device="cpu")).all())

    def _is_made_by_transformers(self) -> bool:
        """Return whether the function consists of functions of masking_utils and the numbers of this call."""
        for _, value in _captured(self.function):
            if callable(value):
                if getattr(value, "__module__", None) != MASKING_UTILS:
                    return False
            elif not (value == self.size if isinstance(value, int) else self._is_by_row(value)):
                return False
        return True

    def _is_by_row(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and tuple(value.shape) == (self.batch_size,)

    def _inside_documents(self, mask: Mask | None, positions: list[int]) -> Mask:
        """Return the mask of documents that the position ids of a row give, each with `mask` inside."""
        if mask is None:
            raise NotImplementedError(
                f"the mask function {_qualname(self.function)} inside of packed documents is not one of transformers' "
                "own: give the context a mask=, and the model position ids that do not begin again"
            )
        starts, lengths = _documents(positions)
        if self.size is None or isinstance(mask, (Causal, Full, SlidingWindow, Keys)):
            return Documents.from_lengths(lengths, within=mask)
        if not hasattr(sys.modules[MASKING_UTILS], REMAP):  # earlier versions count chunks from the row's first token
            return mask_intersection(Documents.from_lengths(lengths, within=Full()), mask)
        if any(start % self.size for start in starts):
            raise NotImplementedError(
                f"chunked attention expects documents whose position ids begin with 0, got {starts}"
            )
        return Documents.from_lengths(lengths, within=mask)

    def _evaluated(self, row: int, lengths: Span) -> Mask:
        """Return the mask of a function by its value at each pair; refuse one that reads tensors of this rank only."""
        q_len, kv_len = lengths
        for name, value in _captured(self.function):
            if not isinstance(value, torch.Tensor) or self.shards == {*lengths}:
                continue
            # A tensor of the batch's shape has each row's left padding, which another rank's shard does not have.
            if {*value.shape} & self.shards or (self.request.padding is not None and self._is_by_row(value)):
                raise NotImplementedError(
                    f"the mask function of this model reads {name}, a tensor of this rank's tokens "
                    f"{tuple(value.shape)}, where context-parallel attention needs that of the whole sequence "
                    f"({q_len} tokens)"
                )
        if q_len * kv_len > _MOST_PAIRS:
            raise NotImplementedError(
                f"the mask function of this model ({_qualname(self.function)}) is not one of transformers' own, "
                f"and {q_len} x {kv_len} pairs are too many to evaluate: give the context a mask="
            )
        utils = sys.modules[MASKING_UTILS]

        def of_row(batch: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.function(batch + row, *places)
            return found

        rows: list[list[Span]] = []
        step = max((1 << 24) // max(kv_len, 1), 1)
        for first in range(0, q_len, step):
            seen = _original(utils.sdpa_mask)(
                batch_size=1, q_length=min(step, q_len - first), kv_length=kv_len, q_offset=first,
                mask_function=of_row, allow_is_causal_skip=False, use_vmap=self.use_vmap, device=self.device,
            )[0]  # fmt: skip
            if seen.size(0) != 1:
                raise NotImplementedError("the mask function of this model differs between heads")
            rows += [_kept_ranges(each) for each in seen[0].tolist()]
        most = max(map(len, rows), default=0)
        if most > _MOST_RANGES:
            raise NotImplementedError(
                f"the mask of this model ({_qualname(self.function)}) shows a query {most} ranges of keys, expected at "
                f"most {_MOST_RANGES}: use FlexAttention inside of the context"
            )
        return Bands.of_rows(rows, kv_len)


def arguments_alone(function: MaskFunction, request: MaskRequest) -> dict[str, Any]:
    """Return arguments of transformers' mask function with which one process makes its own mask.

    Raises:
        NotImplementedError: documents of a function that reads other tensors, whose order differs between versions.
    """
    if request.packed is None:
        return {"attention_mask": request.padding}
    if any(isinstance(value, torch.Tensor) and value.dim() > 1 for _, value in _captured(function)):
        raise NotImplementedError(
            "outside of context_parallel the provider takes no packed documents together with blocks of tokens that "
            'see each other (block_sequence_ids): set attn_implementation="sdpa" there'
        )
    utils = sys.modules[MASKING_UTILS]
    remap = getattr(utils, REMAP, None)
    positions = request.positions
    assert positions is not None
    inside = function if remap is None else remap(function, positions.expand(request.packed.size(0), -1))
    function = utils.and_masks(inside, utils.packed_sequence_mask_function(request.packed))
    return {"attention_mask": None, "mask_function": function, "allow_is_causal_skip": False}


def _kept_ranges(row: list[bool]) -> list[Span]:
    """Return ranges of True.

    >>> _kept_ranges([True, True, False, True])
    [(0, 2), (3, 4)]
    """
    edges = [index for index in range(len(row) + 1) if (index and row[index - 1]) != (index < len(row) and row[index])]
    return list(zip(edges[::2], edges[1::2], strict=True))


# Position ids


_NONE, _KNOWN, _OF_BUFFER, _NEW = range(-1, 3)
"""States of a rank's position ids: it has none, knows those of the whole sequence, or does not, which the ranks gather.
"""
_latest = WeakKeyDictionary[OpenContext, tuple[torch.Tensor, torch.Tensor]]()
"""By context: the latest position ids of this rank, and those of the whole sequence on the CPU, (B, tokens) each."""


def _state_of_positions(request: MaskRequest, batch_size: int) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Return (B, tokens) position ids of a request, those of the whole sequence if they are known, and the state."""
    context, positions = request.context, request.positions
    if positions is None:
        return None, None, _NONE
    if positions.dim() != 2:
        raise NotImplementedError(f"expected position_ids of shape (batch, tokens), got {tuple(positions.shape)}")
    rows = positions.expand(batch_size, -1)
    if context is None:
        return rows, None, _NEW
    latest, whole = _latest.get(context, (None, None))
    if latest is not None and _are_equal(latest, rows):  # by value: collectives write to tensors uncounted
        return rows, whole, _KNOWN
    length = rows.size(1)
    buffers = [shard.buffer.tensor for shard in context.buffers]
    buffers = [each.reshape(-1, length)[:1] for each in buffers if length and each.numel() and each.size(-1) == length]
    is_given = not length or any(_are_equal(each, rows[:1]) for each in buffers)
    return rows, None, _OF_BUFFER if is_given else _NEW


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)


def _refuse_counted_positions(whole: torch.Tensor, call: Call) -> None:
    """Refuse position ids (B, S) that ranks counted in their shards, which some have in no buffer; all alike."""
    length, size = whole.size(1), call.ranks.size
    by_rank = [call.layout.segments(length, rank, size, 0) for rank in range(size)]
    parts = [torch.cat([positions_of([each], whole.device) for each in segments]) for segments in by_rank if segments]
    # The first rank's part of arange(seq_len) is what its model would have counted.
    if len(parts) > 1 and all(torch.equal(whole[0, part], torch.arange(len(part), device="cpu")) for part in parts):
        raise ValueError(
            "the position ids of every rank begin with 0 and count its own tokens: the model has counted them in its "
            "shard. Make position_ids (torch.arange(seq_len) of the whole sequence) one of the context's buffers and "
            "pass them to the model"
        )


def _documents(positions: list[int]) -> tuple[list[int], list[int]]:
    """Return first positions and lengths of documents, which begin where a position does not follow the one before.

    >>> _documents([0, 1, 2, 0, 1])
    ([0, 0], [3, 2])
    """
    begins = [index for index, position in enumerate(positions) if not index or position != positions[index - 1] + 1]
    ends = [*begins[1:], len(positions)]
    return [positions[begin] for begin in begins], [end - begin for begin, end in zip(begins, ends, strict=True)]


# Windows and chunks


def _candidates(size: int | None, here: int, whole: int) -> Iterator[tuple[Mask, Mask]]:
    """Yield masks that transformers makes for a window or chunk of `size` tokens, and their values for the whole row.

    Args:
        size: tokens of a window or chunk; None if there is none.
        here: tokens of left padding that the function counts chunks from.
        whole: tokens of left padding of the whole row.
    """
    masks: list[Mask] = [Causal(), Full()]
    if size is not None and size > 0:
        masks += [SlidingWindow(size - 1, 0), SlidingWindow(size, size)]
    if size is not None and size <= 0:
        masks.append(Keys(()))  # a window that no layer uses: no query sees a key
    yield from zip(masks, masks, strict=True)
    if size is not None and size > 0:
        yield mask_intersection(Chunks(size, here), Causal()), mask_intersection(Chunks(size, whole), Causal())


@lru_cache(maxsize=64)
def _pairs_at(mask: Mask, positions: tuple[int, ...]) -> list[list[bool]]:
    length = positions[-1] + 1
    rows = []
    for query in positions:
        bands = [
            band for each in mask.interval_sets(length, length) for band in each if band.first <= query < band.last
        ]
        rows.append([any(lo <= key < hi for lo, hi in (band.keys(query) for band in bands)) for key in positions])
    return rows


# Closures


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
            if callable(each) and depth < 8:
                yield from _captured(each, depth + 1)


def _original(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of transformers without the patches of open contexts."""
    return getattr(function, "__wrapped__", function)
