"""Open contexts of a thread: which one holds for a call, and which one compiled code asks when it runs.

A context belongs to the thread that entered it. Functions under `torch.utils.checkpoint` are bound to their context, so
that recomputing them is right at any time and in any thread. Other attention in a backward around which a context is
open is refused, since it may or may not belong to the context.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor.attention.backends.select import allowed_backends
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.agreement import warn_once
from cp_dtensor.engine.base import Done
from cp_dtensor.engine.call import Call, both_masks, checked_factors, checked_mask
from cp_dtensor.engine.handles import handle_of, value_of
from cp_dtensor.spec.layouts import HeadTail, Layout, Segment
from cp_dtensor.spec.masks import Causal, Full, Mask

_OPEN = "cp_dtensor_context"
"""Key of the thread state (innermost open context, the backward in which it was entered)."""
ALONE = "cp_dtensor_local_sdpa"
"""Key of the thread state of `local_sdpa`: the open context on entry, and True if queries are shards."""
CAPTURED_BEFORE = "cp_dtensor_captured_before"
"""Key of the context that `ContextParallel` has entered around code which Dynamo captured outside of the context."""
_MOST_CALLS = 64
"""Calls that an open context keeps: that of a module lives as long as it, and a scale may be new in every step."""
_AMBIGUOUS = (
    "attention was called in a backward while a context_parallel context is open around it, and it is ambiguous "
    "whether the call belongs to the context: checkpoint with torch.utils.checkpoint inside of the context, or use the "
    "module form, parallelize_module(attention, mesh, ContextParallel()), which is right at any time"
)


@dataclass(frozen=True)
class LiveLayout(Layout):
    """Stands in compiled code for a layout of one length, which is made for a mask: the open context has it."""

    block: int

    @property
    def alignment(self) -> int:
        return self.block

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        raise RuntimeError("this layout is known only when compiled code runs")


@dataclass(frozen=True, eq=False)
class OpenContext:
    """An open context, or a module with `ContextParallel`: the call that calls inside begin with."""

    call: Call
    buffers: tuple[Any, ...] = ()
    """Its buffers, as shards in place."""
    beside: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of all SDPA inside beside q, k and v, by the names of `Tensors`."""
    is_constant: bool = False
    """True if mask, layout and lengths are constants of compiled code, as those of a module are."""
    seen: set[Any] = field(default_factory=set)
    """Calls inside: "model" of transformers, "cu_seq_lens_q", "whole inputs" given to it, "attention", SDPA tensors."""
    _calls: dict[Any, Call] = field(default_factory=dict)
    _stored: set[Any] = field(default_factory=set)

    @cached_property
    def key(self) -> str:
        """Text that is equal for contexts which one compiled code serves: their masks and lengths may differ."""
        if self.is_constant:
            return self.call.key
        general = replace(self.call, mask=None, lengths=(), layout=self._layout_of_code())
        return f"{general.key}{', masked' * (self.call.mask is not None)}"

    def _layout_of_code(self) -> Layout:
        layout = self.call.layout
        return layout if layout.only_length is None else LiveLayout(layout.alignment)

    @property
    def varies(self) -> bool:
        """True if another context of the same key may have another mask or layout."""
        return not self.is_constant and (self.call.mask is not None or self.call.layout.only_length is not None)

    def inside(
        self, mask: Mask | None = None, is_causal: bool = False, first: tuple[int, int] = (0, 0), *,
        traced: bool = False, **options: float | None,
    ) -> Call:  # fmt: skip
        """Return a call in this context; masks intersect. A program that is `traced` asks the context when it runs.

        Args:
            mask, is_causal: of the call.
            first: as `Call.first`.
            traced: True if the program is being captured.
            options: scale, dropout_p and others that `Call.of` takes.
        """
        # Masks may be new in every batch, and numbers of a trace may be symbols, which have no hash.
        key = None if traced or mask is not None else (is_causal, first, *options.items())
        found = None if key is None else self._calls.get(key)
        if found is not None:
            return found
        own, asks = checked_mask(mask, is_causal), traced and not self.is_constant
        made = replace(
            self.call, mask=own if asks else both_masks(self.call.mask, own), first=first,
            **checked_factors(**options),  # type: ignore[arg-type]
        )  # fmt: skip
        if key is not None and len(self._calls) < _MOST_CALLS:
            self._calls[key] = made
        return self.asked_later(made) if asks else made

    def store_keys(self) -> None:
        """Store the keys of SDPA inside, since code from disk may run before this process has traced any."""
        allowed = allowed_backends()
        if allowed not in self._stored:
            self._stored.add(allowed)
            for mask in (None, Causal(), Causal("bottom_right")):
                _ = replace(self.inside(mask, traced=True), backends=allowed).key

    def asked_later(self, call: Call) -> Call:
        """Return a call without what compiled code asks this context for when it runs."""
        return replace(call, layout=self._layout_of_code(), lengths=(), batch_size=None, context=self.key)


