"""Masks of packed documents, from cumulative lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, chain, groupby, pairwise, zip_longest
from operator import index
from typing import Any

from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.intervals import FAR, IntervalBand, IntervalSets
from cp_dtensor.spec.layouts import CachedHash
from cp_dtensor.spec.masks import Batched, Full, Intersection, Mask, Union, clipped_interval_sets, is_integer


@dataclass(frozen=True, init=False)
class Documents(CachedHash, Mask):
    """Attention within packed documents: query and key are of one document, and `within` has their pair.

    Document d has the positions cu_seqlens[d] to cu_seqlens[d + 1] - 1; documents may be empty. Positions before the
    first and after the last document (padding) see nothing.

    Args:
        cu_seqlens: ascending positions in the whole sequence, one more than documents, as integers or a tensor. A
            tensor on a GPU is copied to the host, which waits for the GPU; pass one on the CPU. Lengths belong to
            `Documents.from_lengths` and ids to `Documents.from_ids`; attention refuses most of them here.
        cu_seqlens_k: positions of the keys' documents if keys are another sequence (cross-attention); queries of
            document d see keys of document d. None: `cu_seqlens`.
        within: the mask inside of each document, with positions counted from its start. None: `Full()`.

    Raises:
        ValueError: positions that do not ascend, another number of documents of keys, or `within` that is no single
            mask.

    >>> from cp_dtensor.spec.masks import Causal
    >>> [band.keys(band.last - 1) for band in Documents([0, 2, 5], within=Causal()).interval_sets(5, 5)[0]]
    [(0, 2), (2, 5)]
    """

    cu_seqlens: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    within: Mask
    only_length: int | None = field(default=None, init=False, repr=False)  # Dynamo hands the others to __init__
    """Length of the sequence if the mask was made for one, else None."""

    def __init__(self, cu_seqlens: Any, cu_seqlens_k: Any = None, *, within: Mask | None = None) -> None:
        queries = ascending(cu_seqlens, "Documents", "cu_seqlens")
        keys = queries if cu_seqlens_k is None else ascending(cu_seqlens_k, "Documents", "cu_seqlens_k")
        if within is not None and (not isinstance(within, Mask) or within.batch_size is not None):
            raise ValueError(f"Documents expects within to be one mask such as Causal(), got {within!r}")
        if len(queries) != len(keys):
            raise ValueError(
                f"Documents expects as many documents of keys as of queries, got {len(keys) - 1} and {len(queries) - 1}"
            )
        values = {"cu_seqlens": queries, "cu_seqlens_k": keys, "within": within or Full(), "only_length": None}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_lengths(cls, lengths: Iterable[int], *, within: Mask | None = None) -> Documents:
        """Return the mask of documents of these lengths, one after the other.

        Raises:
            ValueError: lengths that are no integers >= 0.

        >>> Documents.from_lengths([2, 3]).cu_seqlens
        (0, 2, 5)
        """
        numbers = _as_lists(lengths)
        if not isinstance(numbers, list) or any(not hasattr(each, "__index__") or each < 0 for each in numbers):
            raise ValueError(f"Documents expects lengths to be one list of integers >= 0, got {lengths!r}")
        return cls([0, *accumulate(map(index, numbers))], within=within)

    @classmethod
    def for_length(cls, cu_seqlens: Iterable[int], seq_len: int, *, within: Mask | None = None) -> Documents:
        """Return the mask of documents of a sequence of `seq_len` tokens; attention over other lengths refuses it.

        Any ascending positions are taken as such; without a length, some are refused since they look like lengths.

        >>> Documents.for_length([2, 4], 6).cu_seqlens
        (2, 4)
        """
        mask = cls(cu_seqlens, within=within)
        object.__setattr__(mask, "only_length", seq_len)
        return mask

    @classmethod
    def from_ids(cls, ids: Any, *, within: Mask | None = None) -> Mask:
        """Return the mask whose documents are runs of equal ids.

        Args:
            ids: (S,), or (B, S) where each batch row has documents of its own: the ids of all tokens of the whole
                sequence, in the order of their positions. Make the mask before a context shards the ids; attention
                over another number of queries refuses it.
            within: as for the class.

        Raises:
            ValueError: neither a list nor a tensor.

        >>> Documents.from_ids([7, 7, 1]).cu_seqlens
        (0, 2, 3)
        """
        ids = _as_lists(ids)
        if not isinstance(ids, list):
            raise ValueError(f"Documents expects ids to be a list or a tensor, (S,) or (B, S), got {ids!r}")
        if ids and isinstance(ids[0], list):
            return Batched([cls.from_ids(row, within=within) for row in ids])
        lengths = [len(list(run)) for _, run in groupby(ids)]
        return cls.for_length([0, *accumulate(lengths)], len(ids), within=within)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of queries of each document."""
        return tuple(stop - start for start, stop in pairwise(self.cu_seqlens))

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        """Refuse sequences that are shorter than the documents, or of another length than the mask was made for.

        Raises:
            ValueError: these, and positions that look like ids or lengths.
        """
        if self.cu_seqlens[-1] > q_len or self.cu_seqlens_k[-1] > kv_len:
            raise ValueError(
                f"the documents of a mask end at {self.cu_seqlens[-1]} (queries) and {self.cu_seqlens_k[-1]} (keys), "
                f"expected at most the lengths of the sequence, {q_len} and {kv_len}"
            )
        if self.only_length not in (None, q_len):
            raise ValueError(
                f"Documents made of the ids of {self.only_length} tokens, or for that length, expected the {q_len} "
                "tokens of the whole sequence; ids of a rank's own tokens, or positions (cu_seqlens), make another mask"
            )
        if self.only_length is None:
            refuse_ids_and_lengths(self.cu_seqlens, q_len, "Documents", "cu_seqlens")
            refuse_ids_and_lengths(self.cu_seqlens_k, kv_len, "Documents", "cu_seqlens_k")

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        self.check_lengths(q_len, kv_len)
        by_document = (
            [
                [_moved(band, first, lo) for band in bands]
                for bands in clipped_interval_sets(self.within, last - first, hi - lo)
            ]
            for (first, last), (lo, hi) in zip(pairwise(self.cu_seqlens), pairwise(self.cu_seqlens_k), strict=True)
        )
        return tuple(tuple(chain(*bands)) for bands in zip_longest(*by_document, fillvalue=[]))


