"""What FlexAttention of shards needs around it, as operators that torch.compile captures.

`torch.ops.cp_dtensor.flex_keys` gathers keys and values, `torch.ops.cp_dtensor.flex_tables` has the tables of the local
rows' mask. FlexAttention itself is captured as torch captures it.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_dtensor.compiled_op import recipe_of
from cp_dtensor.extras import NO_EXTRAS
from cp_dtensor.flex_keys import WholeKeys, most_tokens
from cp_dtensor.flex_tables import LocalRows, Tables, local_tables, table_shapes
from cp_dtensor.layouts import Layout
from cp_dtensor.masks import Full
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.shard_recipe import ShardRecipe


def shard_recipe(token: str) -> ShardRecipe:
    """The recipe of some shards."""
    recipe = recipe_of(token)
    assert isinstance(recipe, ShardRecipe)
    return recipe


def division_of(token: str) -> tuple[SequenceRanks, Layout]:
    """Over whom, and how.

    Raises:
        NotImplementedError: a layout that is only found where compiled code runs.
    """
    recipe = shard_recipe(token)
    if recipe.finds_mask:
        raise NotImplementedError(
            "compiled FlexAttention does not take layouts that are made for one length, such as PerDocument and "
            "Balanced: use another layout, or do not compile it"
        )
    settings = recipe.settings()
    return settings.ranks, settings.layout


def check_mask_lengths(expected: tuple[int, int], received: tuple[int, int] | None) -> None:
    """Refuses a block mask of other lengths than those of the sequence."""
    if received not in (None, expected):
        raise ValueError(
            f"expected a block mask of the whole sequence, of {expected[0]} queries and {expected[1]} keys, got one of "
            f"{received}: make it with create_block_mask(mask_mod, B, H, {expected[0]}, {expected[1]})"
        )


def _keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: str, q_len: int, kv_len: int, told: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    known = (q_len, kv_len) if q_len >= 0 else None
    decider = shard_recipe(recipe)
    said = known if told or decider.debug else None  # debugging, ranks compare what their masks say
    lengths, _ = decider.resolve(q, k, v, Full(), NO_EXTRAS, scale, said)
    check_mask_lengths(lengths, known)
    ranks, layout = division_of(recipe)
    rows = lengths[1] if known else most_tokens(layout, k.size(2), ranks.rank, ranks.size)
    keys, values = WholeKeys(ranks, layout, lengths[1], rows).gathered(k, v)
    positions = LocalRows.of(layout, lengths[0], ranks.rank, ranks.size, q.size(0)).positions(q.device)
    # Lengths that were found are handed to backward, which then needs no region and no communication to know them.
    found = q.new_empty(0, dtype=torch.int64) if known else torch.tensor(lengths[1])
    return keys, values, positions.clone(), keys.new_full((1,), lengths[1], dtype=torch.int32), found


def _fake_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: str, q_len: int, kv_len: int, told: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ranks, layout = division_of(recipe)
    rows = kv_len if kv_len >= 0 else most_tokens(layout, int(k.size(2)), ranks.rank, ranks.size)
    per_row = () if len(layout.batch_groups(int(q.size(0)))) == 1 else (q.size(0),)
    found = q.new_empty(0, dtype=torch.int64) if q_len >= 0 else torch.empty((), dtype=torch.int64, device="cpu")
    return (
        k.new_empty(*k.shape[:2], rows, k.size(3)),
        v.new_empty(*v.shape[:2], rows, v.size(3)),
        q.new_empty(*per_row, q.size(2), dtype=torch.int32),
        q.new_empty(1, dtype=torch.int32),
        found,
    )


def _keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, found: torch.Tensor, recipe: str, kv_len: int, local: int
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, layout = division_of(recipe)
    keys = WholeKeys(ranks, layout, int(found) if kv_len < 0 else kv_len, grad_k.size(2))
    return keys.gradients(grad_k, grad_v, local)


def _fake_keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, found: torch.Tensor, recipe: str, kv_len: int, local: int
) -> tuple[torch.Tensor, ...]:
    return tuple(grad.new_empty(*grad.shape[:2], local, grad.size(3)) for grad in (grad_k, grad_v))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, k, _, recipe, _, kv_len, _, _ = inputs
    *_, positions, total, found = output
    ctx.save_for_backward(found)
    ctx.settings = recipe, kv_len, k.size(2)
    ctx.mark_non_differentiable(positions, total, found)


def _gradients(ctx: Any, grad_k: torch.Tensor, grad_v: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.cp_dtensor.flex_keys_backward(grad_k, grad_v, *ctx.saved_tensors, *ctx.settings)
    return None, *grads, *[None] * 5


def traced_tables(
    mask: Tables, recipe: str, lengths: tuple[int, int], batch_size: int, block_size: tuple[int, int], with_q: bool
) -> Tables:
    """`local_tables` in a program that is being captured."""
    made = list(torch.ops.cp_dtensor.flex_tables(*mask[:4], recipe, *lengths, batch_size, *block_size, with_q))
    has_full = mask.full_kv_indices is not None
    parts = [True, has_full, with_q, has_full and with_q]
    several = len(made) > 2 * sum(parts)
    pairs = [(made.pop(0), made.pop(0)) if part else (None, None) for part in [*parts, several]]
    return Tables(*[table for pair in pairs for table in pair])


def _tables(
    kv_num_blocks: torch.Tensor, kv_indices: torch.Tensor, full_kv_num_blocks: torch.Tensor | None,
    full_kv_indices: torch.Tensor | None, recipe: str, q_len: int, kv_len: int, batch_size: int, q_block: int,
    kv_block: int, with_q: bool,
) -> list[torch.Tensor]:  # fmt: skip
    ranks, layout = division_of(recipe)
    rows = LocalRows.of(layout, q_len, ranks.rank, ranks.size, batch_size)
    whole = Tables(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    made = local_tables(whole, (q_block, kv_block), kv_len, rows, with_q)
    # In new memory, since compiled code may write to it when it has done with it.
    return [table.clone(memory_format=torch.contiguous_format) for table in made if table is not None]


def _fake_tables(
    kv_num_blocks: torch.Tensor, kv_indices: torch.Tensor, full_kv_num_blocks: torch.Tensor | None,
    full_kv_indices: torch.Tensor | None, recipe: str, q_len: int, kv_len: int, batch_size: int, q_block: int,
    kv_block: int, with_q: bool,
) -> list[torch.Tensor]:  # fmt: skip
    ranks, layout = division_of(recipe)
    rows = LocalRows.of(layout, q_len, ranks.rank, ranks.size, batch_size)
    mask_shape = tuple(int(size) for size in kv_indices.shape)
    shapes = table_shapes(mask_shape, full_kv_indices is not None, (q_block, kv_block), kv_len, rows, with_q)
    return [
        kv_indices.new_empty(shape, dtype=torch.int8 if name == "kinds" else torch.int32)
        for name, shape in zip(Tables._fields, shapes, strict=True)
        if shape is not None
    ]


def _defined() -> torch.library.Library:
    library = torch.library.Library("cp_dtensor", "FRAGMENT")
    library.define(
        "flex_keys(Tensor q, Tensor k, Tensor v, str recipe, int q_len, int kv_len, bool told, float scale) "
        "-> (Tensor keys, Tensor values, Tensor positions, Tensor kv_total, Tensor found)"
    )
    library.define(
        "flex_keys_backward(Tensor grad_k, Tensor grad_v, Tensor found, str recipe, int kv_len, SymInt local) "
        "-> (Tensor grad_k, Tensor grad_v)"
    )
    library.define(
        "flex_tables(Tensor kv_num_blocks, Tensor kv_indices, Tensor? full_kv_num_blocks, Tensor? full_kv_indices, "
        "str recipe, int q_len, int kv_len, int batch_size, int q_block, int kv_block, bool with_q) -> Tensor[]"
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
