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
from cp_dtensor.integrations.transformers.chosen import (
    CONTEXT,
    Chosen,
    Function,
    Latents,
    rotation_of,
    uncompiled,
    whole_mask,
)
from cp_dtensor.integrations.transformers.pooled import check_places
from cp_dtensor.integrations.transformers.private import has_hooks, implementation_of


class _IndexKeys:
    """Stands for the index keys of all ranks, and for the scores that an indexer computes of them."""

    def __init__(self, owner: str, keys: Tensor) -> None:
        self.owner = owner  # the class of the indexer
        self.keys = self._checked("keys", keys, (None, None, None))  # (B, T, D), of this rank
        self.queries: Any = None  # (B, T, H, D)
        self.weights: Any = None  # (B, T, H)
        self.mask: Any = None
        self.is_positive = False
        # The last dim of scores limits the number of keys to take, which may be larger than that of all keys.
        self.shape = *keys.shape[:-1], sys.maxsize

    def _same(self, *_: Any) -> _IndexKeys:
        return self

    float = transpose = unsqueeze = squeeze = _same

    def __mul__(self, factor: Any) -> _IndexKeys:
        if not isinstance(factor, (int, float)) or factor <= 0:
            self._refuse(f"a factor {factor}")
        return self  # a positive one changes no order of scores

    def __add__(self, mask: Any) -> _IndexKeys:
        if self.weights is None or self.mask is not None or not isinstance(mask, Tensor):
            self._refuse(f"another addition, of {type(mask).__name__}")
        self.mask = mask
        return self

    def topk(self, k: int, dim: int = -1, **options: Any) -> _Best:
        if self.mask is None or dim != -1 or options.keys() - {"sorted"}:
            self._refuse(f"topk of dim {dim} {options}, with{'out' if self.mask is None else ''} a mask")
        mask, queries = whole_mask(self.owner, self.mask), self.queries.to(self.keys.dtype)
        return _Best(select_keys(queries, self.keys, self.weights, topk=k, mesh=CONTEXT, is_causal=False, mask=mask))

    @classmethod
    def __torch_function__(cls, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> _IndexKeys:
        first, keys = args[0], next(each for each in args if isinstance(each, cls))
        batch, tokens, dims = keys.keys.shape
        if function is torch.matmul and keys.queries is None:
            keys.queries = keys._checked("queries", first, (batch, tokens, None, dims))
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


class _Cache(NamedTuple):
    """Stands for a model's cache: takes index keys and returns what stands for all of them."""

    owner: str
    cache: Any

    def update_indexer(self, keys: Tensor, layer_idx: int) -> _IndexKeys:
        if self.cache is not None:
            self.cache.update_indexer(keys, layer_idx)
        return _IndexKeys(self.owner, keys)


@uncompiled
def _select(forward: Function, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for the forward of an indexer of keys: return (B, T, K) positions in the whole sequence."""
    bound = inspect.signature(forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    name = "cache" if "cache" in bound.arguments else "past_key_values"  # its name before transformers 5.24
    bound.arguments[name] = _Cache(type(module).__name__, bound.arguments[name])
    indices = forward(*bound.args, **bound.kwargs)
    return Chosen(indices) if implementation_of(module.config) == "sdpa" else indices


@uncompiled
def _select_blocks(
    forward: Function, module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any,
    position_ids: Tensor,
) -> Tensor:  # fmt: skip
    """Stand for the forward of an indexer of blocks of keys: return (B, G, T, N) numbers of blocks.

    It takes no mask, so that keys of padding count.
    """
    check_places(type(module).__name__, len(hidden_states), in_documents=False)
    queries, keys = (
        norm(projection(hidden_states).unflatten(-1, (-1, module.head_dim))).transpose(1, 2)
        for norm, projection in ((module.q_norm, module.q_proj), (module.k_norm, module.k_proj))
    )
    cos, sin = (table[..., : module.head_dim] for table in position_embeddings)
    queries, keys = rotation_of(forward)(queries, keys, cos, sin)
    if cache is not None:
        cache.layers[module.layer_idx].update_index(keys)
    blocks = select_blocks(
        queries.transpose(1, 2), keys.squeeze(1), block_size=module.block_size, topk=module.topk_blocks,
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
    ("forward", frozenset({"update_indexer", "topk", "index_topk", "split", "bool"}), _select),
    ("forward", frozenset({"update_index", "topk_blocks", "q_norm", "amax", "scatter_"}), _select_blocks),
    ("expand_kv", frozenset({"kv_b_proj", "new_empty", "copy_", "indexer"}), _latents),
    ("build_block_mask", frozenset({"update_index", "block_size", "repeat_interleave"}), _unmasked),
)  # fmt: skip
"""Name of a method, names in its code and in that of `forward`, and the function that stands for it in contexts."""
SELECTIONS = frozenset({ours for method, _, ours in METHODS if method == "forward"})
