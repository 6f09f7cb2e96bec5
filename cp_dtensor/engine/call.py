"""`Call`: an attention call without its tensors. Contexts, modules and functions make it; plans are made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, TypedDict

from torch import Tensor

from cp_dtensor.attention.backends.select import Allowed
from cp_dtensor.comm.groups import Mesh, SequenceRanks, sequence_ranks
from cp_dtensor.comm.transport import TransportMethod
from cp_dtensor.comm.transports import transport_by_name
from cp_dtensor.engine.handles import Keys
from cp_dtensor.plan.partition import LayoutPartition, SequencePartition
from cp_dtensor.spec.layouts import HeadTail, Layout
from cp_dtensor.spec.masks import Causal, Mask, is_integer, mask_intersection

METHODS = ("auto", "ring", "ulysses", "hybrid")
"""Methods of attention over the ranks that share a sequence."""
_HEAD_TAIL, _AUTO, _CAUSAL = HeadTail(), transport_by_name("auto"), Causal()


class ContextOptions(TypedDict, total=False):
    """Options of contexts and modules for all calls inside, described in `context_parallel_attention`."""

    method: str
    mask: Mask | None
    layout: Layout | None
    rotate_method: str | None
    deterministic: bool
    debug: bool


class Options(ContextOptions, total=False):
    """Options of public functions, described in `context_parallel_attention` and checked in `Call.of`."""

    mesh: Mesh | None
    is_causal: bool
    dropout_p: float
    softcap: float
    scale: float | None
    seq_len: int | tuple[int, int] | None


OF_CONTEXTS = ContextOptions.__optional_keys__
"""Names of `ContextOptions`."""
OF_CALLS = Options.__optional_keys__ - OF_CONTEXTS
"""Names of the options that only functions take."""


@dataclass(frozen=True)
class Sharding:
    """The ranks that share a sequence and how it is divided: what attention and layers have in common."""

    ranks: SequenceRanks
    layout: Layout = _HEAD_TAIL
    lengths: tuple[int, ...] = ()
    """Declared global lengths, ascending: of a context's buffers, or `seq_len=`. Others are ranks x local length."""
    debug: bool = False
    """True if the ranks compare at every call what must agree."""
    in_context: bool = False
    """True inside of `context_parallel`, where tensors that were probably not sharded are refused."""
    context: str = ""
    """Key of the open context that compiled code asks for mask, layout and lengths when it runs; "" if it asks none."""


