"""SDPA of local tensors inside an active context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cp_dtensor import _torch
from cp_dtensor.api.active_context import LOCAL_STRETCH, ActiveContext, current_context, innermost_context
from cp_dtensor.api.interception import SdpaArguments, SharedInstallation, intercepted


@dataclass(frozen=True)
class _LocalStretch:
    context: ActiveContext
    """The active context on entry. Contexts entered later are not affected."""
    queries_are_shards: bool


@contextmanager
def local_sdpa(*, queries_are_shards: bool) -> Iterator[None]:
    """Context manager in which SDPA of this thread is torch's own, although a context is active.

    Without an active context it changes nothing. Functions under `torch.utils.checkpoint` are recomputed under it.
    FlexAttention inside is refused.

    Args:
        queries_are_shards: True if q is this rank's shard while k and v are whole on every rank (cross-attention to a
            text prompt); `is_causal=True` is refused then, because the positions of the queries are not known. False
            if q is whole too.
    """
    context = innermost_context()
    if context is None:
        yield
        return
    # Contexts outlive this installation, so its patches lie outside of theirs.
    with _installation.held(), _torch.thread_state(LOCAL_STRETCH, _LocalStretch(context, queries_are_shards)):
        yield


def _current() -> _LocalStretch | None:
    stretch = _torch.get_thread_state(LOCAL_STRETCH)
    return stretch if stretch is not None and stretch.context is current_context() else None


def _sdpa(call: SdpaArguments) -> torch.Tensor | None:
    stretch = _current()
    if stretch is None:
        return None
    if stretch.queries_are_shards and call.is_causal:
        raise NotImplementedError(
            "is_causal is not supported between sharded queries and keys that every rank has whole: got "
            "is_causal=True, expected False (an attn_mask of the local queries is allowed)"
        )
    return _torch.original_sdpa(
        call.q, call.k, call.v, call.attn_mask, call.dropout_p, call.is_causal,
        scale=call.scale, enable_gqa=call.enable_gqa,
    )  # fmt: skip


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Binds a checkpointed function to the current `local_sdpa`, inside of the binding to the active context."""
    stretch = _current()
    if stretch is None:
        return function

    def in_stretch(*args: Any, **kwargs: Any) -> Any:
        with local_sdpa(queries_are_shards=stretch.queries_are_shards):
            return function(*args, **kwargs)

    return in_stretch


def _parts() -> Iterator[AbstractContextManager[None]]:
    yield intercepted(_sdpa)
    yield _torch.checkpointed_functions_bound(_bound)


_installation = SharedInstallation(_parts)
