"""Values that compiled code names: constants by a text, values of a run by an integer in a small tensor.

Compiled code holds text and tensors, not objects. A text key is equal in every process, so code may be kept on disk. A
handle is an int64 tensor on the CPU. A mask that is new in every step travels as one, through models, checkpoints and
graphs; so does what a forward of compiled code leaves for its backward.
"""

from __future__ import annotations

import threading
from dataclasses import fields, is_dataclass
from itertools import count
from operator import index
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cp_dtensor.spec.cache import LRUCache
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask

V = TypeVar("V")


class Keys(Generic[V]):
    """Text keys of values, which live as long as the process.

    >>> keys = Keys[float]("the number")
    >>> keys.key_of(1.5), keys.value_of("1.5")
    ('1.5', 1.5)
    """

    def __init__(self, what: str) -> None:
        self._what = what  # the kind of values, in messages
        self._lock = threading.Lock()
        self._values: dict[str, V] = {}

    def key_of(self, value: V, text: str | None = None) -> str:
        """Return the key of a value, which is stored; `text` is its text, by default its `repr`."""
        key = name = repr(value) if text is None else text
        with self._lock:
            others = 1
            while self._values.setdefault(key, value) != value:  # another value, of a user's class, with an equal text
                others += 1
                key = f"{name} #{others}"
        return key

    def value_of(self, key: str) -> V:
        """Return the value of a key; refuse one that this process has not stored."""
        if key not in self._values:
            raise RuntimeError(
                f"compiled code refers to {self._what} {key}, which this process has not traced yet: it came from "
                "another process, by a way that skips tracing"
            )
        return self._values[key]


# Handles

_SHAPE = (1, 1, 1, 1)
"""Of a handle. SDPA takes no int64 attn_mask, so none can be mistaken for a mask."""
_VALUE, _ROWS = "_cp_dtensor_value", "_cp_dtensor_rows"
"""Attributes of a tensor's storage, which live as long as it."""
_LEAST = 256
_numbers = count(1 << 40)  # far from results of arithmetic on other integers
_values: WeakValueDictionary[int, Any] = WeakValueDictionary()
_latest: LRUCache[Any] = LRUCache(least=_LEAST)


def handle_of(value: Any, *, for_copies: bool = False) -> Tensor:
    """Return a tensor that names a value, as long as the tensor's storage lives.

    Args:
        value: any object that weak references can refer to.
        for_copies: True if copies of the tensor, by offloading or CUDA graphs, may outlive it: the latest values stay.
    """
    number = next(_numbers)
    handle = torch.full(_SHAPE, number, dtype=torch.int64, device="cpu")
    setattr(handle.untyped_storage(), _VALUE, value)
    _values[number] = value
    if for_copies:
        _latest.add(number, value)
    return handle


def fake_handle() -> Tensor:
    """Return a tensor with a handle's shape, dtype and device that names nothing: operators return it in traces."""
    return torch.empty(_SHAPE, dtype=torch.int64, device="cpu")


def is_handle(tensor: object) -> bool:
    """Return whether a tensor names a value, as far as its dtype and shape tell."""
    return isinstance(tensor, Tensor) and tensor.dtype == torch.int64 and tuple(tensor.shape) == _SHAPE


def value_of(handle: Tensor) -> Any:
    """Return the value that a handle names.

    Raises:
        RuntimeError: a handle that a model changed, or a copy of one after many others.
    """
    value = _values.get(int(handle))
    if value is None:
        raise RuntimeError(
            "a mask or a forward pass of context-parallel attention is not known (any more): a model changed the "
            f"tensor that names it, or kept it (or a copy) too long: more than {_LEAST} others have come since, or its "
            "forward and backward are over. A mask of your own is an attn_mask of this rank's query rows and all keys"
        )
    return value


def keep_beside(tensor: Tensor, rows: Any) -> None:
    """Keep tensors whose shapes compiled code cannot know as long as the storage of an operator's result.

    A copy of the result (by offloading or a CUDA graph) does not have them.
    """
    setattr(tensor.untyped_storage(), _ROWS, rows)


def kept_beside(tensor: Tensor) -> Any:
    """Return what `keep_beside` kept with a tensor; None if nothing, or for a copy."""
    return getattr(tensor.untyped_storage(), _ROWS, None)


# Layouts and masks as arguments of functions that Dynamo traces

Parts = tuple[type, tuple[object, ...]]
"""A value as its class and fields, which Dynamo traces and guards where it may not trace the object itself."""


def parts_of(value: Any) -> Any:
    """Return the parts of a layout or mask, recursively; other values as they are."""
    if isinstance(value, (Layout, Mask)):
        has_fields: bool = is_dataclass(value)
        if not has_fields:
            raise TypeError(f"expected layouts and masks to be frozen dataclasses, got {type(value).__name__}")
        return type(value), tuple([parts_of(getattr(value, field.name)) for field in fields(value)])  # type: ignore[arg-type]
    if isinstance(value, tuple):
        parts = tuple([parts_of(each) for each in value])
        return parts if type(value) is tuple else (type(value), parts)  # a named tuple, such as a segment
    if isinstance(value, int) and not isinstance(value, bool):
        return index(value)  # a number again, where Dynamo has made a symbol of a number that changes from call to call
    return value


def made_of(parts: Any) -> Any:
    """Make a value of its parts: the inverse of `parts_of`."""
    if not isinstance(parts, tuple) or not parts:
        return parts
    if not isinstance(parts[0], type):
        return tuple(map(made_of, parts))
    kind: Any = parts[0]
    values = map(made_of, parts[1])
    if issubclass(kind, tuple):
        return kind(*values)
    made: Any = object.__new__(kind)
    for field, value in zip(fields(kind), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made