@dataclass(frozen=True)
class Call(Sharding):
    """An attention call without its tensors. A context holds one, too: calls inside replace a few of its fields."""

    mask: Mask | None = None
    """The keys that each query sees, by global position; None for all."""
    method: str = "auto"
    """One of `METHODS`."""
    transport: TransportMethod = _AUTO
    """The KV transport of rings."""
    pair: tuple[int, int] | None = None
    """The global (queries, keys) of this very call, where the caller or a DTensor knows them."""
    batch_size: int | None = None
    """The batch size of a context's buffers, where the layout divides batch rows differently."""
    scale: float | None = None
    """Factor of the logits; None is 1 / sqrt(D)."""
    softcap: float = 0.0
    dropout_p: float = 0.0
    first: tuple[int, int] = (0, 0)
    """Global index of this rank's first batch row and first query head, on which dropout depends."""
    deterministic: bool = False
    """True if results must be equal in every run, also without `torch.use_deterministic_algorithms`."""
    placed: SequencePartition | None = None
    """The partition of DTensors, by their placements; `layout` is not used then."""
    backends: Allowed | None = None
    """The backends that may be used; None for those that are allowed when the call runs."""

    @classmethod
    def of(
        cls, mesh: Mesh | None = None, *, method: str = "auto", layout: Layout | None = None, mask: Mask | None = None,
        is_causal: bool = False, rotate_method: str | None = None, seq_len: int | tuple[int, int] | None = None,
        scale: float | None = None, softcap: float = 0.0, dropout_p: float = 0.0, deterministic: bool = False,
        debug: bool = False,
    ) -> Call:  # fmt: skip
        """Return the call of public arguments, which are checked here."""
        ranks, method = ranks_and_method(mesh, method)
        checked_bools(is_causal=is_causal, deterministic=deterministic, debug=debug)
        if mask is None and is_causal:
            mask = _CAUSAL
        elif mask is not None:
            mask = checked_mask(mask, is_causal)
        # Defaults need no check: one frame less each, in every call.
        if not (scale is None and softcap == 0.0 and dropout_p == 0.0):
            scale, softcap, dropout_p = checked_factors(scale=scale, softcap=softcap, dropout_p=dropout_p).values()
        return cls(
            ranks, _HEAD_TAIL if layout is None else checked_layout(layout), (), debug, False, "", mask, method,
            transport_by_name(rotate_method), None if seq_len is None else checked_pair(seq_len), None,
            scale, softcap, dropout_p, (0, 0), deterministic,
        )  # fmt: skip

    @property
    def key(self) -> str:
        """Text of the call in compiled code, equal in every process, by which `call_of` finds it.

        Left out are numbers that may be symbols in compiled code, and what is the same for all calls of a process.
        """
        no_ranks: Any = None  # process groups end before compiled code does
        # The partition of DTensors is the same whatever their lengths.
        placed = None if self.placed is None else self.placed.resized(0, 0, 0)
        kept = replace(self, ranks=no_ranks, placed=placed, batch_size=None, **_NUMBERS)
        names, others = self.ranks.names, [name for name in _DEFAULTS if getattr(kept, name) != _DEFAULTS[name]]
        options = ", ".join(f"{name} {getattr(kept, name)!r}" for name in others if name != "transport")
        text = f"operators {_OPERATORS} over {' x '.join(names)}, {kept.transport.name}, {options}"
        return _keys.key_of((names, kept), text)

    @property
    def numbers(self) -> list[int]:
        """Integers that may be symbols in compiled code: `pair` (-1, -1 for None) and `first`."""
        return [*(self.pair or (-1, -1)), *self.first]

    def factors(self, head_dim: int) -> list[float]:
        """Return floats that may be symbols in compiled code: scale, softcap and dropout_p."""
        return [softmax_scale(head_dim, self.scale), self.softcap, self.dropout_p]

    @cached_property
    def changes_weights(self) -> bool:
        """True with dropout or softcap, which only our own kernels compute."""
        return self.dropout_p > 0 or self.softcap > 0

    @cached_property
    def of_modifiers(self) -> dict[str, Any]:
        """Numbers of the call's modifiers, by name."""
        batch, head = self.first
        return {"dropout_p": self.dropout_p, "softcap": self.softcap, "first_batch": batch, "first_head": head}

    @property
    def is_live(self) -> bool:
        """True if compiled code has to do more each time than a CUDA graph repeats."""
        return bool(self.context) or self.debug

    def under(self, around: Call) -> Call:
        """Return the call with mask, layout and lengths of the context that compiled code has asked."""
        mask = both_masks(around.mask, self.mask)
        return replace(
            self, context="", layout=around.layout, lengths=around.lengths, batch_size=around.batch_size, mask=mask
        )

    @property
    def of_dtensors(self) -> dict[str, Any]:
        """Options of a context that hold for DTensors inside, too: these know their mesh, their layout and lengths."""
        return {"mask": self.mask, "deterministic": self.deterministic}

    def partition(self, pair: tuple[int, int], batch_size: int) -> SequencePartition:
        """Return the positions of all ranks' queries and keys."""
        if self.placed is None:
            return LayoutPartition(self.layout, *pair, batch_size, self.ranks.size)
        if (self.placed.q_len, self.placed.kv_len, self.placed.batch_size) == (*pair, batch_size):
            return self.placed
        return self.placed.resized(*pair, batch_size)


