"""Reading where packed documents begin and end, once for all layers that are called with the same tensors."""

from __future__ import annotations

import threading

import torch
from torch.utils.weak import WeakIdKeyDictionary

from cp_dtensor import _torch_private
from cp_dtensor.documents import ascending
from cp_dtensor.packed_rows import PackedEdges


class _Read:
    """The numbers in tensors, as long as these exist and nobody has written to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = WeakIdKeyDictionary()

    def numbers(self, name: str, edges: torch.Tensor) -> tuple[int, ...]:
        """Of a tensor of edges; of one on a GPU, waits for it when they are read."""
        version = _torch_private.version_of(edges)
        with self._lock:
            seen, numbers = self._numbers.get(edges, (None, ()))
        if version is None or seen != version:
            numbers = ascending(edges, "varlen_attn", name)
            with self._lock:
                self._numbers[edges] = (version, numbers)
        return numbers


_read = _Read()


def packed_edges(cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor) -> PackedEdges:
    """The documents of `varlen_attn`.

    Raises:
        ValueError: no ascending integers.
    """
    queries = _read.numbers("cu_seq_q", cu_seq_q)
    return PackedEdges(queries, queries if cu_seq_k is cu_seq_q else _read.numbers("cu_seq_k", cu_seq_k))
