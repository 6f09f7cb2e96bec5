"""torch's experimental context parallel: its modules, whose names may be replaced, and the op of its that is shared."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import (
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.nn.attention.flex_attention import BlockMask
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


# torch's context parallel of FlexAttention, as its users must put it together of private parts; for benchmarks.

__all__ = ["FlexBalancer", "flex_cp_allgather"]

_TAKES_BLOCK_SIZE = "BLOCK_SIZE" in inspect.signature(_create_cp_block_mask).parameters  # from 2.15 on

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class FlexBalancer:
    """How torch rearranges a sequence before it is cut into contiguous shards.

    Args:
        balancer: one of torch's load balancers.
    """

    def __init__(self, balancer: Any) -> None:
        self._balancer = balancer

    @classmethod
    def head_tail(cls, seq_len: int, world_size: int, device: torch.device) -> FlexBalancer:
        """Rank r has the chunks r and 2n - 1 - r."""
        return cls(_HeadTailLoadBalancer(seq_len, world_size, device))

    @classmethod
    def per_document(cls, lengths: Sequence[int], world_size: int, device: torch.device) -> FlexBalancer:
        """The same in each document; lengths are multiples of 2 n."""
        return cls(_PerDocumentHeadTailLoadBalancer([list(lengths)], world_size, device))

    @classmethod
    def by_processing_time(cls, blocks: BlockMask, world_size: int) -> FlexBalancer:
        """Blocks of queries, dealt by the number of key blocks that they see."""
        return cls(_PTRRLoadBalancer(blocks, world_size))

    def positions(self) -> torch.Tensor:
        """(S,): the token at each place of the rearranged sequence."""
        return self._balancer._generate_indices(restore=False)[0]

    def block_mask(self, mask_mod: MaskMod, seq_len: int, mesh: DeviceMesh) -> BlockMask:
        """This rank's queries against all keys, rearranged."""
        blocks = {"BLOCK_SIZE": (128, 128)} if _TAKES_BLOCK_SIZE else {}
        return _create_cp_block_mask(
            mask_mod, 1, 1, seq_len, seq_len, device_mesh=mesh, load_balancer=self._balancer, **blocks
        )


# The settings of torch's own context parallel, which live in a module of torch's that is not public.


@contextmanager
def experimental_context_parallel_settings(rotate_method: str, *, load_balance: bool) -> Iterator[None]:
    """While open, `torch.distributed.tensor.experimental.context_parallel` moves K/V so, in head-tail order or not."""
    from torch.distributed.tensor.experimental import _attention as torchs  # takes long, and only benchmarks need it

    options = torchs._cp_options
    before = options.rotate_method, options.enable_load_balance
    torchs.set_rotate_method(rotate_method)
    options.enable_load_balance = load_balance
    try:
        yield
    finally:
        options.rotate_method, options.enable_load_balance = before
