"""Operations of queries whose keys a mask limits, on the queries of each rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cp_dtensor.api.extension import positions_of, seen_positions
from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.exchange import tables_on
from cp_dtensor.layers.layer import Inputs, SequenceLayer
from cp_dtensor.spec.masks import Full, Mask, interval_sets_of


class MaskedLayer(SequenceLayer):
    """An operation with a mask of the keys of each query."""

    takes_mask = True
    mask: Mask | None

    def check(self, call: SequenceCall, tensors: Inputs) -> None:
        interval_sets_of(self.mask or Full(), call.length, call.length, tensors[0].size(0))

    def queries(self, call: SequenceCall, batch_size: int, device: torch.device) -> list[Queries]:
        """Return this rank's queries for each batch row."""
        seq_len, ranks = call.length, call.ranks
        key = "queries", self.mask, call.layout, seq_len, ranks.rank, ranks.size, batch_size

        def made() -> tuple[Tensor, ...]:
            intervals, found = interval_sets_of(self.mask or Full(), seq_len, seq_len, batch_size), list[Tensor]()
            for (start, stop), sequence in call.sequences(batch_size):
                positions = positions_of(sequence.segments(ranks.rank), "cpu")
                for row in range(start, stop):
                    sets = intervals[row % len(intervals)] or ((),)  # one without keys for a mask of none
                    seen = torch.stack([seen_positions(bands, positions) for bands in sets])
                    found += positions, seen, seen.to(device)
            return tuple(found)

        of_rows = iter(tables_on(device, key, made))
        return [Queries(*each) for each in zip(of_rows, of_rows, of_rows, strict=True)]


class Queries(NamedTuple):
    """A rank's queries of a batch row."""

    positions: Tensor
    """(T,) on the CPU."""
    seen: Tensor
    """The first key that a query sees, and the end of those that it sees, in each interval: (intervals, 2, T), on the
    CPU."""
    on_device: Tensor
    """`seen` on the device of the tensors."""


def in_intervals(ends: Tensor, keys: Tensor) -> Tensor:
    """Return whether queries, which see (intervals, 2, T) as `Queries.seen` tells, see keys, (T or 1, n)."""
    lo, hi = ends.to(keys.device).unsqueeze(-1).unbind(1)
    return ((lo <= keys) & (keys < hi)).any(0)


def largest_seen(scores: Tensor, seen: Tensor, key_numbers: Tensor, topk: int) -> Tensor:
    """Return (rows, topk): the seen keys of the largest scores, ascending, then -1; of equal scores the first keys.

    >>> scores, seen = torch.tensor([[2.0, 1.0, 2.0, 2.0, 9.0]]), torch.tensor([[True, True, True, True, False]])
    >>> [largest_seen(scores, seen, torch.arange(5, dtype=torch.int32), topk).tolist() for topk in (2, 5)]
    [[[0, 2]], [[0, 1, 2, 3, -1]]]
    """
    count = min(topk, scores.size(1))
    # A key of a NaN score is the first to be selected, so that the NaN is seen in the output of attention.
    scores = scores.masked_fill(scores.isnan(), float("inf")).masked_fill_(~seen, float("-inf"))
    least = scores.topk(count, 1).values[:, -1:]
    is_above, is_equal = scores > least, (scores == least) & seen
    missing = count - is_above.sum(1, keepdim=True)
    taken = is_above | (is_equal & (is_equal.cumsum(1) <= missing))
    place = torch.where(taken, taken.cumsum(1) - 1, topk)  # those that are not taken go to a column that is dropped
    out = key_numbers.new_full((scores.size(0), topk + 1), -1)
    return out.scatter_(1, place, key_numbers.expand(scores.shape))[:, :topk]
