"""Values of many numbers, such as the edges of documents, that are looked up at every call of attention."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any


class RememberedHash:
    """Of frozen dataclasses, computed once. They say `__hash__ = RememberedHash.__hash__`, or are given another."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # hashes differ by process
