"""Sharding strategies of torch's fused SDPA ops, with the sequence dim among what may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from cp_dtensor import _torch_private
from cp_dtensor.dtensor.placements import BATCH_DIM, HEAD_DIM, SEQ_DIM, is_seq_sharded, on_seq

aten = torch.ops.aten

# What each output and each tensor input of an op is: a query-like tensor (B, H, S, ...), a key-like one
# (B, Hkv, T, ...), the gradient of a key-like one, the same on every rank, or no tensor.
Q, KV, GRAD_KV, SAME, NONE = "q", "kv", "grad_kv", "same", "none"

# op: (roles of outputs, roles of tensor inputs)
FORWARD_OPS: dict[Any, tuple[tuple[str, ...], tuple[str, ...]]] = {
    aten._scaled_dot_product_flash_attention.default: (
        (Q, Q, NONE, NONE, NONE, NONE, SAME, NONE, SAME),
        (Q, KV, KV),
    ),
    aten._scaled_dot_product_efficient_attention.default: ((Q, Q, NONE, NONE), (Q, KV, KV)),
    aten._scaled_dot_product_cudnn_attention.default: (
        (Q, Q, NONE, NONE, NONE, NONE, NONE, NONE, NONE),
        (Q, KV, KV),
    ),
    aten._scaled_dot_product_flash_attention_for_cpu.default: ((Q, Q), (Q, KV, KV)),
}
BACKWARD_OPS: dict[Any, tuple[tuple[str, ...], tuple[str, ...]]] = {
    aten._scaled_dot_product_flash_attention_backward.default: (
        (Q, GRAD_KV, GRAD_KV),
        (Q, Q, KV, KV, Q, Q),
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: (
        (Q, GRAD_KV, GRAD_KV, NONE),
        (Q, Q, KV, KV, Q, Q),
    ),
    aten._scaled_dot_product_cudnn_attention_backward.default: (
        (Q, GRAD_KV, GRAD_KV),
        (Q, Q, KV, KV, Q, Q),
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        (Q, GRAD_KV, GRAD_KV),
        (Q, Q, KV, KV, Q, Q),
    ),
}

Strategy = Callable[[Any], Any]


def with_sequence_sharding(op: Any) -> Callable[[Strategy | None], Strategy]:
    """How to make the new strategy of `op` from the one that torch has (None if it has none)."""
    outputs, inputs = (FORWARD_OPS | BACKWARD_OPS)[op]
    first_kv = inputs.index(KV)

    def make(original: Strategy | None) -> Strategy:
        def strategy(op_schema: Any) -> Any:
            tensors = _torch_private.tensor_inputs(op_schema)
            if original is not None and not is_seq_sharded(*(placements for placements, _ in tensors)):
                return original(op_schema)
            q_heads, kv_heads = (tensors[index][1][HEAD_DIM] for index in (inputs.index(Q), first_kv))
            roles = (*outputs, *inputs, *([SAME] * (len(tensors) - len(inputs))))
            return _torch_private.expand_strategies(
                op_schema,
                _one_axis_strategies(roles, q_heads, kv_heads, _torch_private.mesh_of(op_schema).size()),
                len(outputs),
                lambda placements: sum(map(on_seq, placements[first_kv])) <= 1,  # K/V travel around one axis
            )

        return strategy

    return make


def _one_axis_strategies(
    roles: Sequence[str], q_heads: int, kv_heads: int, mesh_size: int
) -> list[list[Placement | None]]:
    """What one mesh axis can do: nothing, shard the batch, the sequence (of all, or of queries only), or the heads."""
    shardings: list[tuple[Placement, Placement, Placement]] = [
        (Replicate(), Replicate(), Replicate()),
        (Shard(BATCH_DIM), Shard(BATCH_DIM), Shard(BATCH_DIM)),
        (Shard(SEQ_DIM), Shard(SEQ_DIM), Shard(SEQ_DIM)),
        (Shard(SEQ_DIM), Replicate(), Partial()),
    ]
    if q_heads == kv_heads or (q_heads % mesh_size == 0 and kv_heads % mesh_size == 0):
        shardings.append((Shard(HEAD_DIM), Shard(HEAD_DIM), Shard(HEAD_DIM)))
    return [
        [{Q: q, KV: kv, GRAD_KV: grad_kv, SAME: Replicate(), NONE: None}[role] for role in roles]
        for q, kv, grad_kv in shardings
    ]
