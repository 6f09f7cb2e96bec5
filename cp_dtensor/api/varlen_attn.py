"""`torch.nn.attention.varlen.varlen_attn` in contexts: packed documents of the whole sequences of batch rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor.api.active_context import ActiveContext, attends_alone, current_context, refuse_sinks
from cp_dtensor.api.varlen import bottom_right_mask, heads_first_of_packed
from cp_dtensor.engine.attend import attend_packed

_REFUSED = {
    "seqused_k": "cache of keys",
    "block_table": "paged cache of keys",
    "num_splits": "batch-invariant results",
}
"""Arguments of `varlen_attn` that sequence shards do not support, and the feature that each asks for."""


def varlen_attn_in_context(call: dict[str, Any]) -> Any:
    """`(out, lse, random state)` of this rank's tokens within the documents; None outside of contexts."""
    context = _context_of(call)
    if context is None:
        return None
    tensors = q, _, _ = call["query"], call["key"], call["value"]
    if any(tensor.is_nested or isinstance(tensor, DTensor) for tensor in tensors):
        raise NotImplementedError(
            "varlen_attn takes plain tensors inside of context_parallel, this rank's shards; got nested tensors or "
            "DTensors"
        )
    refuse_sinks(context, "varlen_attn", "varlen_attention")
    for name, feature in _REFUSED.items():
        if call.get(name) is not None:
            raise NotImplementedError(
                f"varlen_attn of sequence shards has no {feature}: got {name}={call[name]!r}, expected None"
            )
    if call["cu_seq_k"] is None:
        raise NotImplementedError("varlen_attn of sequence shards expects cu_seq_k to be a tensor, got None")
    out, lse = attend_packed(
        *heads_first_of_packed(*tensors), context.config, (call["cu_seq_q"], call["cu_seq_k"]),
        within=bottom_right_mask(call["is_causal"], call["window_size"] or (-1, -1)), scale=call["scale"],
    )  # fmt: skip
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which varlen_attn does not have
    return out.squeeze(0).transpose(0, 1).contiguous(), lse.squeeze(0), random_state


def refuse_varlen_attn_out(call: dict[str, Any]) -> None:
    """Refuses `varlen_attn_out` in contexts."""
    if _context_of(call) is not None:
        raise NotImplementedError(
            "varlen_attn_out is not supported inside of context_parallel, where results are new tensors: call "
            "varlen_attn"
        )


def _context_of(call: dict[str, Any]) -> ActiveContext | None:
    if call["query"].is_meta:
        return None
    context = current_context()
    return None if context is None or attends_alone(context) else context
