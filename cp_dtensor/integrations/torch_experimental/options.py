"""Settings of the process (`_cp_options`) and the recorded order of shards."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor import Contiguous, HeadTail, Layout
from cp_dtensor import set_rotate_method as set_process_default
from cp_dtensor.api.extension import Mesh, default_rotate_method


class _RotateMethod(Enum):
    """KV transports, as in torch."""

    ALL_TO_ALL = auto()
    ALL_GATHER = auto()


_NAMES = {"ALL_TO_ALL": "alltoall", "ALL_GATHER": "allgather"}


class ShardOrders:
    """The layouts in which this process has sharded sequences, by group and global length.

    In torch it is one flag of the process, which shard helpers change for all attention.
    """

    def __init__(self) -> None:
        # Keys are ordered by their latest use. None is the order of a load balancer that no layout describes.
        self._noted: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, Layout | None], None]] = WeakKeyDictionary()
        self._have_balancer: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()

    def note(self, group: dist.ProcessGroup, length: int, layout: Layout | None) -> None:
        """Record the layout of a sequence of `length` tokens."""
        noted = self._noted.setdefault(group, {})
        noted.pop((length, layout), None)
        noted[length, layout] = None

    def note_shards(self, group: dist.ProcessGroup, length: int, layout: Layout | None, has_balancer: bool) -> None:
        """Record the layout of shards outside of contexts, and whether they had a load balancer."""
        self.note(group, length, layout)
        self._have_balancer[group] = has_balancer

    def shards_are_contiguous(self, group: dist.ProcessGroup) -> bool:
        """Return whether the latest shards outside of contexts had no load balancer."""
        return not self._have_balancer.get(group, True)

    def of_length(self, group: dist.ProcessGroup, length: int) -> list[Layout | None]:
        """Return the layouts in which sequences of this length were sharded, the latest last."""
        return [layout for noted, layout in self.of_group(group) if noted == length]

    def of_group(self, group: dist.ProcessGroup) -> list[tuple[int, Layout | None]]:
        """Return All (length, layout), the latest last."""
        return list(self._noted.get(group, {}))

    def forget(self) -> None:
        """Delete all records; called when the program sets `enable_load_balance`."""
        self._noted.clear()
        self._have_balancer.clear()


class _ContextParallelOptions:
    """Settings of contexts and calls that begin afterwards; active contexts and calls keep theirs.

    Attributes:
        enable_load_balance: True, the default, for head-tail order if twice the number of ranks divides the length.
        rotate_method: a `_RotateMethod`; the process default of `cp_dtensor.set_rotate_method`, whose other methods
            read as ALL_GATHER.
        convert_to_f32: no effect: sums are always in float32 (float64 for float64).
    """

    __slots__ = ("_enable_load_balance", "convert_to_f32", "orders")

    def __init__(self) -> None:
        self.convert_to_f32 = True
        self.orders = ShardOrders()
        self._enable_load_balance = True

    @property
    def enable_load_balance(self) -> bool:
        """True for head-tail order where it divides evenly."""
        return self._enable_load_balance

    @enable_load_balance.setter
    def enable_load_balance(self, value: bool) -> None:
        self._enable_load_balance = bool(value)
        self.orders.forget()

    @property
    def rotate_method(self) -> _RotateMethod:
        """The default KV transport of the process."""
        is_ring = default_rotate_method() == "alltoall"
        return _RotateMethod.ALL_TO_ALL if is_ring else _RotateMethod.ALL_GATHER

    @rotate_method.setter
    def rotate_method(self, value: _RotateMethod) -> None:
        name = getattr(value, "name", None)  # torch's own enum is accepted too
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
    """Set the default KV transport of this process.

    Args:
        rotate_method: "allgather" or "alltoall", as in torch; also "symm_mem" or "auto", the initial default (see
            `cp_dtensor.set_rotate_method`).

    Raises:
        NotImplementedError: anything else.
    """
    try:
        set_process_default(rotate_method)
    except ValueError as error:
        raise NotImplementedError(str(error)) from error


def check_one_dim_each(buffers: Sequence[object], dims: Sequence[object]) -> None:
    """Refuse more or fewer dims than buffers, in torch's words."""
    if len(buffers) != len(dims):
        raise ValueError(
            "`seq_dims` must have the same number of elements as `buffers`: expected one sequence dim per buffer, got "
            f"{len(buffers)} buffers and {len(dims)} dims"
        )


def axis_group(mesh: Mesh) -> dist.ProcessGroup:
    """Return the process group of a context-parallel axis."""
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
    """Return the layout of a context: torch's, so that its shards fit those of other helpers."""
    balanced = _cp_options.enable_load_balance and length % (2 * world_size) == 0
    return HeadTail() if balanced else Contiguous()


def assumed_layout(group: dist.ProcessGroup, length: int) -> Layout:
    """Return the layout of shards for calls that do not name one, if all sequences of this length have one layout."""
    orders = _cp_options.orders.of_length(group, length)
    if not orders:
        return default_layout(length, group.size())
    if len(orders) > 1 or orders[0] is None:
        said = ", ".join("a load balancer's" if order is None else repr(order) for order in orders)
        raise ValueError(
            f"sequences of {length} tokens have been sharded in this order: {said}; pass the right one as "
            "load_balancer=, or as layout= of the cp_dtensor function of the same name"
        )
    return orders[0]
