"""The settings that programs set, and what is remembered of the order in which shards are."""

from __future__ import annotations

from enum import Enum, auto
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor.comm.select import set_rotate_method as set_process_default
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout

Mesh = DeviceMesh | dist.ProcessGroup


class _RotateMethod(Enum):
    """How keys and values travel."""

    ALL_TO_ALL = auto()
    ALL_GATHER = auto()


_NAMES = {"ALL_TO_ALL": "alltoall", "ALL_GATHER": "allgather"}


class _CausalBehavior(Enum):
    """What a rank does with another rank's keys under a causal mask: the value is `is_causal` of that call."""

    SKIP = None
    NOT_IS_CAUSAL = False
    IS_CAUSAL = True


class ShardOrders:
    """In which order this process has sharded sequences, by group and global length.

    torch keeps one flag for the process, which shard helpers flip for everybody; here the facts are kept apart.
    """

    def __init__(self) -> None:
        # The keys are in the order of their latest use. A layout of None is an order that no layout describes.
        self._noted: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, Layout | None], None]] = WeakKeyDictionary()

    def note(self, group: dist.ProcessGroup, length: int, layout: Layout | None) -> None:
        """Says that a sequence of `length` tokens is sharded so now."""
        noted = self._noted.setdefault(group, {})
        noted.pop((length, layout), None)
        noted[length, layout] = None

    def of_length(self, group: dist.ProcessGroup, length: int) -> list[Layout | None]:
        """The orders that sequences of this length were sharded in, the latest last."""
        return [layout for noted, layout in self._noted.get(group, {}) if noted == length]

    def of_group(self, group: dist.ProcessGroup) -> list[tuple[int, Layout | None]]:
        """All lengths and orders, the latest last."""
        return list(self._noted.get(group, {}))

    def forget(self) -> None:
        """Forgets everything: the program has said anew what it wants."""
        self._noted.clear()


class _ContextParallelOptions:
    """What programs set on `_cp_options`; it holds for what begins afterwards, and for nothing that has begun.

    Attributes:
        enable_load_balance: head-tail order where twice the number of ranks divides the length, which is the default.
        rotate_method: a `_RotateMethod`; the process default of `cp_dtensor.set_rotate_method`, whose other methods
            read as ALL_GATHER.
        convert_to_f32: sums are in float32 (float64 for float64) whatever it is.
    """

    __slots__ = ("_enable_load_balance", "convert_to_f32", "orders")

    def __init__(self) -> None:
        self.convert_to_f32 = True
        self.orders = ShardOrders()
        self._enable_load_balance = True

    @property
    def enable_load_balance(self) -> bool:
        """Whether sequences are divided in head-tail order where that divides evenly."""
        return self._enable_load_balance

    @enable_load_balance.setter
    def enable_load_balance(self, value: bool) -> None:
        self._enable_load_balance = bool(value)
        self.orders.forget()

    @property
    def rotate_method(self) -> _RotateMethod:
        """How keys and values travel."""
        is_ring = transport_by_name(None).name == "alltoall"
        return _RotateMethod.ALL_TO_ALL if is_ring else _RotateMethod.ALL_GATHER

    @rotate_method.setter
    def rotate_method(self, value: _RotateMethod) -> None:
        name = getattr(value, "name", None)  # also of torch's own enum, imported before
        if name not in _NAMES:
            raise ValueError(f"expected rotate_method to be a _RotateMethod, got {value!r}")
        set_process_default(_NAMES[name])

    def __repr__(self) -> str:
        return (
            f"_ContextParallelOptions(convert_to_f32={self.convert_to_f32}, "
            f"enable_load_balance={self.enable_load_balance}, rotate_method={self.rotate_method})"
        )


_cp_options = _ContextParallelOptions()


def set_rotate_method(rotate_method: str) -> None:
    """Sets how K/V travel by default in this process.

    Args:
        rotate_method: "allgather" or "alltoall", as in torch; also "symm_mem" or "auto", which is what holds as long
            as nothing is set (see `cp_dtensor.set_rotate_method`).

    Raises:
        NotImplementedError: anything else.
    """
    try:
        set_process_default(rotate_method)
    except ValueError as error:
        raise NotImplementedError(str(error)) from error


def _is_causal_behavior(rank: int, world_size: int, i: int, is_causal: bool) -> _CausalBehavior:
    """What `rank` does with the keys of rank - i, under `_cp_options.enable_load_balance`."""
    if not is_causal:
        return _CausalBehavior.NOT_IS_CAUSAL
    if i == 0:
        return _CausalBehavior.IS_CAUSAL
    is_seen = (rank - i) % world_size < rank or _cp_options.enable_load_balance
    return _CausalBehavior.NOT_IS_CAUSAL if is_seen else _CausalBehavior.SKIP


def axis_group(mesh: Mesh) -> dist.ProcessGroup:
    """The group of a context-parallel axis.

    Raises:
        TypeError: neither a DeviceMesh nor a process group.
        ValueError: a mesh of several dims.
    """
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected mesh to be a DeviceMesh of one dim or a ProcessGroup, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"expected a mesh of one dim, the context-parallel axis; got {mesh.ndim} dims (names {mesh.mesh_dim_names})"
        )
    return mesh.get_group()


def default_layout(length: int, world_size: int) -> Layout:
    """The order of a context: head-tail where torch has it, so that its shards and other helpers' are in one order."""
    balanced = _cp_options.enable_load_balance and length % (2 * world_size) == 0
    return HeadTail() if balanced else Contiguous()


def assumed_layout(group: dist.ProcessGroup, length: int) -> Layout:
    """The order that shards of a sequence are in when the caller does not say.

    Raises:
        ValueError: it cannot be known: they have been sharded in several orders, or in one that no layout describes.
    """
    orders = _cp_options.orders.of_length(group, length)
    if not orders:
        return default_layout(length, group.size())
    if len(orders) > 1 or orders[0] is None:
        said = ", ".join("a load balancer's" if order is None else repr(order) for order in orders)
        raise ValueError(
            f"sequences of {length} tokens have been sharded in this order: {said}; say which one is meant with "
            "load_balancer=, or pass it to the cp_dtensor function of the same name as layout="
        )
    return orders[0]
