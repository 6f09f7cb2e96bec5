"""The active context of a thread, and the configuration that calls inside take over from it.

A context belongs to the thread that entered it. Functions under `torch.utils.checkpoint` are bound to their context, so
that recomputing them is right at any time and in any thread. Other attention in a backward around which a context is
open is refused, since it may or may not belong to the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cp_dtensor import _torch
from cp_dtensor.api.buffers import InPlaceShard
from cp_dtensor.api.interception import TORCHS_TOO
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.agreement import warn_once
from cp_dtensor.engine.compiled_spec import CONTEXT_STATE, ActiveConfig, CompiledCallSpec, key_of
from cp_dtensor.engine.config import AttentionConfig, refuse_dtensors
from cp_dtensor.spec.layouts import Contiguous, HeadTail
from cp_dtensor.spec.masks import Full

LOCAL_SDPA = "cp_dtensor_local_sdpa"
"""Key of the thread state of `local_sdpa`: the active context on entry, and True if queries are shards."""
CAPTURED_BEFORE = "cp_dtensor_captured_before"
"""Key of the context that `ContextParallel` has entered around code which Dynamo captured outside of the context."""
_AMBIGUOUS = (
    "attention was called in a backward while a context_parallel context is open around it, and it is ambiguous "
    "whether the call belongs to the context: checkpoint with torch.utils.checkpoint inside of the context, or use the "
    "module form, parallelize_module(attention, mesh, ContextParallel()), which is right at any time"
)


@dataclass(frozen=True, eq=False)
class ActiveContext(ActiveConfig):
    """An open context."""

    buffers: tuple[InPlaceShard, ...] = ()
    sinks: torch.Tensor | None = None
    """(query heads,), logits of all SDPA inside."""
    seen: set[str | torch.Size] = field(default_factory=set)
    """Calls inside: "model" of transformers, "cu_seq_lens_q" given to it, "attention", shapes of queries of SDPA."""


def open_local_sdpa(context: ActiveContext) -> bool | None:
    """The argument of the `local_sdpa` that is open in this context: each rank attends to its own keys; else None."""
    state = _torch.get_thread_state(LOCAL_SDPA)
    return state[1] if state is not None and state[0] is context else None


def innermost_context() -> ActiveContext | None:
    """The context that was entered last in this thread and is still open, also in a backward that runs inside."""
    state = _torch.get_thread_state(CONTEXT_STATE)
    return None if state is None else state[0]


def current_context() -> ActiveContext | None:
    """The innermost open context of this thread.

    Raises:
        RuntimeError: this is a backward, and the context was entered outside of it. The caller is a recompute that is
            not torch.utils.checkpoint's, or one of a checkpoint made outside of the context.
    """
    state = _torch.get_thread_state(CONTEXT_STATE)
    if state is None:
        if _unseen_contexts and _torch.in_autograd_thread():
            raise RuntimeError(_AMBIGUOUS)
        return None
    context, entered_in = state
    if entered_in != _torch.current_backward():
        raise RuntimeError(_AMBIGUOUS)
    return context


_unseen_contexts: list[ActiveContext] = []
"""Open contexts of threads other than the main one, whose state autograd's threads cannot read."""


def warn_of_other_threads() -> None:
    """Warns, once, of attention in a thread without a context while another thread of this rank has one.

    Not in a backward, which may be that of code outside of the context.
    """
    of_main_thread = _torch.main_thread_state(CONTEXT_STATE)
    for context in (*_unseen_contexts, *(() if of_main_thread is None else of_main_thread[:1])):
        ranks = context.config.ranks
        if ranks.size > 1 and ranks.are_of_this_thread and _torch.current_backward() is None:
            text = (
                "scaled_dot_product_attention was called in a thread without a context while another thread has one: "
                "each rank attends to its own keys only. If q, k and v are shards, enter context_parallel in the "
                "thread that calls attention, or call context_parallel_attention"
            )
            warn_once(ranks, "another thread", text)
            return


@contextmanager
def listed_if_unseen(context: ActiveContext) -> Iterator[None]:
    """Lists a context while open, if this is such a thread."""
    if _torch.in_main_thread() or _torch.in_autograd_thread():
        yield
        return
    _unseen_contexts.append(context)
    try:
        yield
    finally:
        _unseen_contexts.remove(context)


def refuse_torchs_modules() -> None:
    """Refuses modules with torch's `_ContextParallel`, whose DTensors are contiguous, where shards are not."""
    context = innermost_context()
    if context is not None and context.config.ranks.size > 1 and context.config.layout != Contiguous():
        raise RuntimeError(TORCHS_TOO)


