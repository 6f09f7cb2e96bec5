"""Notices that a program has replaced parts of torch's ring: they are here for who calls them, and no context does."""

from __future__ import annotations

import sys
from types import ModuleType

from cp_dtensor.integrations.torch_experimental.merger import _SDPAMerger
from cp_dtensor.integrations.torch_experimental.templated import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

_PARTS: dict[str, object] = {
    "_SDPAMerger": _SDPAMerger,
    "_templated_ring_attention": _templated_ring_attention,
    "_templated_ring_attention_backward": _templated_ring_attention_backward,
}
_METHODS = dict(vars(_SDPAMerger))


class _Watched:
    """The modules in which a program finds our names."""

    def __init__(self) -> None:
        self.redirected: list[ModuleType] = []

    def modules(self) -> list[ModuleType]:
        ours = sys.modules.get(__package__ or "")
        return [*self.redirected, *([] if ours is None else [ours])]


watched = _Watched()


def refuse_patched_rings() -> None:
    """Refuses to compute attention that would leave out what a program has put in.

    Raises:
        NotImplementedError: names what has been replaced.
    """
    replaced = [
        f"{module.__name__}.{name}"
        for module in watched.modules()
        for name, ours in _PARTS.items()
        if vars(module).get(name, ours) is not ours
    ]
    replaced += [f"_SDPAMerger.{name}" for name in ("step", "results") if vars(_SDPAMerger)[name] is not _METHODS[name]]
    if replaced:
        raise NotImplementedError(
            f"{', '.join(replaced)} have been replaced, which would have no effect: attention in contexts and modules "
            "does not call them. Call _templated_ring_attention with an op of your own, or stay with torch's "
            "context parallel for this model"
        )
