"""Compiled call specs: attention calls as constants of compiled code, and values that are read when it runs.

Compiled code holds text and numbers, not objects, and may be kept on disk. So configurations and masks have keys, equal
in every process. Masks, layouts and lengths that differ from context to context are read from the open context when
compiled code runs.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import count
from operator import index
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.tensors import split_rows
from cp_dtensor.attention.backends.select import allowed_backends
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.config import AttentionConfig, check_batch_size, check_bias
from cp_dtensor.engine.lengths import global_lengths
from cp_dtensor.engine.named_masks import NamedMask
from cp_dtensor.spec.cache import LRUCache
from cp_dtensor.spec.documents import PackedEdges, packed_mask
from cp_dtensor.spec.layouts import Contiguous, Layout
from cp_dtensor.spec.masks import Causal, Full, Mask, mask_intersection

# Layouts and masks as arguments of functions that Dynamo traces

Parts = tuple[type, tuple[object, ...]]
"""A value as its class and fields, which Dynamo traces and guards where it may not trace the object itself."""


def parts_of(value: Any) -> Any:
    """The parts of a layout or mask, recursively; other values as they are."""
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
    """The inverse of `parts_of`."""
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


# Keys of constants

V = TypeVar("V")


class ConstantKeys(Generic[V]):
    """Text keys of values: their `repr`, equal in every process. Values live as long as the process.

    >>> keys = ConstantKeys[float]("the number")
    >>> keys.value_of(keys.key_of(1.5))
    1.5
    """

    def __init__(self, what: str, prefix: str = "") -> None:
        self._what = what  # the kind of values, in messages
        self._prefix = prefix
        self._lock = threading.Lock()
        self._values: dict[str, V] = {}

    def key_of(self, value: V) -> str:
        """The key of a value, which is stored."""
        key = name = f"{self._prefix}{value!r}"
        with self._lock:
            others = 1
            while self._values.setdefault(key, value) != value:  # another value, of a user's class, with an equal repr
                others += 1
                key = f"{name} #{others}"
        return key

    def value_of(self, key: str) -> V:
        """The value of a key; refused if this process has not stored it."""
        if key not in self._values:
            raise RuntimeError(
                f"compiled code refers to {self._what} {key}, which this process has not traced yet: it came from "
                "another process, by a way that skips tracing"
            )
        return self._values[key]


mask_keys = ConstantKeys[Mask]("a mask,")
for _plain in (Full(), Causal()):  # code from disk may need these before this process has traced any
    mask_keys.key_of(_plain)


# Values that are known only when compiled code runs

_LEAST_NUMBERS = 256
"""Passes that may wait for their backward, with masks of their own, however large these are."""
_NOT_IN_BACKWARD = -1


class ContextValues(NamedTuple):
    """Values of an open context that compiled code reads when it runs."""

    mask: Mask | None
    layout: Layout
    lengths: tuple[int, ...] | None
    """Known global lengths."""


class RuntimeValues(NamedTuple):
    """Values of a call that are known when it runs."""

    mask: Mask
    """The mask of the call and of the context together."""
    context: ContextValues | None = None
    """The values that were read from the open context; None if the compiled call spec has all of them."""
    rows: int = 1
    """Batch rows whose tokens make up the one row of a packed call, one after the other."""


class RuntimeNumbers:
    """Numbers for the latest `RuntimeValues`, by which forward passes them to backward in a tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = LRUCache[int](least=_LEAST_NUMBERS)
        self._by_number = LRUCache[RuntimeValues](least=_LEAST_NUMBERS)
        self._unused = count()

    def number_of(self, values: RuntimeValues) -> int:
        """A number for the values of a call; valid until hundreds of other values have come."""
        with self._lock:
            number = self._numbers.get(values)
            if number is None:
                number = self._numbers.add(values, next(self._unused))
            self._by_number.add(number, values)
        return number

    def of(self, number: int) -> RuntimeValues:
        """The values of a number; refused if too many others have come since."""
        values = self._by_number.get(number)
        if values is None:
            raise RuntimeError(
                f"the mask of a forward pass is no longer known: at least {_LEAST_NUMBERS} others came before its "
                "backward"
            )
        return values


