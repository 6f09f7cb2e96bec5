"""Autograd: functions that are differentiated once, and state that follows a backward."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cp_dtensor._torch.compiler import constant_in_trace, never_compiled
from cp_dtensor._torch.patches import attribute_replaced
from cp_dtensor._torch.tensors import is_batched

Tensors = tuple[torch.Tensor, ...]


_NOT_BACKWARD = (
    "attention and layers of sequence shards are differentiated by torch.autograd (backward, grad), and take whole "
    "batches: got {}"
)


def refuse_transforms() -> None:
    """Refuse code under a transform of torch.func, whose tensors cannot be moved between ranks."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(_NOT_BACKWARD.format("a transform of torch.func, such as grad, vjp, jvp or vmap"))


def refuse_tangents(ctx: Any, *_tangents: Any) -> Any:
    """Refuse forward-mode differentiation, as `jvp` of an `autograd.Function`."""
    raise NotImplementedError(_NOT_BACKWARD.format("tangents of forward-mode differentiation"))


@constant_in_trace
def refuse_traced_transforms() -> None:
    """Refuse code that is traced under a transform or a level of forward mode: its operators would drop tangents."""
    refuse_transforms()
    if torch.autograd.forward_ad._current_level >= 0:
        refuse_tangents(None)


class RankFunction(torch.autograd.Function):
    """An `autograd.Function` that communicates between ranks; torch.func and forward mode are refused by name."""

    jvp = staticmethod(refuse_tangents)

    @classmethod
    def apply(cls, *args: Any) -> Any:
        refuse_transforms()
        refuse_batches(*[x for x in args if isinstance(x, torch.Tensor)])
        return super().apply(*args)


class _NoSecondDerivative(torch.autograd.Function):
    """A gradient that raises an error when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *_differentiable: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "trying to differentiate twice: attention of sequence shards, and context_parallel_unshard, have first "
            "derivatives only; got create_graph=True and then a derivative of their gradients"
        )


def differentiated_once(backward: Callable[..., tuple[torch.Tensor | None, ...]]) -> Callable[..., Any]:
    """Wrap a backward so that a second differentiation raises an error.

    torch's `once_differentiable` raises only if the incoming gradients require gradients. Those of `out.sum()` do not,
    and a second derivative would silently lack what comes through q, k and v. So, for autograd, the gradients depend on
    all tensors that they could be differentiated by: the incoming gradients and the saved inputs, or the saved outputs,
    which stand for all inputs. (A leaf alone is not enough: if unused inputs are allowed, as in
    `torch.autograd.functional`, autograd skips paths that lead to none of the requested inputs, and returns zero.)

    `backward(ctx, saved, *grads)` gets `ctx.saved_tensors`, which are unpacked only once, as checkpoints require.
    Compiled autograd runs it as plain Python.
    """

    @wraps(backward)
    def first_only(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            saved = ctx.saved_tensors
            found = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():  # no create_graph=True
            return found
        made = torch.zeros((), device="cpu", requires_grad=True)
        origins = [x for x in (*grads, *saved) if x is not None and x.requires_grad]
        return tuple(None if grad is None else _NoSecondDerivative.apply(grad, made, *origins) for grad in found)

    plain = never_compiled(first_only)

    @wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (plain if torch.compiler.is_dynamo_compiling() else first_only)(ctx, *grads)

    return run


def refuse_batches(*grads: torch.Tensor) -> None:
    """Refuse a batch of gradients, which transports between ranks cannot move."""
    if any(map(is_batched, grads)):
        raise NotImplementedError(
            "attention and layers of sequence shards, and sums over ranks, take one gradient at a time, got a batch of "
            "them (is_grads_batched=True, vectorize=True or torch.vmap around a backward): go through them in a loop"
        )


# Checkpoints

open_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes that are open in this thread, selective checkpoints among them."""


# Without them, policies see the operators of tiles.
_RECORDS = getattr(checkpoint, "_CachingTorchDispatchMode", ())
_REPEATS = getattr(checkpoint, "_CachedTorchDispatchMode", ())
_SAVES = (True, checkpoint.CheckpointPolicy.MUST_SAVE, checkpoint.CheckpointPolicy.PREFER_SAVE)
_TELLS_RESULTS = "op_output" in signature(checkpoint.SelectiveCheckpointContext).parameters  # torch 2.13
_ANSWERS = "cp_dtensor_answers"
"""Key of a checkpoint's storage, which forward and recompute share: for each call, in order, the answer of its policy,
and whether results were kept."""


