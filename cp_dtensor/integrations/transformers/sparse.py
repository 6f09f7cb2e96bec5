"""Indexers of transformers' models with learned sparse attention, in contexts: they select keys of all ranks.

An indexer scores the index keys that its cache returns and takes the best ones. In a context its cache returns an
object that stands for the index keys of all ranks. It records what the indexer computes of them; where the indexer
takes the best ones, `select_keys` does so over all ranks. An operation that is not known is refused by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_dtensor import select_blocks, select_keys
from cp_dtensor.api.extension import never_compiled
from cp_dtensor.integrations.transformers.chosen import (
    CONTEXT,
    UNCOMPILED,
    Chosen,
    Function,
    Latents,
    selecting_context,
    whole_mask,
)
from cp_dtensor.integrations.transformers.pooled import check_places
from cp_dtensor.integrations.transformers.private import has_hooks, implementation_of


class _IndexKeys:
    """Stands for the index keys of all ranks, and for the scores that an indexer computes of them."""

    def __init__(self, owner: str, keys: Tensor, dims: int) -> None:
        self.owner = owner  # the class of the indexer
        self.keys = self._checked("keys", keys, [None] * dims)  # (B, T, D), of this rank; of blocks (B, 1, T, D)
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
        if not isinstance(factor, (int, float)) or factor <= 0:  # else it may not be moved across relu
            self._refuse(f"a factor {factor}")
        self.scale *= factor
        return self

    def __add__(self, mask: Any) -> _IndexKeys:
        if self.weights is None or self.mask is not None or not isinstance(mask, Tensor):
            self._refuse(f"another addition, of {type(mask).__name__}")
        self.mask = mask
        return self

    def topk(self, k: int, dim: int = -1, **options: Any) -> _Best:
        if self.mask is None or dim != -1 or options.keys() - {"sorted"}:
            self._refuse(f"topk of dim {dim} {options}, with{'out' if self.mask is None else ''} a mask")
        mask = whole_mask(selecting_context(), self.owner, self.mask)
        queries, weights = self.queries.to(self.keys.dtype), self.weights * self.scale
        return _Best(select_keys(queries, self.keys, weights, topk=k, mesh=CONTEXT, is_causal=False, mask=mask))

    @classmethod
    def __torch_function__(cls, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> _IndexKeys:
        first, keys = args[0], next(each for each in args if isinstance(each, cls))
        batch, *one, tokens, dims = keys.keys.shape
        if function is torch.matmul and keys.queries is None:
            shape = (batch, None, tokens, dims) if one else (batch, tokens, None, dims)
            keys.queries = keys._checked("queries", first, shape)
            if one:
                raise _ScoredError(first, keys.keys)
        elif function is torch.matmul and keys.is_positive and keys.weights is None:
            keys.weights = keys._checked("weights", first, (batch, tokens, 1, keys.queries.size(2))).squeeze(2)
        elif function is F.relu and keys.queries is not None:
            keys.is_positive = True
        else:
            keys._refuse(getattr(function, "__name__", repr(function)))
        return keys

    def _checked(self, name: str, x: Any, shape: Sequence[int | None]) -> Tensor:
        """Return a tensor; refuse another shape, in which None stands for any size."""
        sizes = tuple(x.shape) if isinstance(x, Tensor) else ()
        if len(sizes) != len(shape) or any(want not in (None, size) for want, size in zip(shape, sizes, strict=True)):
            expected = ", ".join("any" if want is None else str(want) for want in shape)
            self._refuse(f"{name} of shape {sizes}, not ({expected}),")
        return x

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
        return _IndexKeys(self._owner, keys, 3)

    def update_index(self, keys: Tensor) -> _IndexKeys:
        if self._cache is not None:
            self._cache.update_index(keys)
        return _IndexKeys(self._owner, keys, 4)

    @property
    def layers(self) -> _Cache:
        return self

    def __getitem__(self, layer_idx: int) -> _Cache:
        return _Cache(self._owner, None if self._cache is None else self._cache.layers[layer_idx])


def _run(forward: Function, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of an indexer with the keys of all ranks in its cache."""
    bound = inspect.signature(forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    name = "cache" if "cache" in bound.arguments else "past_key_values"  # its name before transformers 5.24
    bound.arguments[name] = _Cache(type(module).__name__, bound.arguments[name])
    return forward(*bound.args, **bound.kwargs)


def _select(forward: Function, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for the forward of an indexer of keys: return (B, T, K) positions in the whole sequence."""
    indices = _run(forward, module, args, kwargs)
    return Chosen(indices) if implementation_of(module.config) == "sdpa" else indices


def _select_blocks(forward: Function, module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Stand for the forward of an indexer of blocks of keys: return (B, G, T, N) numbers of blocks.

    It takes no mask, so that keys of padding count.
    """
    owner, context = type(module).__name__, selecting_context()
    try:
        _run(forward, module, args, kwargs)
    except _ScoredError as scored:
        queries, keys = scored.args
    else:
        raise NotImplementedError(f"{owner} selects blocks of keys in a way that is not known here")
    check_places(owner, whole_mask(context, owner, None), context, len(keys), in_documents=False)
    blocks = select_blocks(
        queries.to(keys.dtype).transpose(1, 2), keys.squeeze(1), block_size=module.block_size, topk=module.topk_blocks,
        local_blocks=module.local_blocks, mesh=CONTEXT,
    )  # fmt: skip
    return blocks.transpose(1, 2)


# Other methods of layers


def _latents(expand: Function, module: Any, latent: Tensor, rotary: Tensor) -> tuple[Any, Any]:
    """Stand for `expand_kv` of a layer; keys are expanded where the weight is not a plain one that can be absorbed."""
    up = module.kv_b_proj
    is_plain = type(up) is nn.Linear and "forward" not in vars(up) and not isinstance(up.weight, DTensor)
    if is_plain and not has_hooks(up) and up.bias is None:
        latents = Latents(latent, rotary, partial(expand, module))
        return latents, latents
    return expand(module, latent, rotary)


def _unmasked(_: Function, module: nn.Module, blocks: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """Stand for a function that makes a mask of blocks of keys, which attention in a context takes as they are."""
    return mask


METHODS: tuple[tuple[str, frozenset[str], Function], ...] = (
    # Without "bool", in transformers 5.15, indexers add a boolean mask to scores.
    (
        "forward", frozenset({"update_indexer", "topk", "index_topk", "split", "bool"}),
        never_compiled(_select, UNCOMPILED),
    ),
    (
        "forward", frozenset({"update_index", "topk_blocks", "local_blocks", "block_size", "amax", "scatter_"}),
        never_compiled(_select_blocks, UNCOMPILED),
    ),
    ("expand_kv", frozenset({"kv_b_proj", "new_empty", "copy_", "indexer"}), _latents),
    ("build_block_mask", frozenset({"update_index", "block_size", "repeat_interleave"}), _unmasked),
)  # fmt: skip
"""Name of a method, names in its code and in that of `forward`, and the function that stands for it in contexts."""
SELECTIONS = frozenset({ours for method, _, ours in METHODS if method == "forward"})