_OPERATORS = 16
"""Version of the operators' arguments and results: part of every key, so that no code on disk of another is used."""
FACTORS = ("scale", "softcap", "dropout_p")
"""Names of `Call.factors`."""
_NUMBERS: dict[str, Any] = {"pair": None, "scale": None, "softcap": 0.0, "dropout_p": 0.0, "first": (0, 0)}
_DEFAULTS = {each.name: each.default for each in fields(Call) if each.name != "ranks"}
_keys = Keys[tuple[tuple[str, ...], Call]]("attention by")
_NOT_PLANNED = ("debug", "context", "scale", "first", "dropout_p", "backends")
plan_fields = attrgetter(*(name for name in _DEFAULTS if name not in _NOT_PLANNED))
"""Return the fields of a call that its plan depends on, besides the ranks."""


def call_of(key: str, factors: list[float] | None = None, numbers: list[int] | None = None) -> Call:
    """Return the call of a key, on this process's groups, with these `factors` and `numbers`."""
    names, call = _keys.value_of(key)
    ranks = SequenceRanks.of_names(names)
    if factors is None or numbers is None:
        return replace(call, ranks=ranks)
    q_len, kv_len, *first = numbers
    pair = None if q_len < 0 else (q_len, kv_len)
    by_name: dict[str, Any] = dict(zip(FACTORS, factors, strict=True))
    return replace(call, ranks=ranks, pair=pair, first=(first[0], first[1]), **by_name)


def factors_of(head_dim: int, **options: Any) -> list[float]:
    """Check scale, softcap and dropout_p; return them as `Call.factors`, for traced code, which has no `Call`."""
    scale, softcap, dropout_p = checked_factors(**options).values()
    return [softmax_scale(head_dim, scale), softcap, dropout_p]


# Checks of options


def ranks_and_method(mesh: Mesh | None, method: str) -> tuple[SequenceRanks, str]:
    """Return the ranks without axes of one rank, and the method without them.

    Raises:
        TypeError, ValueError, NotImplementedError: what `sequence_ranks` refuses, unknown methods, and methods of
            another number of axes.
    """
    if method not in METHODS:
        checked_method(method)
    ranks = sequence_ranks(mesh)
    if ranks.inner is None and method == "hybrid":
        raise ValueError(
            f'method "hybrid" expects a mesh of two or three dims, got one axis of {ranks.size} ranks: make one with '
            'init_device_mesh(..., mesh_dim_names=("ring", "ulysses"))'
        )
    if ranks.inner is None:
        return ranks, method
    if method == "ulysses":
        raise ValueError(
            f'method "ulysses" expects a mesh of one dim, got axes of {" x ".join(map(str, ranks.sizes))} ranks: pass '
            'one of them, or use "hybrid"'
        )
    kept = [group for group in ranks.axes if group.size() > 1] or [ranks.outer]
    if method == "hybrid" and kept[-1] is not ranks.axes[-1]:
        method = "ring"
    elif method == "hybrid" and len(kept) == 1:
        method = "ulysses"
    return SequenceRanks(*kept, members=ranks.members if len(kept) > 1 else ()), method


def checked_method(method: str) -> str:
    """Return `method`; refuse other names than those of `METHODS`."""
    if method not in METHODS:
        raise ValueError(f"unknown method: got {method!r}, expected one of {', '.join(map(repr, METHODS))}")
    return method


def checked_layout(layout: Layout | None) -> Layout:
    """Return `layout`, or `HeadTail()` if None; refuse anything else, such as the class itself."""
    if layout is None:
        return HeadTail()
    if not isinstance(layout, Layout):
        raise TypeError(f"expected layout to be a Layout such as HeadTail() or None, got {layout!r}")
    return layout


def checked_bools(**options: object) -> None:
    """Refuse options by name that are no bools."""
    for name, value in options.items():
        if value is not True and value is not False:
            raise TypeError(f"expected {name} to be True or False, got {value!r}")


