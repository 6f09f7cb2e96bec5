"""Layouts and masks as arguments of functions that Dynamo follows, where it may not know the objects themselves."""

from __future__ import annotations

from dataclasses import fields
from operator import index
from typing import Any

from cp_dtensor.layouts import Layout
from cp_dtensor.masks import Mask

Parts = tuple[type, tuple[object, ...]]
"""A value as class and fields, which Dynamo follows (and guards) where it may not know the object itself."""


def parts_of(value: Any) -> Any:
    """The parts of a layout or mask, and of those that it consists of; other values as they are."""
    if isinstance(value, (Layout, Mask)):
        return type(value), tuple([parts_of(getattr(value, field.name)) for field in fields(value)])  # type: ignore[arg-type]
    if isinstance(value, tuple):
        return tuple([parts_of(each) for each in value])
    if isinstance(value, int) and not isinstance(value, bool):
        return index(value)  # where it has changed from call to call, Dynamo makes a symbol of it; this, a number
    return value


def made_of(parts: Any) -> Any:
    """The inverse of `parts_of`."""
    if not isinstance(parts, tuple) or not parts:
        return parts
    if not isinstance(parts[0], type):
        return tuple(map(made_of, parts))
    value: Any = object.__new__(parts[0])
    for field, part in zip(fields(parts[0]), parts[1], strict=True):
        object.__setattr__(value, field.name, made_of(part))
    return value
