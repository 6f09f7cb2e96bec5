"""Operators that compiled FlexAttention of shards calls: `flex_keys` gathers K/V, `flex_tables` makes local tables.

They are in `torch.ops.cp_dtensor`. FlexAttention itself is captured as torch captures it.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_dtensor._torch import constant_in_trace
from cp_dtensor._torch.autograd import Tensors, differentiated_once
from cp_dtensor.api.flex.block_mask import LocalRows, Tables, local_tables, longest_seq_len, table_shapes
from cp_dtensor.api.flex.gather_kv import KVGather
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.compiled_spec import RuntimeValues, call_spec_of, pending_backwards, runtime_numbers
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Full, Mask


@constant_in_trace
def world_size(token: str) -> int:
    """The number of ranks that share the sequence."""
    return call_spec_of(token).config().ranks.size


@constant_in_trace
def layout_is_found(token: str) -> bool:
    """True if the layout, made for one length, is looked up in the active context when the compiled code runs."""
    return call_spec_of(token).reads_context


def check_context_mask(mask: Mask | None) -> None:
    """Refuses contexts with a mask."""
    if mask is not None:
        raise NotImplementedError(
            f"FlexAttention does not take the mask of its context, got {mask!r}: give flex_attention a block_mask, "
            "in a context without a mask"
        )


def check_mask_lengths(expected: tuple[int, int], received: tuple[int, int] | None) -> None:
    """Refuses a block mask of other lengths than those of the sequence."""
    if received not in (None, expected):
        raise ValueError(
            f"expected a block mask of the whole sequence, of {expected[0]} queries and {expected[1]} keys, got one of "
            f"{received}: make it with create_block_mask(mask_mod, B, H, {expected[0]}, {expected[1]})"
        )


def _ranks_and_layout(token: str, found: RuntimeValues | None = None) -> tuple[SequenceRanks, Layout]:
    """The ranks that share the sequence, and the layout: the one found at run time, if any."""
    config = call_spec_of(token).config(None if found is None else found.context)
    return config.ranks, config.layout


def _kv_gather(token: str, found: RuntimeValues | None, seq_len: int, rows: int) -> KVGather:
    return KVGather(*_ranks_and_layout(token, found), seq_len, rows, call_spec_of(token).fixed.transport)


def _local_rows(token: str, found: RuntimeValues | None, seq_len: int, batch_size: int) -> LocalRows:
    ranks, layout = _ranks_and_layout(token, found)
    return LocalRows.of(layout, seq_len, ranks.rank, ranks.size, batch_size)


def _found_in(numbers: torch.Tensor) -> RuntimeValues | None:
    """The layout and mask that `flex_keys` found in the active context, from its last output."""
    return None if numbers.numel() < 2 else runtime_numbers.of(int(numbers[1]))


# K/V


def _keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: str, q_len: int, kv_len: int, declared: bool,
    scale: float, needs_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    known = (q_len, kv_len) if q_len >= 0 else None
    call_spec = call_spec_of(token)
    compared = (
        known if declared or call_spec.fixed.debug else None
    )  # debugging, ranks compare the lengths of their masks
    lengths, found = call_spec.resolve(q, k, v, Full(), NO_MODIFIERS, scale, compared)
    check_mask_lengths(lengths, known)
    if found.context is not None:
        check_context_mask(found.context.mask)
    ranks, layout = _ranks_and_layout(token, found)
    if call_spec.reads_context and len(layout.batch_groups(q.size(0))) > 1:
        raise NotImplementedError(
            "compiled FlexAttention takes layouts that are made for one length if they divide batch rows alike, got "
            f"{layout}"
        )
    rows = lengths[1] if known else longest_seq_len(layout, k.size(2), ranks.rank, ranks.size)
    keys, values = _kv_gather(token, found, lengths[1], rows).gather(k, v)
    positions = _local_rows(token, found, lengths[0], q.size(0)).positions(q.device)
    # Backward gets these numbers, so it needs neither the context nor communication.
    if call_spec.reads_context:
        begun_in = pending_backwards.begin(found, needs_backward)
        numbers = torch.tensor([lengths[1], runtime_numbers.number_of(found), begun_in], device="cpu")
    else:
        numbers = q.new_empty(0, dtype=torch.int64) if known else torch.tensor([lengths[1]], device="cpu")
    return keys, values, positions.clone(), q.new_full((1,), lengths[1], dtype=torch.int32), numbers


def _fake_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: str, q_len: int, kv_len: int, declared: bool,
    scale: float, needs_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    (ranks, layout), is_found = _ranks_and_layout(token), layout_is_found(token)
    rows = kv_len if kv_len >= 0 else longest_seq_len(layout, int(k.size(2)), ranks.rank, ranks.size)
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
    grad_k: torch.Tensor, grad_v: torch.Tensor, numbers: torch.Tensor, token: str, kv_len: int, local: int
) -> tuple[torch.Tensor, torch.Tensor]:
    found = _found_in(numbers)
    if found is not None:
        pending_backwards.end(found, int(numbers[2]))
    gather = _kv_gather(token, found, int(numbers[0]) if kv_len < 0 else kv_len, grad_k.size(2))
    return gather.reduce_gradients(grad_k, grad_v, local)


def _fake_keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, numbers: torch.Tensor, token: str, kv_len: int, local: int
) -> tuple[torch.Tensor, ...]:
    return tuple(grad.new_empty(*grad.shape[:2], local, grad.size(3)) for grad in (grad_k, grad_v))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, k, _, token, _, kv_len, *_ = inputs
    *_, positions, total, numbers = output
    ctx.save_for_backward(numbers)
    ctx.settings = token, kv_len, k.size(2)
    ctx.mark_non_differentiable(positions, total, numbers)


@differentiated_once
def _gradients(
    ctx: Any, saved: Tensors, grad_k: torch.Tensor, grad_v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.cp_dtensor.flex_keys_backward(grad_k, grad_v, *saved, *ctx.settings)
    return None, *grads, *[None] * 6


# Tables


def traced_tables(
    mask: Tables, numbers: torch.Tensor, token: str, lengths: tuple[int, int], batch_size: int, local: int,
    block_size: tuple[int, int], with_q: bool,
) -> Tables:  # fmt: skip
    """`local_tables` in a program that is being captured; `numbers` are of `flex_keys`, `local` counts its queries."""
    made = list(
        torch.ops.cp_dtensor.flex_tables(*mask[:4], numbers, token, *lengths, batch_size, local, *block_size, with_q)
    )
    has_full = mask.full_kv_indices is not None
    pairs = [True, has_full, with_q, has_full and with_q]
    made = [made.pop(0) if exists else None for exists in pairs for _ in range(2)] + made  # the rest: block_kinds
    return Tables(*made)


def _tables(
    kv_num_blocks: torch.Tensor, kv_indices: torch.Tensor, full_kv_num_blocks: torch.Tensor | None,
    full_kv_indices: torch.Tensor | None, numbers: torch.Tensor, token: str, q_len: int, kv_len: int, batch_size: int,
    local: int, q_block: int, kv_block: int, with_q: bool,
) -> list[torch.Tensor]:  # fmt: skip
    rows = _local_rows(token, _found_in(numbers), q_len, batch_size)
    whole = Tables(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    unaligned = layout_is_found(token) and _may_be_unaligned(token, q_block)
    tables = local_tables(whole, (q_block, kv_block), kv_len, rows, with_q, unaligned)
    # In new memory: compiled code may reuse the memory of an operator's results.
    return [table.clone(memory_format=torch.contiguous_format) for table in tables if table is not None]


def _fake_tables(
    kv_num_blocks: torch.Tensor, kv_indices: torch.Tensor, full_kv_num_blocks: torch.Tensor | None,
    full_kv_indices: torch.Tensor | None, numbers: torch.Tensor, token: str, q_len: int, kv_len: int, batch_size: int,
    local: int, q_block: int, kv_block: int, with_q: bool,
) -> list[torch.Tensor]:  # fmt: skip
    mask_shape = tuple(int(size) for size in kv_indices.shape)
    if layout_is_found(token):
        batch, unaligned = mask_shape[0], _may_be_unaligned(token, q_block)
    else:
        rows = _local_rows(token, None, q_len, batch_size)
        rows.check_batch_size(mask_shape[0])
        batch = rows.batch_size if len(rows.groups) > 1 else mask_shape[0]
        unaligned = rows.has_unaligned_blocks(q_block)
    shapes = table_shapes(
        mask_shape, full_kv_indices is not None, (q_block, kv_block), (q_len, kv_len), batch, local, with_q, unaligned
    )
    return [
        kv_indices.new_empty(shape, dtype=torch.int8 if name == "block_kinds" else torch.int32)
        for name, shape in zip(Tables._fields, shapes, strict=True)
        if shape is not None
    ]


def _may_be_unaligned(token: str, q_block: int) -> bool:
    """True if a layout that is found at run time may begin and end shards inside a block of queries."""
    return call_spec_of(token).alignment % q_block != 0


def _define_operators() -> torch.library.Library:
    library = torch.library.Library("cp_dtensor", "FRAGMENT")
    for schema, implementation, fake in (
        (
            "flex_keys(Tensor q, Tensor k, Tensor v, str token, int q_len, int kv_len, bool declared, float scale, "
            "bool needs_backward) "
            "-> (Tensor keys, Tensor values, Tensor positions, Tensor kv_total, Tensor numbers)",
            _keys, _fake_keys,
        ),
        (
            "flex_keys_backward(Tensor grad_k, Tensor grad_v, Tensor numbers, str token, int kv_len, SymInt local) "
            "-> (Tensor grad_k, Tensor grad_v)",
            _keys_backward, _fake_keys_backward,
        ),
        (
            "flex_tables(Tensor kv_num_blocks, Tensor kv_indices, Tensor? full_kv_num_blocks, Tensor? full_kv_indices, "
            "Tensor numbers, str token, int q_len, int kv_len, int batch_size, int local, int q_block, int kv_block, "
            "bool with_q) -> Tensor[]",
            _tables, _fake_tables,
        ),
    ):  # fmt: skip
        # When the code runs, lengths are exchanged, and compared with those of masks: no CUDA graphs.
        name = library.define(schema, tags=torch.Tag.cudagraph_unsafe)
        library.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cp_dtensor::{name}", fake, lib=library)
    torch.library.register_autograd("cp_dtensor::flex_keys", _gradients, setup_context=_save_for_backward, lib=library)
    return library


_library = _define_operators()  # the operators exist as long as this object