def checked_mask(mask: object, is_causal: bool) -> Mask | None:
    """Return the intersection of a call's mask and `is_causal`, None for neither; refuse other than mask values."""
    if mask is not None and not isinstance(mask, Mask):
        got = f"the class {mask.__name__}" if isinstance(mask, type) else type(mask).__name__
        hint = "; pass tensors as attn_mask" if isinstance(mask, Tensor) else ""
        raise TypeError(f"expected mask to be a Mask such as SlidingWindow(1024, 0), got {got}{hint}")
    return both_masks(mask, Causal()) if is_causal else mask


def both_masks(one: Mask | None, other: Mask | None) -> Mask | None:
    """Return the intersection of two masks, of which None stands for all keys."""
    if one is None or other is None:
        return other if one is None else one
    return mask_intersection(one, other)


def checked_factors(
    *, scale: Any = None, softcap: float = 0.0, dropout_p: float = 0.0, **flags: bool
) -> dict[str, Any]:
    """Return these options by name, in this order; refuse what is no number or out of range, and flags but bools."""
    if flags:
        checked_bools(**flags)
    if isinstance(scale, (bool, str, Tensor)):  # the gradient of a tensor would be lost
        got = f"a tensor of shape {tuple(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
        raise TypeError(f"expected scale to be a number or None, got {got}")
    for name, value in (("softcap", softcap), ("dropout_p", dropout_p)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"expected {name} to be a number, got {value!r}")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"expected softcap to be a finite number of at least 0.0, which is none, got {softcap}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"expected dropout_p between 0 and 1, got {dropout_p}")
    return {"scale": scale, "softcap": float(softcap), "dropout_p": float(dropout_p), **flags}


def refuse_unknown(owner: str, options: Mapping[str, object], names: AbstractSet[str]) -> None:
    """Refuse options whose names are not among `names`, as Python does for a function without `**options`."""
    if unknown := options.keys() - names:
        raise TypeError(f"{owner}() got an unexpected keyword argument {min(unknown)!r}")


def softmax_scale(head_dim: int, scale: float | None) -> float:
    """Return the factor of the logits; 1 / sqrt(head_dim) if None. Refuse NaN and infinity."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not abs(scale) < math.inf:
        raise ValueError(f"expected a finite scale, got {scale}")
    return float(scale)


# Lengths


def checked_pair(seq_len: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the global lengths of queries and keys; refuse anything but None, a length or a pair of lengths."""
    if type(seq_len) is int and seq_len >= 0:
        return seq_len, seq_len
    if seq_len is None:
        return None
    pair = tuple(seq_len) if isinstance(seq_len, (tuple, list)) else (seq_len, seq_len)
    if len(pair) != 2 or not all(is_integer(length) and length >= 0 for length in pair):
        raise ValueError(f"expected seq_len to be a length >= 0 or a pair of lengths (queries, keys), got {seq_len!r}")
    return pair[0], pair[1]


def checked_length(length: int, what: str = "seq_len") -> int:
    """Return `length`, a global length; refuse anything but integers >= 0."""
    if not is_integer(length) or length < 0:
        raise ValueError(f"expected {what} to be an integer >= 0, got {length!r}")
    return length


def checked_lengths(layout: Layout, seq_len: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the global lengths that `seq_len` declares, ascending; refuse those that `layout` does not divide."""
    if seq_len is None:
        return ()
    several: Any = seq_len
    if not isinstance(several, Iterable) or isinstance(several, Tensor):
        several = (several,)
    lengths = {checked_length(length) for length in several}
    for length in lengths:
        refuse_other_lengths(layout, length, "seq_len")
    return tuple(sorted(lengths))


def refuse_other_lengths(layout: Layout, length: int, what: str) -> None:
    """Refuse another length than the only one of a layout; the message begins with `what`."""
    if layout.only_length not in (None, length):
        raise ValueError(
            f"{what}: got {length} tokens, but this {type(layout).__name__} divides sequences of {layout.only_length} "
            "tokens only"
        )
