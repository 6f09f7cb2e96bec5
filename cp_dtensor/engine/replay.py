"""Plans whose passes are captured as CUDA graphs when they come again, and replayed after that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from weakref import ref

import torch
from torch import Tensor

from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.cache import GroupCache, capturing
from cp_dtensor._torch.cuda_graph import Replay
from cp_dtensor._torch.tensors import current_stream, no_modes, on_device
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.head_exchange import CollectiveHeads
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.symm_mem_workspace import Workspace, current_workspace
from cp_dtensor.engine.base import Gradients, Plan, Result, Values
from cp_dtensor.engine.base import Tensors as CallTensors
from cp_dtensor.engine.call import Call
from cp_dtensor.engine.ring import Ring
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.spec.cache import LRUCache
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.logs import log_once
from cp_dtensor.spec.masks import Batched, Intersection, Mask, Union
from cp_dtensor.spec.model_masks import Bands, Keys

_MOST_PASSES = 16
"""Kinds of passes of a group that are kept, with the memory of their graphs."""


@dataclass(eq=False)
class _KnownPass:
    """A kind of pass that has run."""

    workspaces: tuple[ref[Workspace] | None, ...] = ()
    """The symmetric buffers that it used. When the ranks map a larger buffer, all of them do so in the same call, and
    each runs its next pass of each kind eagerly."""
    replay: Replay | None = None
    """None before it has come again, and if it could not be captured."""
    can_be_captured: bool = True


_passes = GroupCache[LRUCache[_KnownPass]]()


@dataclass(frozen=True)
class ReplayedPlan(Plan):
    """A plan whose passes run eagerly twice, are captured then, and are replayed after that.

    Graphs compute what the plan computes, with one launch of the host. Ranks need not agree about which of them replay:
    a replay passes the same flags through the same symmetric buffer as the eager pass. Dispatch modes, such as those
    of selective checkpoints, see neither replays nor eager passes.
    """

    inner: Plan
    saves_rows_of_others: bool
    identity: object = field(default_factory=object)
    """Stands for the plan in keys, since the hash of a plan takes longer than a replay."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, values: Values, needs_lse: bool) -> Result:
        modifiers = values.modifiers
        sinks = () if modifiers.sinks is None else (modifiers.sinks,)

        def compute(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensors:
            own = values._replace(modifiers=replace(modifiers, sinks=sinks[0])) if sinks else values
            out, lse, saved = self.inner.forward(q, k, v, own, needs_lse)
            return out, lse, *saved

        out, lse, *saved = self._run(needs_lse, compute, (q, k, v, *sinks), values)
        return out, lse, tuple(saved)

    def backward(self, grad_out: Tensor, saved: Tensors, values: Values, grad_bias: Tensor | None) -> Gradients:
        assert grad_bias is None

        def compute(grad_out: Tensor, *saved: Tensor) -> Gradients:
            return self.inner.backward(grad_out, saved, values, None)

        dq, dk, dv = self._run("backward", compute, (grad_out, *saved), values)
        return dq, dk, dv

    def remake_saved(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, values: Values) -> Tensors:
        return self.inner.remake_saved(q, k, v, out, lse, values)

    def abandon(self, ranks: SequenceRanks) -> None:
        self.inner.abandon(ranks)

    def _run(self, kind: Hashable, function: Callable[..., Tensors], arguments: Tensors, values: Values) -> Tensors:
        """Run `function(*arguments)`, eagerly or by a graph."""
        like = arguments[0]
        if capturing() or 0 in like.shape[:2]:  # a graph of the user's, or nothing to launch
            return function(*arguments)
        passes = _passes.get(values.ranks.outer, None, lambda: LRUCache(most_bytes=0, least=_MOST_PASSES))
        facts = [(x.shape, x.stride(), x.dtype) for x in arguments]
        key = self.identity, kind, values.scale, values.modifiers.numbers, *facts
        with no_modes(), on_device(like.device):
            used = _followed_workspaces(values.ranks, like)
            known = passes.get(key) or passes.add(key, _KnownPass())
            is_same = known.workspaces == _references(used)
            if is_same and known.replay is not None:
                return known.replay(*arguments)
            results = function(*arguments)
            if not is_same:
                known.workspaces, known.replay = _references(_current_workspaces(values.ranks)), None
            elif known.can_be_captured:
                torch.cuda.synchronize(like.device)
                _current_workspaces(values.ranks)  # raises if the pass has waited for a peer in vain
                known.replay = _captured(function, arguments)
                known.can_be_captured = known.replay is not None
                _followed_workspaces(values.ranks, like)  # the latest stream was that of the capture
            return results


def _captured(function: Callable[..., Tensors], arguments: Tensors) -> Replay | None:
    """Return the graph of a pass; None, with a warning, if it cannot be captured, as where memory is short."""
    try:
        return Replay(function, arguments)
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {error}"
        log_once("engine", logging.WARNING, f"replay=True: a pass could not be captured, and stays eager: {reason}")
        return None


def _current_workspaces(ranks: SequenceRanks) -> tuple[Workspace | None, ...]:
    """Return the symmetric buffers of the ranks."""
    groups = (ranks.outer,) if ranks.inner is None else (ranks.outer, ranks.inner)
    return tuple(map(current_workspace, groups))


def _followed_workspaces(ranks: SequenceRanks, like: Tensor) -> tuple[Workspace | None, ...]:
    """Return the symmetric buffers of the ranks, for whose earlier use the current stream waits."""
    used = _current_workspaces(ranks)
    for each in used:
        if each is not None:
            each.follow(current_stream(like.device), "rows", like)
    return used


def _references(used: tuple[Workspace | None, ...]) -> tuple[ref[Workspace] | None, ...]:
    """Return weak references, which are equal for the same buffers and do not keep their memory."""
    return tuple([None if each is None else ref(each) for each in used])


def replayed(plan: Plan, device_type: str) -> ReplayedPlan:
    """Return a plan that replays the passes of another plan.

    Raises:
        NotImplementedError: CPU tensors, or ranks that do not exchange all rows through shared memory.
    """
    if device_type != "cuda":
        raise NotImplementedError(f"replay=True makes CUDA graphs: expected CUDA tensors, got those on {device_type}")
    if _uses_collectives(plan):
        raise NotImplementedError(
            "replay=True needs ranks that share GPU memory, with rotate_method 'auto' or 'symm_mem': got a call whose "
            "rows travel by NCCL's collectives, which a rank may wait for without end in a graph"
        )
    return ReplayedPlan(plan, plan.saves_rows_of_others)


def _uses_collectives(plan: Plan) -> bool:
    """Return whether a plan exchanges rows otherwise than through shared memory."""
    if isinstance(plan, UlyssesPlan):
        return isinstance(plan.exchange, CollectiveHeads) or any(map(_uses_collectives, plan.inner))
    assert isinstance(plan, Ring)
    return plan.tile_plan.world_size > 1 and not isinstance(plan.transport, SymmetricMemory)


def refuse_unreplayable(call: Call, t: CallTensors) -> None:
    """Refuse calls that `replay=True` does not take."""
    is_of_a_batch = call.mask is not None and _is_of_a_batch(call.mask)
    given = {
        "attn_mask": t.bias is not None,
        "dropout_p": call.dropout_p > 0,
        "latents": t.up is not None,
        "packed documents and padding, which are new in every batch,": is_of_a_batch,
    }
    if unwanted := [name for name, is_given in given.items() if is_given]:
        raise NotImplementedError(
            f"replay=True takes no {unwanted[0]} in this call: leave replay out, here or in the context"
        )


def _is_of_a_batch(mask: Mask) -> bool:
    """Return whether a mask depends on the data of a batch: documents, padding, and masks of evaluated functions."""
    if isinstance(mask, (Batched, Intersection, Union)):
        return any(map(_is_of_a_batch, mask.masks))
    return isinstance(mask, (Documents, Keys, Bands))
