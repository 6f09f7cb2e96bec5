"""Stretches of a region in which SDPA is left to each rank alone, since the keys are not sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cp_dtensor import _torch_private
from cp_dtensor.installation import SharedInstallation
from cp_dtensor.interception import SdpaArguments, intercepted
from cp_dtensor.region import LOCAL_STRETCH, Region, current_region, innermost_region


@dataclass(frozen=True)
class _LocalStretch:
    region: Region
    """The region in which it was opened; one that is opened inside of it has its own meaning of SDPA."""
    queries_are_shards: bool


@contextmanager
def local_sdpa(*, queries_are_shards: bool) -> Iterator[None]:
    """While open, SDPA in this thread is torch's own. Outside of regions, where it is so anyway, changes nothing.

    Functions under `torch.utils.checkpoint` are bound to it, as they are to regions.

    Args:
        queries_are_shards: refuse `is_causal`, since the positions of the queries are not known here.
    """
    region = innermost_region()
    if region is None:
        yield
        return
    # The installation is held for less long than that of regions always, so its parts come before those of regions.
    with _installation.held(), _torch_private.thread_state(LOCAL_STRETCH, _LocalStretch(region, queries_are_shards)):
        yield


def _current() -> _LocalStretch | None:
    stretch = _torch_private.get_thread_state(LOCAL_STRETCH)
    return stretch if stretch is not None and stretch.region is current_region() else None


def _sdpa(call: SdpaArguments) -> torch.Tensor | None:
    stretch = _current()
    if stretch is None:
        return None
    if stretch.queries_are_shards and call.is_causal:
        raise NotImplementedError(
            "is_causal is not supported between sharded queries and keys that every rank has whole: got "
            "is_causal=True, expected False (an attn_mask of the local queries is allowed)"
        )
    return _torch_private.original_sdpa(
        call.q, call.k, call.v, call.attn_mask, call.dropout_p, call.is_causal,
        scale=call.scale, enable_gqa=call.enable_gqa,
    )  # fmt: skip


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpointed function that runs in the present stretch, of the region that it is bound to as well."""
    stretch = _current()
    if stretch is None:
        return function

    def in_stretch(*args: Any, **kwargs: Any) -> Any:
        with local_sdpa(queries_are_shards=stretch.queries_are_shards):
            return function(*args, **kwargs)

    return in_stretch


def _parts() -> Iterator[AbstractContextManager[None]]:
    yield intercepted(_sdpa)
    yield _torch_private.checkpointed_functions_bound(_bound)


_installation = SharedInstallation(_parts)
