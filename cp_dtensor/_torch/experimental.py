"""torch's experimental context parallel: its modules, whose names may be replaced, and the op of its that is shared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["EXPERIMENTAL", "aten_name", "experimental_module", "flatten_tree", "flex_cp_allgather", "names_replaced"]

EXPERIMENTAL = "torch.distributed.tensor.experimental"


def experimental_module(name: str) -> ModuleType | None:
    """The module of torch's with this name below `EXPERIMENTAL` ("" for itself), None if this version has none."""
    try:
        return importlib.import_module(f"{EXPERIMENTAL}.{name}".rstrip("."))
    except ModuleNotFoundError:
        return None


@contextmanager
def names_replaced(module: ModuleType, names: Mapping[str, object]) -> Iterator[None]:
    """While open, a module has these names; on exit they are as before, but for those that others replaced since."""
    missing = object()
    before = {name: vars(module).get(name, missing) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        for name, ours in names.items():
            if vars(module).get(name, missing) is not ours:
                continue
            if before[name] is missing:
                delattr(module, name)
            else:
                setattr(module, name, before[name])


def aten_name(op: Any) -> str | None:
    """The name of an aten op, without its overload; None for anything else."""
    if not isinstance(op, (OpOverload, OpOverloadPacket)):
        return None
    namespace, _, name = (op.name() if isinstance(op, OpOverload) else op._qualified_op_name).partition("::")
    return name.partition(".")[0] if namespace == "aten" else None


def flatten_tree(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of nested lists, tuples, dicts and the like, and what makes such a tree of other leaves."""
    leaves, structure = tree_flatten(tree, is_leaf=is_leaf)
    return leaves, lambda others: tree_unflatten(others, structure)
