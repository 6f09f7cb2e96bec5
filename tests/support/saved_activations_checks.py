"""Recorder of the exchanges of Ulysses, and of the tensors that its compiled code saves for backward."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from cp_dtensor.comm.head_exchange import CollectiveHeads
from cp_dtensor.engine import attend

Rows = list[weakref.ref[torch.Tensor]]


@contextmanager
def watched() -> Iterator[tuple[list[int], Rows]]:
    """Yields the number of tensors of each exchange (negative: from heads back to rows), and all saved tensors."""
    exchanges: list[int] = []
    rows: Rows = []
    to_heads, to_rows, keep = CollectiveHeads.to_heads, CollectiveHeads.to_rows, attend.keep_beside

    def counted(self: Any, bundles: Any, *args: Any) -> Any:
        exchanges.append(sum(map(len, bundles)))
        return to_heads(self, bundles, *args)

    def counted_home(self: Any, bundles: Any, *args: Any) -> Any:
        exchanges.append(-sum(map(len, bundles)))
        return to_rows(self, bundles, *args)

    def noted(tensor: torch.Tensor, kept: Any) -> None:
        rows.extend(map(weakref.ref, kept[1]))
        keep(tensor, kept)

    with (
        mock.patch.object(CollectiveHeads, "to_heads", counted),
        mock.patch.object(CollectiveHeads, "to_rows", counted_home),
        mock.patch.object(attend, "keep_beside", noted),
    ):
        yield exchanges, rows


FORWARD, BACKWARD = [3, -2], [1, -3]  # q, k, v, then out and LSE back; the gradient of out, then dq, dk, dv back
FORWARD_WITHOUT_GRAD = [3, -1]
AGAIN = [3, 2]  # q, k and v; out and LSE


def alive(rows: Rows) -> int:
    gc.collect()
    return sum(each() is not None for each in rows)