def innermost() -> OpenContext | None:
    """Return the context that this thread entered last and that is still open, also in a backward that runs inside."""
    state = _torch.get_thread_state(_OPEN)
    return None if state is None else state[0]


def current() -> OpenContext | None:
    """Return the innermost open context of this thread.

    Raises:
        RuntimeError: this is a backward, and the context was entered outside of it. The caller is a recompute that is
            not torch.utils.checkpoint's, or one of a checkpoint made outside of the context.
    """
    state = _torch.get_thread_state(_OPEN)
    if state is None:
        if _unseen and _torch.in_autograd_thread():
            raise RuntimeError(_AMBIGUOUS)
        return None
    context, entered_in = state
    if entered_in != _torch.current_backward():
        raise RuntimeError(_AMBIGUOUS)
    found: OpenContext = context
    return found


def queries_alone(context: OpenContext) -> bool | None:
    """Return the argument of the `local_sdpa` that is open in this context: each rank attends to its own keys."""
    state = _torch.get_thread_state(ALONE)
    return state[1] if state is not None and state[0] is context else None


_unseen: list[OpenContext] = []
"""Open contexts of threads other than the main one, whose state autograd's threads cannot read."""


@contextmanager
def opened(context: OpenContext) -> Iterator[None]:
    """Make this the context of the thread while open."""
    is_unseen = not (_torch.in_main_thread() or _torch.in_autograd_thread())
    if is_unseen:
        _unseen.append(context)
    try:
        with _torch.thread_state(_OPEN, (context, _torch.current_backward())):
            yield
    finally:
        if is_unseen:
            _unseen.remove(context)


def warn_of_other_threads() -> None:
    """Warn, once, of attention in a thread without a context while another thread of this rank has one.

    Not in a backward, which may be that of code outside of the context.
    """
    of_main_thread = _torch.main_thread_state(_OPEN)
    for context in (*_unseen, *(() if of_main_thread is None else of_main_thread[:1])):
        ranks = context.call.ranks
        if ranks.size > 1 and ranks.are_of_this_thread and _torch.current_backward() is None:
            text = (
                "scaled_dot_product_attention was called in a thread without a context while another thread has one: "
                "each rank attends to its own keys only. If q, k and v are shards, enter context_parallel in the "
                "thread that calls attention, or call context_parallel_attention"
            )
            warn_once(ranks, "another thread", text)
            return


# Layouts and masks of the context around a call


def around(owner: str, ranks: SequenceRanks, *, layout: bool = False, mask: bool = False) -> OpenContext | None:
    """Return the innermost context or module of this thread, if it is over these ranks and `layout` or `mask` is asked.

    Raises:
        ValueError: the ranks of the context in another order, if its layout is asked for.
        RuntimeError: a backward, which may belong to the context or not, if that has another layout or mask (where the
            argument is True) than the default.
    """
    state = _torch.get_thread_state(_OPEN)
    if state is None or not (layout or mask):
        return None
    context: OpenContext = state[0]
    call = context.call
    if not call.ranks.shares_sequence_with(ranks):
        return None
    if layout and not ranks.is_in_order_of(call.ranks):
        raise ValueError(
            f"{owner} got the ranks of the context around it in another order, {ranks.global_ranks()} (the "
            f"context's: {call.ranks.global_ranks()}), and no layout: pass the context's mesh, or layout="
        )
    if state[1] == _torch.current_backward():
        return context
    if (layout and call.layout != HeadTail()) or (mask and call.mask not in (None, Full())):
        raise RuntimeError(
            f"{owner} was called in a backward inside of a context over the same ranks, without "
            f"{'layout' if layout else 'mask'}=, and it is ambiguous whether the call belongs to the context: pass "
            "layout= and mask= (Full() for none), or checkpoint with torch.utils.checkpoint inside of the context"
        )
    return None


