"""Private names of torch that this drop-in builds on.

The only file of `integrations/` that imports private names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor.experimental import _context_parallel
from torch.distributed.tensor.experimental._context_parallel import (
    _attention,
    _cp_options,
    _HeadTailLoadBalancer,
    _RotateMethod,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "_HeadTailLoadBalancer", "_RotateMethod", "_cp_options", "flatten_tree", "torchs_own", "torchs_shard",
    "torchs_unshard",
]  # fmt: skip

torchs_shard, torchs_unshard = _context_parallel._context_parallel_shard, _context_parallel.context_parallel_unshard


def torchs_own(name: str) -> Any:
    """Return torch's object of a name of its context parallel."""
    for module in (_context_parallel, _attention):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"neither cp_dtensor nor torch's experimental context parallel has a name {name!r}")


def flatten_tree(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of nested lists, tuples and dicts, and a function that rebuilds the tree from other leaves."""
    leaves, structure = tree_flatten(tree, is_leaf=is_leaf)
    return leaves, lambda others: tree_unflatten(others, structure)
