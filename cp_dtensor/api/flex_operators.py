"""Operators of compiled FlexAttention: `flex_keys` gathers K/V of all ranks, `flex_tables` makes a local block mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors, differentiated_once
from cp_dtensor.api.flex_block_mask import LocalRows, Tables, check_mask_lengths, local_tables, table_shapes
from cp_dtensor.engine.agreement import agreed_pair
from cp_dtensor.engine.base import Tensors as CallTensors
from cp_dtensor.engine.call import Call, call_of
from cp_dtensor.engine.contexts import Left, LiveLayout
from cp_dtensor.engine.gather_kv import KVGather, Pair
from cp_dtensor.engine.handles import fake_handle
from cp_dtensor.spec.masks import Mask


def layout_is_asked(key: str) -> bool:
    """True if the layout, made for one length, is that of the context in which the compiled code runs."""
    return isinstance(call_of(key).layout, LiveLayout)


def call_in(key: str, left: torch.Tensor) -> Call:
    """The call of a key; `left`, the last output of `flex_keys`, names the context that was asked, if one was."""
    found = Left.of(left)
    return call_of(key) if found is None else found.call


def agreed_lengths(
    call: Call, t: CallTensors, of_mask: tuple[int, int] | None, needs_grads: tuple[bool, ...] | None
) -> tuple[int, int]:  # fmt: skip
    """The global (queries, keys), which a block mask has if nothing else declares any; arguments as `agreed_pair`."""
    is_declared = call.pair is not None or (call.lengths and not call.debug)  # debugging, ranks compare masks
    try:
        lengths = agreed_pair(
            call if is_declared or not of_mask else replace(call, pair=of_mask), t, False, needs_grads, "FlexAttention"
        )
    except ValueError as error:
        ranks, local = call.ranks, (t.q.size(2), t.k.size(2))
        share = [call.layout.local_length(length, ranks.rank, ranks.size) for length in of_mask or ()]
        if is_declared or not of_mask or share == [*local]:
            raise
        raise ValueError(
            f"expected a block mask of the whole sequence, got one of {of_mask}, of which {t.q.size(2)} queries and "
            f"{t.k.size(2)} keys are not this rank's share in {call.layout}"
        ) from error
    check_mask_lengths(lengths, of_mask)
    return lengths


def check_context_mask(mask: Mask | None) -> None:
    """Refuses contexts with a mask."""
    if mask is not None:
        raise NotImplementedError(
            f"FlexAttention does not take the mask of its context, got {mask!r}: give flex_attention a block_mask, "
            "in a context without a mask"
        )


# Keys and values


def _keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, q_len: int, kv_len: int, declared: bool,
    scale: float, needs_backward: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """`declared`: True if the caller or a block mask has the lengths."""
    found = Left.by(call_of(key), q, k)
    call = found.call
    check_context_mask(call.mask)
    agreed = agreed_lengths(
        replace(call, mask=None, scale=scale), CallTensors(q, k, v), (q_len, kv_len) if declared else None, None
    )
    if agreed != (q_len, kv_len):
        raise ValueError(
            f"compiled FlexAttention without a block mask takes equally many tokens on all ranks, {q_len} queries and "
            f"{kv_len} keys in all; got a sequence of {agreed}: pass seq_len, or a block mask of the whole sequence"
        )
    ranks, layout = call.ranks, call.layout
    if layout_is_asked(key) and len(layout.batch_groups(q.size(0))) > 1:
        raise NotImplementedError(
            "compiled FlexAttention takes layouts that are made for one length if they divide batch rows alike, got "
            f"{layout}"
        )
    keys, values = KVGather(ranks, layout, kv_len, kv_len, call.transport, call.debug).gather(k, v)
    positions = LocalRows.of(layout, q_len, ranks.rank, ranks.size, q.size(0)).positions(q.device)
    left = q.new_empty(0, dtype=torch.int64) if found.asked is None else found.handle(needs_backward)
    return keys, values, positions.clone(), left


def _fake_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: str, _q_len: int, kv_len: int, *_: Any
) -> tuple[torch.Tensor, ...]:
    call = call_of(key)
    per_row = () if layout_is_asked(key) or len(call.layout.batch_groups(int(q.size(0)))) == 1 else (q.size(0),)
    return (
        k.new_empty(*k.shape[:2], kv_len, k.size(3)),
        v.new_empty(*v.shape[:2], kv_len, v.size(3)),
        q.new_empty(*per_row, q.size(2), dtype=torch.int32),
        fake_handle() if call.context else q.new_empty(0, dtype=torch.int64),
    )


def _keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, left: torch.Tensor, key: str, kv_len: int, local: int
) -> Pair:
    """Return the gradients of this rank's keys and values: sums over the ranks of those of the gathered rows."""
    found = Left.of(left, in_backward=True)
    call = call_of(key) if found is None else found.call
    gather = KVGather(call.ranks, call.layout, kv_len, grad_k.size(2), call.transport, call.debug)
    return gather.reduce_gradients(grad_k, grad_v, local)