def warn_of_other_layout(config: AttentionConfig, seq_len: tuple[int, ...]) -> None:
    """Warns, once, of a context without buffers inside of one whose buffers are shards in another layout.

    Args:
        config: of the context that is about to be entered.
        seq_len: its global lengths. Others than those of the context around are of shards of its own.
    """
    around = innermost_context()
    if around is None or not around.buffers or config.ranks.size == 1 or around.config.layout == config.layout:
        return
    outer = around.config
    if outer.ranks.shares_sequence_with(config.ranks) and {*seq_len} <= {*(outer.declared_lengths or ())}:
        text = (
            f"a context_parallel without buffers, in {config.layout} (layout=None is HeadTail()), was entered inside "
            f"of one over the same ranks whose buffers are shards in {outer.layout}: attention of these shards inside "
            f"takes their tokens for others. Pass layout={outer.layout}, or list the buffers of the inner context"
        )
        warn_once(config.ranks, (type(outer.layout), type(config.layout)), text)


# Arguments of contexts


def checked_context_sinks(sinks: Any) -> torch.Tensor:
    """The sinks of a context, checked as far as possible without queries: a plain floating tensor of one dim."""
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"expected sinks to be a torch.Tensor of one logit per query head, got {type(sinks).__name__}")
    refuse_dtensors(sinks=sinks)
    if not sinks.is_floating_point() or sinks.dim() != 1:
        raise ValueError(
            f"expected sinks of a floating dtype and shape (query heads,), got {sinks.dtype} {tuple(sinks.shape)}"
        )
    return sinks


def refuse_sinks(has_sinks: bool, attention: str, function: str = "context_parallel_attention") -> None:
    """Refuses `attention`, which cannot have the sinks of its context; `function` can."""
    if has_sinks:
        raise NotImplementedError(
            f"{attention} does not take the sinks of its context: call {function}(..., sinks=...) instead"
        )


# Layouts and masks of the context around a call


def config_around(
    owner: str, ranks: SequenceRanks, *, layout: bool = False, mask: bool = False
) -> AttentionConfig | None:
    """The configuration of the innermost context or module of this thread, if it is over these ranks.

    Refuses a backward, which may belong to the context or not, if that has another layout or mask (where the argument
    is True) than the default.
    """
    state = _torch.get_thread_state(CONTEXT_STATE)
    if state is None or not (layout or mask):
        return None
    around: AttentionConfig = state[0].config
    if not around.ranks.shares_sequence_with(ranks):
        return None
    if layout and not ranks.is_in_order_of(around.ranks):
        raise ValueError(
            f"{owner} got the ranks of the context around it in another order, {ranks.global_ranks()} (the "
            f"context's: {around.ranks.global_ranks()}), and no layout: pass the context's mesh, or layout="
        )
    if state[1] == _torch.current_backward():
        return around
    if (layout and around.layout != HeadTail()) or (mask and around.mask not in (None, Full())):
        raise RuntimeError(
            f"{owner} was called in a backward inside of a context over the same ranks, without "
            f"{'layout' if layout else 'mask'}=, and it is ambiguous whether the call belongs to the context: pass "
            "layout= and mask= (Full() for none), or checkpoint with torch.utils.checkpoint inside of the context"
        )
    return None


def with_inherited(owner: str, config: AttentionConfig, *, layout: bool, mask: bool) -> AttentionConfig:
    """`config`, with the layout and the mask (if these are True) of `config_around`."""
    around = config_around(owner, config.ranks, layout=layout, mask=mask)
    if around is None:
        return config
    inherited = replace(
        config, layout=around.layout if layout else config.layout, mask=around.mask if mask else config.mask
    )
    return config if inherited == config else inherited


def with_inherited_in_trace(owner: str, config: AttentionConfig, *, layout: bool, mask: bool) -> AttentionConfig:
    """`with_inherited` for code that Dynamo traces, which is compiled once for all contexts of an equal key.

    Returns:
        the configuration of all these contexts. If their masks or layouts may differ: that of the context itself, whose
        call spec finds them when the code runs.

    Raises:
        NotImplementedError: masks or layouts may differ, and the call has other options than the context.
    """
    inherited = with_inherited(owner, config, layout=layout, mask=mask)
    around = config_around(owner, config.ranks, layout=layout, mask=mask)
    if around is None or not CompiledCallSpec.of(around).reads_context:
        return inherited
    as_context = replace(inherited, lengths_vary=True)
    if layout and mask and key_of(CompiledCallSpec.of(as_context)) == key_of(CompiledCallSpec.of(around)):
        return around
    # A key has Contiguous() for that layout and for all layouts that are made for one length.
    if layout and not mask and around.layout.only_length is None and around.layout != Contiguous():
        return inherited
    raise NotImplementedError(
        f"{owner} got {' and '.join(['layout=None'] * layout + ['mask=None'] * mask)} in compiled code inside of a "
        "context whose mask or layout may differ at the next call. Compiled code takes over both of them or none, with "
        "the method, rotate_method, deterministic and debug of the context: pass layout= and mask= (Full() for none)"
    )
