"""Private names of torch that this drop-in uses. The only file of `integrations/` that imports any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["flatten_tree", "flex_cp_allgather"]


def flatten_tree(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the leaves of nested lists, tuples and dicts, and a function that rebuilds the tree from other leaves."""
    leaves, structure = tree_flatten(tree, is_leaf=is_leaf)
    return leaves, lambda others: tree_unflatten(others, structure)
