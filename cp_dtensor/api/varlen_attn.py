"""`torch.nn.attention.varlen.varlen_attn` inside of regions: packed documents of whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor.api.active_context import ActiveContext, attends_alone, current_context, refuse_sinks
from cp_dtensor.api.varlen import bottom_right_mask, heads_first_of_packed
from cp_dtensor.engine.attend import attend_packed

_REFUSED = {
    "seqused_k": "a cache of keys",
    "block_table": "a paged cache of keys",
    "num_splits": "results that do not hang on the batch, bit by bit",
}
"""Arguments of torch's that sequence shards cannot honour, and what they ask for."""


def varlen_replacements() -> Iterator[AbstractContextManager[None]]:
    """What is replaced in torch while a region is open."""
    yield _torch.varlen_attn_overridden(_varlen_attn, _varlen_attn_out)


def _varlen_attn(call: dict[str, Any]) -> Any:
    """Attention within the documents of the whole sequences of this rank's tokens; None outside of regions."""
    context = _context_of(call)
    if context is None:
        return None
    tensors = q, _, _ = call["query"], call["key"], call["value"]
    if any(tensor.is_nested or isinstance(tensor, DTensor) for tensor in tensors):
        raise NotImplementedError(
            "varlen_attn takes plain tensors inside of a context-parallel region, this rank's shards; got nested "
            "tensors or DTensors"
        )
    refuse_sinks(context, "varlen_attn", "varlen_attention")
    for name, what in _REFUSED.items():
        if call.get(name) is not None:
            raise NotImplementedError(
                f"varlen_attn of sequence shards has no {what}: got {name}={call[name]!r}, expected None"
            )
    if call["cu_seq_k"] is None:
        raise NotImplementedError("varlen_attn of sequence shards expects cu_seq_k to be a tensor, got None")
    out, lse = attend_packed(
        *heads_first_of_packed(*tensors), context.settings, (call["cu_seq_q"], call["cu_seq_k"]),
        within=bottom_right_mask(call["is_causal"], call["window_size"] or (-1, -1)), scale=call["scale"],
    )  # fmt: skip
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
    return out.squeeze(0).transpose(0, 1).contiguous(), lse.squeeze(0), random_state


def _varlen_attn_out(call: dict[str, Any]) -> None:
    if _context_of(call) is not None:
        raise NotImplementedError(
            "varlen_attn_out is not supported inside of a context-parallel region, where nothing is written in place: "
            "call varlen_attn"
        )


def _context_of(call: dict[str, Any]) -> ActiveContext | None:
    if call["query"].is_meta:
        return None
    context = current_context()
    return None if context is None or attends_alone(context) else context
