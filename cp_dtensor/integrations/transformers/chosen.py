"""Attention of transformers' models to selected keys, in contexts: objects that stand for keys and masks, and masks.

Layers give the keys that an indexer has selected to their attention function (`indices=`, `block_indices=`), or with
"sdpa" make a mask of them, for which `Chosen` stands. Where a layer would expand latents to keys and values of all
heads, `Latents` stand for these, and are what travels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor import Causal, Full, Mask, block_attention, indexed_attention, pooled_attention
from cp_dtensor.api.extension import (
    OpenContext,
    both_masks,
    constant_in_trace,
    current,
    innermost,
    is_handle,
    never_compiled,
    queries_alone,
    softmax_scale,
    value_of,
)
from cp_dtensor.integrations.transformers.masks import whole_positions
from cp_dtensor.integrations.transformers.private import PASSED_ON
from cp_dtensor.layers.arguments import IN_CONTEXT
from cp_dtensor.spec.masks import interval_sets_of

Function = Callable[..., Any]
CONTEXT: Any = IN_CONTEXT
_SELECTED = "keys of indexers"
"""In `OpenContext.seen`, once an indexer has selected keys of all ranks."""


# Contexts


def sharding_context() -> OpenContext | None:
    """Return the context in which models see shards; None outside, and where attention is left to each rank."""
    context = innermost()
    if context is None or context.call.ranks.size == 1 or queries_alone(context) is not None:
        return None
    return current()


@constant_in_trace
def shards_are_seen() -> bool:
    """Return whether models see shards now."""
    return sharding_context() is not None


def uncompiled(function: Function) -> Function:
    """Wrap a function of layers, in which ranks exchange, so that compiled code runs it as plain Python."""
    return never_compiled(
        function, "the ranks of context_parallel select keys in uncompiled code: compile without fullgraph=True"
    )


def rotation_of(forward: Function) -> Function:
    """Return the function that rotates queries and keys in the Python module of a layer's forward."""
    rotate: Function = inspect.unwrap(forward).__globals__["apply_rotary_pos_emb"]
    return rotate


def selecting_context() -> OpenContext:
    """Return the context in which a layer selects keys of all ranks."""
    context = current()
    assert context is not None, "functions of layers are replaced in contexts alone"
    context.seen.add(_SELECTED)
    return context


def whole_mask(owner: str, mask: Tensor | None) -> Mask:
    """Return the mask of the whole sequence of a mask that a model passes on; None is causal."""
    if mask is not None and not is_handle(mask if mask.dim() == 4 else mask.unsqueeze(0)):
        raise NotImplementedError(
            f"{owner} in context_parallel expects a mask of transformers.masking_utils that was made in the context, "
            f"got a tensor {tuple(mask.shape)}: pass an attention_mask of (batch, tokens) or none"
        )
    call = selecting_context().call
    own = Causal() if mask is None else value_of(mask).of_call(call).mask
    return both_masks(call.mask, own) or Full()


def _without_padding_first(owner: str, mask: Tensor | None, batch_size: int) -> Mask:
    """Return `whole_mask`; refuse one with padding at the left, whose keys count in the blocks of other tokens."""
    whole, positions = whole_mask(owner, mask), whole_positions(selecting_context())
    length = 0 if positions is None else positions.size(1)
    for sets in interval_sets_of(whole, length, length, batch_size):
        spans = [band.keys(0) for bands in sets for band in bands if band.first == 0]
        if not any(lo < hi for lo, hi in spans):
            raise NotImplementedError(
                f"{owner}: expected no padding at the left in context_parallel, which attends to all keys alike in "
                "transformers, and whose keys are in the blocks that other tokens see"
            )
    return whole


# Stand-ins


class Latents(NamedTuple):
    """Stands for the keys and the values of all heads that a layer would expand from latents."""

    latent: Tensor  # (B, 1, T, R)
    rotary: Tensor  # (B, 1, T, Dr)
    expand: Function  # returns keys and values of the two

    @property
    def shape(self) -> torch.Size:
        return self.latent.shape


