"""Where the gradients of a ring are summed: of what tiles give on this rank, and what other ranks contribute."""

from __future__ import annotations

import torch

from cp_dtensor._torch_private import label
from cp_dtensor.accumulate import Part, gradient_accumulator, place_sums
from cp_dtensor.plan import Step
from cp_dtensor.rotation.base import GradTransfers
from cp_dtensor.rotation.rows import unpack_rows


class KeyValueGradients:
    """dK and dV of this rank: from its own tiles, and, one step later, what the other ranks contribute."""

    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, state_dtype: torch.dtype, transfers: GradTransfers | None
    ) -> None:
        self._k, self._v = k, v
        self._state_dtype = state_dtype
        self._sums = [gradient_accumulator(x, state_dtype) for x in (k, v)]
        self._transfers = transfers
        self._in_flight: Step | None = None

    def add(self, step: Step, parts_k: list[Part], parts_v: list[Part]) -> None:
        """Adds what the tiles of a step give, or sends it home."""
        if step.transfer is None:
            self._add_own(step, parts_k, parts_v)
            return
        assert self._transfers is not None
        with label("pack dK/dV"):
            buffer = self._transfers.buffer()
            if step.has_gaps:
                buffer.zero_()
            for rows, parts in zip(unpack_rows(buffer, self._k, self._v, step.heads), (parts_k, parts_v), strict=True):
                place_sums(rows, parts, self._state_dtype)
        parts_k.clear()  # the memory is needed for what comes home
        parts_v.clear()
        self._transfers.send()
        self._take_home()
        self._in_flight = step

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dK and dV, complete."""
        self._take_home()
        return self._sums[0].result()[0], self._sums[1].result()[0]

    def _take_home(self) -> None:
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        assert self._transfers is not None
        batch = (0, self._k.size(0))
        parts_k, parts_v = [], []
        with label("wait for dK/dV"):
            contributions = self._transfers.receive()
        for rows, stack in contributions:
            stack_k, stack_v = unpack_rows(stack, self._k, self._v, step.heads)
            parts_k.append(Part(batch, rows, (stack_k,)))
            parts_v.append(Part(batch, rows, (stack_v,)))
        self._add_own(step, parts_k, parts_v)

    def _add_own(self, step: Step, parts_k: list[Part], parts_v: list[Part]) -> None:
        with label("sum dK/dV"):
            self._sums[0].add(step.heads, parts_k, step.is_last)
            self._sums[1].add(step.heads, parts_v, step.is_last)
