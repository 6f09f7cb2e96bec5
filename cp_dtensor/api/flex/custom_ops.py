"""What FlexAttention of shards needs around it, as operators that torch.compile captures.

`torch.ops.cp_dtensor.flex_keys` gathers keys and values, `torch.ops.cp_dtensor.flex_tables` has the tables of the local
rows' mask. FlexAttention itself is captured as torch captures it.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_dtensor._torch.autograd import Tensors, differentiated_once
from cp_dtensor.api.flex.block_mask import (
    LocalRows,
    Tables,
    aligned_shapes,
    general_shapes,
    local_tables,
    most_tokens,
    table_shapes,
)
from cp_dtensor.api.flex.gather_kv import WholeKeys
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.compiled_spec import (
    CompiledCallSpec,
    RuntimeValues,
    call_spec_of,
    pending_backwards,
    runtime_numbers,
)
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Full, Mask


def shard_call_spec(token: str) -> CompiledCallSpec:
    """The recipe of some shards."""
    call_spec = call_spec_of(token)
    assert isinstance(call_spec, CompiledCallSpec)
    return call_spec


def _partition_of(token: str, what: RuntimeValues | None = None) -> tuple[SequenceRanks, Layout]:
    """Over whom, and how; the layout is the one that was found, if there is any."""
    settings = shard_call_spec(token).settings()
    return settings.ranks, settings.layout if what is None or what.layout is None else what.layout


def _whole_keys(token: str, what: RuntimeValues | None, seq_len: int, rows: int) -> WholeKeys:
    return WholeKeys(*_partition_of(token, what), seq_len, rows, shard_call_spec(token).transport)


def _found_in(found: torch.Tensor | None) -> RuntimeValues | None:
    """What a call of `flex_keys` has found besides lengths."""
    return None if found is None or found.numel() < 2 else runtime_numbers.of(int(found[1]))


def world_size(token: str) -> int:
    """Of the ranks that share the sequence."""
    return shard_call_spec(token).settings().ranks.size


def finds_layout(token: str) -> bool:
    """Whether the layout is only found where compiled code runs, being one of those made for one length."""
    return shard_call_spec(token).reads_context


def _lies_anywhere(token: str, block: int) -> bool:
    """Whether the layout is only found where compiled code runs, and a local block may lie in several global ones."""
    return finds_layout(token) and shard_call_spec(token).alignment % block != 0


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


def _keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call_spec: str,
    q_len: int,
    kv_len: int,
    told: bool,
    scale: float,
    needs_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    known = (q_len, kv_len) if q_len >= 0 else None
    decider = shard_call_spec(call_spec)
    said = known if told or decider.debug else None  # debugging, ranks compare what their masks say
    lengths, what = decider.resolve(q, k, v, Full(), NO_MODIFIERS, scale, said)
    check_mask_lengths(lengths, known)
    if what.of_context is not None:
        check_context_mask(what.of_context.mask)
    ranks, layout = _partition_of(call_spec, what)
    if decider.reads_context and len(layout.batch_groups(q.size(0))) > 1:
        raise NotImplementedError(
            "compiled FlexAttention takes layouts that are made for one length if they divide batch rows alike, got "
            f"{layout}"
        )
    rows = lengths[1] if known else most_tokens(layout, k.size(2), ranks.rank, ranks.size)
    keys, values = _whole_keys(call_spec, what, lengths[1], rows).gathered(k, v)
    positions = LocalRows.of(layout, lengths[0], ranks.rank, ranks.size, q.size(0)).positions(q.device)
    # What was found is handed to backward, which then needs no region and no communication to know it.
    if decider.reads_context:
        begun_in = pending_backwards.begin(what, needs_backward)
        found = torch.tensor([lengths[1], runtime_numbers.number_of(what), begun_in], device="cpu")
    else:
        found = q.new_empty(0, dtype=torch.int64) if known else torch.tensor([lengths[1]], device="cpu")
    return keys, values, positions.clone(), q.new_full((1,), lengths[1], dtype=torch.int32), found


def _fake_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call_spec: str,
    q_len: int,
    kv_len: int,
    told: bool,
    scale: float,
    needs_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (ranks, layout), finds = _partition_of(call_spec), finds_layout(call_spec)
    rows = kv_len if kv_len >= 0 else most_tokens(layout, int(k.size(2)), ranks.rank, ranks.size)
    per_row = () if finds or len(layout.batch_groups(int(q.size(0)))) == 1 else (q.size(0),)
    numbers = 3 if finds else 0 if q_len >= 0 else 1
    found = torch.empty(numbers, dtype=torch.int64, device="cpu" if numbers else q.device)
    return (
        k.new_empty(*k.shape[:2], rows, k.size(3)),
        v.new_empty(*v.shape[:2], rows, v.size(3)),
        q.new_empty(*per_row, q.size(2), dtype=torch.int32),
        q.new_empty(1, dtype=torch.int32),
        found,
    )


def _keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, found: torch.Tensor, call_spec: str, kv_len: int, local: int
) -> tuple[torch.Tensor, torch.Tensor]:
    what = _found_in(found)
    if what is not None:
        pending_backwards.end(what, int(found[2]))
    keys = _whole_keys(call_spec, what, int(found[0]) if kv_len < 0 else kv_len, grad_k.size(2))
    return keys.gradients(grad_k, grad_v, local)


def _fake_keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, found: torch.Tensor, call_spec: str, kv_len: int, local: int
) -> tuple[torch.Tensor, ...]:
    return tuple(grad.new_empty(*grad.shape[:2], local, grad.size(3)) for grad in (grad_k, grad_v))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, k, _, call_spec, _, kv_len, *_ = inputs
    *_, positions, total, found = output
    ctx.save_for_backward(found)
    ctx.settings = call_spec, kv_len, k.size(2)
    ctx.mark_non_differentiable(positions, total, found)


@differentiated_once
def _gradients(
    ctx: Any, saved: Tensors, grad_k: torch.Tensor, grad_v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.cp_dtensor.flex_keys_backward(grad_k, grad_v, *saved, *ctx.settings)
    return None, *grads, *[None] * 6


def traced_tables(
    mask: Tables, found: torch.Tensor, call_spec: str, lengths: tuple[int, int], batch_size: int, local: int,
    block_size: tuple[int, int], with_q: bool,
) -> Tables:  # fmt: skip
    """`local_tables` in a program that is being captured; `found` is by `flex_keys`, `local` counts its queries."""
    made = list(
        torch.ops.cp_dtensor.flex_tables(*mask[:4], found, call_spec, *lengths, batch_size, local, *block_size, with_q)
    )
    has_full = mask.full_kv_indices is not None
    parts = [True, has_full, with_q, has_full and with_q]
    several = len(made) > 2 * sum(parts)
    pairs = [(made.pop(0), made.pop(0)) if part else (None, None) for part in [*parts, several]]
    return Tables(*[table for pair in pairs for table in pair])


def _tables(
    kv_num_blocks: torch.Tensor, kv_indices: torch.Tensor, full_kv_num_blocks: torch.Tensor | None,
    full_kv_indices: torch.Tensor | None, found: torch.Tensor, call_spec: str, q_len: int, kv_len: int, batch_size: int,
    local: int, q_block: int, kv_block: int, with_q: bool,
) -> list[torch.Tensor]:  # fmt: skip
    ranks, layout = _partition_of(call_spec, _found_in(found))
    rows = LocalRows.of(layout, q_len, ranks.rank, ranks.size, batch_size)
    whole = Tables(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    general = _lies_anywhere(call_spec, q_block)
    made = [
        table for table in local_tables(whole, (q_block, kv_block), kv_len, rows, with_q, general) if table is not None
    ]
    # In new memory, since compiled code may write to it when it has done with it.
    return [table.clone(memory_format=torch.contiguous_format) for table in made]


def _fake_tables(
    kv_num_blocks: torch.Tensor, kv_indices: torch.Tensor, full_kv_num_blocks: torch.Tensor | None,
    full_kv_indices: torch.Tensor | None, found: torch.Tensor, call_spec: str, q_len: int, kv_len: int, batch_size: int,
    local: int, q_block: int, kv_block: int, with_q: bool,
) -> list[torch.Tensor]:  # fmt: skip
    mask_shape, has_full = tuple(int(size) for size in kv_indices.shape), full_kv_indices is not None
    block_size, lengths = (q_block, kv_block), (q_len, kv_len)
    if _lies_anywhere(call_spec, q_block):
        shapes = general_shapes(mask_shape, has_full, block_size, lengths, local, with_q)
    elif finds_layout(call_spec):
        shapes = aligned_shapes(mask_shape, has_full, q_block, local, with_q)
    else:
        ranks, layout = _partition_of(call_spec)
        rows = LocalRows.of(layout, q_len, ranks.rank, ranks.size, batch_size)
        shapes = table_shapes(mask_shape, has_full, block_size, kv_len, rows, with_q)
    return [
        kv_indices.new_empty(shape, dtype=torch.int8 if name == "kinds" else torch.int32)
        for name, shape in zip(Tables._fields, shapes, strict=True)
        if shape is not None
    ]


def _defined() -> torch.library.Library:
    library = torch.library.Library("cp_dtensor", "FRAGMENT")
    apart = torch.Tag.cudagraph_unsafe  # lengths are found, or compared with those of masks, when the code runs
    library.define(
        "flex_keys(Tensor q, Tensor k, Tensor v, str recipe, int q_len, int kv_len, bool told, float scale, "
        "bool needs_backward) "
        "-> (Tensor keys, Tensor values, Tensor positions, Tensor kv_total, Tensor found)",
        tags=apart,
    )
    library.define(
        "flex_keys_backward(Tensor grad_k, Tensor grad_v, Tensor found, str recipe, int kv_len, SymInt local) "
        "-> (Tensor grad_k, Tensor grad_v)",
        tags=apart,
    )
    library.define(
        "flex_tables(Tensor kv_num_blocks, Tensor kv_indices, Tensor? full_kv_num_blocks, Tensor? full_kv_indices, "
        "Tensor found, str recipe, int q_len, int kv_len, int batch_size, int local, int q_block, int kv_block, "
        "bool with_q) -> Tensor[]",
        tags=apart,
    )
    for name, implementation, fake in (
        ("flex_keys", _keys, _fake_keys),
        ("flex_keys_backward", _keys_backward, _fake_keys_backward),
        ("flex_tables", _tables, _fake_tables),
    ):
        library.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cp_dtensor::{name}", fake, lib=library)
    torch.library.register_autograd(
        "cp_dtensor::flex_keys", _gradients, setup_context=_keep_for_backward, lib=library
    )  # fmt: skip
    return library


_library = _defined()  # operators exist as long as this does
