"""Mask functions of transformers as mask values of the whole sequence.

A model of transformers describes its mask by a function of (batch row, head, query, key), composed of the functions of
`transformers.masking_utils`. Here those are recognised by their names and checked at sample positions; another function
is evaluated at all pairs. What is neither is refused. Position ids and padding of shards are gathered first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any

import torch

from cp_dtensor.api.sharding import gathered_shards
from cp_dtensor.api.transformers_private import MASKING_UTILS
from cp_dtensor.attention.masked import positions_of
from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.engine.lengths import global_length
from cp_dtensor.engine.named_masks import NamedMask
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import Span
from cp_dtensor.spec.masks import Batched, Causal, Full, Mask, SlidingWindow, mask_intersection
from cp_dtensor.spec.model_masks import Bands, Chunks, Keys

_MOST_PAIRS = 1 << 32
"""Pairs of positions up to which a function is evaluated: 65,536 squared."""
_MOST_RANGES = 64
"""Ranges of keys of one query up to which a function is a mask value."""
NO_CACHE = (
    "context-parallel attention takes no cache of keys that has tokens, or room for tokens, of other calls: pass "
    "use_cache=False"
)
MaskFunction = Callable[..., Any]


@dataclass(eq=False)
class ModelMask(NamedMask):
    """A mask of a model: its function, and this rank's part of the position ids and of the padding.

    Args:
        function: of (batch row, head, query, key).
        batch_size: rows of the batch.
        local: this rank's numbers of queries and keys.
        padding: (B, keys) boolean, False for padding: whole on every rank, or of this rank's keys. None: no padding.
        use_vmap: True if the function takes single numbers only.
        alone: makes the tensor that one process uses.
    """

    function: MaskFunction
    batch_size: int
    local: Span
    padding: torch.Tensor | None
    use_vmap: bool
    alone: Callable[[], Any]
    positions_are_checked: bool = False
    """True if the model's position ids are known not to be counted in each shard."""
    is_cached: bool = False
    """True if there are keys of other calls, which only attention of one process takes."""
    whole: Span = (-1, -1)
    """Global numbers of queries and keys, once known."""
    fewest_queries: int = 0
    """The number of queries on the rank that has fewest, once known."""
    _known: dict[Any, Mask] = field(default_factory=dict)

    def mask_for(self, config: AttentionConfig) -> Mask:
        if self.is_cached:
            raise NotImplementedError(NO_CACHE)
        key = (config.ranks, config.layout)
        if key not in self._known:
            self._known[key] = self._found(config)
        return self._known[key]

    def _found(self, config: AttentionConfig) -> Mask:
        q_len, kv_len, kept = self._whole_lengths(config)
        padding = None if kept is None else [_kept_ranges(row) for row in kept.tolist()]
        function, positions = unpacked(self.function)
        packed = None if positions is None else whole_positions(positions, self.batch_size, config)
        if packed is not None and not self.positions_are_checked:
            refuse_counted_positions(packed, config)
        if packed is not None and (packed.diff(dim=1) == 1).all():
            packed = None
        rows = []
        for row in range(self.batch_size):
            left = 0 if not padding else (padding[row][0][0] if padding[row] else kv_len)
            if packed is None:
                mask = self._value(function, row, left, (q_len, kv_len))
            else:
                starts, lengths = _documents(packed[row].tolist())
                mask = Documents.from_lengths(lengths, within=_within(function, starts))
            if padding and padding[row] != [(0, kv_len)]:
                mask = mask_intersection(mask, Keys(tuple(padding[row])))
            rows.append(mask)
        return rows[0] if len({*rows}) == 1 else Batched(rows)

    def _whole_lengths(self, config: AttentionConfig) -> tuple[int, int, torch.Tensor | None]:
        """Global numbers of queries and keys, and the whole padding; refused alike on every rank."""
        ranks, layout = config.ranks, config.layout
        given = -1 if self.padding is None else self.padding.size(1)
        device = torch.device("cpu") if self.padding is None else self.padding.device
        gathered = ranks.gather_integers([*self.local, given, self.batch_size], device)
        of_queries, of_keys, widths, rows = map(list, zip(*gathered, strict=True))
        if len({*rows}) > 1 or (-1 in widths and {*widths} != {-1}):
            raise ValueError(
                f"the ranks of a sequence have other batches: {rows} batch rows and attention_mask of {widths} columns "
                f"(-1: none) on ranks 0 to {len(rows) - 1}; every rank needs its part of the same batch"
            )
        q_len, kv_len = global_length(of_queries, layout, "query"), global_length(of_keys, layout, "key")
        self.whole, self.fewest_queries = (q_len, kv_len), min(of_queries)
        if self.padding is None:
            return q_len, kv_len, None
        if widths == of_keys:
            whole = gathered_shards(self.padding, layout, ranks, "an attention_mask")
        elif {*widths} == {kv_len}:
            whole = self.padding
        else:
            raise ValueError(
                f"attention_mask has {widths} columns on ranks 0 to {len(widths) - 1}, which have {of_keys} of "
                f"{kv_len} keys: make it one of the context's buffers (buffer_seq_dims 1), or pass the whole one on "
                "every rank"
            )
        return q_len, kv_len, None if bool(whole.all()) else whole.cpu()

    def _value(self, function: MaskFunction, row: int, left_padding: int, lengths: Span) -> Mask:
        """The mask value of one batch row."""
        mask = recognised(function, left_padding)
        return self._evaluated(function, row, lengths) if mask is None else mask

    def _evaluated(self, function: MaskFunction, row: int, lengths: Span) -> Mask:
        """The mask value of a function by its value at each pair; refused if it reads tensors of this rank only."""
        q_len, kv_len = lengths
        for name, tensor in _captured_tensors(function):
            if self.local != lengths and {*tensor.shape} & {*self.local}:
                raise NotImplementedError(
                    f"the mask function of this model reads {name}, a tensor of this rank's tokens "
                    f"{tuple(tensor.shape)}, where context-parallel attention needs that of the whole sequence "
                    f"({q_len} tokens)"
                )
        if q_len * kv_len > _MOST_PAIRS:
            raise NotImplementedError(
                f"the mask function of this model ({_qualname(function)}) is not one of transformers.masking_utils, "
                f"and {q_len} x {kv_len} pairs are too many to evaluate: give the context a mask="
            )
        utils = sys.modules[MASKING_UTILS]

        def of_row(batch: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
            return function(batch + row, *places)

        rows: list[list[Span]] = []
        step = max((1 << 24) // max(kv_len, 1), 1)
        for first in range(0, q_len, step):
            seen = _original(utils.sdpa_mask)(
                batch_size=1, q_length=min(step, q_len - first), kv_length=kv_len, q_offset=first,
                mask_function=of_row, allow_is_causal_skip=False, use_vmap=self.use_vmap,
            )[0]  # fmt: skip
            if seen.size(0) != 1:
                raise NotImplementedError("the mask function of this model differs between heads")
            rows += [_kept_ranges(each) for each in seen[0].tolist()]
        most = max(map(len, rows), default=0)
        if most > _MOST_RANGES:
            raise NotImplementedError(
                f"the mask of this model ({_qualname(function)}) shows a query {most} ranges of keys, expected at most "
                f"{_MOST_RANGES}: use FlexAttention inside of the context"
            )
        return Bands.of_rows(rows, kv_len)


def _kept_ranges(row: list[bool]) -> list[Span]:
    """Ranges of True.

    >>> _kept_ranges([True, True, False, True])
    [(0, 2), (3, 4)]
    """
    edges = [index for index in range(len(row) + 1) if (index and row[index - 1]) != (index < len(row) and row[index])]
    return list(zip(edges[::2], edges[1::2], strict=True))


# Packed documents


def unpacked(function: MaskFunction) -> tuple[MaskFunction, torch.Tensor | None]:
    """Splits a function of packed documents into the function inside of documents and this rank's position ids."""
    parts = _parts(function, "and_masks")
    if parts is None or len(parts) != 2 or not _is(parts[0], "packed_sequence_mask_function"):
        return function, None
    if not _is(parts[1], "remap_positions_for_packed_sequence"):
        raise NotImplementedError(f"an unknown mask function of packed documents: {_qualname(parts[1])}")
    captured = _captured(parts[1])
    return captured["mask_function"], captured["position_ids"]


def packed_alone(function: MaskFunction, allow_is_causal_skip: bool) -> dict[str, Any]:
    """Arguments of a mask of one process: here a function has position ids also where one document is no packing."""
    inside, positions = unpacked(function)
    if positions is None:
        return {}
    utils = sys.modules[MASKING_UTILS]
    documents = utils.find_packed_sequence_indices(positions)
    if documents is None:
        skip = allow_is_causal_skip or is_plain_alone(function)
        return {"mask_function": inside, "allow_is_causal_skip": skip}
    _, remapped = _parts(function, "and_masks") or ()
    return {"mask_function": utils.and_masks(utils.packed_sequence_mask_function(documents), remapped)}


def is_plain_alone(function: MaskFunction) -> bool:
    """True if one process makes a plain causal mask of one document, which transformers leaves out."""
    inside, positions = unpacked(function)
    return positions is not None and _is(inside, "causal_mask_function")


def has_cache(function: MaskFunction, lengths: Span, offsets: Sequence[Any]) -> bool:
    """True if queries are not the first tokens of the sequence, or keys have room for later ones."""
    return any(map(bool, offsets)) or (lengths[0] != lengths[1] and not _is(function, "bidirectional_mask_function"))


def whole_positions(position_ids: torch.Tensor, batch_size: int, config: AttentionConfig) -> torch.Tensor:
    """(B, S) position ids of the whole sequence on the CPU, from this rank's; a collective."""
    if position_ids.dim() != 2:
        raise NotImplementedError(f"expected position_ids of shape (batch, tokens), got {tuple(position_ids.shape)}")
    rows = position_ids.expand(batch_size, -1).contiguous()
    return gathered_shards(rows, config.layout, config.ranks, "position_ids").cpu()


def refuse_counted_positions(
    whole: torch.Tensor, config: AttentionConfig, are_given: Callable[[], bool] = lambda: False
) -> None:
    """Refuses position ids (B, S) that ranks counted in their shards, unless `are_given()`; on every rank alike."""
    length, ranks = whole.size(1), range(config.ranks.size)
    by_rank = [config.layout.segments(length, rank, len(ranks), 0) for rank in ranks]
    parts = [torch.cat([positions_of([each], whole.device) for each in segments]) for segments in by_rank if segments]
    counted = all(torch.equal(whole[0, part], torch.arange(len(part), device="cpu")) for part in parts)
    if len(parts) > 1 and counted and not are_given():
        raise ValueError(
            "the position ids of every rank begin with 0 and count its own tokens: the model has counted them in its "
            "shard. Make position_ids (torch.arange(seq_len) of the whole sequence) one of the context's buffers and "
            "pass them to the model"
        )


def _documents(positions: list[int]) -> tuple[list[int], list[int]]:
    """First positions and lengths of documents, which begin where a position does not follow the one before.

    >>> _documents([0, 1, 2, 0, 1])
    ([0, 0], [3, 2])
    """
    begins = [index for index, position in enumerate(positions) if not index or position != positions[index - 1] + 1]
    ends = [*begins[1:], len(positions)]
    return [positions[begin] for begin in begins], [end - begin for begin, end in zip(begins, ends, strict=True)]


def _within(function: MaskFunction, starts: list[int]) -> Mask:
    """The mask inside of each document, of a function of position ids that begin with `starts`."""
    mask = recognised(function, 0)
    if mask is None:
        raise NotImplementedError(
            f"the mask function {_qualname(function)} inside of packed documents is not one of transformers' own: "
            "give the context a mask=, and the model position ids that do not begin again"
        )
    counted = [each for each in _leaves(function) if _is(each, "chunked_overlay")]
    if counted and any(start % _captured(each)["chunk_size"] for each in counted for start in starts):
        raise NotImplementedError(f"chunked attention expects documents whose position ids begin with 0, got {starts}")
    return mask


# Functions of transformers.masking_utils


def recognised(function: MaskFunction, left_padding: int) -> Mask | None:
    """The mask value of a function of transformers.masking_utils; None if it is another function."""
    parts = _parts(function, "and_masks")
    if parts is not None:
        masks = [recognised(part, left_padding) for part in parts]
        return None if None in masks else reduce(_both, [mask for mask in masks if mask is not None])
    parts = _parts(function, "or_masks")
    if parts is not None:
        masks = [recognised(part, left_padding) for part in parts]
        return None if None in masks else reduce(lambda one, other: one | other, [x for x in masks if x is not None])
    if _is(function, "causal_mask_function"):
        return _checked(function, Causal())
    if _is(function, "bidirectional_mask_function"):
        return _checked(function, Full())
    if _is(function, "sliding_window_overlay"):
        return _checked(function, SlidingWindow(int(_captured(function)["sliding_window"]) - 1, None))
    if _is(function, "sliding_window_bidirectional_overlay"):
        window = int(_captured(function)["sliding_window"])
        return _checked(function, SlidingWindow(window, window))
    if _is(function, "chunked_overlay"):
        # The function has the left padding of this rank's shard.
        make = sys.modules[MASKING_UTILS].chunked_overlay
        chunk = int(_captured(function)["chunk_size"])
        return _checked(make(chunk, torch.tensor([left_padding])), Chunks(chunk, left_padding))
    return None


def _both(one: Mask, other: Mask) -> Mask:
    """The intersection, as one window if both are windows."""
    ends = [_ends(one), _ends(other)]
    if None in ends:
        return mask_intersection(one, other)
    left, right = (
        min((end for end in pair if end is not None), default=None)
        for pair in zip(*[each for each in ends if each is not None], strict=True)
    )
    if left is None:
        return {None: Full(), 0: Causal()}.get(right) or SlidingWindow(None, right)
    return SlidingWindow(left, right)


def _ends(mask: Mask) -> tuple[int | None, int | None] | None:
    if isinstance(mask, SlidingWindow):
        return mask.left, mask.right
    return {Full(): (None, None), Causal(): (None, 0)}.get(mask)


def _checked(function: MaskFunction, mask: Mask) -> Mask:
    """`mask`; refuses one whose pairs are not those of the function at sample positions."""
    if not _agrees(function, mask):
        raise NotImplementedError(
            f"{_qualname(function)} of this version of transformers is not the mask that it was in other versions, "
            f"{mask}: it cannot be used with context-parallel attention"
        )
    return mask


def _agrees(function: MaskFunction, mask: Mask) -> bool:
    wide = max([4, *(end for end in (getattr(mask, name, None) for name in ("left", "right", "size")) if end)]) + 2
    positions = sorted({*range(4), wide // 2, *range(max(wide - 4, 0), wide + 3), 2 * wide, 2 * wide + 1})
    expected = _pairs_at(mask, tuple(positions))
    at = torch.tensor(positions)
    found = function(torch.zeros_like(at), torch.zeros_like(at), at[:, None], at[None])
    return bool((found.expand(len(at), len(at)) == torch.tensor(expected)).all())


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


def _is(function: MaskFunction, name: str) -> bool:
    """True if a function is `name` of transformers.masking_utils, or was made by it."""
    if getattr(function, "__module__", None) != MASKING_UTILS:
        return False
    return getattr(function, "__qualname__", "").split(".<locals>.")[0] == name


def _captured(function: MaskFunction) -> dict[str, Any]:
    """Variables that a function has captured."""
    cells = getattr(function, "__closure__", None) or ()
    return (
        {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
        if cells
        else {}
    )


def _parts(function: MaskFunction, name: str) -> tuple[MaskFunction, ...] | None:
    return _captured(function)["mask_functions"] if _is(function, name) else None


def _leaves(function: MaskFunction) -> Iterator[MaskFunction]:
    parts = _parts(function, "and_masks") or _parts(function, "or_masks")
    if parts is None:
        yield function
    for part in parts or ():
        yield from _leaves(part)


def _captured_tensors(function: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a function has captured, also by functions that it calls."""
    if depth > 8 or not callable(function) or not hasattr(function, "__code__"):
        return
    for name, value in _captured(function).items():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, torch.Tensor):
                yield name, each
            else:
                yield from _captured_tensors(each, depth + 1)


def _original(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of transformers without the patches of open contexts."""
    return getattr(function, "__wrapped__", function)
