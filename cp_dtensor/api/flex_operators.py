"""Operators of compiled FlexAttention: `flex_keys` gathers K/V of all ranks, `flex_tables` makes a local block mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors, differentiated_once
from cp_dtensor.api.flex_block_mask import LocalRows, Tables, check_mask_lengths, local_tables, table_shapes
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.engine.compiled_spec import RuntimeValues, compiled_spec_of, pending_backwards, runtime_numbers
from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.engine.gather_kv import KVGather, Pair
from cp_dtensor.engine.lengths import longest_length
from cp_dtensor.spec.masks import Full, Mask


@_torch.constant_in_trace
def layout_is_found(spec_key: str) -> bool:
    """True if the layout, made for one length, is looked up in the active context when the compiled code runs."""
    return compiled_spec_of(spec_key).reads_context


def config_of(spec_key: str, numbers: torch.Tensor | None = None) -> AttentionConfig:
    """The configuration of a compiled call.

    `numbers`, the last output of `flex_keys`, has the layout that was found when the code ran, if one was.
    """
    found = None if numbers is None else found_in(numbers)
    return compiled_spec_of(spec_key).config(None if found is None else found.context)


def found_in(numbers: torch.Tensor) -> RuntimeValues | None:
    """The layout and mask that `flex_keys` found in the active context."""
    return None if numbers.numel() < 2 else runtime_numbers.of(int(numbers[1]))


def check_context_mask(mask: Mask | None) -> None:
    """Refuses contexts with a mask."""
    if mask is not None:
        raise NotImplementedError(
            f"FlexAttention does not take the mask of its context, got {mask!r}: give flex_attention a block_mask, "
            "in a context without a mask"
        )


# Keys and values


def _keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec_key: str, q_len: int, kv_len: int, declared: bool,
    scale: float, needs_backward: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Lengths are -1 where they are known only when the code runs, and `declared` if the caller passed them."""
    known, compiled_spec = (q_len, kv_len) if q_len >= 0 else None, compiled_spec_of(spec_key)
    compared = known if declared or compiled_spec.fixed.debug else None  # debugging, ranks compare the lengths of masks
    lengths, found = compiled_spec.resolve(q, k, v, Full(), NO_MODIFIERS, scale, compared)
    check_mask_lengths(lengths, known)
    if found.context is not None:
        check_context_mask(found.context.mask)
    config = compiled_spec.config(found.context)
    ranks, layout = config.ranks, config.layout
    if compiled_spec.reads_context and len(layout.batch_groups(q.size(0))) > 1:
        raise NotImplementedError(
            "compiled FlexAttention takes layouts that are made for one length if they divide batch rows alike, got "
            f"{layout}"
        )
    rows = lengths[1] if known else longest_length(k.size(2), layout, ranks.rank, ranks.size)
    keys, values = KVGather(ranks, layout, lengths[1], rows, config.transport, config.debug).gather(k, v)
    positions = LocalRows.of(layout, lengths[0], ranks.rank, ranks.size, q.size(0)).positions(q.device)
    # Backward gets these numbers, so it needs neither the context nor communication.
    if compiled_spec.reads_context:
        begun_in = pending_backwards.begin(found, needs_backward)
        numbers = torch.tensor([lengths[1], runtime_numbers.number_of(found), begun_in], device="cpu")
    else:
        numbers = q.new_empty(0, dtype=torch.int64) if known else torch.tensor([lengths[1]], device="cpu")
    return keys, values, positions.clone(), q.new_full((1,), lengths[1], dtype=torch.int32), numbers


def _fake_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec_key: str, q_len: int, kv_len: int, *_: Any
) -> tuple[torch.Tensor, ...]:
    config, is_found = config_of(spec_key), layout_is_found(spec_key)
    ranks, layout = config.ranks, config.layout
    rows = kv_len if kv_len >= 0 else longest_length(int(k.size(2)), layout, ranks.rank, ranks.size)
    per_row = () if is_found or len(layout.batch_groups(int(q.size(0)))) == 1 else (q.size(0),)
    numbers = 3 if is_found else 0 if q_len >= 0 else 1
    return (
        k.new_empty(*k.shape[:2], rows, k.size(3)),
        v.new_empty(*v.shape[:2], rows, v.size(3)),
        q.new_empty(*per_row, q.size(2), dtype=torch.int32),
        q.new_empty(1, dtype=torch.int32),
        torch.empty(numbers, dtype=torch.int64, device="cpu" if numbers else q.device),
    )


