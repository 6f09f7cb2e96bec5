"""Learned sparse attention of transformers' models in contexts: keys that an indexer selects, and attention over them.

An indexer scores the index keys that its cache returns and takes the best ones. In a context its cache returns an
object that stands for the index keys of all ranks. It records what the indexer computes of them; where the indexer
takes the best ones, `select_keys` does so over all ranks. An operation that is not known is refused by name.

Layers give the selected keys to their attention function (`indices=`, `block_indices=`), or with "sdpa" make a mask of
them. Where a layer expands latents to keys and values of all heads (`expand_kv`), it passes on the latents, which is
what travels.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_dtensor import Causal, Full, Mask, block_attention, indexed_attention, select_blocks, select_keys
from cp_dtensor.api.extension import (
    OpenContext,
    both_masks,
    constant_in_trace,
    current,
    entry_replaced,
    is_handle,
    never_compiled,
    softmax_scale,
    value_of,
)
from cp_dtensor.integrations.transformers.masks import whole_positions
from cp_dtensor.integrations.transformers.private import PASSED_ON, implementation_of
from cp_dtensor.layers.arguments import IN_CONTEXT
from cp_dtensor.spec.masks import interval_sets_of

Function = Callable[..., Any]
_CONTEXT: Any = IN_CONTEXT
_SELECTED = "keys of indexers"
"""In `OpenContext.seen`, once an indexer has selected keys of all ranks."""
_UNCOMPILED = "the ranks of context_parallel select keys in uncompiled code: compile without fullgraph=True"


# Indexers


class _IndexKeys:
    """Stands for the index keys of all ranks, and for the scores that an indexer computes of them."""

    def __init__(self, owner: str, keys: Tensor) -> None:
        self.owner = owner  # the class of the indexer
        self.keys = keys  # (B, T, D), of this rank; (B, 1, T, D) of an indexer of blocks
        self.queries: Any = None  # (B, T, H, D)
        self.weights: Any = None  # (B, T, H)
        self.mask: Any = None
        self.scale, self.is_positive = 1.0, False
        # The last dim of scores limits the number of keys to take, which may be larger than that of all keys.
        self.shape = *keys.shape[:-1], sys.maxsize

    def _same(self, *_: Any) -> _IndexKeys:
        return self

    float = transpose = unsqueeze = squeeze = _same

    def __mul__(self, factor: Any) -> _IndexKeys:
        self.scale *= factor  # before relu or after it
        return self

    def __add__(self, mask: Tensor) -> _IndexKeys:
        self.mask = mask
        return self

    def topk(self, count: int, dim: int) -> _Best:
        if self.weights is None or self.mask is None or dim != -1 or self.scale <= 0:
            self._refuse("topk before weights and a mask")
        mask = _whole_mask(_context(), self.owner, self.mask)
        queries, weights = self.queries.to(self.keys.dtype), self.weights * self.scale
        return _Best(select_keys(queries, self.keys, weights, topk=count, mesh=_CONTEXT, is_causal=False, mask=mask))

    @classmethod
    def __torch_function__(cls, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> _IndexKeys:
        first, keys = args[0], next(each for each in args if isinstance(each, cls))
        if function is torch.matmul and keys.queries is None:
            keys.queries = first
            if keys.keys.dim() == 4:
                raise _ScoredError(first, keys.keys)
        elif function is torch.matmul and keys.is_positive and keys.weights is None:
            keys.weights = first.squeeze(-2)
        elif function is F.relu and keys.queries is not None:
            keys.is_positive = True
        else:
            keys._refuse(getattr(function, "__name__", repr(function)))
        return keys

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    def _refuse(self, what: str) -> Any:
        raise NotImplementedError(
            f"{self.owner} selects keys in a way that is not known here: its scores are made by {what}, expected relu "
            "of products, a weighted sum over heads, a mask and topk"
        )


class _Best(NamedTuple):
    indices: Tensor


class _ScoredError(Exception):
    """Ends the forward of an indexer of blocks where it scores keys; `args` are its queries and keys."""


class _Cache:
    """Stands for a model's cache, or for a layer of it: takes index keys and returns what stands for all of them."""

    def __init__(self, owner: str, cache: Any) -> None:
        self._owner, self._cache = owner, cache

    def update_indexer(self, keys: Tensor, layer_idx: int) -> _IndexKeys:
        if self._cache is not None:
            self._cache.update_indexer(keys, layer_idx)
        return _IndexKeys(self._owner, keys)

    def update_index(self, keys: Tensor) -> _IndexKeys:
        if self._cache is not None:
            self._cache.update_index(keys)
        return _IndexKeys(self._owner, keys)

    @property
    def layers(self) -> _Cache:
        return self

    def __getitem__(self, layer_idx: int) -> _Cache:
        return _Cache(self._owner, None if self._cache is None else self._cache.layers[layer_idx])