class Chosen:
    """Stands for indices (B, T, K) of keys of all ranks, and for the masks that a layer makes of them."""

    def __init__(self, indices: Tensor, mask: Any = None) -> None:
        self.indices, self.mask = indices, mask

    def _same(self, *_: Any, **__: Any) -> Chosen:
        return self

    new_ones = scatter = long = unsqueeze = _same

    @classmethod
    def __torch_function__(cls, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> Chosen:
        mask, chosen, *_ = args
        if function is not Tensor.masked_fill or not is_handle(mask):
            raise NotImplementedError(f"a layer uses selected keys in a way that is not known here: {function}")
        return Chosen(chosen.indices, mask)


class Compressed(NamedTuple):
    """Stands for the keys of a window, which are values too, and for those of all blocks."""

    pooled: Tensor  # (B, n, D), the blocks of this rank
    size: int
    indices: Tensor | None  # (B, T, K), None for all blocks
    keys: Any = None  # (B, 1, T, D)

    @property
    def shape(self) -> tuple[int, ...]:
        return 0, 0, 0, 0  # no longer than the mask, which a layer would extend

    @classmethod
    def __torch_function__(cls, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> Compressed:
        (keys, compressed), *_ = args
        assert function is torch.cat
        made: Compressed = compressed._replace(keys=keys)
        return made


# Attention


def with_selected_keys(attend: Function, **beside: str) -> Function:
    """Return an attention function of transformers that takes selected keys, too; other attention is `attend`.

    `beside` are arguments of `attend` that selected keys take, too, and their names in `indexed_attention`.
    """

    @wraps(attend)
    def attention(
        module: Any, query: Tensor, key: Any, value: Any, attention_mask: Any, indices: Tensor | None = None,
        block_indices: Tensor | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Compute attention over keys of `indices` (B, T, K) or `block_indices` (B, Hkv, T, N), -1 for none.

        query is (B, H, T, D), key (B, Hkv, T, D), value (B, Hkv, T, Dv). Keys and values may be `Latents` or
        `Compressed`, the mask may be `Chosen`, which has indices.
        """
        indices = attention_mask.indices if isinstance(attention_mask, Chosen) else indices
        if indices is None and isinstance(key, Latents):
            key, value = key.expand(key.latent, key.rotary)
        if indices is None and block_indices is None and not isinstance(key, Compressed):
            return attend(module, query, key, value, attention_mask, **kwargs)
        if not shards_are_seen():
            positions = kwargs.get("position_ids")
            mask = _mask_alone(module, query, key, attention_mask, indices, block_indices, positions)
            return attend(module, query, key, value, mask, **kwargs)
        name, taken = type(module).__name__, {"scaling": "scale", **beside}
        _check_selected(name)
        for each in sorted(kwargs.keys() - PASSED_ON - taken.keys()):
            if isinstance(kwargs[each], Tensor) or kwargs[each]:
                raise NotImplementedError(f"{name}, with selected keys in context_parallel, does not take {each}")
        options: dict[str, Any] = {"mesh": CONTEXT, **{ours: kwargs.get(each) for each, ours in taken.items()}}
        if isinstance(key, Compressed):
            out = _attention_to_compressed(module, query, key, attention_mask, kwargs["sliding_window"], options)
        elif indices is None:
            out = _attention_to_blocks(module, query, key, value, block_indices, attention_mask, options)
        elif isinstance(key, Latents):
            out = _attention_to_latents(query, key, module.kv_b_proj.weight, indices, options)
        else:  # blocks of one key, the same for each head
            blocks = indices.unsqueeze(2).expand(-1, -1, key.size(1), -1)
            options |= {"block_size": 1, "is_causal": False, "mask": Full()}
            out = block_attention(query, key, value, block_indices=blocks, **options)
        return out.transpose(1, 2).contiguous(), None

    return attention


def _attention_to_latents(query: Tensor, key: Latents, up: Tensor, indices: Tensor, options: dict[str, Any]) -> Tensor:
    """Return attention (B, H, T, Dv) to the keys of `indices`, which travel as latents and rotary keys."""
    latent, rotary = key.latent.squeeze(1), key.rotary.squeeze(1)
    if not rotary.size(2):  # layers without RoPE: a rotary key of one zero changes nothing
        options |= {"scale": softmax_scale(query.size(3), options["scale"])}
        query, rotary = F.pad(query, (0, 1)), latent.new_zeros((*latent.shape[:2], 1))
    return indexed_attention(query, latent, rotary, up=up, indices=indices, **options)


@uncompiled
def _attention_to_blocks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Any, mask: Any, options: dict[str, Any]
) -> Tensor:
    """Return attention (B, H, T, Dv) to blocks of keys, of which queries see those that the mask has."""
    whole = _without_padding_first(type(module).__name__, mask, query.size(0))
    return block_attention(
        query, key, value, block_indices=blocks.transpose(1, 2), block_size=module.indexer.block_size, mask=whole,
        is_causal=False, **options,
    )  # fmt: skip


@uncompiled
def _attention_to_compressed(
    module: Any, query: Tensor, key: Compressed, mask: Any, window: int, options: dict[str, Any]
) -> Tensor:
    """Return attention (B, H, T, D) to a window and to blocks."""
    _without_padding_first(type(module).__name__, mask, query.size(0))
    place = {"size": key.size, "window": window, "indices": key.indices, **options}
    return pooled_attention(query, key.keys.squeeze(1), key.pooled, **place)


@constant_in_trace
def _check_selected(name: str) -> None:
    """Refuse keys that were not selected by an indexer that is known here: they would be places in the shard."""
    context = current()
    if context is None or _SELECTED not in context.seen:
        raise NotImplementedError(
            f"{name} in context_parallel expects keys that were selected by an indexer that is known here (docs/"
            "sparse.md), got those of another one"
        )


@never_compiled
def _mask_alone(
    module: Any, query: Tensor, key: Tensor, mask: Any, indices: Tensor | None, blocks: Any, position_ids: Any
) -> Tensor:
    """Return the mask (B, 1 or H, T, keys) of selected keys with which "sdpa" attends in one process."""
    mask = value_of(mask).alone() if is_handle(mask) else mask
    if indices is not None:
        chosen = mask.new_zeros((*indices.shape[:2], key.size(2))).scatter(-1, indices.long(), True)
        return mask & chosen.unsqueeze(1)
    positions = position_ids.expand(query.size(0), -1)
    made: Tensor = module.indexer.build_block_mask(blocks, mask, key.size(2), query.dtype, query.device, positions)
    return made
