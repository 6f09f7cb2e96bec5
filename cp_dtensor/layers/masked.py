"""Operations of queries whose keys a mask limits, on the queries of each rank."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dtensor.api.extension import positions_of, seen_positions
from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.layer import Inputs, SequenceLayer
from cp_dtensor.spec.masks import Full, Mask, interval_sets_of


class MaskedLayer(SequenceLayer):
    """An operation with a mask of the keys of each query."""

    takes_mask = True
    mask: Mask | None

    def check_length(self, tensors: Inputs, seq_len: int) -> None:
        interval_sets_of(self.mask or Full(), seq_len, seq_len, tensors[0].size(0))

    def queries(self, call: SequenceCall, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        """Return for each batch row the positions (T,) of this rank's queries, and the keys that they see, on the CPU.

        Those are the first key and the end of each interval of keys, (intervals, 2, T).
        """
        assert call.seq_len is not None
        intervals, found = interval_sets_of(self.mask or Full(), call.seq_len, call.seq_len, batch_size), []
        for (start, stop), sequence in call.sequences(batch_size):
            segments = sequence.layout.segments(sequence.seq_len, call.ranks.rank, call.ranks.size, sequence.group)
            positions = positions_of(segments, "cpu")
            for row in range(start, stop):
                sets = intervals[row % len(intervals)] or ((),)  # one without keys for a mask of none
                found.append((positions, torch.stack([seen_positions(bands, positions) for bands in sets])))
        return found


def in_intervals(ends: Tensor, keys: Tensor) -> Tensor:
    """Return whether queries, which see (intervals, 2, T) as `MaskedLayer.queries` tells, see keys, (T or 1, n)."""
    lo, hi = ends.to(keys.device).unsqueeze(-1).unbind(1)
    return ((lo <= keys) & (keys < hi)).any(0)
