"""Operations of queries whose keys a mask limits, on the queries of each rank."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dtensor.api.extension import positions_of
from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.layer import Inputs, SequenceLayer
from cp_dtensor.spec.intervals import IntervalSets
from cp_dtensor.spec.masks import Full, Mask, interval_sets_of


class MaskedLayer(SequenceLayer):
    """An operation with a mask of the keys of each query."""

    takes_mask = True
    mask: Mask | None

    def check_length(self, tensors: Inputs, seq_len: int) -> None:
        interval_sets_of(self.mask or Full(), seq_len, seq_len, tensors[0].size(0))

    def queries(self, call: SequenceCall, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        """Return for each batch row the positions (T,) of this rank's queries, and `seen_keys` of them, on the CPU."""
        assert call.seq_len is not None
        intervals, found = interval_sets_of(self.mask or Full(), call.seq_len, call.seq_len, batch_size), []
        for (start, stop), sequence in call.sequences(batch_size):
            segments = sequence.layout.segments(sequence.seq_len, call.ranks.rank, call.ranks.size, sequence.group)
            positions = positions_of(segments, "cpu")
            found += [(positions, seen_keys(intervals[row % len(intervals)], positions)) for row in range(start, stop)]
        return found


def seen_keys(sets: IntervalSets, positions: Tensor) -> Tensor:
    """Return (intervals, 2, T): first key and end of the intervals of keys that the queries at some positions see.

    >>> from cp_dtensor.spec.masks import Causal
    >>> seen_keys(Causal().interval_sets(4, 4), torch.tensor([0, 3])).tolist()
    [[[0, 0], [1, 4]]]
    """
    ends = torch.zeros(len(sets), 2, len(positions), dtype=torch.int64, device="cpu")
    for (lo, hi), bands in zip(ends, sets, strict=True):
        table = torch.tensor(bands, dtype=torch.int64, device="cpu")
        index = torch.searchsorted(table[:, 0].contiguous(), positions, right=True) - 1
        first, last, least, most, left, right = table[index.clamp(min=0)].unbind(1)
        is_inside = (first <= positions) & (positions < last)
        lo.copy_(torch.where(is_inside, torch.maximum(least, positions - left), 0))
        hi.copy_(torch.where(is_inside, torch.minimum(most, positions + right + 1), 0))
    return ends


def in_intervals(ends: Tensor, keys: Tensor) -> Tensor:
    """Return whether queries, whose `seen_keys` are (intervals, 2, T), see keys, (T or 1, n)."""
    lo, hi = ends.to(keys.device).unsqueeze(-1).unbind(1)
    return ((lo <= keys) & (keys < hi)).any(0)