class PendingBackwards:
    """Counts, for each context, the forward passes of compiled code whose backward has not come.

    When compiled code recomputes attention in a backward, its forward pass is not known. Where all pending ones are of
    equal contexts, their values are those of the recompute; otherwise the recompute is refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: Counter[ContextValues] = Counter()

    def begin(self, values: RuntimeValues, needs_backward: bool) -> int:
        """Counts a forward pass, unless it is a recompute in a backward; returns that backward, for `end`."""
        running = _torch.current_backward()
        if running is not None:
            return running
        if values.context is not None and needs_backward:
            with self._lock:
                self._passes[values.context] += 1
        return _NOT_IN_BACKWARD

    def end(self, values: RuntimeValues, begun_in: int) -> None:
        """Counts the backward of a forward pass, unless it keeps its graph for another one."""
        # A reentrant checkpoint recomputes in one backward, begins another, and has run forward without gradients.
        is_reentrant = begun_in not in (_NOT_IN_BACKWARD, _torch.current_backward())
        context = values.context
        if context is None or is_reentrant or _torch.backward_may_come_again():
            return
        with self._lock:
            self._passes[context] -= 1
            if self._passes[context] <= 0:
                del self._passes[context]

    def only_context(self) -> ContextValues | None:
        """The values of all pending passes, where they are equal; None if they differ, or there are none."""
        with self._lock:
            return next(iter(self._passes)) if len(self._passes) == 1 else None


runtime_numbers = RuntimeNumbers()
pending_backwards = PendingBackwards()


# Compiled call specs

CONTEXT_STATE = "cp_dtensor_context"
"""Key of the thread state (innermost open context, the backward in which it was entered)."""
_LAYOUT_OF_CONTEXT = Contiguous()
"""Placeholder for a layout that is read from the open context."""


@dataclass(frozen=True, eq=False)
class ActiveConfig:
    """An open context, as far as compiled code reads it."""

    config: AttentionConfig

    @cached_property
    def key(self) -> str:
        """The key of its compiled call spec."""
        return key_of(CompiledCallSpec.of(self.config))


@dataclass(frozen=True)
class CompiledCallSpec:
    """An `AttentionConfig` with process groups by their names, valid in every process that has these groups.

    Its `repr` is its key in compiled code. It has no lengths, mask or layout that belong to a single context.
    """

    groups: tuple[str, ...]
    fixed: AttentionConfig
    """The part of the configuration that is the same in all contexts, without ranks."""
    reads_context: bool
    """True if a mask or a layout is read from the open context."""
    alignment: int
    """Alignment of a layout that is read from the open context."""

    @classmethod
    def of(cls, config: AttentionConfig) -> CompiledCallSpec:
        """The compiled call spec of a configuration."""
        ranks = (config.ranks.outer, config.ranks.inner)
        groups = tuple(_torch.name_of_group(group) for group in ranks if group is not None)
        # Process groups end before compiled code does. The partition of DTensors is the same whatever their lengths.
        no_ranks: Any = None
        placed = None if config.placed is None else config.placed.resized(0, 0, 0)
        fixed = replace(config, ranks=no_ranks, placed=placed, batch_size=None, lengths_vary=False, replay=False)
        if not config.lengths_vary:
            return cls(groups, fixed, reads_context=False, alignment=1)
        # A layout of one length is made for a mask, and like it differs from context to context.
        of_one_context = config.layout.only_length is not None
        layout = _LAYOUT_OF_CONTEXT if of_one_context else config.layout
        fixed = replace(fixed, layout=layout, mask=None, declared_lengths=None)
        reads_context = config.mask is not None or of_one_context
        return cls(groups, fixed, reads_context, config.layout.alignment if of_one_context else 1)

    def __repr__(self) -> str:
        fixed = self.fixed
        return (
            f"{fixed.method} ({fixed.transport.name}) over {' x '.join(self.groups)}, {fixed.placed or fixed.layout}"
            f"{'' if fixed.declared_lengths is None else f', lengths {fixed.declared_lengths}'}"
            f"{', deterministic' * fixed.deterministic}{', debug' * fixed.debug}{', masked' * self.reads_context}"
            f"{'' if fixed.mask is None else f', {fixed.mask}'}"
            f"{'' if self.alignment == 1 else f', in blocks of {self.alignment}'}"
        )

    def resolve(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, modifiers: Modifiers, scale: float,
        known: tuple[int, int] | None, edges: PackedEdges | None = None, named: NamedMask | None = None, *,
        gives_lse: bool = False,
    ) -> tuple[tuple[int, int], RuntimeValues]:  # fmt: skip
        """The global (q, kv) lengths, checked or found, and what the call reads at run time; may communicate.

        With `edges`, the tokens of q, k and v (1, H, T, D) are those of batch rows one after the other, and `mask` is
        the mask inside of each document. `named` is one more mask.
        """
        if self.fixed.placed is not None and known is not None:
            return known, RuntimeValues(self.with_own_mask(mask))
        context = active = None
        reads_lengths = edges is not None and self.fixed.declared_lengths is None
        if known is None or self.reads_context or reads_lengths:
            active, entered_in = _torch.get_thread_state(CONTEXT_STATE) or (None, None)
            if active is not None and active.key != key_of(self):  # not the context that the code was compiled in
                active = entered_in = None
            if self.reads_context or reads_lengths:
                is_recompute = _torch.current_backward() not in (None, entered_in)
                context = _values_of_recompute() if is_recompute else _values_of(active)
        config = self.config(context)
        if active is not None and context in (None, _values_of(active)):
            config = active.config
        rows = 1
        if edges is not None:
            rows, known = edges.rows_and_lengths(config.declared_lengths)
            mask = packed_mask(edges, rows, known, within=mask)
            q, k, v = (split_rows(x, rows) for x in (q, k, v))
        mask = self.with_own_mask(mask)
        if named is not None:
            mask = mask_intersection(named.mask_for(config), mask)
        if context is not None and context.mask is not None:
            mask = mask_intersection(context.mask, mask)
        check_batch_size(q, config)
        lengths = global_lengths(q, k, v, config, mask, modifiers, scale, known, gives_lse=gives_lse, compiled=True)
        check_bias(q, modifiers.bias, lengths, config.layout, config.ranks)
        return lengths, RuntimeValues(mask, context, rows)

    def with_own_mask(self, mask: Mask) -> Mask:
        """The mask of a call together with that of the configuration."""
        return mask if self.fixed.mask is None else mask_intersection(self.fixed.mask, mask)

    def config(self, context: ContextValues | None = None) -> AttentionConfig:
        """The configuration, on this process's groups, with the layout and the lengths of a context if there is one."""
        ranks = SequenceRanks(*map(_torch.group_of_name, self.groups))
        if context is None:
            return replace(self.fixed, ranks=ranks)
        return replace(self.fixed, ranks=ranks, layout=context.layout, declared_lengths=context.lengths)


