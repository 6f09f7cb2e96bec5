"""Private modules of torch: names that this drop-in uses, and names that `redirect_imports` replaces.

The only file of `integrations/` that imports private names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.utils._pytree import tree_flatten, tree_unflatten

from cp_dtensor.api.extension import SharedInstallation, entry_replaced
from cp_dtensor.integrations.torchtitan import describe_installed

__all__ = ["Redirection", "flatten_tree", "flex_cp_allgather", "redirect_imports", "refuse_patched_rings", "simulated"]

_EXPERIMENTAL = "torch.distributed.tensor.experimental"


def flatten_tree(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of nested lists, tuples and dicts, and a function that rebuilds the tree from other leaves."""
    leaves, structure = tree_flatten(tree, is_leaf=is_leaf)
    return leaves, lambda others: tree_unflatten(others, structure)


def simulated(mesh: DeviceMesh, tensor: Any, shard: Callable[[Any, int], torch.Tensor]) -> torch.Tensor | None:
    """Return the `LocalTensor` of `shard(tensor, rank)` for each rank that torch's `LocalTensorMode` simulates.

    Args:
        mesh: an axis; its ranks are those of the simulation.
        tensor: whole on every rank.

    Returns:
        None outside of the simulation.

    Raises:
        NotImplementedError: a block mask in the simulation.
    """
    module = sys.modules.get("torch.distributed._local_tensor")  # not in use if it is not loaded
    if module is None:
        return None
    mode = getattr(module, "enabled_local_tensor_mode", module.local_tensor_mode)()
    if mode is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise NotImplementedError("under LocalTensorMode, tensors can be sharded only; got a BlockMask")
    place: Any = mesh.get_local_rank()
    places = place.node._local_ints if isinstance(place, torch.SymInt) else dict.fromkeys(mode.ranks, place)
    parts = tensor._local_tensors if isinstance(tensor, module.LocalTensor) else dict.fromkeys(mode.ranks, tensor)
    with mode.disable():
        shards = {rank: shard(parts[rank], places[rank]) for rank in sorted(mode.ranks)}
    made: torch.Tensor = module.LocalTensor(shards)
    return made


class _Redirection:
    """The modules in which `redirect_imports` replaces names, and their replacement."""

    def __init__(self) -> None:
        self.replaced: dict[ModuleType, tuple[str, ...]] = {}
        self.rings: dict[ModuleType, dict[str, Any]] = {}  # as they were after the replacement
        self.installation = SharedInstallation(self._parts)

    def _parts(self) -> Iterator[AbstractContextManager[None]]:
        ours = importlib.import_module(__package__ or "")
        names = {name: getattr(ours, name) for name in ours.__all__ if name != "redirect_imports"}
        chosen = {
            "": {"context_parallel": names["context_parallel"]},  # of torch.distributed.tensor.experimental itself
            **dict.fromkeys(("_attention", "_context_parallel", "_context_parallel._attention"), names),
            "_context_parallel._load_balancer": {name: names[name] for name in names if name.endswith("LoadBalancer")},
        }
        for name, replaced in chosen.items():
            try:
                module = importlib.import_module(f"{_EXPERIMENTAL}.{name}".rstrip("."))
            except ModuleNotFoundError:  # in this version of torch
                continue
            yield self._replaced(module, replaced)

    @contextmanager
    def _replaced(self, module: ModuleType, names: dict[str, Any]) -> Iterator[None]:
        """Set names of a module while open. On exit restores them, except those that others have replaced since."""
        with ExitStack() as stack:
            for name, ours in names.items():
                stack.enter_context(entry_replaced(vars(module), name, ours))
            self.replaced[module], self.rings[module] = tuple(names), _rings_of(module)
            try:
                yield
            finally:
                del self.replaced[module], self.rings[module]


_redirection = _Redirection()


class Redirection(ExitStack):
    """A call of `redirect_imports`; `close()`, or the end of a `with` block, takes it back.

    Attributes:
        replaced: the names that are replaced, by module.
        torchtitan: a sentence on what the installed TorchTitan takes from torch, and so from here; "" without one.
    """

    def __init__(self) -> None:
        super().__init__()
        _redirection.installation.acquire()
        self.callback(_redirection.installation.release)  # unlike an entered context, not called on garbage collection
        self.replaced = {module.__name__: names for module, names in _redirection.replaced.items()}
        self.torchtitan = describe_installed()

    def __repr__(self) -> str:
        lines = [f"{module}: {', '.join(names)}" for module, names in self.replaced.items()]
        return "\n".join(["names of cp_dtensor now in", *lines, *([self.torchtitan] if self.torchtitan else [])])


def redirect_imports() -> Redirection:
    """Replace the names in `torch.distributed.tensor.experimental` and its private modules by those of this package.

        redirect_imports()  # before other imports of these names
        import accelerate

    The modules stay torch's, and so do names in them that this package does not have. Code that imported a name before
    keeps torch's. It may be called several times; `close()` of the result, or the end of a `with` block over it, takes
    one call back. After the last one the modules are as before, except for names that others replaced meanwhile.

        print(redirect_imports())  # the names by module, and what the installed TorchTitan does not take from them
    """
    return Redirection()


_RINGS = ("_SDPAMerger", "_templated_ring_attention", "_templated_ring_attention_backward")


def _rings_of(module: ModuleType) -> dict[str, Any]:
    """Return the parts of rings in a module, and the methods of those that are classes."""
    found = {name: vars(module).get(name) for name in _RINGS}
    methods = dict(vars(found["_SDPAMerger"])) if found["_SDPAMerger"] is not None else {}
    return {**found, **{f"_SDPAMerger.{name}": methods.get(name) for name in ("step", "results")}}


def refuse_patched_rings() -> None:
    """Refuse attention of contexts and modules, which does not call names that a program has replaced.

    Raises:
        NotImplementedError: naming the replaced functions.
    """
    replaced = [
        f"{module.__name__}.{name}"
        for module, rings in _redirection.rings.items()
        for name, value in _rings_of(module).items()
        if value is not rings[name]
    ]
    if replaced:
        raise NotImplementedError(
            f"{', '.join(replaced)} have been replaced, which would have no effect: attention in contexts and modules "
            "does not call them. Call _templated_ring_attention with an op of your own, or stay with torch's "
            "context parallel for this model"
        )
