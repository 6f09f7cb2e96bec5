"""Layouts and masks that a call inside of a context leaves out, where the context has others than the defaults."""

from __future__ import annotations

from cp_dtensor import _torch
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.compiled_spec import ACTIVE_CONFIG
from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.spec.layouts import HeadTail
from cp_dtensor.spec.masks import Full


def refuse_left_out(owner: str, ranks: SequenceRanks, *, layout: bool, mask: bool = True) -> None:
    """Refuses calls without a layout, or a mask, inside of a context over the same ranks that has one of its own.

    Args:
        owner: whose arguments they are.
        ranks: the call's.
        layout, mask: whether the call says which. What is left out stands for `HeadTail()` and for no mask.

    Raises:
        ValueError: on every rank alike.
    """
    around = None if layout and mask else _context_over(ranks)
    if around is None:
        return
    if not layout and around.layout != HeadTail():
        raise ValueError(
            f"{owner} got layout=None, which stands for HeadTail(), inside of a context over the same ranks whose "
            f"layout is {_short(around.layout)}: pass the layout of these tokens, that one or HeadTail()"
        )
    if not mask and around.mask not in (None, Full()):
        raise ValueError(
            f"{owner} got mask=None inside of a context over the same ranks whose mask, {_short(around.mask)}, it does "
            "not take over: pass that mask, or mask=Full() if it is not to hold here"
        )


def _context_over(ranks: SequenceRanks) -> AttentionConfig | None:
    """The innermost context or module of this thread, if it is over these ranks.

    None in a backward that runs inside of a context: what is computed again there may belong to another.
    """
    state = _torch.get_thread_state(ACTIVE_CONFIG)
    if state is None:
        return None
    ambient, entered_in = state
    if entered_in != _torch.current_backward():
        return None
    settings: AttentionConfig = ambient.settings
    return settings if settings.ranks.global_ranks() == ranks.global_ranks() else None


def _short(value: object) -> str:
    """Its repr, where that is short."""
    said = repr(value)
    return said if len(said) <= 60 else f"{type(value).__name__}(...)"