_OPERATORS = 11
"""Version of the operators' arguments and results: part of every key, so that no code on disk of another is used."""
_compiled_specs = ConstantKeys[CompiledCallSpec]("attention by", f"operators {_OPERATORS}, ")
key_of, compiled_spec_of = _compiled_specs.key_of, _compiled_specs.value_of


CallKeys = tuple[str, str, str, bool]
"""Keys of call spec, backends and mask; and True if each run reads the open context or compares values of the ranks."""


def keys_of(config: AttentionConfig, mask: Mask) -> CallKeys:
    """The keys of a call, which are constants of compiled code; `mask` is that of the call alone."""
    spec = CompiledCallSpec.of(config)
    backends = repr(tuple(allowed_backends()))  # Dynamo recompiles on a change
    return key_of(spec), backends, mask_keys.key_of(mask), spec.reads_context or spec.fixed.debug


def _values_of(active: ActiveConfig | None) -> ContextValues:
    if active is None:
        raise RuntimeError(
            "this code was compiled inside of context_parallel with a mask, a layout or packed documents of its own, "
            "and runs outside of any such context"
        )
    return ContextValues(active.config.mask, active.config.layout, active.config.declared_lengths)


def _values_of_recompute() -> ContextValues:
    """The context of attention that compiled code recomputes in a backward."""
    only = pending_backwards.only_context()
    if only is None:
        raise RuntimeError(
            "attention is computed again in a backward, by code that was compiled inside of context_parallel with a "
            "mask, a layout or packed documents of its own; there have been several such contexts whose backward has "
            "not come, and it cannot be told which of them this is: keep attention (selective checkpointing with a "
            "policy that saves cp_dtensor.ATTENTION_OPS), or checkpoint around what is compiled"
        )
    return only
