"""Documents of several batch rows whose tokens stand one after the other, as torch's `varlen_attn` is called with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from cp_dtensor.documents import Documents, ascending
from cp_dtensor.layouts import Span
from cp_dtensor.masks import Batched, Mask


@dataclass(frozen=True)
class PackedEdges:
    """Where documents begin and end in the whole sequences of all batch rows, row after row.

    Two rows of 6 tokens, the first with documents of 2 and 4 tokens: (0, 2, 6, 12).
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def of(cls, cu_seq_q: Any, cu_seq_k: Any) -> PackedEdges:
        """What tensors say now; of those on a GPU, waits for it.

        To remember the numbers would be wrong: nothing tells that collectives, or compiled code, have written others.

        Raises:
            ValueError: no ascending integers.
        """
        queries = ascending(cu_seq_q, "varlen_attn", "cu_seq_q")
        return cls(queries, queries if cu_seq_k is cu_seq_q else ascending(cu_seq_k, "varlen_attn", "cu_seq_k"))

    def in_rows(self, lengths: tuple[int, ...] | None) -> PackedRows:
        """The batch rows.

        Args:
            lengths: tokens that a row may have; None if nobody has said.

        Raises:
            ValueError: it is not known how many rows there are, or they have no such lengths.
        """
        for name, edges in (("cu_seq_q", self.queries), ("cu_seq_k", self.keys)):
            if edges[0] != 0:
                raise ValueError(f"varlen_attn expects {name} to begin with 0, got {edges[0]}")
        if len(self.queries) != len(self.keys):
            raise ValueError(
                f"varlen_attn expects as many documents of keys as of queries, got {len(self.keys) - 1} and "
                f"{len(self.queries) - 1}"
            )
        lengths = checked_lengths(lengths)
        q_total, kv_total = self.queries[-1], self.keys[-1]
        fitting = [
            (q_total // length, length)
            for length in lengths
            if length and q_total and q_total % length == 0 and kv_total % (q_total // length) == 0
            and kv_total // (q_total // length) in lengths
        ]  # fmt: skip
        if not fitting:
            raise ValueError(
                f"varlen_attn of sequence shards takes documents of the whole sequences, row after row: got cu_seq_q "
                f"up to {q_total} and cu_seq_k up to {kv_total}, expected multiples of the length of a row, which is "
                f"one of {list(lengths)} here (what follows the last document is one more document)"
            )
        if len(fitting) > 1:
            raise ValueError(
                f"documents of {q_total} tokens may be of several numbers of batch rows: sequences of this context "
                f"have one of the lengths {list(lengths)}. Open a context_parallel inside, with seq_lens=[the one]"
            )
        rows, q_len = fitting[0]
        return PackedRows(self, rows, (q_len, kv_total // rows))


def checked_lengths(lengths: tuple[int, ...] | None) -> tuple[int, ...]:
    """Tokens that batch rows may have.

    Raises:
        ValueError: nobody has said.
    """
    if not lengths:
        raise ValueError(
            "varlen_attn of sequence shards needs to know how long the whole sequence of a batch row is, since packed "
            "tokens do not show rows: give context_parallel its buffers or seq_lens=[...], or ContextParallel its "
            "seq_len"
        )
    return lengths


@dataclass(frozen=True)
class PackedRows:
    """Documents of `rows` batch rows, whose whole sequences have the (query, key) `lengths`."""

    edges: PackedEdges
    rows: int
    lengths: tuple[int, int]

    def mask(self, within: Mask) -> Mask:
        """Documents of each row, which show `within` inside.

        Raises:
            ValueError: a document that lies in two rows.
        """
        return _mask(self, within)


@lru_cache(maxsize=64)
def _mask(packed: PackedRows, within: Mask) -> Mask:
    edges, (q_len, kv_len) = packed.edges, packed.lengths
    if packed.rows == 1:
        return Documents(edges.queries, edges.keys, within=within)
    by_row: list[list[tuple[Span, Span]]] = [[]]
    for queries, keys in zip(pairwise(edges.queries), pairwise(edges.keys), strict=True):
        # Of documents that are in order, the first row that holds one is at or after that of the one before.
        while queries[1] > len(by_row) * q_len or keys[1] > len(by_row) * kv_len:
            by_row.append([])
        row = len(by_row) - 1
        if (queries[0] < row * q_len and queries[1] > queries[0]) or (keys[0] < row * kv_len and keys[1] > keys[0]):
            raise ValueError(
                f"varlen_attn expects every document inside of a batch row, of {q_len} queries and {kv_len} keys here; "
                f"got one with queries {queries} and keys {keys}"
            )
        by_row[-1].append((queries, keys))
    return Batched(
        Documents(
            [0, *(queries[1] - index * q_len for queries, _ in documents)],
            [0, *(keys[1] - index * kv_len for _, keys in documents)],
            within=within,
        )
        for index, documents in enumerate(by_row)
    )