def _keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, numbers: torch.Tensor, spec_key: str, kv_len: int, local: int
) -> Pair:
    found = found_in(numbers)
    if found is not None:
        pending_backwards.end(found, int(numbers[2]))
    config, seq_len = config_of(spec_key, numbers), int(numbers[0]) if kv_len < 0 else kv_len
    gather = KVGather(config.ranks, config.layout, seq_len, grad_k.size(2), config.transport, config.debug)
    return gather.reduce_gradients(grad_k, grad_v, local)


def _fake_keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, _numbers: torch.Tensor, _spec_key: str, _kv_len: int, local: int
) -> tuple[torch.Tensor, ...]:
    return tuple(grad.new_empty(*grad.shape[:2], local, grad.size(3)) for grad in (grad_k, grad_v))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, k, _, spec_key, _, kv_len, *_ = inputs
    *_, positions, total, numbers = output
    ctx.save_for_backward(numbers)
    ctx.constants = spec_key, kv_len, k.size(2)
    ctx.mark_non_differentiable(positions, total, numbers)


@differentiated_once
def _gradients(
    ctx: Any, saved: Tensors, grad_k: torch.Tensor, grad_v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.cp_dtensor.flex_keys_backward(grad_k, grad_v, *saved, *ctx.constants)
    return None, *grads, *[None] * 6


_torch.define_operator(
    "flex_keys(Tensor q, Tensor k, Tensor v, str spec_key, int q_len, int kv_len, bool declared, float scale, "
    "bool needs_backward) -> (Tensor keys, Tensor values, Tensor positions, Tensor kv_total, Tensor numbers)",
    _keys, _fake_keys, gradients=_gradients, save=_save_for_backward,
)  # fmt: skip
_torch.define_operator(
    "flex_keys_backward(Tensor grad_k, Tensor grad_v, Tensor numbers, str spec_key, int kv_len, SymInt local) "
    "-> (Tensor grad_k, Tensor grad_v)",
    _keys_backward, _fake_keys_backward,
)  # fmt: skip


# Tables of the block mask


class TableCall(NamedTuple):
    """Constants of the operator `flex_tables`, in the order of its schema."""

    spec_key: str
    q_len: int
    kv_len: int
    batch_size: int
    local: int
    """Number of local queries."""
    q_block: int
    kv_block: int
    with_q: bool

    def rows(self, numbers: torch.Tensor | None = None) -> LocalRows:
        """The local queries; `numbers` as for `config_of`."""
        config = config_of(self.spec_key, numbers)
        return LocalRows.of(config.layout, self.q_len, config.ranks.rank, config.ranks.size, self.batch_size)

    def may_be_unaligned(self) -> bool:
        """True if a layout that is found at run time may begin and end shards inside a block of queries."""
        return layout_is_found(self.spec_key) and compiled_spec_of(self.spec_key).alignment % self.q_block != 0


def traced_tables(mask: Tables, numbers: torch.Tensor, call: TableCall) -> Tables:
    """`local_tables` in a program that is being captured; `numbers` are of `flex_keys`."""
    made = list(torch.ops.cp_dtensor.flex_tables(*mask[:4], numbers, *call))
    has_full = mask.full_kv_indices is not None
    pairs = [True, has_full, call.with_q, has_full and call.with_q]
    made = [made.pop(0) if exists else None for exists in pairs for _ in range(2)] + made  # the rest: block_kinds
    return Tables(*made)


def _tables(*arguments: Any) -> list[torch.Tensor]:
    *whole, numbers = arguments[:5]
    call = TableCall(*arguments[5:])
    block_size, rows = (call.q_block, call.kv_block), call.rows(numbers)
    tables = local_tables(Tables(*whole), block_size, call.kv_len, rows, call.with_q, call.may_be_unaligned())
    # In new memory: compiled code may reuse the memory of an operator's results.
    return [table.clone(memory_format=torch.contiguous_format) for table in tables if table is not None]


def _fake_tables(*arguments: Any) -> list[torch.Tensor]:
    _, kv_indices, _, full_kv_indices, _ = arguments[:5]
    call = TableCall(*arguments[5:])
    mask_shape = tuple(int(size) for size in kv_indices.shape)
    batch, unaligned = mask_shape[0], call.may_be_unaligned()
    if not layout_is_found(call.spec_key):
        rows = call.rows()
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
    "Tensor numbers, str spec_key, int q_len, int kv_len, int batch_size, int local, int q_block, int kv_block, "
    "bool with_q) -> Tensor[]",
    _tables, _fake_tables,
)  # fmt: skip
