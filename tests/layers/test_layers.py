"""The operator of layers in compiled code, called on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from cp_dtensor import Contiguous
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.layer import AffineScan, CausalConv1d, LinearRecurrence, SequenceLayer, traced_layer

Tensors = list[torch.Tensor | None]


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _convolution(dtype: torch.dtype) -> tuple[SequenceLayer, Tensors]:
    return CausalConv1d("silu"), [normal(1, 5, 2, dtype=dtype), normal(2, 3, dtype=dtype)]


def _recurrence(dtype: torch.dtype) -> tuple[SequenceLayer, Tensors]:
    q, v = normal(1, 5, 1, 3, dtype=dtype), normal(1, 5, 2, 2, dtype=dtype)
    return LinearRecurrence(0.5, False, True), [v, q, q, None, normal(1, 5, 2, dtype=dtype).sigmoid()]


def _scan(dtype: torch.dtype) -> tuple[SequenceLayer, Tensors]:
    return AffineScan(True), [normal(1, 3, 2, dtype=dtype), normal(1, 3, 3, dtype=dtype)]


each_layer = pytest.mark.parametrize("make", [_convolution, _recurrence, _scan])


def on_one_rank(layer: SequenceLayer, use: Callable[[str], Any]) -> Any:
    """Calls `use` with the key of a call of a layer."""

    def body(rank: int) -> Any:
        ranks = SequenceRanks(dist.group.WORLD)  # type: ignore[arg-type]
        return use(SequenceCall(ranks, Contiguous(), owner="a layer", operation=layer).key)

    return run_ranks(1, body)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@each_layer
def test_fake_results_have_the_dtypes_of_results(make: Any, dtype: torch.dtype) -> None:
    """Compiled code allocates by them."""
    layer, tensors = make(dtype)
    padded = [*tensors, *[None] * (6 - len(tensors))]
    operator: Any = torch.ops.cp_dtensor.sequence_layer
    on_one_rank(
        layer, lambda key: torch.library.opcheck(operator, (*padded, None, key, 5, -1), test_utils="test_faketensor")
    )


@each_layer
def test_autocast_changes_nothing(make: Any) -> None:
    layer, tensors = make(torch.float32)

    def use(key: str) -> None:
        plain = traced_layer(key, tensors, None, 5)
        with torch.autocast("cpu", torch.bfloat16):
            cast = traced_layer(key, tensors, None, 5)
        assert all(torch.equal(*pair) for pair in zip(cast, plain, strict=True) if pair[0] is not None)

    on_one_rank(layer, use)
