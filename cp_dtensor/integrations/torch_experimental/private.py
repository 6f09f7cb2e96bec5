"""Private names of torch that this drop-in builds on.

The only file of `integrations/` that imports private names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _ContextParallel,
    _cp_options,
    _RotateMethod,
    _templated_ring_attention,
)
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "_ContextParallel", "_HeadTailLoadBalancer", "_LoadBalancer", "_PTRRLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer", "_RotateMethod", "_cp_options", "_templated_ring_attention", "flatten_tree",
    "flex_cp_allgather", "torchs_shard", "torchs_unshard",
]  # fmt: skip

torchs_shard, torchs_unshard = _attention._context_parallel_shard, _attention.context_parallel_unshard


def flatten_tree(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of nested lists, tuples and dicts, and a function that rebuilds the tree from other leaves."""
    leaves, structure = tree_flatten(tree, is_leaf=is_leaf)
    return leaves, lambda others: tree_unflatten(others, structure)
