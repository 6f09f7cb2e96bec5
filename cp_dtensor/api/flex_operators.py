"""FlexAttention in compiled code: the operator `flex_keys`, which gathers K/V of all ranks, and local block masks."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors, differentiated_once
from cp_dtensor.api.flex_block_mask import LocalRows, check_mask_lengths, local_block_mask
from cp_dtensor.engine.agreement import agreed_pair
from cp_dtensor.engine.base import Tensors as CallTensors
from cp_dtensor.engine.call import Call, call_of
from cp_dtensor.engine.contexts import Left, LiveLayout
from cp_dtensor.engine.gather_kv import KVGather, Pair
from cp_dtensor.engine.handles import fake_handle


def agreed_lengths(
    call: Call, t: CallTensors, of_mask: tuple[int, int] | None, needs_grads: tuple[bool, ...] | None
) -> tuple[int, int]:  # fmt: skip
    """Return `agreed_pair`; a block mask declares the global lengths if nothing else does."""
    is_declared = call.pair is not None or (call.lengths and not call.debug)  # debugging, ranks compare masks
    if is_declared or of_mask is None:
        lengths = agreed_pair(call, t, False, needs_grads, "FlexAttention")
        check_mask_lengths(lengths, of_mask)
        return lengths
    try:
        return agreed_pair(replace(call, pair=of_mask), t, False, needs_grads, "FlexAttention")
    except ValueError as error:
        ranks, local = call.ranks, (t.q.size(2), t.k.size(2))
        if tuple(call.layout.local_length(each, ranks.rank, ranks.size) for each in of_mask) == local:
            raise
        raise ValueError(
            f"expected a block mask of the whole sequence, got one of {of_mask}, of which {local[0]} queries and "
            f"{local[1]} keys are not this rank's share in {call.layout}"
        ) from error


def check_context(call: Call) -> None:
    """Refuse contexts with a mask, or that promise equal bits in every run, which torch's kernels do not."""
    for name, value in call.of_dtensors.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"FlexAttention does not take the option {name} of its context, got {value!r}: use a context without "
                "it, and for masks the block_mask of flex_attention"
            )


# Keys and values


def _keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, q_len: int, kv_len: int, declared: bool,
    scale: float, needs_backward: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gather K/V and find the positions of the local queries; `left` is a handle of `Left`.

    Args:
        key: of the call.
        declared: True if the caller or a block mask has the lengths.
        needs_backward: True if gradients are enabled.
    """
    of_key = call_of(key)
    found = Left.by(of_key, q, k)
    call, is_live = found.call, isinstance(of_key.layout, LiveLayout)
    check_context(call)
    agreed = agreed_lengths(
        replace(call, mask=None, scale=scale), CallTensors(q, k, v), (q_len, kv_len) if declared else None, None
    )
    if agreed != (q_len, kv_len):
        raise ValueError(
            f"compiled FlexAttention without a block mask takes equally many tokens on all ranks, {q_len} queries and "
            f"{kv_len} keys in all; got a sequence of {agreed}: pass seq_len, or a block mask of the whole sequence"
        )
    ranks, layout = call.ranks, call.layout
    if is_live and len(layout.batch_groups(q.size(0))) > 1:
        raise NotImplementedError(
            "compiled FlexAttention takes layouts that are made for one length if they divide batch rows alike, got "
            f"{layout}"
        )
    keys, values = KVGather(call, kv_len).gather(k, v)
    positions = LocalRows.of(layout, q_len, ranks.rank, ranks.size, q.size(0)).positions(q.device)
    return keys, values, positions.clone(), found.handle(needs_backward)


def _fake_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, _q_len: int, kv_len: int, *_: Any
) -> tuple[torch.Tensor, ...]:
    layout = call_of(key).layout
    per_row = not isinstance(layout, LiveLayout) and len(layout.batch_groups(int(q.size(0)))) > 1
    return (
        k.new_empty(*k.shape[:2], kv_len, k.size(3)),
        v.new_empty(*v.shape[:2], kv_len, v.size(3)),
        q.new_empty(*((q.size(0),) * per_row), q.size(2), dtype=torch.int32),
        fake_handle(),
    )


def _keys_backward(grad_k: torch.Tensor, grad_v: torch.Tensor, left: torch.Tensor, local: int) -> Pair:
    """Return the gradients of this rank's keys and values: sums over the ranks of those of the gathered rows."""
    found = Left.of(left, in_backward=True)
    assert found is not None
    return KVGather(found.call, grad_k.size(2)).reduce_gradients(grad_k, grad_v, local)


def _fake_keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, _left: torch.Tensor, local: int
) -> tuple[torch.Tensor, ...]:
    return tuple(grad.new_empty(*grad.shape[:2], local, grad.size(3)) for grad in (grad_k, grad_v))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *_, positions, left = output
    ctx.save_for_backward(left)
    ctx.local = inputs[1].size(2)
    ctx.mark_non_differentiable(positions, left)


@differentiated_once
def _gradients(
    ctx: Any, saved: Tensors, grad_k: torch.Tensor, grad_v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.cp_dtensor.flex_keys_backward(grad_k, grad_v, *saved, ctx.local)
    return None, *grads, *[None] * 6


_torch.define_operator(
    "flex_keys(Tensor q, Tensor k, Tensor v, str key, int q_len, int kv_len, bool declared, float scale, "
    "bool needs_backward) -> (Tensor keys, Tensor values, Tensor positions, Tensor left)",
    _keys, _fake_keys, gradients=_gradients, save=_save_for_backward,
)  # fmt: skip
_torch.define_operator(
    "flex_keys_backward(Tensor grad_k, Tensor grad_v, Tensor left, SymInt local) "
    "-> (Tensor grad_k, Tensor grad_v)",
    _keys_backward, _fake_keys_backward,
)  # fmt: skip


# Block masks


def traced_block_mask(whole: BlockMask, key: str, lengths: tuple[int, int], positions: torch.Tensor) -> BlockMask:
    """Return `local_block_mask` in a program that is being captured.

    Args:
        whole: of the whole sequence.
        key: of the call.
        lengths: global numbers of queries and keys.
        positions: of `flex_keys`.
    """
    batch_size = index(positions.size(0)) if positions.dim() > 1 else 1
    of_mask, q_block = index(whole.kv_indices.size(0)), index(whole.BLOCK_SIZE[0])
    unaligned = _may_be_unaligned(key, lengths[0], batch_size, of_mask, q_block)
    return local_block_mask(whole, lengths[1], positions, unaligned)


@_torch.constant_in_trace
def _may_be_unaligned(key: str, q_len: int, batch_size: int, of_mask: int, q_block: int) -> bool:
    """Return whether a local block of queries may span several global blocks.

    Args:
        key: of the call; where code asks for a layout when it runs, only the alignment of that is known.
        batch_size: that of positions; 1 if all batch rows have the same.
        of_mask: batch rows of the block mask.
    """
    call = call_of(key)
    if isinstance(call.layout, LiveLayout):
        return call.layout.alignment % q_block != 0
    rows = LocalRows.of(call.layout, q_len, call.ranks.rank, call.ranks.size, batch_size)
    rows.check_batch_size(of_mask)
    with _torch.no_modes():
        return rows.has_unaligned_blocks(q_block)