def in_selective_checkpoint() -> bool:
    """Return whether a selective checkpoint of eager code is open in this thread, in forward or in its recompute."""
    return any(isinstance(mode, (_RECORDS, _REPEATS)) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def checkpoint_keeps(operator: Any, argument: torch.Tensor, results: Tensors) -> Iterator[bool]:
    """Yield whether a selective checkpoint of eager code, open in this thread, keeps the results of a call.

    Each policy is asked once a call, as for all operators, since it may count its calls: while open, the modes of
    checkpoints have its answer. A recompute repeats the answer of forward, and what came of it: a checkpoint around the
    one of a policy may have kept results that this policy did not ask for. Policies may look at `results`, which are
    like those that the call will return.
    """
    with ExitStack() as stack:
        keeps, asked = False, []
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if not isinstance(mode, (_RECORDS, _REPEATS)):
                continue
            policy, answers = getattr(mode, "policy_fn", None), mode.storage.setdefault(_ANSWERS, [])
            answer, is_recompute = None, isinstance(mode, _REPEATS)
            if policy is not None:  # from torch 2.13 on, recomputes ask no policy
                told = {"op_output": results} if _TELLS_RESULTS else {}
                context = checkpoint.SelectiveCheckpointContext(is_recompute=is_recompute, **told)
                answer = policy(context, operator, argument)
            if is_recompute:
                answer, was_kept = answers.pop(0) if answers else (None, False)
                answers.append((answer, was_kept))  # for another backward
                keeps = keeps or was_kept
            else:
                asked.append((answers, answer))
                keeps = keeps or answer in _SAVES
            stack.enter_context(attribute_replaced(mode, "policy_fn", lambda *_, answer=answer: answer))
            if is_recompute and answer in _SAVES:  # the modes below do not see the call
                break
        for answers, answer in asked:
            answers.append((answer, keeps))
        if not keeps:
            stack.close()  # the policies are asked about the operators of tiles
        yield keeps


# State of a thread that follows a backward to the threads in which autograd runs it

_Stack = tuple[Any, ...]
_plain = threading.local()
_of_main_thread: dict[str, _Stack] = {}
_MARK = "cp_dtensor.follows_main_thread"


def get_thread_state(key: str) -> Any:
    """Return the latest object under `key` of this thread or, in autograd's own threads, of the main thread."""
    values: _Stack = getattr(_plain, key, ())
    if not values and torch._C._is_key_in_tls(_MARK):
        values = _of_main_thread.get(key, ())
    return values[-1] if values else None


def main_thread_state(key: str) -> Any:
    """Return the latest object under `key` of the main thread, in whatever thread this is called."""
    values: _Stack = _of_main_thread.get(key, ())
    return values[-1] if values else None


@contextmanager
def thread_state(key: str, value: Any) -> Iterator[None]:
    """Store an object for `get_thread_state` while open. Contexts may be left in any order, as by dropped generators.

    Of the state that autograd carries from thread to thread, only a mark is used, and only in the main thread: such
    state cannot be removed from a thread again, a thread that ends with some of it while the interpreter shuts down
    aborts the process, and torch 2.11 loses a reference to an object that is replaced.
    """
    if in_main_thread():
        if not torch._C._is_key_in_tls(_MARK):
            torch._C._stash_obj_in_tls(_MARK, True)
        stacks = _of_main_thread
    else:
        stacks = vars(_plain)  # of this thread
    stacks[key] = (*stacks.get(key, ()), value)
    try:
        yield
    finally:
        values = stacks.get(key, ())
        place = max((index for index, each in enumerate(values) if each is value), default=len(values))
        stacks[key] = values[:place] + values[place + 1 :]


def _forget() -> None:
    _of_main_thread.clear()
    vars(_plain).clear()


if hasattr(os, "register_at_fork"):  # a forked process, such as a DataLoader's worker, is no rank
    os.register_at_fork(after_in_child=_forget)


def current_backward() -> int | None:
    """Return an id of the backward that runs in this thread, None if none does."""
    identity = torch._C._current_graph_task_id()
    return None if identity == -1 else identity


def backward_may_come_again() -> bool:
    """Return whether the backward that runs in this thread keeps its graph for another one (`retain_graph=True`)."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return current_backward() is not None and keeps


def in_main_thread() -> bool:
    """Return True in the thread that the interpreter started in."""
    return threading.current_thread() is threading.main_thread()


def in_autograd_thread() -> bool:
    """Return True in a thread of autograd (in which CUDA backwards run), during a backward."""
    return current_backward() is not None and isinstance(threading.current_thread(), threading._DummyThread)


@contextmanager
def autograd_recorded() -> Iterator[None]:
    """Open a context in which autograd records operations, also inside of an operator's implementation."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name, key in vars(torch._C.DispatchKey).items():
        if name.startswith(("Autograd", "ADInplaceOrView")):
            exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield
