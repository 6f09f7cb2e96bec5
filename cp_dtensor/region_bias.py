"""torch's causal biases inside of regions: `causal_lower_right(...)` as the `attn_mask` of SDPA.

With one of unequal lengths torch calls kernels below SDPA, which interception does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch_private
from cp_dtensor.interception import SdpaArguments
from cp_dtensor.masks import Causal
from cp_dtensor.region import attends_alone, current_region, sdpa_of_shards


def bias_replacements() -> Iterator[AbstractContextManager[None]]:
    """What is replaced in torch while a region is open."""
    yield _torch_private.lower_right_bias_redirected(_redirected)


def _redirected(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """SDPA with a causal bias whose last query stands at the last key: of the whole sequences, in regions."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        region = current_region()
        if region is None or attends_alone(region):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
            raise NotImplementedError(
                "causal_lower_right of unequal lengths takes plain tensors inside of a context-parallel region, this "
                "rank's shards; got DTensors"
            )
        call = SdpaArguments(query, key, value, None, dropout_p, is_causal, scale, enable_gqa)
        return sdpa_of_shards(region, call, Causal("bottom_right"))

    return attend