def _moved(band: IntervalBand, first: int, lo: int) -> IntervalBand:
    """Return a band of a document whose queries begin at `first` and whose keys begin at `lo`."""
    left = band.left if band.left >= FAR else band.left + first - lo
    right = band.right if band.right >= FAR else band.right + lo - first
    return IntervalBand(band.first + first, band.last + first, band.lo + lo, band.hi + lo, left, right)


@lru_cached
def edges_of_documents(mask: Mask, seq_len: int | None = None) -> tuple[int, ...]:
    """Return the positions where the documents of a mask begin and end, for layers that keep to them; () without any.

    Tokens are of one document if they are in every `Documents` of an intersection, and in all that are nested.

    Args:
        mask: any mask of self-attention.
        seq_len: the length of the sequence, with which positions are compared; None if it is not known yet.

    Raises:
        ValueError: documents that are not of this length, as attention refuses them.
        NotImplementedError: documents that `cu_seqlens` cannot have; the message is a noun phrase.

    >>> edges_of_documents(Documents([0, 4, 8], within=Documents([0, 1, 4])) & Documents([0, 6, 8]))
    (0, 1, 4, 5, 6, 8)
    """
    if isinstance(mask, Documents):
        if seq_len is not None:
            mask.check_lengths(seq_len, seq_len)
        if mask.cu_seqlens != mask.cu_seqlens_k:
            raise NotImplementedError("documents whose keys are at other positions")
        if not edges_of_documents(mask.within):
            return mask.cu_seqlens
        nested = [
            (start + lo, start + hi)
            for start, stop in pairwise(mask.cu_seqlens)
            for lo, hi in pairwise(edges_of_documents(mask.within, stop - start))
        ]
        if any(before[1] != behind[0] for before, behind in pairwise(nested)):
            raise NotImplementedError("nested documents with padding between them")
        return (nested[0][0], *(stop for _, stop in nested)) if nested else mask.cu_seqlens[:1]
    if isinstance(mask, Intersection):
        found = [edges for part in mask.masks if (edges := edges_of_documents(part, seq_len))]
        return reduce(_edges_of_both, found) if found else ()
    if isinstance(mask, (Union, Batched)):
        different = {edges_of_documents(part, seq_len) for part in mask.masks}
        if len(different) > 1:
            of = "batch rows" if isinstance(mask, Batched) else "masks of a union"
            raise NotImplementedError(f"{of} with different documents")
        return different.pop()
    return ()


