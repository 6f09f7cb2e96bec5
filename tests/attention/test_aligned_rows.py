"""Rows that torch's kernels read: they begin at multiples of 16 bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_dtensor.attention.backends import aten
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.plan.tiles import FULL_TILE

BACKENDS = [aten.FlashAttention(), aten.CudnnAttention(), aten.EfficientAttention()]
SHAPE = (2, 2, 40, 8)


def drawn(kind: str) -> torch.Tensor:
    """Random numbers (B, H, S, D) whose memory begins at an odd address, has rows of odd length, or is expanded."""
    if kind == "expanded":
        return torch.randn(2, 1, 40, 8).bfloat16().expand(SHAPE)
    if kind == "start":
        return torch.randn(2 * 2 * 40 * 8 + 1).bfloat16()[1:].view(SHAPE)
    return torch.randn(*SHAPE[:3], 9).bfloat16()[..., :8]


@pytest.mark.parametrize("kind", ["start", "rows", "expanded"])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_kernels_get_aligned_rows(backend: AttentionBackend, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the kernels, which would fault: the process loses its device then."""
    given = [drawn(kind) for _ in range(3)]
    read: list[torch.Tensor] = []

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            def kernel(*arguments: Any, **options: Any) -> Any:
                read.extend(x for x in arguments if isinstance(x, torch.Tensor) and x.shape == SHAPE)
                q = read[0]
                return (
                    (torch.zeros_like(q),) * 4 if "backward" in name else (torch.zeros_like(q), q.new_zeros(2, 2, 40))
                )

            return kernel

    monkeypatch.setattr(aten, "aten", Kernels())
    backend.forward(*given, FULL_TILE, 1.0)  # type: ignore[call-arg, arg-type]
    assert len(read) == 3
    backend.backward(drawn(kind), *given, drawn(kind), torch.zeros(2, 2, 40), FULL_TILE, 1.0)  # type: ignore[call-arg, arg-type]
    assert len(read) == 3 + 5
    for each in read:
        assert each.data_ptr() % 16 == 0
        assert not any(step * each.itemsize % 16 for step in each.stride()[:-1])
    values = [*given, *(each for each in read[3:] if any(torch.equal(each, one) for one in given))]
    assert len(values) == 3 + 3, "copies have the same values"
    assert (read[1].data_ptr() == given[1].data_ptr()) == (kind == "expanded"), "what is aligned is not copied"
