"""From shards and settings to a call: which way of splitting the work, looked up where it has been decided before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_dtensor import _torch_private
from cp_dtensor.attention_call import AttentionCall
from cp_dtensor.decisions import Decision
from cp_dtensor.division import LayoutDivision
from cp_dtensor.estimates import Axis, estimates, fastest
from cp_dtensor.extras import Extras
from cp_dtensor.layouts import Layout
from cp_dtensor.local_attention.policy import Allowed, allowed_backends, choose_backend, is_deterministic
from cp_dtensor.masks import Full, Mask, as_plain, is_plain
from cp_dtensor.planning import (
    CallRequest,
    decide_ring,
    decide_two_level,
    decide_ulysses,
    describe_problem,
    has_stairs,
)
from cp_dtensor.rotation.auto import hardware_of
from cp_dtensor.rotation.base import RotationMethod
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.rotation.workspace import why_unshared
from cp_dtensor.tensors import on_device
from cp_dtensor.tiling import Masking


@dataclass(frozen=True)
class Splitting:
    """How a caller wants a sequence to be divided and the work to be spread."""

    layout: Layout
    method: str
    """One of `arguments.METHODS`."""
    rotation: RotationMethod
    """How K/V travel in rings."""
    deterministic: bool = False
    """Whether results must be the same in every run, whatever torch's switch says."""


def decide_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    splitting: Splitting,
    lengths: tuple[int, int],
    mask: Mask,
    extras: Extras,
    scale: float,
    ranks: SequenceRanks,
    allowed: Allowed | None = None,
) -> AttentionCall:
    """The call on checked local shards of (queries, keys) that have these global lengths.

    `allowed` are the backends that may be used, None for those that are allowed at this moment.
    """
    allowed = allowed or allowed_backends()
    return decision_on(q, k, v, splitting, lengths, mask, extras, ranks, allowed).call(ranks, scale)


def decision_on(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    splitting: Splitting,
    lengths: tuple[int, int],
    mask: Mask,
    extras: Extras,
    ranks: SequenceRanks,
    allowed: Allowed,
) -> Decision:
    """What `decide_call` decides, remembered."""
    inner = None if ranks.inner is None else _torch_private.name_of_group(ranks.inner)
    # All that masking depends on is here too, so that a known call need not find out how it is masked.
    asks = (extras.bias is None, extras.dropout_p > 0, allowed, ranks.rank, ranks.size, inner)
    key = (q.shape, k.shape, v.shape, q.dtype, q.device, splitting, lengths, mask, asks)

    def make() -> Decision:
        deterministic = is_deterministic(q, allowed, splitting.deterministic)
        masking = masking_of(mask, extras, lengths, deterministic, splitting.layout, ranks.size)
        by_row = masking is not Masking.BY_SHAPE
        staircase = not by_row and mask != Full() and has_stairs(splitting.layout, lengths[1], ranks.size)
        problem = describe_problem(q, k, v, staircase, by_row)
        request = CallRequest(
            division=LayoutDivision(splitting.layout, *lengths, q.size(0), ranks.size),
            mask=mask if by_row else as_plain(mask),
            problem=problem,
            batch_size=q.size(0),
            itemsize=q.element_size(),
            device=q.device,
            backend=choose_backend(problem, allowed),
            rotation=splitting.rotation,
            masking=masking,
        )
        return decide(request, splitting.method, ranks)

    return remembered(ranks.outer, key, make)


_MOST_SHAPED_SEGMENTS = 16
"""Of a shard: every pair of segments is a tile by shape, and a call by row has few tiles whatever they are."""