def _edges_of_both(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return all edges, but for those in the padding of either; an edge comes as often as where it is more often.

    >>> _edges_of_both((0, 3, 3, 8), (2, 5, 9))
    (2, 3, 3, 5, 8)
    """
    first, last = max(one[0], other[0]), min(one[-1], other[-1])
    edges = sorted((Counter(one) | Counter(other)).elements())
    return tuple(edge for edge in edges if first <= edge <= last) or (first,)


def ascending(values: Any, owner: str, name: str) -> tuple[int, ...]:
    """Return ascending positions from integers or a tensor.

    Raises:
        ValueError: anything else; the message names the argument `name` of `owner`.
    """
    numbers = _as_lists(values)
    if not isinstance(numbers, list) or not numbers or not all(map(is_integer, numbers)):
        raise ValueError(f"{owner} expects {name} to be one list of integers, got {values!r}")
    if numbers[0] < 0 or any(one > other for one, other in pairwise(numbers)):
        raise ValueError(f"{owner} expects {name} to be >= 0 and ascending, got {numbers}")
    return tuple(numbers)


def refuse_ids_and_lengths(numbers: tuple[int, ...], seq_len: int, owner: str, name: str) -> None:
    """Refuse ids and lengths that were passed as positions: nearly all tokens would be padding.

    Raises:
        ValueError: ascending numbers that are no sensible `cu_seqlens` of a sequence of `seq_len` tokens; the message
            names the argument `name` of `owner`.
    """
    if _are_ids(numbers, seq_len):
        kind, instead = "a document id of each token", "Documents.from_ids(ids)"
    elif _are_lengths(numbers, seq_len):
        kind, instead = "the lengths of documents", "Documents.from_lengths(lengths)"
    else:
        return
    shown = f"{numbers[0]}, ..., {numbers[-1]}" if len(numbers) > 8 else ", ".join(map(str, numbers))
    raise ValueError(
        f"{owner} expects {name} to be the positions where documents begin and end, such as [0, 2, 5]; got "
        f"{len(numbers)} numbers ({shown}) for {seq_len} tokens, which look like {kind}: {instead}.cu_seqlens has the "
        "positions"
    )


def _are_ids(numbers: tuple[int, ...], seq_len: int) -> bool:
    """Return whether there are as many numbers as tokens, and as positions they would make empty documents.

    Empty documents at the end do not count, since a list of fixed size may be filled up, and zeros alone are a list
    without any document.

    >>> [_are_ids(numbers, 6) for numbers in ((0, 0, 0, 1, 1, 2), (4, 4, 4, 4, 4, 4), (0, 3, 4, 4, 4, 4), (0,) * 6)]
    [True, True, False, False]
    """
    if len(numbers) != seq_len or numbers[-1] >= seq_len - 1 or numbers[-1] == 0:
        return False
    lengths = [last - first for first, last in pairwise(numbers)]
    while lengths and lengths[-1] == 0:
        lengths.pop()
    return 0 in lengths or max(lengths, default=0) <= 1


def _are_lengths(numbers: tuple[int, ...], seq_len: int) -> bool:
    """Return whether these ascending numbers add up to `seq_len`, or are all equal and add up to less.

    >>> [_are_lengths(numbers, 12) for numbers in ((3, 4, 5), (4, 4), (0, 3, 9), (0, 0), (12, 12), (5, 5, 5))]
    [True, True, False, False, False, False]
    """
    total = sum(numbers)
    return numbers[0] > 0 and (total == seq_len or (numbers[0] == numbers[-1] and total < seq_len))


def _as_lists(values: Any) -> Any:
    """Return a list (of lists if there are more dims), or the value itself if it is no sequence.

    Raises:
        ValueError: a tensor without values.
    """
    if getattr(values, "is_meta", False):
        raise ValueError(f"expected documents of a tensor with values, got {tuple(values.shape)} on the meta device")
    if hasattr(values, "tolist"):
        return values.tolist()
    return list(values) if isinstance(values, Iterable) else values


# Documents of varlen_attn


def checked_lengths(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths that batch rows may have; refuse calls without any."""
    if not lengths:
        raise ValueError(
            "varlen_attn of sequence shards needs to know how long the whole sequence of a batch row is, since packed "
            "tokens do not show rows: give context_parallel its buffers or seq_len=..., or ContextParallel its "
            "seq_len"
        )
    return lengths


@lru_cached
def packed_mask(
    queries: tuple[int, ...], keys: tuple[int, ...], lengths: tuple[int, ...], within: Mask
) -> tuple[Mask, tuple[int, int], int]:
    """Return the mask of packed documents, the (queries, keys) of a batch row, and the number of rows.

    Args:
        queries, keys: positions where documents begin and end, in the whole sequences of all rows one after the other.
        lengths: those that a row may have.
        within: the mask inside of each document.

    Raises:
        ValueError: documents that fit no number of rows or several, or that are in two rows; no lengths.

    Two rows of 6 tokens, the first with documents of 2 and 4 tokens:

    >>> [row.cu_seqlens for row in packed_mask((0, 2, 6, 12), (0, 2, 6, 12), (6,), Full())[0].masks]
    [(0, 2, 6), (0, 6)]
    """
    rows, q_len, kv_len = _rows_of_packed(queries, keys, checked_lengths(lengths))
    if rows == 1:
        return Documents(queries, keys, within=within), (q_len, kv_len), rows
    by_row = [([0], [0])]  # of each row, the ends of its documents of queries and of keys
    for of_q, of_k in zip(pairwise(queries), pairwise(keys), strict=True):
        # Documents ascend, so the row of one is that of the one before or a later one.
        while of_q[1] > len(by_row) * q_len or of_k[1] > len(by_row) * kv_len:
            by_row.append(([0], [0]))
        row = len(by_row) - 1
        if (of_q[0] < row * q_len and of_q[1] > of_q[0]) or (of_k[0] < row * kv_len and of_k[1] > of_k[0]):
            raise ValueError(
                f"varlen_attn expects every document inside of a batch row, of {q_len} queries and {kv_len} keys here; "
                f"got one with queries {of_q} and keys {of_k}"
            )
        by_row[-1][0].append(of_q[1] - row * q_len)
        by_row[-1][1].append(of_k[1] - row * kv_len)
    return Batched(Documents(*ends, within=within) for ends in by_row), (q_len, kv_len), rows


def _rows_of_packed(queries: tuple[int, ...], keys: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the number of batch rows, and the queries and the keys of each."""
    for name, edges in (("cu_seq_q", queries), ("cu_seq_k", keys)):
        if edges[0] != 0:
            raise ValueError(f"varlen_attn expects {name} to begin with 0, got {edges[0]}")
    if len(queries) != len(keys):
        raise ValueError(
            f"varlen_attn expects as many documents of keys as of queries, got {len(keys) - 1} and {len(queries) - 1}"
        )
    q_total, kv_total = queries[-1], keys[-1]
    found = [(q_total // q_len, q_len) for q_len in lengths if q_len and q_total and q_total % q_len == 0]
    fitting = [
        (rows, q_len, kv_total // rows) for rows, q_len in found if kv_total % rows == 0 and kv_total // rows in lengths
    ]
    if not fitting:
        raise ValueError(
            f"varlen_attn of sequence shards takes documents of the whole sequences, row after row: got cu_seq_q "
            f"up to {q_total} and cu_seq_k up to {kv_total}, expected multiples of the length of a row, which is "
            f"one of {list(lengths)} here (what follows the last document is one more document)"
        )
    if len(fitting) > 1:
        raise ValueError(
            f"documents of {q_total} tokens may be of several numbers of batch rows: sequences of this context "
            f"have one of the lengths {list(lengths)}. Open a context_parallel inside, with seq_len=the one"
        )
    return fitting[0]
