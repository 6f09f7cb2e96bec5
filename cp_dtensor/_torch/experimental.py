"""torch's experimental context parallel: its modules, custom op, load balancers and settings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _attention
from torch.distributed.tensor.experimental._attention import (
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_flatten, tree_unflatten

from cp_dtensor._torch.patches import entry_replaced

__all__ = ["EXPERIMENTAL", "FlexBalancer", "aten_name", "experimental_context_parallel_settings"]
__all__ += ["experimental_module", "flatten_tree", "flex_cp_allgather", "names_replaced"]

EXPERIMENTAL = "torch.distributed.tensor.experimental"


def experimental_module(name: str) -> ModuleType | None:
    """Returns torch's module with this name below `EXPERIMENTAL` ("" for itself), None if this torch has none."""
    try:
        return importlib.import_module(f"{EXPERIMENTAL}.{name}".rstrip("."))
    except ModuleNotFoundError:
        return None


@contextmanager
def names_replaced(module: ModuleType, names: Mapping[str, object]) -> Iterator[None]:
    """While open, a module has these names; on exit each is restored unless other code has replaced it since."""
    with ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(entry_replaced(vars(module), name, value))
        yield


def aten_name(op: Any) -> str | None:
    """Returns the name of an aten op, without its overload; None for anything else."""
    if not isinstance(op, (OpOverload, OpOverloadPacket)):
        return None
    namespace, _, name = (op.name() if isinstance(op, OpOverload) else op._qualified_op_name).partition("::")
    return name.partition(".")[0] if namespace == "aten" else None


def flatten_tree(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the leaves of nested lists, tuples, dicts etc., and a function from other leaves to such a tree."""
    leaves, structure = tree_flatten(tree, is_leaf=is_leaf)
    return leaves, lambda others: tree_unflatten(others, structure)


# FlexAttention, which users of torch's context parallel assemble of private parts (for benchmarks)

_TAKES_BLOCK_SIZE = "BLOCK_SIZE" in inspect.signature(_create_cp_block_mask).parameters  # from 2.15 on

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class FlexBalancer:
    """Rearranges a sequence, as torch does, before it is cut into contiguous shards.

    Args:
        balancer: one of torch's load balancers.
    """

    def __init__(self, balancer: Any) -> None:
        self._balancer = balancer

    @classmethod
    def head_tail(cls, seq_len: int, world_size: int, device: torch.device) -> FlexBalancer:
        """Balances by head-tail chunks: rank r of n has the chunks r and 2n - 1 - r."""
        return cls(_HeadTailLoadBalancer(seq_len, world_size, device))

    @classmethod
    def per_document(cls, lengths: Sequence[int], world_size: int, device: torch.device) -> FlexBalancer:
        """Balances by head-tail chunks of each document, whose lengths are multiples of 2n."""
        return cls(_PerDocumentHeadTailLoadBalancer([list(lengths)], world_size, device))

    @classmethod
    def by_processing_time(cls, blocks: BlockMask, world_size: int) -> FlexBalancer:
        """Balances blocks of queries by the number of key blocks that they attend to."""
        return cls(_PTRRLoadBalancer(blocks, world_size))

    def positions(self) -> torch.Tensor:
        """Returns (S,): the token at each place of the rearranged sequence."""
        return self._balancer._generate_indices(restore=False)[0]

    def block_mask(self, mask_mod: MaskMod, seq_len: int, mesh: DeviceMesh) -> BlockMask:
        """Returns the block mask of this rank's queries and all keys, rearranged."""
        blocks = {"BLOCK_SIZE": (128, 128)} if _TAKES_BLOCK_SIZE else {}
        return _create_cp_block_mask(
            mask_mod, 1, 1, seq_len, seq_len, device_mesh=mesh, load_balancer=self._balancer, **blocks
        )


@contextmanager
def experimental_context_parallel_settings(rotate_method: str, *, load_balance: bool) -> Iterator[None]:
    """While open, sets the rotate method and the load balancing of torch's experimental `context_parallel`."""
    options = _attention._cp_options
    before = options.rotate_method, options.enable_load_balance
    _attention.set_rotate_method(rotate_method)
    options.enable_load_balance = load_balance
    try:
        yield
    finally:
        options.rotate_method, options.enable_load_balance = before