def _run(forward: Function, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of an indexer with the keys of all ranks in its cache."""
    bound = inspect.signature(forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    bound.arguments["past_key_values"] = _Cache(type(module).__name__, bound.arguments["past_key_values"])
    return forward(*bound.args, **bound.kwargs)


def _select(forward: Function, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for the forward of an indexer of keys: return (B, T, K) positions in the whole sequence."""
    indices = _run(forward, module, args, kwargs)
    return Chosen(indices) if implementation_of(module.config) == "sdpa" else indices


def _select_blocks(forward: Function, module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Stand for the forward of an indexer of blocks of keys: return (B, G, T, N) numbers of blocks.

    It takes no mask, so that keys of padding count.
    """
    owner, context = type(module).__name__, _context()
    _check_places(owner, context)
    try:
        _run(forward, module, args, kwargs)
    except _ScoredError as scored:
        queries, keys = scored.args
    else:
        raise NotImplementedError(f"{owner} selects blocks of keys in a way that is not known here")
    blocks = select_blocks(
        queries.to(keys.dtype).transpose(1, 2), keys.squeeze(1), block_size=module.block_size, topk=module.topk_blocks,
        local_blocks=module.local_blocks, mesh=_CONTEXT,
    )  # fmt: skip
    return blocks.transpose(1, 2)


def _check_places(owner: str, context: OpenContext) -> None:
    """Refuse position ids that are not places: MiniMax M3 compares them with the places of keys."""
    positions = whole_positions(context)
    if positions is None or not bool((positions == torch.arange(positions.size(1), device="cpu")).all()):
        raise NotImplementedError(
            f"{owner} takes position ids for places of keys in the sequence, which they are not in packed documents"
        )


def _context() -> OpenContext:
    context = current()
    assert context is not None, "functions of layers are replaced in contexts alone"
    context.seen.add(_SELECTED)
    return context


def _whole_mask(context: OpenContext, owner: str, mask: Tensor | None) -> Mask:
    """Return the mask of the whole sequence of a mask that a model passes on; None is causal."""
    if mask is not None and not is_handle(mask if mask.dim() == 4 else mask.unsqueeze(0)):
        raise NotImplementedError(
            f"{owner} in context_parallel expects a mask of transformers.masking_utils that was made in the context, "
            f"got a tensor {tuple(mask.shape)}: pass an attention_mask of (batch, tokens) or none"
        )
    own = Causal() if mask is None else value_of(mask).of_call(context.call).mask
    return both_masks(context.call.mask, own) or Full()


# Latents, masks and attention


class Latents(NamedTuple):
    """Stands for the keys and the values of all heads that a layer would expand from latents."""

    latent: Tensor  # (B, 1, T, R)
    rotary: Tensor  # (B, 1, T, Dr)
    expand: Function  # returns keys and values of the two

    @property
    def shape(self) -> torch.Size:
        return self.latent.shape


def _latents(expand: Function, module: Any, latent: Tensor, rotary: Tensor) -> tuple[Any, Any]:
    """Stand for `expand_kv` of a layer; keys are expanded where the weight is not a plain one that can be absorbed."""
    up = module.kv_b_proj
    is_plain = type(up) is nn.Linear and "forward" not in vars(up) and not isinstance(up.weight, DTensor)
    if is_plain and up.bias is None:
        latents = Latents(latent, rotary, partial(expand, module))
        return latents, latents
    return expand(module, latent, rotary)


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


def _unmasked(_: Function, module: nn.Module, blocks: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """Stand for a function that makes a mask of blocks of keys, which attention in a context takes as they are."""
    return mask


def attention_to_chosen(
    attend: Function, is_sharded: bool, beside: Mapping[str, Any], module: Any, query: Tensor, key: Any, value: Any,
    mask: Any, indices: Tensor | None = None, block_indices: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention over selected keys as a function of transformers; leave other attention to `attend`.

    Args:
        attend: the function for other attention.
        is_sharded: True where models see shards.
        beside: more arguments of `indexed_attention` and `block_attention`; other attention has them in `kwargs`.
        query: (B, H, T, D).
        key, value: (B, Hkv, T, D) and (B, Hkv, T, Dv), or `Latents`.
        mask: of transformers, or `Chosen`.
        indices: (B, T, K), -1 for none.
        block_indices: (B, Hkv, T, N), -1 for none.
    """
    indices = mask.indices if isinstance(mask, Chosen) else indices
    if indices is None and isinstance(key, Latents):
        key, value = key.expand(key.latent, key.rotary)
    if indices is None and block_indices is None:
        return attend(module, query, key, value, mask, **kwargs)
    if not is_sharded:
        made = _mask_uncompiled(module, query, key, mask, indices, block_indices, kwargs.get("position_ids"))
        return attend(module, query, key, value, made, **kwargs)
    name, refused = type(module).__name__, kwargs.keys() - PASSED_ON - {"scaling", *(["s_aux"] if beside else [])}
    _check_selected(name)
    for each in sorted(refused):
        if isinstance(kwargs[each], Tensor) or kwargs[each]:
            raise NotImplementedError(f"{name}, with selected keys in context_parallel, does not take {each}")
    options = {"mesh": _CONTEXT, "scale": kwargs.get("scaling"), **beside}
    if indices is None:
        out = _blocks_uncompiled(module, query, key, value, block_indices, mask, options)
    elif isinstance(key, Latents):
        out = _attention_to_latents(query, key, module.kv_b_proj.weight, indices, options)
    else:  # blocks of one key, the same for each head
        blocks = indices.unsqueeze(2).expand(-1, -1, key.size(1), -1)
        options |= {"block_size": 1, "is_causal": False, "mask": Full()}
        out = block_attention(query, key, value, block_indices=blocks, **options)
    return out.transpose(1, 2).contiguous(), None


def _attention_to_latents(query: Tensor, key: Latents, up: Tensor, indices: Tensor, options: dict[str, Any]) -> Tensor:
    """Return attention (B, H, T, Dv) to the keys of `indices`, which travel as latents and rotary keys."""
    latent, rotary = key.latent.squeeze(1), key.rotary.squeeze(1)
    if not rotary.size(2):  # layers without RoPE: a rotary key of one zero changes nothing
        options |= {"scale": softmax_scale(query.size(3), options["scale"])}
        query, rotary = F.pad(query, (0, 1)), latent.new_zeros((*latent.shape[:2], 1))
    return indexed_attention(query, latent, rotary, up=up, indices=indices, **options)


def _attention_to_blocks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Any, mask: Any, options: dict[str, Any]
) -> Tensor:
    """Return attention (B, H, T, Dv) to blocks of keys, of which queries see those that the mask has."""
    context, name = _context(), type(module).__name__
    whole, positions = _whole_mask(context, name, mask), whole_positions(context)
    assert positions is not None
    for sets in interval_sets_of(whole, positions.size(1), positions.size(1), query.size(0)):
        spans = [band.keys(0) for bands in sets for band in bands if band.first == 0]
        if not any(lo < hi for lo, hi in spans):
            raise NotImplementedError(
                f"{name} in context_parallel expects no padding at the left, which attends to all keys alike in "
                "transformers, and whose index keys count in the blocks that other tokens select"
            )
    return block_attention(
        query, key, value, block_indices=blocks.transpose(1, 2), block_size=module.indexer.block_size, mask=whole,
        is_causal=False, **options,
    )  # fmt: skip


@constant_in_trace
def _check_selected(name: str) -> None:
    """Refuse keys that were not selected by an indexer that is known here: they would be places in the shard."""
    context = current()
    if context is None or _SELECTED not in context.seen:
        raise NotImplementedError(
            f"{name} in context_parallel expects keys that were selected by an indexer that is known here (docs/"
            "sparse.md), got those of another one"
        )


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


def sdpa_of_chosen(table: dict[str, Any], is_sharded: Callable[[], bool]) -> AbstractContextManager[object]:
    """Return a patch of the attention function "sdpa" in a table, which then takes selected keys of all ranks."""
    original = table["sdpa"]

    @wraps(original)
    def sdpa(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return attention_to_chosen(original, is_sharded(), {}, *args, **kwargs)

    return entry_replaced(table, "sdpa", sdpa)


_blocks_uncompiled = never_compiled(_attention_to_blocks, _UNCOMPILED)
_mask_uncompiled = never_compiled(_mask_alone)
METHODS: tuple[tuple[str, frozenset[str], Function], ...] = (
    ("forward", frozenset({"update_indexer", "topk", "index_topk", "split"}), never_compiled(_select, _UNCOMPILED)),
    (
        "forward", frozenset({"update_index", "topk_blocks", "local_blocks", "block_size", "amax", "scatter_"}),
        never_compiled(_select_blocks, _UNCOMPILED),
    ),
    ("expand_kv", frozenset({"kv_b_proj", "new_empty", "copy_", "indexer"}), _latents),
    ("build_block_mask", frozenset({"update_index", "block_size", "repeat_interleave"}), _unmasked),
)  # fmt: skip
"""Name of a method, names in its code and in that of `forward`, and the function that stands for it in contexts."""
SELECTIONS = frozenset({ours for method, _, ours in METHODS if method == "forward"})
