"""Layouts and masks that calls take over from the context around them."""

from __future__ import annotations

from dataclasses import replace

from cp_dtensor import _torch
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.compiled_spec import CONTEXT_STATE, CompiledCallSpec, key_of
from cp_dtensor.engine.config import AttentionConfig
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout
from cp_dtensor.spec.masks import Full, Mask


@_torch.never_compiled
def inherited_layout(owner: str, ranks: SequenceRanks) -> Layout:
    """Layout of the context over these ranks, `HeadTail()` if there is none.

    Raises:
        RuntimeError: the context cannot be known (see `_context_config`).
    """
    around = _context_config(owner, ranks, layout=True, mask=False)
    return HeadTail() if around is None else around.layout


def inherited_mask(owner: str, ranks: SequenceRanks) -> Mask | None:
    """Mask of the context over these ranks, None if there is none.

    Raises:
        RuntimeError: the context cannot be known (see `_context_config`).
    """
    around = _context_config(owner, ranks, layout=False, mask=True)
    return None if around is None else around.mask


def with_inherited(owner: str, config: AttentionConfig, *, layout: bool, mask: bool) -> AttentionConfig:
    """`config`, with the layout and the mask (if these are True) of the context over its ranks; raises as above."""
    around = _context_config(owner, config.ranks, layout=layout, mask=mask)
    if around is None:
        return config
    if layout and config.layout != around.layout:
        config = replace(config, layout=around.layout)
    if mask and config.mask is not around.mask:
        config = replace(config, mask=around.mask)
    return config


def with_inherited_in_trace(owner: str, config: AttentionConfig, *, layout: bool, mask: bool) -> AttentionConfig:
    """`with_inherited` for code that Dynamo traces, which is compiled once for all contexts of an equal token.

    Returns:
        the configuration of all these contexts. If their masks or layouts may differ: that of the context itself, whose
        call spec finds them when the code runs.

    Raises:
        NotImplementedError: masks or layouts may differ, and the call has other options than the context.
    """
    inherited = with_inherited(owner, config, layout=layout, mask=mask)
    around = _context_config(owner, config.ranks, layout=layout, mask=mask)
    if around is None or not CompiledCallSpec.of(around).reads_context:
        return inherited
    as_context = replace(inherited, lengths_vary=True)
    if layout and mask and key_of(CompiledCallSpec.of(as_context)) == key_of(CompiledCallSpec.of(around)):
        return around
    # A token has Contiguous() for that layout and for all layouts that are made for one length.
    if layout and not mask and around.layout.only_length is None and around.layout != Contiguous():
        return inherited
    raise NotImplementedError(
        f"{owner} got {' and '.join(['layout=None'] * layout + ['mask=None'] * mask)} in compiled code inside of a "
        "context whose mask or layout may differ at the next call. Compiled code takes over both of them or none, with "
        "the method, rotate_method, deterministic and debug of the context: pass layout= and mask= (Full() for none)"
    )


def _context_config(owner: str, ranks: SequenceRanks, *, layout: bool, mask: bool) -> AttentionConfig | None:
    """The configuration of the innermost context or module of this thread, if it is over these ranks.

    Raises:
        RuntimeError: this is a backward, which may belong to the context or not, and the layout or mask of the context
            (if the argument is True) is not the default.
    """
    state = _torch.get_thread_state(CONTEXT_STATE)
    if state is None or not (layout or mask):
        return None
    around: AttentionConfig = state[0].config
    if around.ranks.global_ranks() != ranks.global_ranks():
        return None
    if state[1] == _torch.current_backward():
        return around
    if (layout and around.layout != HeadTail()) or (mask and around.mask not in (None, Full())):
        raise RuntimeError(
            f"{owner} was called in a backward inside of a context over the same ranks, without "
            f"{'layout' if layout else 'mask'}=, and it is ambiguous whether the call belongs to the context: pass "
            "layout= and mask= (Full() for none), or checkpoint with torch.utils.checkpoint inside of the context"
        )
    return None