def masking_of(
    mask: Mask,
    extras: Extras,
    lengths: tuple[int, int],
    deterministic: bool,
    layout: Layout | None = None,
    world_size: int = 1,
) -> Masking:
    """How tiles are masked: by shape, which is fastest, where nothing forbids it.

    `layout` None: every rank has one range of positions. `deterministic` is what `is_deterministic` says.
    """
    if extras.bias is not None:
        return Masking.BY_ROW_UNBROKEN
    if extras.dropout_p:
        return Masking.BY_ROW_IN_RUNS
    # Of torch's kernels on GPUs few are deterministic, and those are slower than ours.
    if deterministic or not is_plain(mask, *lengths):
        return Masking.BY_ROW
    has_few_segments = layout is None or _segment_count(layout, lengths[1], world_size) <= _MOST_SHAPED_SEGMENTS
    return Masking.BY_SHAPE if has_few_segments else Masking.BY_ROW


@lru_cache(maxsize=1024)
def _segment_count(layout: Layout, seq_len: int, world_size: int) -> int:
    return len(layout.segments(seq_len, 0, world_size))


def decide(request: CallRequest, method: str, ranks: SequenceRanks) -> Decision:
    """The decision for a method that fits the ranks; "auto" takes the one that is predicted to be fastest."""
    if ranks.size == 1:
        return decide_ring(request, None, 0)
    if method == "auto" and request.masking is Masking.BY_ROW_UNBROKEN:
        method = "ring"  # by heads, the rows of a bias would have to travel
    if method == "auto":
        method = _predicted_fastest(request, ranks)
    if method == "ring":
        one_axis = ranks.inner is None
        return decide_ring(request, ranks.outer, ranks.rank) if one_axis else decide_two_level(request, ranks)
    return decide_ulysses(request, ranks)


def _predicted_fastest(request: CallRequest, ranks: SequenceRanks) -> str:
    if request.device.type != "cuda":  # of which the cost model knows nothing
        return "ring" if ranks.inner is None else "hybrid"
    with on_device(request.device):
        outer, inner = axes_of(ranks, request.device, request.itemsize)
    return fastest(estimates(request.shape, outer, inner, request.rotation))


_MOST_DECISIONS = 1024
"""Of a group: beyond, lengths change at every call, and looking back is of no use."""
_decisions: WeakKeyDictionary[dist.ProcessGroup, dict[object, Decision]] = WeakKeyDictionary()


def remembered(group: dist.ProcessGroup, key: object, make: Callable[[], Decision]) -> Decision:
    """What has been decided for `key`, a value that says all that the decision depends on.

    Looking it up is all that a call of a known shape costs.
    """
    of_group = _decisions.get(group)
    if of_group is None or len(of_group) > _MOST_DECISIONS:
        of_group = _decisions[group] = {}
    found = of_group.get(key)
    if found is None:
        found = of_group[key] = make()
    return found


# What all ranks of two axes have in common: by the outer group, then by the inner one's name.
_axes: WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[Axis, Axis]]] = WeakKeyDictionary()


def axes_of(ranks: SequenceRanks, device: torch.device, itemsize: int) -> tuple[Axis, Axis | None]:
    """The outer and the inner axis as the weakest ranks have them, alike on all. At first a collective."""
    if ranks.inner is None:
        return _axis_of(ranks.outer, device, itemsize), None
    known = _axes.setdefault(ranks.outer, {})
    name = f"{_torch_private.name_of_group(ranks.inner)} {itemsize}"
    if name not in known:
        outer, inner = (_axis_of(group, device, itemsize) for group in (ranks.outer, ranks.inner))
        # Other ranks have other groups, which have measured something else.
        mine = [value for axis in (outer, inner) for value in (axis.hardware.link_speed, float(axis.shares_memory))]
        weakest = ranks.gather(torch.tensor(mine, dtype=torch.float64, device=device)).amin(0).tolist()
        known[name] = (
            Axis(outer.size, replace(outer.hardware, link_speed=weakest[0]), bool(weakest[1])),
            Axis(inner.size, replace(inner.hardware, link_speed=weakest[2]), bool(weakest[3])),
        )
    return known[name]


def _axis_of(group: dist.ProcessGroup, device: torch.device, itemsize: int) -> Axis:
    return Axis(group.size(), hardware_of(group, device, itemsize), why_unshared(group, device) is None)