def inherited(owner: str, call: Call, *, layout: bool, mask: bool, traced: bool = False) -> Call:
    """Return `call` with the layout and the mask (if these are True) of the context around it, over its ranks.

    Args:
        owner: the public function, for messages.
        call: with the call's own mask, such as that of `is_causal`.
        layout, mask: True if the caller passed none.
        traced: True in a program that is being captured, which asks the context when it runs for what may differ then.

    Raises:
        ValueError, RuntimeError: as `around`.
        NotImplementedError: compiled code that would take over only one of a layout and a mask which may differ.
    """
    if _torch.get_thread_state(_OPEN) is None:
        return call
    context = around(owner, call.ranks, layout=layout, mask=mask)
    if context is None:
        return call
    outer = context.call
    if traced and context.varies:
        if layout and mask:
            return context.asked_later(call)
        # A layout of one length may differ at the next call.
        if mask or outer.layout.only_length is not None:
            raise NotImplementedError(
                f"{owner} got {' and '.join(['layout=None'] * layout + ['mask=None'] * mask)} in compiled code inside "
                "of a context whose mask or layout may differ at the next call. Compiled code takes over both of them "
                "or none: pass layout= and mask= (Full() for none)"
            )
    return replace(
        call, layout=outer.layout if layout else call.layout,
        lengths=call.lengths or (outer.lengths if layout else ()),
        mask=both_masks(outer.mask, call.mask) if mask else call.mask,
    )  # fmt: skip


# Contexts that compiled code asks


_pending: Counter[tuple[str, Call]] = Counter()
"""Forward passes of compiled code whose backward has not come, by key and call of the context that they asked."""
_MOST_PENDING = 256
"""Contexts that are kept in `_pending`: some forwards never have a backward."""
_lock = threading.Lock()


@dataclass(eq=False)
class Left:
    """What a forward of compiled code leaves for its backward. A handle names it."""

    call: Call
    """With mask, layout and lengths of the open context, if the call asks one."""
    asked: tuple[str, Call] | None = None
    """Key and call of the context that was asked."""
    done: Done | None = None
    """Of attention."""
    begun_in: int | None = None
    """The backward in which the forward was a recompute."""

    @classmethod
    def by(cls, call: Call, q: Tensor, k: Tensor) -> Left:
        """Ask the context of a call, if it has one, for mask, layout and lengths (see `_live`)."""
        if not call.context:
            return cls(call)
        around = _live(call.context, q.size(2), k.size(2))
        return cls(call.under(around), (call.context, around))

    def handle(self, needs_backward: bool) -> Tensor:
        """Return the handle of this. Where a context was asked, the pass is pending until its backward."""
        if needs_backward and self.asked is not None:
            self.begun_in = _torch.current_backward()
            if self.begun_in is None:  # a recompute stands for a pass that is pending
                with _lock:
                    _pending[self.asked] += 1
                    if len(_pending) > _MOST_PENDING:
                        del _pending[next(iter(_pending))]
        return handle_of(self, for_copies=needs_backward)

    @staticmethod
    def of(handle: Tensor, *, in_backward: bool = False) -> Left | None:
        """Return what a handle names, None for an empty tensor. `in_backward`: the pass is no longer pending."""
        if not handle.numel():
            return None
        left: Left = value_of(handle)
        # A reentrant checkpoint recomputes in one backward, begins another, and has run forward without gradients.
        is_its_backward = in_backward and left.begun_in in (None, _torch.current_backward())
        if is_its_backward and left.asked is not None and not _torch.backward_may_come_again():
            with _lock:
                _pending[left.asked] -= 1
                if _pending[left.asked] <= 0:
                    del _pending[left.asked]
        return left


def _live(key: str, q_local: int, kv_local: int) -> Call:
    """Return the call of the context with this key in which compiled code runs; lengths are this rank's.

    A recompute inside of a backward cannot tell which forward it repeats. Where all pending ones are of equal contexts,
    theirs is used; otherwise the recompute is refused. (An effectful operator would not help: torch recomputes it, too,
    in checkpoints.)
    """
    context, entered_in = _torch.get_thread_state(_OPEN) or (None, None)
    if _torch.current_backward() in (None, entered_in):
        if context is None or context.key != key:
            raise RuntimeError(
                "this code was compiled inside of context_parallel, and runs outside of any context with the same "
                "options"
            )
        call: Call = context.call
        return call
    with _lock:
        found = [asked for each, asked in _pending if each == key]
    if len({replace(asked, lengths=(), batch_size=None) for asked in found}) == 1:  # they differ in lengths only
        declared = [asked for asked in found if _declares(asked, q_local) and _declares(asked, kv_local)]
        found = declared or found[-1:]  # older ones may never have a backward
    if len(found) != 1:
        raise RuntimeError(
            "attention is computed again in a backward, by code that was compiled inside of context_parallel; "
            f"there have been {len(found) or 'no'} contexts with the same options whose backward has not come, and "
            "it cannot be told which of them this is: keep attention (selective checkpointing with a policy that "
            "saves cp_dtensor.ATTENTION_OPS), or checkpoint around what is compiled"
        )
    return found[0]


def _declares(call: Call, local: int) -> bool:
    """Return whether a declared length of a context gives this rank as many tokens."""
    layout, ranks = call.layout, call.ranks
    return any(layout.local_length(length, ranks.rank, ranks.size) == local for length in call.lengths)