def _fake_keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, _left: torch.Tensor, _key: str, _kv_len: int, local: int
) -> tuple[torch.Tensor, ...]:
    return tuple(grad.new_empty(*grad.shape[:2], local, grad.size(3)) for grad in (grad_k, grad_v))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, k, _, key, _, kv_len, *_ = inputs
    *_, positions, left = output
    ctx.save_for_backward(left)
    ctx.constants = key, kv_len, k.size(2)
    ctx.mark_non_differentiable(positions, left)


@differentiated_once
def _gradients(
    ctx: Any, saved: Tensors, grad_k: torch.Tensor, grad_v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.cp_dtensor.flex_keys_backward(grad_k, grad_v, *saved, *ctx.constants)
    return None, *grads, *[None] * 6


_torch.define_operator(
    "flex_keys(Tensor q, Tensor k, Tensor v, str key, int q_len, int kv_len, bool declared, float scale, "
    "bool needs_backward) -> (Tensor keys, Tensor values, Tensor positions, Tensor left)",
    _keys, _fake_keys, gradients=_gradients, save=_save_for_backward,
)  # fmt: skip
_torch.define_operator(
    "flex_keys_backward(Tensor grad_k, Tensor grad_v, Tensor left, str key, int kv_len, SymInt local) "
    "-> (Tensor grad_k, Tensor grad_v)",
    _keys_backward, _fake_keys_backward,
)  # fmt: skip


# Tables of the block mask


class TableCall(NamedTuple):
    """Constants of the operator `flex_tables`, in the order of its schema."""

    key: str
    q_len: int
    kv_len: int
    batch_size: int
    local: int
    """Number of local queries."""
    q_block: int
    kv_block: int
    with_q: bool

    def rows(self, left: torch.Tensor) -> LocalRows:
        """The local queries; `left` as for `call_in`."""
        call = call_in(self.key, left)
        return LocalRows.of(call.layout, self.q_len, call.ranks.rank, call.ranks.size, self.batch_size)

    def may_be_unaligned(self) -> bool:
        """True if a layout that is asked for at run time may begin and end shards inside a block of queries."""
        return layout_is_asked(self.key) and call_of(self.key).layout.alignment % self.q_block != 0


def traced_tables(mask: Tables, left: torch.Tensor, call: TableCall) -> Tables:
    """`local_tables` in a program that is being captured; `left` is of `flex_keys`."""
    made = list(torch.ops.cp_dtensor.flex_tables(*mask[:4], left, *call))
    has_full = mask.full_kv_indices is not None
    pairs = [True, has_full, call.with_q, has_full and call.with_q]
    made = [made.pop(0) if exists else None for exists in pairs for _ in range(2)] + made  # the rest: block_kinds
    return Tables(*made)


def _tables(*arguments: Any) -> list[torch.Tensor]:
    *whole, left = arguments[:5]
    call = TableCall(*arguments[5:])
    block_size, rows = (call.q_block, call.kv_block), call.rows(left)
    tables = local_tables(Tables(*whole), block_size, call.kv_len, rows, call.with_q, call.may_be_unaligned())
    # In new memory: compiled code may reuse the memory of an operator's results.
    return [table.clone(memory_format=torch.contiguous_format) for table in tables if table is not None]


def _fake_tables(*arguments: Any) -> list[torch.Tensor]:
    _, kv_indices, _, full_kv_indices, _ = arguments[:5]
    call = TableCall(*arguments[5:])
    mask_shape = tuple(int(size) for size in kv_indices.shape)
    batch, unaligned = mask_shape[0], call.may_be_unaligned()
    if not layout_is_asked(call.key):
        rows = call.rows(kv_indices.new_empty(0))
        rows.check_batch_size(mask_shape[0])
        batch = rows.batch_size if len(rows.groups) > 1 else mask_shape[0]
        unaligned = rows.has_unaligned_blocks(call.q_block)
    shapes = table_shapes(
        mask_shape, full_kv_indices is not None, (call.q_block, call.kv_block), (call.q_len, call.kv_len), batch,
        call.local, call.with_q, unaligned,
    )  # fmt: skip
    return [
        kv_indices.new_empty(shape, dtype=torch.int8 if name == "block_kinds" else torch.int32)
        for name, shape in zip(Tables._fields, shapes, strict=True)
        if shape is not None
    ]


_torch.define_operator(
    "flex_tables(Tensor kv_num_blocks, Tensor kv_indices, Tensor? full_kv_num_blocks, Tensor? full_kv_indices, "
    "Tensor left, str key, int q_len, int kv_len, int batch_size, int local, int q_block, int kv_block, "
    "bool with_q) -> Tensor[]",
    _tables, _fake_tables,
)  # fmt: skip
